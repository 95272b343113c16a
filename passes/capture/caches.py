"""Caches that the code of a model keeps outside of its modules: a trace leaves none of its tensors in them.

Models keep tables in `functools.lru_cache`, in global variables, in attributes of classes, and in dicts there. A tensor
of the trace in one would be read by the next call of the model.
"""

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeGuard

from torch import nn

from passes._torch import FakeTensor
from passes.capture.source import is_foreign

# What `functools.cache` and `functools.lru_cache` make of a function.
_CACHED = type(functools.cache(len))
# Subclasses may compute their items when they are asked for them.
_DICTS = (dict, OrderedDict, defaultdict)


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
    owners = _owners(module)
    # Each owner is kept, so that its id stays its own.
    before = {id(owner): (owner, dict(vars(owner))) for owner in owners}
    misses = {function: function.cache_info().misses for owner in owners for function in _functions(owner)}
    try:
        yield
    finally:
        for owner in _owners(module):
            _, values = before.get(id(owner), (owner, {}))
            for name in [name for name, value in list(vars(owner).items()) if _has_fakes(value)]:
                if name in values:
                    setattr(owner, name, values[name])
                else:
                    delattr(owner, name)
            for entries in [value for value in list(vars(owner).values()) if is_dict(value)]:
                for key in [key for key, value in entries.items() if _has_fakes(value)]:
                    del entries[key]
            for function in _functions(owner):
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


def _functions(owner: object) -> list[_Cached]:
    """The functions and methods of a module or a class whose results are kept."""
    items = list(vars(owner).values())
    own = (item.__func__ if isinstance(item, staticmethod | classmethod) else item for item in items)
    return [item for item in own if _is_cached(item)]


def _is_cached(value: object) -> TypeGuard[_Cached]:
    return isinstance(value, _CACHED)


def is_dict(value: object) -> TypeGuard[dict[object, object]]:
    """Whether a value is a dict of Python's own kinds, whose items can be taken out without side effects."""
    return type(value) in _DICTS


def _has_fakes(value: object) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, FakeTensor) for item in items)
