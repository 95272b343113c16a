"""Caches that the code of a model keeps outside of its modules: a trace leaves none of its tensors in them.

Models keep tables in `functools.lru_cache`, or in dicts of a module of Python or of a class. A tensor of the trace in
one would be read by the next call of the model.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeGuard

from torch import nn

from passes._torch import FakeTensor
from passes.capture.source import is_foreign

# What `functools.cache` and `functools.lru_cache` make of a function.
_CACHED = type(functools.cache(len))
_Values = dict[object, object]


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
    """Enter around a traced forward pass of `module`. Afterwards empties the caches of functions that it added to, and
    removes its tensors from dicts, in all that is imported of the packages that its modules are from."""
    before = {id(function): function.cache_info().misses for function in _caches(module)}
    try:
        yield
    finally:
        for function in _caches(module):
            if function.cache_info().misses > before.get(id(function), 0):
                function.cache_clear()
        for values in _dicts(module):
            for key in [key for key, value in values.items() if _has_fakes(value)]:
                del values[key]


def _caches(module: nn.Module) -> list[_Cached]:
    return [value for value in _attributes(module) if _is_cached(value)]


def _dicts(module: nn.Module) -> list[_Values]:
    return [value for value in _attributes(module) if type(value) is dict]


def _attributes(module: nn.Module) -> Iterator[object]:
    """The attributes of modules of Python, and of the classes in them, of the packages that `module` is from."""
    packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
    for name, imported in list(sys.modules.items()):
        file = getattr(imported, "__file__", None)
        if name.partition(".")[0] not in packages or (file is not None and is_foreign(file)):
            continue
        for value in list(vars(imported).values()):
            yield value
            if isinstance(value, type) and value.__module__ == name:
                for item in list(vars(value).values()):
                    yield item.__func__ if isinstance(item, staticmethod | classmethod) else item


def _is_cached(value: object) -> TypeGuard[_Cached]:
    return isinstance(value, _CACHED)


def _has_fakes(value: object) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, FakeTensor) for item in items)
