"""deferred: the products whose weight gradients a schedule computes apart, their seconds, and their source."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.cost.walk import Optimizer, Prices, stage_seconds
from passes.ir.configuration import Configuration, Staging
from passes.ir.lowered import Compute, Stage
from passes.lower.deferred import deferred
from passes.lower.recompute import recompute
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of, source_of
from tests.passes.planning import STATES, Planning, planning

MESH = mesh_of(dp=2)
WIDTH = 256


class Layer(nn.Module):
    """A product of a norm, one of a weight that is transposed first, and one without any weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        hidden = self.up(self.norm(x)).relu() @ self.down.transpose(0, 1)
        return x + hidden @ hidden.transpose(1, 2) @ x


class Model(nn.Module):
    """A product of the input, which takes no gradient, and three layers; the head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, and sum."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.fixture(scope="module")
def case() -> Planning:
    return planning(Model(), {"x": torch.empty(4, 16, WIDTH, device="meta")}, MESH, "h100")


@pytest.fixture(scope="module")
def stage(case: Planning) -> Stage:
    return case.lowered(solve(case.problem, case.cluster, Limits(1e12, STATES), Configuration(MESH)))


def test_products_of_weights_and_activations_are_marked(case: Planning, stage: Stage) -> None:
    """Not those of the input or a frozen weight, nor those of two activations."""
    made = deferred(stage, case.folded.flowing)
    products = [item for item in made.statements if isinstance(item, Compute) and item.op.kind in ("linear", "matmul")]
    marked = {item.op.key: item.deferred for item in products if item.deferred}
    assert len(marked) == 2
    assert len(products) == 6
    linear, matmul = marked.values()
    assert "up.weight" in linear[0]
    assert "transpose" in matmul[0]
    assert "relu" in matmul[1]


def test_source_leaves_weights(case: Planning, stage: Stage) -> None:
    """Plain calls before, methods of what takes the gradients after; recomputed ones are a function of their
    operands."""
    plain = source_of(stage, MESH)
    assert "self.deferred" not in plain
    made = deferred(stage, case.folded.flowing)
    source = source_of(made, MESH)
    assert source.count("self.deferred.linear(") == source.count("self.deferred.matmul(") == 1
    assert plain.count("F.linear(") == source.count("F.linear(") + 1 == 3
    again = source_of(deferred(recompute(stage, {"layers.*": "ops"}), case.folded.flowing), MESH)
    assert "self.deferred.matmul(" in again
    for text in (source, again):
        compile(text, "deferred", "exec")


@pytest.mark.parametrize("level", ["none", "full"])
def test_seconds_are_those_of_the_whole_backward_pass(case: Planning, stage: Stage, level: str) -> None:
    """Gradients of weights take half of a product's backward pass, which has as much less; what is computed again
    stays in it; and reductions, which a whole backward pass hides, come after the step."""
    configuration = Configuration(MESH, 4, {"layers.*": level}, reduce_once=True)
    apart = replace(configuration, pipeline=Staging(schedule="zb_h1"))
    lowered = recompute(stage, configuration.recompute)
    prices = Prices(case.folded, case.cluster, MESH)
    _, whole = stage_seconds(lowered, prices, Optimizer(STATES), configuration)
    marked = deferred(lowered, case.folded.flowing)
    _, split = stage_seconds(marked, prices, Optimizer(STATES), apart)
    assert whole.weight == 0.0
    assert split.weight > 0.0
    assert split.backward + split.weight == pytest.approx(whole.backward)
    assert (split.forward, split.before) == pytest.approx((whole.forward, whole.before))
    assert split.after >= whole.after
    made = [item for item in deferred(lowered, case.folded.flowing).statements if isinstance(item, Compute)]
    assert split.weight < whole.backward / 2
    assert sum(bool(item.deferred) for item in made) == 2
