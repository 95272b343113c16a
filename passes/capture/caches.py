"""Caches that the code of a model keeps outside of its modules: a trace leaves none of its tensors in them.

Models keep tables in `functools.lru_cache`, in global variables, in attributes of classes, and in dicts, lists and
objects there. A tensor of the trace in one would be read by the next call of the model.
"""

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from operator import is_
from types import ModuleType
from typing import Protocol, TypeGuard, TypeVar, cast

from torch import nn

from passes._torch import FakeTensor
from passes.capture.source import is_foreign

# What `functools.cache` and `functools.lru_cache` make of a function.
_CACHED = type(functools.cache(len))
# Subclasses may compute their items when they are asked for them.
_DICTS = (dict, OrderedDict, defaultdict)

T = TypeVar("T")


class _Info(Protocol):
    misses: int


class _Cached(Protocol):
    """A function whose results are kept."""

    def cache_info(self) -> _Info:
        """Counts of its calls."""

    def cache_clear(self) -> None:
        """Forget the results."""


@contextmanager
def caches_kept(module: nn.Module) -> Iterator[None]:
    """Enter around a traced forward pass of `module`. Afterwards no fake tensor is in the caches of the packages that
    its modules are from: functions whose caches were added to forget them all, and global variables, attributes of
    classes, and the dicts, lists and objects in these have what they had in place of one."""
    # Each owner and each container is kept, so that its id stays its own.
    before = {id(owner): (owner, dict(vars(owner))) for owner in _owners(module)}
    containers, functions = _Containers(packages_of(module)), list[_Cached]()
    for _, values in before.values():
        containers.add(values.values())
        functions += _functions(values.values())
    misses = {function: function.cache_info().misses for function in functions}
    try:
        yield
    finally:
        for owner in _owners(module):
            _, values = before.get(id(owner), (owner, {}))
            now = dict(vars(owner))
            if _is_changed(now.values(), values.values()):
                functions += _functions(now.values())
                for name in _fakes(now):
                    if name in values:
                        setattr(owner, name, values[name])
                    else:
                        delattr(owner, name)
        containers.restore()
        for function in functions:
            if function.cache_info().misses > misses.get(function, 0):
                function.cache_clear()


class _Containers:
    """Dicts, lists and the attributes of objects of some packages' classes, and those in them, each with a copy."""

    def __init__(self, packages: Set[str]) -> None:
        self._packages = packages
        self._dicts: dict[int, tuple[dict[object, object], dict[object, object]]] = {}
        self._lists: dict[int, tuple[list[object], list[object]]] = {}

    def add(self, values: Collection[object]) -> None:
        """Add those among some values."""
        waiting = [values]
        while waiting:
            each = waiting.pop()
            # Of tens of thousands of values few are: their types are compared first.
            types = {kind for kind in set(map(type, each)) if kind is list or kind in _DICTS or self._is_own(kind)}
            for value in [value for value in each if type(value) in types] if types else ():
                items = value if isinstance(value, list) or is_dict(value) else cast(dict[object, object], vars(value))
                if isinstance(items, list):
                    self._lists[id(items)] = items, list(items)
                elif id(items) not in self._dicts:
                    self._dicts[id(items)] = items, dict(items)
                    waiting.append(items.values())

    def _is_own(self, kind: type) -> bool:
        """Whether it is a class of the packages whose objects may keep something."""
        is_own = kind.__module__.partition(".")[0] in self._packages and bool(kind.__dictoffset__)
        return is_own and not issubclass(kind, type | ModuleType | nn.Module)

    def restore(self) -> None:
        """Give them what they had in place of fake tensors."""
        for items, earlier in self._lists.values():
            if _is_changed(items, earlier) and _has_fakes(items):
                items[:] = earlier
        for entries, before in self._dicts.values():
            if _is_changed(entries.values(), before.values()):
                for key in _fakes(entries):
                    if key in before:
                        entries[key] = before[key]
                    else:
                        del entries[key]


def packages_of(module: nn.Module) -> set[str]:
    """The packages that define the parts of a module, without torch and ours."""
    modules = {type(part).__module__ for part in module.modules()}
    return {name.partition(".")[0] for name in modules if not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_foreign(file)


def _owners(module: nn.Module) -> list[object]:
    """The imported modules of the packages that `module` is from, and the classes that are defined in them."""
    packages = packages_of(module)
    found: list[object] = []
    for name, imported in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            own = list(vars(imported).values())
            found += [imported, *(item for item in own if isinstance(item, type) and item.__module__ == name)]
    return found


def _is_changed(values: Collection[object], before: Collection[object]) -> bool:
    """Whether there are other values than before. Packages have tens of thousands, few of which change."""
    return len(values) != len(before) or not all(map(is_, values, before))


def _functions(values: Collection[object]) -> list[_Cached]:
    """The functions and methods among the values of a module or a class whose results are kept."""
    items = _of_types(values, (_CACHED, staticmethod, classmethod))
    own = (item.__func__ if isinstance(item, staticmethod | classmethod) else item for item in items)
    return [item for item in own if _is_cached(item)]


def _of_types(values: Collection[object], types: tuple[type, ...]) -> list[object]:
    """The values of some types. Few owners have any, so a set of their types is compared first."""
    if not any(issubclass(kind, types) for kind in set(map(type, values))):
        return []
    return [value for value in values if isinstance(value, types)]


def _is_cached(value: object) -> TypeGuard[_Cached]:
    return isinstance(value, _CACHED)


def is_dict(value: object) -> TypeGuard[dict[object, object]]:
    """Whether a value is a dict of Python's own kinds, whose items can be taken out without side effects."""
    return type(value) in _DICTS


def _fakes(entries: Mapping[T, object]) -> list[T]:
    """The keys of entries that are fake tensors or sequences with some."""
    return [key for key, value in entries.items() if _has_fakes(value)]


def _has_fakes(value: object) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, FakeTensor) for item in items)
