"""Costs that ops and strategies share, against each by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.cost.price import op_seconds
from passes.cost.workspace import workspace
from passes.rules.strategies import named_choices
from passes.strategies import analyze
from tests.passes.helpers import mesh_of
from tests.passes.planning import planning

MESH = mesh_of(a=2, b=2)


class Layers(nn.Module):
    """Attention, a product, and what is pointwise, twice: of the same sizes, and the product alone of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x: [2, 4, 8]."""
        for product in (self.first, self.second):
            y = functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
            x = x + functional.silu(product(y[:, 0])) * x
        return torch.tanh(self.wide(x)).sum()


def test_every_strategy_costs_what_it_does_alone() -> None:
    """Ops that do the same share their strategies, and strategies with the same splits their work."""
    case = planning(Layers(), {"x": torch.ones(2, 4, 8, requires_grad=True)}, MESH, "h100")
    analysis = analyze(case.folded)
    checked = 0
    for placed in analysis.placed:
        node, context = case.problem.nodes[case.problem.index[placed.op.key]], analysis.contexts[placed.op.key]
        fused = analysis.fused.get(placed.op.results[0])
        saved = [item.index for item in analysis.saved[placed.op.key] if item.copy]
        for number, strategy in enumerate(node.strategies):
            choices = named_choices(context, strategy.methods, MESH)
            assert choices is not None
            seconds = op_seconds(context, choices, strategy, case.cluster, MESH, fused)
            kept, backward = workspace(context, choices, strategy, MESH, case.cluster.device.type)
            assert node.seconds[number] == node.count * sum(seconds)
            assert node.memory[number].transient == backward
            assert saved or node.copies[number] == node.count * kept
            checked += 1
    assert checked > 100


def test_ops_do_the_same_where_arguments_and_types_are_equal() -> None:
    """Both products of one size are the same op, the one of another size is not; nor are ops of other kinds."""
    case = planning(Layers(), {"x": torch.ones(2, 4, 8, requires_grad=True)}, MESH, "h100")
    analysis = analyze(case.folded)
    products = [placed.op.key for placed in analysis.placed if placed.op.kind == "linear"]
    assert [analysis.same[key] for key in products] == [products[0], products[0], products[2]]
    kinds = {placed.op.key: placed.op.kind for placed in analysis.placed}
    assert all(kinds[key] == kinds[other] for key, other in analysis.same.items())
    nodes = [case.problem.nodes[case.problem.index[key]] for key in products]
    assert nodes[0].strategies == nodes[1].strategies
