"""What the search counts as memory, by blocks."""

import torch
from torch import Tensor, nn

from passes.cost.account import account
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


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

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
