"""Caches outside of modules: a trace leaves none of its tensors in them."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from passes._torch import FakeTensor
from passes.ir.errors import CaptureError
from tests.passes.helpers import captured

_TABLES: dict[int, Tensor] = {}
_PAIRS: dict[int, tuple[Tensor, float]] = {}
_ORDERED: OrderedDict[int, Tensor] = OrderedDict()
_LISTS: dict[str, list[Tensor]] = {"tables": []}
_LAST: dict[str, Tensor] = {}
_kept: list[Tensor] = []


class _Tables:
    """An object that keeps a table."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def of(self, length: int) -> Tensor:
        """[length]"""
        if self.table is None:
            self.table = torch.arange(length).cos()
        return self.table


_tables = _Tables()
_last: Tensor | None = None
_made: dict[str, dict[int, Tensor]] | None = None


@functools.lru_cache(maxsize=4)
def _table(length: int) -> Tensor:
    return torch.arange(length).cos()


@functools.cache
def _squared(number: int) -> int:
    return number**2


def _in_function(model: "_Scaled", length: int) -> Tensor:
    return _table(length)


def _in_method(model: "_Scaled", length: int) -> Tensor:
    return model.table(length)


def _in_static_method(model: "_Scaled", length: int) -> Tensor:
    return model.other_table(length)


def _in_dict(model: "_Scaled", length: int) -> Tensor:
    if length not in _TABLES:
        _TABLES[length] = torch.arange(length).cos()
    return _TABLES[length]


def _in_pair(model: "_Scaled", length: int) -> Tensor:
    if length not in _PAIRS:
        _PAIRS[length] = torch.arange(length).cos(), 1.0
    return _PAIRS[length][0]


def _in_ordered_dict(model: "_Scaled", length: int) -> Tensor:
    if length not in _ORDERED:
        _ORDERED[length] = torch.arange(length).cos()
    return _ORDERED[length]


def _in_list(model: "_Scaled", length: int) -> Tensor:
    if not _kept:
        _kept.append(torch.arange(length).cos())
    return _kept[0]


def _in_dict_of_lists(model: "_Scaled", length: int) -> Tensor:
    tables = _LISTS["tables"]
    if not tables:
        tables.append(torch.arange(length).cos())
    return tables[0]


def _in_object(model: "_Scaled", length: int) -> Tensor:
    return _tables.of(length)


