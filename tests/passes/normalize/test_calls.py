"""calls: the order of the ops of layers that are called several times."""

import re
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

from passes.ir.program import Program
from passes.normalize.calls import with_calls_side_by_side
from passes.regions import fold
from tests.passes.helpers import normalized
from tests.passes.normalize.running import run

X, Y = torch.ones(2, 6), torch.full((2, 6), 2.0)


class Layer(nn.Module):
    """A layer with a norm whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 6], as the result."""
        return x + self.norm(self.linear(x).tanh())


class Layers(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, depth: int, inner: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        layers = (nn.Sequential(*(Layer() for _ in range(inner))) if inner else Layer() for _ in range(depth))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 6]; [batch, 1]."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Compared(nn.Module):
    """A preference of one input over another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both [batch, 6]; a scalar."""
        return -(self.model(x) - self.model(y)).sigmoid().log().mean()


class Rounds(nn.Module):
    """Layers that run again on what they have made."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 6]; a scalar."""
        for _ in range(2):
            for layer in self.layers:
                x = layer(x).relu()
        return x.sum()


class Steps(nn.Module):
    """Layers that run over time, each with a state of its own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(12, 6) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """x: [time, batch, 6]; a scalar."""
        states = [torch.zeros_like(x[0]) for _ in self.cells]
        for step in x.unbind():
            for number, cell in enumerate(self.cells):
                step = states[number] = cell(torch.cat((step, states[number]), -1))
        return step.sum()


def _calls(program: Program) -> list[str]:
    """The entries of module lists in the order of the ops, those next to each other once."""
    entries = (found.group() for op in program.ops if (found := re.match(r".*\d+(?=\.|$)", op.module)))
    return [entry for entry, _ in groupby(entries)]


def test_calls_of_a_layer_are_next_to_each_other() -> None:
    """Two calls of three layers are three copies of one region, each with the parameters of its layer."""
    program = normalized(Compared(Layers(3)), x=X, y=Y)
    assert _calls(program) == [f"model.layers.{number}" for number in range(3)]
    (region,) = fold(program).regions
    assert region.count == 3
    assert len(region.carries) == 2
    assert sum(op.kind == "linear" for op in region.ops) == 2
    # The first op of the second call, which is not in a layer, comes before all layers.
    embeddings = [place for place, op in enumerate(program.ops) if op.module == "model.embedding"]
    assert max(embeddings) < min(place for place, op in enumerate(program.ops) if "layers" in op.module)


def test_nested_lists() -> None:
    """Of lists in lists the inner entries are next to each other, too."""
    program = normalized(Compared(Layers(2, inner=2)), x=X, y=Y)
    assert _calls(program) == [f"model.layers.{outer}.{inner}" for outer in range(2) for inner in range(2)]


def test_the_whole_model_in_a_list() -> None:
    """A list with one entry, in which layers lie, is called twice."""
    program = normalized(Compared(nn.Sequential(Layers(3))), x=X, y=Y)
    layers = [f"model.0.layers.{number}" for number in range(3)]
    assert _calls(program) == ["model.0", *layers, "model.0"]
    assert [region.count for region in fold(program).regions] == [3]


@pytest.mark.parametrize("model", [Rounds(1), Rounds(2), Rounds(3)])
def test_rounds_stay_in_order(model: Rounds) -> None:
    """A call that depends on later layers of the call before stays behind them."""
    program = normalized(model, x=X)
    depth = len(model.layers)
    assert _calls(program) == [f"layers.{number}" for number in range(depth)] * (2 if depth > 1 else 1)
    assert with_calls_side_by_side(program) == program


def test_states_stay_in_order() -> None:
    """Layers that run over time do so step by step."""
    program = normalized(Steps(2), x=torch.ones(3, 2, 6))
    assert _calls(program) == ["cells.0", "cells.1"] * 3


def test_values_and_statistics_are_the_same() -> None:
    """The order changes no value, nor the statistics that one call after the other updates."""
    model = Compared(Layers(3)).double()
    inputs = {name: torch.randn(4, 6, dtype=torch.float64) for name in ("x", "y")}
    program = normalized(model, **inputs)
    state = {name: item.detach().clone() for name, item in (*model.named_parameters(), *model.named_buffers())}
    outputs, updates = run(program, {**state, **inputs})
    assert torch.equal(next(iter(outputs.values())), model(**inputs))
    buffers = dict(model.named_buffers())
    assert len(updates) == len(buffers)
    assert all(torch.equal(value, buffers[name]) for name, value in updates.items())
