"""The memory model of the search: live ranges of tensors, and bytes under all strategies at once."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from passes.cost.live_ranges import layout_bytes
from passes.cost.memory import chosen_memory, memory_model, memory_use
from passes.cost.program_points import LiveRange, Phase
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.mesh import Mesh
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.cost.layers import LAYERS, ROWS, WIDTH, Between, Layers, batch
from tests.passes.planning import STATES, Planning, planning, random_configuration, random_planning, zero_configuration


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


def _totals_alone(case: Planning, solution: Solution) -> NDArray[np.float64]:
    """Bytes at each point of a problem that offers the solution alone."""
    model, found = chosen_memory(case.problem, solution)
    return model.totals(found)


def test_what_is_made_again_is_made_of_something() -> None:
    """If tanh is computed again, the result of the product before it stays, and tanh's own result does not."""
    case = planning(Layers(lambda: Between(torch.tanh)), batch(), Mesh.of({"dp": 1}))
    remade = {case.problem.nodes[edge.producer].key for edge in case.problem.edges if edge.remade}
    assert remade == {"layers.*.first/linear"}
    (name,) = (region.name for region in case.folded.regions)
    live = {}
    for level in ("none", "selective"):
        configuration = Configuration(case.mesh, recompute={name: level})
        solution = solve(case.problem, case.cluster, Limits(1e30, STATES), configuration)
        model, found = chosen_memory(case.problem, solution)
        tensor = ROWS * WIDTH * 4 * LAYERS
        live[level] = {model.ranges[item.range] for item in found if item.kind == "saved" and item.size == tensor}
    block = case.problem.blocks.index(name)
    product, tanh, last = (
        index for index, node in enumerate(case.problem.nodes) if node.block == block and node.kind == "op"
    )
    # None: what each product reads, which is what tanh keeps. Selective: what a layer is given, and the first product;
    # what tanh gives is there for the second product and itself.
    assert live["none"] == {LiveRange(Phase.FORWARD, block, product), LiveRange(Phase.FORWARD, block, tanh)}
    assert live["selective"] == {
        LiveRange(Phase.FORWARD, block, product),
        LiveRange(Phase.FORWARD, block, tanh),
        LiveRange(Phase.COPY, block, tanh, last),
    }


def test_what_sends_is_not_made_again() -> None:
    """A norm over a dim that is split sends, so it does not run again where recompute is selective: what it gives
    stays. Another strategy of the same norm runs again, and what it gives does not stay."""
    mesh = Mesh.of({"tp": 2})
    case = planning(Layers(_Normed), batch(), mesh)
    (name,) = (region.name for region in case.folded.regions)
    configuration = Configuration(mesh, recompute={name: "selective"})
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), configuration)
    norm = case.problem.index["layers.*.norm/layer_norm"]
    node = case.problem.nodes[norm]
    assert node.cheap
    model = memory_model(case.problem, configuration)
    (use,) = (edge for edge in case.problem.edges if edge.producer == norm)
    wanted = [item.operands[use.operand] for item in case.problem.nodes[use.consumer].strategies]
    tried = set()
    for pick, strategy in enumerate(node.strategies):
        (layout,) = strategy.results
        if layout in wanted:
            picks = list(solution.picks)
            picks[norm], picks[use.consumer] = pick, wanted.index(layout)
            found = model.allocations(picks, solution.regathered)
            assert model.totals(found) == pytest.approx(_totals_alone(case, replace(solution, picks=tuple(picks))))
            size = layout_bytes(case.problem.groups[use.group], layout, mesh)
            kept = [(item.size, model.ranges[item.range]) for item in found if item.kind == "saved"]
            ((own, live),) = ((own, live) for own, live in kept if live.first == use.consumer and own)
            assert own == size
            assert live.phase is (Phase.COPY if node.light[pick] else Phase.FORWARD)
            tried.add(node.light[pick])
    assert tried == {False, True}


@pytest.mark.parametrize("seed", range(6))
def test_all_strategies_at_once_are_each_alone(seed: int) -> None:
    """The arrays of all strategies give for a random choice of them, at every point and by kind, the bytes of a problem
    that offers this choice alone."""
    case = random_planning(seed, blocks=2 + seed % 2)
    choose = random.Random(seed)
    configuration = zero_configuration(case, seed) if seed % 2 else random_configuration(case, seed)
    model = memory_model(case.problem, configuration)
    for _ in range(4):
        picks = tuple(choose.randrange(len(node.strategies)) for node in case.problem.nodes)
        redone = case.changed_and_kept(picks, configuration)
        again = frozenset(choose.sample(redone, len(redone) // 2))
        solution = Solution(picks, again, 0.0, 0.0, configuration)
        found = model.allocations(picks, again)
        np.testing.assert_allclose(model.totals(found), _totals_alone(case, solution), rtol=1e-12)
        alone = memory_use(case.problem, solution, STATES)
        assert model.use(found, STATES).kinds() == pytest.approx(alone.kinds(), rel=1e-12)
