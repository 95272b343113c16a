"""What the search counts as memory, by blocks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from passes.cost.account import account, layout_bytes
from passes.cost.memory import lying
from passes.cost.moments import Place, Span
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.solve import solve
from passes.solving.limits import Limits
from tests.passes.planning import STATES, planning

ROWS, WIDTH, LAYERS = 8, 16, 3


class _Layer(nn.Module):
    """A product, a cheap function of it, and a product of that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class _Normed(nn.Module):
    """A norm, of which a product is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        result: Tensor = self.last(self.norm(x))
        return result


class _Layers(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = _Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_what_is_made_again_is_made_of_something() -> None:
    """Where tanh is computed again, what the product before it gives stays, and tanh's own result does not."""
    case = planning(_Layers(), {"x": torch.zeros(ROWS, WIDTH)}, Mesh.of({"dp": 1}))
    remade = {case.problem.nodes[edge.producer].key for edge in case.problem.edges if edge.remade}
    assert remade == {"layers.*.first/linear"}
    (name,) = (region.name for region in case.folded.regions)
    places = {}
    for level in ("none", "selective"):
        regime = Regime(recompute={name: level})
        solution = solve(case.problem, case.cluster, case.mesh, Limits(1e30, STATES), regime)
        found = lying(case.problem, solution, case.mesh, account(case.problem, regime))
        tensor = ROWS * WIDTH * 4 * LAYERS
        places[level] = {item.place for item in found if item.kind == "kept" and item.size == tensor}
    block = case.problem.blocks.index(name)
    product, tanh, last = (
        index for index, node in enumerate(case.problem.nodes) if node.block == block and node.kind == "op"
    )
    # None: what each product reads, which is what tanh keeps. Selective: what a layer is given, and the first product;
    # what tanh gives is there for the second product and itself.
    assert places["none"] == {Place(Span.FORWARD, block, product), Place(Span.FORWARD, block, tanh)}
    assert places["selective"] == {
        Place(Span.FORWARD, block, product),
        Place(Span.FORWARD, block, tanh),
        Place(Span.RUNNING, block, tanh, last),
    }


def test_what_sends_is_not_made_again() -> None:
    """A norm over a dim that is split sends, so it does not run again where recompute is selective: what it gives
    stays. Another strategy of the same norm runs again, and what it gives does not stay."""
    mesh = Mesh.of({"tp": 2})
    case = planning(_Layers(_Normed), {"x": torch.zeros(ROWS, WIDTH)}, mesh)
    (name,) = (region.name for region in case.folded.regions)
    regime = Regime(recompute={name: "selective"})
    solution = solve(case.problem, case.cluster, mesh, Limits(1e30, STATES), regime)
    norm = case.problem.index["layers.*.norm/layer_norm"]
    node = case.problem.nodes[norm]
    assert node.cheap
    places = account(case.problem, regime)
    (use,) = (edge for edge in case.problem.edges if edge.producer == norm)
    wanted = [item.operands[use.operand] for item in case.problem.nodes[use.consumer].strategies]
    tried = set()
    for pick, strategy in enumerate(node.strategies):
        (layout,) = strategy.results
        if layout in wanted:
            picks = list(solution.picks)
            picks[norm], picks[use.consumer] = pick, wanted.index(layout)
            found = lying(case.problem, replace(solution, picks=tuple(picks)), mesh, places)
            size = layout_bytes(case.problem.groups[use.group], layout, mesh)
            kept = [item for item in found if item.kind == "kept" and item.place.first == use.consumer]
            assert [item.size for item in kept] == [size]
            assert kept[0].place.span is (Span.RUNNING if node.light[pick] else Span.FORWARD)
            tried.add(node.light[pick])
    assert tried == {False, True}