def _remembered(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A function that keeps its results, as models decorate theirs."""
    results: dict[int, Tensor] = {}

    @functools.wraps(function)
    def remembering(length: int) -> Tensor:
        if length not in results:
            results[length] = function(length)
        return results[length]

    return remembering


@_remembered
def _remembered_table(length: int) -> Tensor:
    return torch.arange(length).cos()


def _in_closure(model: "_Scaled", length: int) -> Tensor:
    return _remembered_table(length)


def _once(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A function that keeps its first result."""
    result: Tensor | None = None

    def computing(length: int) -> Tensor:
        nonlocal result
        result = function(length) if result is None else result
        return result

    return computing


_table_once = _once(lambda length: torch.arange(length).cos())


def _in_variable_of_closure(model: "_Scaled", length: int) -> Tensor:
    return _table_once(length)


# Functions that refer to themselves, and that are from no module.
def _itself(length: int, again: object = None) -> int:
    return length


_itself.__defaults__ = (_itself,)
_from_nowhere = eval("lambda length=1: length", {})


def _in_default(model: "_Scaled", length: int, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 (the cache)
    if length not in tables:
        tables[length] = torch.arange(length).cos()
    return tables[length]


def _in_dict_that_is_made(model: "_Scaled", length: int) -> Tensor:
    global _made
    if _made is None:
        _made = {"tables": {}}
    if length not in _made["tables"]:
        _made["tables"][length] = torch.arange(length).cos()
    return _made["tables"][length]


def _in_object_that_is_made(model: "_Scaled", length: int) -> Tensor:
    if model.maker[0] is None:
        model.maker[0] = _Tables()
    return model.maker[0].of(length)


def _in_global_variable(model: "_Scaled", length: int) -> Tensor:
    global _last
    if _last is None:
        _last = torch.arange(length).cos()
    return _last


def _in_attribute_of_class(model: "_Scaled", length: int) -> Tensor:
    if not hasattr(_Scaled, "last"):
        _Scaled.last = torch.arange(length).cos()
    return _Scaled.last


def _in_dict_of_class(model: "_Scaled", length: int) -> Tensor:
    if length not in model.tables:
        model.tables[length] = torch.arange(length).cos()
    return model.tables[length]


class _Scaled(nn.Module):
    """Scales its input by a table, which is kept in one place or another."""

    tables: ClassVar[dict[int, Tensor]] = {}
    last: ClassVar[Tensor]
    maker: ClassVar[list[_Tables | None]] = [None]

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    @functools.cache  # noqa: B019 (what models do)
    def table(self, length: int) -> Tensor:
        """[length]"""
        return torch.arange(length).cos()

    @staticmethod
    @functools.cache
    def other_table(length: int) -> Tensor:
        """[length]"""
        return torch.arange(length).cos()

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length]."""
        return x * PLACES[self.place](self, x.shape[1])


PLACES = {
    "a function": _in_function,
    "a method": _in_method,
    "a static method": _in_static_method,
    "a dict": _in_dict,
    "a dict of pairs": _in_pair,
    "an ordered dict": _in_ordered_dict,
    "a list": _in_list,
    "a dict of lists": _in_dict_of_lists,
    "an object": _in_object,
    "a dict that is made": _in_dict_that_is_made,
    "an object that is made": _in_object_that_is_made,
    "a closure": _in_closure,
    "a variable of a closure": _in_variable_of_closure,
    "a default": _in_default,
    "a global variable": _in_global_variable,
    "a class": _in_attribute_of_class,
    "a dict of a class": _in_dict_of_class,
}


@pytest.mark.parametrize("place", PLACES)
def test_the_model_runs_as_before(place: str) -> None:
    """After a trace, whether or not the table was there before it."""
    model, x = _Scaled(place), torch.ones(2, 6)
    expected = torch.arange(6).cos() * x
    for _ in range(2):
        captured(model, x=x)
        found = model(x)
        assert not isinstance(found, FakeTensor)
        assert torch.equal(found, expected)


class _Noting(nn.Module):
    """Notes its last result among global variables."""

    def forward(self, x: Tensor) -> Tensor:
        """x: any shape."""
        _LAST["result"] = x.exp()
        _kept.append(_LAST["result"])
        return _LAST["result"]


def test_entries_that_the_trace_replaced_are_put_back() -> None:
    _kept[:] = [torch.ones(2)]
    model = _Noting()
    result = model(torch.ones(2))
    captured(model, x=torch.ones(3))
    assert _LAST["result"] is result
    assert len(_kept) == 2
    assert _kept[1] is result
    _kept.clear()


def test_other_entries_stay() -> None:
    """Entries that the trace did not make, and caches of functions that it did not call."""
    _TABLES[3] = torch.arange(3).cos()
    kept = _TABLES[3]
    _squared(3)
    captured(_Scaled("a dict"), x=torch.ones(2, 5))
    assert _TABLES[3] is kept
    assert 5 not in _TABLES
    assert _squared.cache_info().currsize == 1


def _with_attribute(length: int) -> Tensor:
    if not hasattr(_with_attribute, "table"):
        _with_attribute.table = torch.arange(length).cos()
    return _with_attribute.table


class _Elsewhere(nn.Module):
    """Keeps a table where nobody looks for one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length]."""
        return x * _with_attribute(x.shape[1])


def test_a_tensor_of_an_earlier_trace_is_refused() -> None:
    captured(_Elsewhere(), x=torch.ones(2, 6))
    with pytest.raises(
        CaptureError, match=r"test_caches.py:\d+ .*: it computes with a tensor of shape \[6\] that an ear"
    ):
        captured(_Elsewhere(), x=torch.ones(2, 6))
    del _with_attribute.table
