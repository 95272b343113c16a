"""State of a model, besides its tensors, that a forward pass changes."""

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from passes.ir.errors import CaptureError
from tests.passes.helpers import captured

X = torch.ones(4, 6)


class _Given(nn.Module):
    """Runs a function of itself and its input."""

    def __init__(self, function: Callable[["_Given", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = nn.Module()
        self.function = function
        self.count, self.is_ready, self.kept = 0, False, torch.zeros(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Run the function."""
        return self.function(self, self.linear(x))


def _python(model: _Given, x: Tensor) -> Tensor:
    return x * (2.0 if random.random() < 0.5 else 1.0)


def _numpy(model: _Given, x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.random.rand(6).astype("float32"))


def _seeds(model: _Given, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * torch.rand(6)


def _inference(model: _Given, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = x.sum()
    return x * scale.clone()


@torch.inference_mode()
def _scale(x: Tensor) -> Tensor:
    return x.sum()


def _decorated(model: _Given, x: Tensor) -> Tensor:
    return x * _scale(x).clone()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_python, "it draws random numbers with Python's random, which would be the same in every call"),
        (_numpy, "it draws random numbers with numpy.random, which would be the same in every call"),
        (_seeds, r"test_state.py:\d+ \(torch.manual_seed\(0\)\): it seeds torch's random numbers"),
        (_inference, r"test_state.py:\d+ .*: it enters torch.inference_mode, which a trace does not keep"),
        (_decorated, r"test_state.py:\d+ .*: it enters torch.inference_mode, which a trace does not keep"),
    ],
    ids=["random", "numpy", "seed", "inference mode", "decorated"],
)
def test_what_a_trace_does_not_keep_is_refused(function: Callable[[_Given, Tensor], Tensor], message: str) -> None:
    """Every call would have the numbers of the trace, and gradients that the model has not."""
    before = torch.initial_seed()
    with pytest.raises(CaptureError, match=message):
        captured(_Given(function), x=X)
    assert torch.initial_seed() == before


def _counts(model: _Given, x: Tensor) -> Tensor:
    model.count += 1
    return x * model.count


def _keeps(model: _Given, x: Tensor) -> Tensor:
    before, model.inner.kept = model.kept, x.detach()
    return x + before


def _flags(model: _Given, x: Tensor) -> Tensor:
    model.is_ready = True
    return x


@pytest.mark.parametrize(
    ("function", "changed"),
    [(_counts, "count"), (_keeps, "inner.kept"), (_flags, "")],
    ids=["number", "tensor", "flag"],
)
def test_attributes_that_change_are_a_warning(
    caplog: pytest.LogCaptureFixture, function: Callable[[_Given, Tensor], Tensor], changed: str
) -> None:
    """A model may set one that it never reads, so it is no error."""
    with caplog.at_level(logging.WARNING, "autopar"):
        captured(_Given(function), x=X)
    said = [item.getMessage() for item in caplog.records if "a forward pass of _Given" in item.getMessage()]
    assert len(said) == bool(changed)
    assert all(f"changes its {changed}, which it may read in the next one" in text for text in said)


def _several(model: _Given, x: Tensor) -> Tensor:
    model.inner.table = torch.ones(6)
    model.inner.register_buffer("sine", torch.ones(6))
    model.inner.register_buffer("cosine", torch.ones(6))
    model.tables[6], model.steps[0] = x.detach(), x.detach()
    model.steps.append(x.detach())
    return x * model.inner.table * model.inner.sine


def _hooked(model: _Given, x: Tensor) -> Tensor:
    """As models of transformers hook layers whose outputs are asked for, once."""
    if not hasattr(model, "is_hooked"):
        model.is_hooked = True
        model.inner.register_forward_hook(lambda *_: None)
        model.inner.register_forward_pre_hook(lambda *_: None)
    return x


@pytest.mark.parametrize("function", [_counts, _keeps, _flags, _several, _hooked])
def test_attributes_are_as_before(function: Callable[[_Given, Tensor], Tensor]) -> None:
    """Attributes and hooks of all parts, and items of dicts and lists: the model runs after a trace as before."""
    model = _Given(function)
    model.inner.register_buffer("cosine", None)
    model.tables, model.steps = {5: torch.zeros(5)}, [torch.zeros(1)]
    before = {path: dict(vars(part)) for path, part in model.named_modules()}
    table, step = model.tables[5], model.steps[0]
    captured(model, x=X)
    for path, part in model.named_modules():
        assert vars(part).keys() == before[path].keys()
        # torch makes new dicts and lists of tensors.
        others = {name: value for name, value in vars(part).items() if name not in ("tables", "steps")}
        assert all(value is before[path][name] for name, value in others.items())
    assert list(model.tables) == [5]
    assert model.tables[5] is table
    assert len(model.steps) == 1
    assert model.steps[0] is step
    assert model.inner._buffers == {"cosine": None}
    assert not model.inner._forward_hooks
    assert not model.inner._forward_pre_hooks


class _Table:
    """An object that computes a table once."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.by_length: dict[int, Tensor] = {}

    def of(self, length: int) -> Tensor:
        """[length]"""
        if self.values is None:
            self.values = self.by_length[length] = torch.arange(length).cos()
        return self.values


@pytest.mark.parametrize("place", ["attribute", "list", "tuple", "dict", "object"])
def test_objects_that_modules_hold_are_as_before(place: str) -> None:
    """Wherever an object of the model's own classes is: it holds nothing of the trace, which has its table, too."""
    table = _Table()
    holding = _Table()
    holding.table = table
    places = {"attribute": table, "list": [1, table], "tuple": (table,), "dict": {"a": table}, "object": holding}
    model = _Given(lambda _, x: x * table.of(6))
    model.inner.held = places[place]
    for _ in range(2):
        program = captured(model, x=X)
        assert any(op.kind == "cos" for op in program.ops)
        assert table.values is None
        assert not table.by_length
