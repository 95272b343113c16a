"""The memory traffic that chains of ops avoid."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.cost.cluster import CLUSTERS, Cluster, Device, Link
from passes.cost.fusion import Fused, fusion, joined
from passes.cost.price import op_seconds
from passes.ir.choices import Strategy
from passes.ir.folded import Folded
from passes.ir.layout import R
from passes.rules import written_rule
from passes.rules.strategies import op_context, replicated
from tests.passes.helpers import mesh_of
from tests.passes.planning import planning

ONE = mesh_of(one=1)
# A byte a second, and nothing else costs anything.
SLOW = Cluster("slow", Device("d", {"float32": 1e30}, 1.0, 1e9, 1.0, 0.0, 0.0), 1, Link(1.0, 0.0), Link(1.0, 0.0))


class Gated(nn.Module):
    """A gated pair of projections, and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 32, bias=False)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """rows 16 -> rows 16."""
        x = x * 2
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Norm(nn.Module):
    """A norm as models write it, between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16, bias=False)
        self.weight = nn.Parameter(torch.ones(16))
        self.after = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """rows 16 -> rows 16."""
        x = self.before(x)
        return self.after(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


def folded_of(module: nn.Module) -> Folded:
    """Traced on 8 rows, with a gradient for the input."""
    return planning(module, {"x": torch.ones(8, 16, requires_grad=True)}, ONE, CLUSTERS["cpu"]).folded


def by_kind(folded: Folded) -> dict[str, list[Fused | None]]:
    """The fusion found for the ops of each kind, in order."""
    found = fusion(folded)
    kinds: dict[str, list[Fused | None]] = {}
    for op in folded.ops:
        kinds.setdefault(op.kind, []).append(found.get(op.results[0]))
    return kinds


def moved(folded: Folded, kinds: set[str]) -> tuple[float, float]:
    """Bytes that the ops of `kinds` move forward and backward when compiled."""
    chains = fusion(folded)
    forward = backward = 0.0
    for op in folded.ops:
        if op.kind in kinds:
            context = op_context(op, written_rule(op, folded.types), folded.types, folded.flowing, set(), set())
            choice = replicated(len(op.operands), len(op.results), R)
            strategy = Strategy((choice.name,), ((R,),) * len(op.operands), ((R,),) * len(op.results))
            once, back, *_ = op_seconds(context, (choice,), strategy, SLOW, ONE, chains.get(op.results[0]))
            forward, backward = forward + once, backward + back
    return forward, backward


def test_a_gate() -> None:
    """silu(a) * b reads a and b and writes the product; backward it reads both and the gradient, and writes two."""
    size = 8 * 32 * 4
    folded = folded_of(Gated())
    assert by_kind(folded)["silu"] == [Fused(frozenset(), frozenset({0}), True, frozenset({0}), frozenset())]
    # There is another product, x * 2, before it: read and write forward and backward.
    other = 8 * 16 * 4
    assert moved(folded, {"silu", "mul"}) == (3 * size + 2 * other, 5 * size + 2 * other)


def test_a_norm_that_is_written_out() -> None:
    """Its input is read and its result written; the statistics stay. Backward: input, weight and the gradient are read,
    the gradients of input and weight written."""
    whole, weight = 8 * 16 * 4, 16 * 4
    forward, backward = moved(folded_of(Norm()), {"pow", "mean", "add", "rsqrt", "mul"})
    assert forward == pytest.approx(2 * whole + weight)
    assert backward == pytest.approx(3 * whole + 2 * weight)


def test_products_are_not_joined() -> None:
    """They, and whatever reads what they make after others did, read and write memory."""
    folded = folded_of(Gated())
    kinds = by_kind(folded)
    assert kinds["linear"] == [None] * 3
    # The residual is read once more behind the products: it does not stay in registers for that long.
    (add,) = kinds["add"]
    assert add is not None
    assert add.operands == frozenset()
    assert add.starts
    first = kinds["mul"][0]
    assert first is not None
    assert first.results == frozenset()


def test_a_chain_starts_once() -> None:
    """One of its ops starts the kernel."""
    kinds = by_kind(folded_of(Norm()))
    chain = [fused for kind in ("pow", "mean", "add", "rsqrt", "mul") for fused in kinds[kind]]
    assert len(chain) == 6
    assert sum(fused is not None and fused.starts for fused in chain) == 1


class Layers(nn.Module):
    """Equal layers of products and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Sigmoid()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for layer in self.layers:
            x = layer(x)
        return x.exp().sum()


def test_what_leaves_a_region_is_written() -> None:
    """The next copy reads it from memory, and so does what follows the last."""
    folded = folded_of(Layers())
    assert len(folded.regions) == 1
    kinds = by_kind(folded)
    (relu,), (sigmoid,), (exp,) = kinds["relu"], kinds["sigmoid"], kinds["exp"]
    assert relu == Fused(frozenset(), frozenset({0}), True, frozenset({0}), frozenset())
    assert sigmoid == Fused(frozenset({0}), frozenset(), False, frozenset(), frozenset({0}))
    assert exp is not None
    assert exp.operands == frozenset()


def test_what_is_returned_is_written() -> None:
    """Though a chain goes on behind it."""

    class Both(nn.Module):
        """Two results, one of the other."""

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Twice x, and its exponential."""
            y = x * 2
            return y, y.exp()

    kinds = by_kind(folded_of(Both()))
    (mul,), (exp,) = kinds["mul"], kinds["exp"]
    assert mul is not None
    assert exp is not None
    assert mul.results == frozenset()
    assert exp.operands == frozenset({0})


def test_regions_are_joined_where_the_program_is_compiled() -> None:
    """Ops outside of the regions are not joined."""
    folded = folded_of(Layers())
    assert joined(folded) == {}
    compiled = replace(folded, program=replace(folded.program, compiled=True))
    inside = {op.results[0] for region in folded.regions for op in region.ops}
    assert set(joined(compiled)) == inside & set(fusion(folded))
    assert set(joined(compiled)) < set(fusion(folded))
