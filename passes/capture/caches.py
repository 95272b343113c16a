"""Caches that the code of a model keeps outside of its modules: a trace leaves none of its tensors in them.

Models keep tables in `functools.lru_cache`, in global variables, in attributes of classes, and in dicts there. A tensor
of the trace in one would be read by the next call of the model.
"""

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol, TypeGuard, TypeVar

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
    its modules are from: functions whose caches were added to forget them all, global variables and attributes of
    classes have their values from before, and entries of dicts are removed."""
    # Each owner and each dict is kept, so that its id stays its own.
    before = {id(owner): (owner, dict(vars(owner))) for owner in _owners(module)}
    known = [_kept(values) for _, values in before.values()]
    dicts = {id(each): (each, dict(each)) for own, _ in known for each in own}
    misses = {each: each.cache_info().misses for _, own in known for each in own}
    try:
        yield
    finally:
        functions, nothing = list(misses), dict[object, object]()
        for owner in _owners(module):
            _, values = before.get(id(owner), (owner, {}))
            if not _is_changed(vars(owner), values):
                continue
            for name in _fakes(dict(vars(owner))):
                if name in values:
                    setattr(owner, name, values[name])
                else:
                    delattr(owner, name)
            new_dicts, new_functions = _kept(dict(vars(owner)))
            dicts |= {id(each): (each, nothing) for each in new_dicts if id(each) not in dicts}
            functions += new_functions
        for entries, earlier in dicts.values():
            if _is_changed(entries, earlier):
                for key in _fakes(entries):
                    del entries[key]
        for function in functions:
            if function.cache_info().misses > misses.get(function, 0):
                function.cache_clear()


def _owners(module: nn.Module) -> list[object]:
    """The imported modules of the packages that `module` is from, and the classes that are defined in them."""
    packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
    found: list[object] = []
    for name, imported in list(sys.modules.items()):
        file = getattr(imported, "__file__", None)
        if name.partition(".")[0] in packages and not (file is not None and is_foreign(file)):
            own = list(vars(imported).values())
            found += [imported, *(item for item in own if isinstance(item, type) and item.__module__ == name)]
    return found


def _is_changed(entries: Mapping[Any, object], before: Mapping[Any, object]) -> bool:
    """Whether entries have other values than before. Packages have tens of thousands, few of which change."""
    return len(entries) != len(before) or not all(map(is_, entries.values(), before.values()))


def _kept(values: Mapping[str, object]) -> tuple[list[dict[object, object]], list[_Cached]]:
    """Dicts among the values of a module or a class, and its functions and methods whose results are kept."""
    kinds = (*_DICTS, _CACHED, staticmethod, classmethod)
    # Few owners have one: types are compared first.
    if not any(issubclass(kind, kinds) for kind in set(map(type, values.values()))):
        return [], []
    own = [item.__func__ if isinstance(item, staticmethod | classmethod) else item for item in values.values()]
    return [item for item in own if is_dict(item)], [item for item in own if _is_cached(item)]


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
