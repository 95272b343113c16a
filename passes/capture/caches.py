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
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol, TypeGuard, TypeVar

from torch import Tensor, nn

from passes._torch import FakeTensor
from passes.capture.source import is_foreign

# What `functools.cache` and `functools.lru_cache` make of a function.
_CACHED = type(functools.cache(len))
# Subclasses may compute their items when they are asked for them.
_DICTS = (dict, OrderedDict, defaultdict)
# Values that are looked into, besides objects.
_SEARCHED = (*_DICTS, list, FunctionType, staticmethod, classmethod)

# Objects with attributes that are not looked into.
_NO_HOLDERS = (type, ModuleType, FunctionType, nn.Module, Tensor)

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
    its modules are from: functions whose caches were added to forget them all; global variables, attributes of classes,
    variables of closures, and the dicts, lists and objects in these have what they had in place of one."""
    # Each owner and each container is kept, so that its id stays its own.
    packages = packages_of(module)
    before = {id(owner): (owner, dict(vars(owner))) for owner in owners(packages)}
    containers, functions = _Containers(packages), list[_Cached]()
    for _, values in before.values():
        functions += _functions(values.values())
    containers.add([value for _, values in before.values() for value in values.values()])
    misses = {function: function.cache_info().misses for function in functions}
    try:
        yield
    finally:
        for owner in owners(packages):
            _, values = before.get(id(owner), (owner, {}))
            now = dict(vars(owner))
            if _is_changed(now.values(), values.values()):
                functions += _functions(now.values())
                for name in _fakes(now, values):
                    if name in values:
                        setattr(owner, name, values[name])
                    else:
                        delattr(owner, name)
        containers.restore()
        for function in functions:
            if function.cache_info().misses > misses.get(function, 0):
                function.cache_clear()


class _Containers:
    """Dicts, lists, the attributes of objects of some packages' classes, the variables and defaults of these packages'
    functions, and those in them, each with a copy."""

    def __init__(self, packages: Set[str]) -> None:
        self._packages = packages
        self._dicts: dict[int, tuple[dict[object, object], dict[object, object]]] = {}
        self._lists: dict[int, tuple[list[object], list[object]]] = {}
        self._cells: dict[int, tuple[CellType, object]] = {}
        self._functions: dict[int, FunctionType] = {}

    def add(self, values: Collection[object]) -> None:
        """Add those among some values."""
        waiting = list(values)
        while waiting:
            # Of tens of thousands of values few are: their types are compared first.
            types = {kind for kind in set(map(type, waiting)) if kind in _SEARCHED or self._is_own(kind)}
            found, waiting = [value for value in waiting if type(value) in types], []
            for value in found:
                if isinstance(value, list):
                    self._lists[id(value)] = value, list(value)
                elif isinstance(value, FunctionType):
                    waiting += self._of_function(value)
                elif isinstance(value, staticmethod | classmethod):
                    waiting.append(value.__func__)
                else:
                    waiting += self._of_dict(value if is_dict(value) else vars(value))

    def _of_dict(self, items: dict[Any, object]) -> Collection[object]:
        """Add a dict; its values, if it is new."""
        if id(items) in self._dicts:
            return ()
        self._dicts[id(items)] = items, dict(items)
        return items.values()

    def _of_function(self, function: FunctionType) -> list[object]:
        """Add the variables of a function from the packages; their values and the function's defaults."""
        closure, defaults, named = function.__closure__, function.__defaults__, function.__kwdefaults__
        is_plain = closure is None and defaults is None and named is None
        if is_plain or id(function) in self._functions or not self._is_from_packages(function):
            return []
        self._functions[id(function)] = function
        found = [*(defaults or ()), *(named or {}).values()]
        for cell in closure or ():
            if id(cell) not in self._cells:
                self._cells[id(cell)] = cell, _content(cell)
                found.append(_content(cell))
        return found

    def _is_own(self, kind: type) -> bool:
        """Whether it is a class of the packages whose objects may keep something."""
        is_own = bool(kind.__dictoffset__) and self._is_from_packages(kind)
        return is_own and not issubclass(kind, _NO_HOLDERS)

    def _is_from_packages(self, item: type | FunctionType) -> bool:
        # What was made by `exec` may be from no module.
        return str(item.__module__).partition(".")[0] in self._packages

    def restore(self) -> None:
        """Give them what they had in place of fake tensors."""
        for cell, content in self._cells.values():
            now = _content(cell)
            if now is not content and _has_fakes(now):
                cell.cell_contents = content
        for items, earlier in self._lists.values():
            if _is_changed(items, earlier) and _has_fakes(items):
                items[:] = earlier
        for entries, before in self._dicts.values():
            if _is_changed(entries.values(), before.values()):
                for key in _fakes(entries, before):
                    if key in before:
                        entries[key] = before[key]
                    else:
                        del entries[key]


def _content(cell: CellType) -> object:
    """The value of a variable of a closure; None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def packages_of(module: nn.Module) -> set[str]:
    """The packages that define the parts of a module, and the classes that these are derived from, without torch,
    Python and ours."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    modules = {kind.__module__ for kind in kinds} - {"builtins"}
    return {name.partition(".")[0] for name in modules if not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_foreign(file)


def owners(packages: Set[str]) -> list[object]:
    """The imported modules of some packages, and the classes that are defined in them."""
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


def _fakes(entries: Mapping[T, object], before: Mapping[T, object]) -> list[T]:
    """The keys of entries that have another value than before, which holds a fake tensor."""
    return [key for key, value in entries.items() if before.get(key) is not value and _has_fakes(value)]


def _has_fakes(value: object) -> bool:
    """Whether a value is a fake tensor, or holds one in sequences, dicts and objects."""
    seen, waiting = set[int](), [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, FakeTensor):
            return True
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tuple | list):
            waiting += item
        elif is_dict(item):
            waiting += item.values()
        elif type(item).__dictoffset__ and not isinstance(item, _NO_HOLDERS):
            waiting += [] if _is_foreign(str(type(item).__module__)) else vars(item).values()
    return False
