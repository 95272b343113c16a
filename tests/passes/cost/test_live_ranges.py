"""Live ranges of what selective recompute keeps, and what the count of the search refuses."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from passes.cost.live_ranges import layout_bytes, saved_edges
from passes.cost.memory import chosen_memory
from passes.cost.program_points import LiveRange, Phase
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.layout import Layout, S
from passes.ir.mesh import Mesh
from passes.solve.instance import refuse_if_hopeless
from passes.solve.limits import Limits
from passes.solve.solver import Solver
from tests.passes.cost.layers import LAYERS, ROWS, WIDTH, Between, Layers, batch
from tests.passes.planning import (
    STATES,
    Planning,
    planning,
    random_configuration,
    random_planning,
    zero_configuration,
)

MESH = Mesh.of({"tp": 2})
TANH, SIGMOID = "layers.*/tanh", "layers.*/sigmoid"


@pytest.fixture(scope="module")
def case() -> Planning:
    """The planning problem of the layers on two devices."""
    return planning(Layers(lambda: Between(torch.tanh, torch.sigmoid)), batch(), MESH)


def _running(case: Planning, key: str, layout: Layout) -> int:
    """The strategy of a function that has this layout."""
    strategies = case.problem.nodes[case.problem.index[key]].strategies
    return next(pick for pick, each in enumerate(strategies) if each.results == each.operands == (layout,))


def _chosen(case: Planning, level: str, sigmoid: Layout, again: bool = False) -> Solution:
    """The choice in which all nodes have their first strategy, but tanh splits rows, and sigmoid has a layout; `again`
    says that backward repeats the redistribution between them."""
    (region,) = case.folded.regions
    picks = [0] * len(case.problem.nodes)
    picks[case.problem.index[TANH]] = _running(case, TANH, (S(0),))
    picks[case.problem.index[SIGMOID]] = _running(case, SIGMOID, sigmoid)
    (between,) = (edge for edge in case.problem.edges if edge.consumer == case.problem.index[SIGMOID])
    repeated = frozenset({(between.group, sigmoid)} if again else ())
    return Solution(tuple(picks), repeated, 0.0, 0.0, Configuration(MESH, recompute={region.name: level}))


def _kept(case: Planning, solution: Solution, reader: str) -> list[tuple[LiveRange, float]]:
    """The saved tensors that begin to be live at an op, with their bytes."""
    model, found = chosen_memory(case.problem, solution)
    kept = [(model.ranges[item.range], item.size) for item in found if item.kind == "saved" and item.size]
    return [(range, size) for range, size in kept if range.first == case.problem.index[reader]]


def test_what_a_recomputed_op_reads_of_another_is_passed(case: Planning) -> None:
    """Sigmoid reads what tanh gives, and both run again at selective recompute: nothing of that is kept where it stays
    as it is, and it counts as used where it is redistributed. Without recompute tanh keeps its own result."""
    (region,) = case.folded.regions
    (between,) = (edge for edge in case.problem.edges if edge.consumer == case.problem.index[SIGMOID])
    assert between.passed == {"selective", "ops"}
    assert not between.remade
    assert not between.saved
    for level, saved in (("none", []), ("selective", [between]), ("ops", [between]), ("full", [])):
        assert saved_edges(case.problem, Configuration(MESH, recompute={region.name: level}), [between]) == saved


@pytest.mark.parametrize("level", ["none", "selective", "ops", "full"])
def test_a_redistribution_of_a_recomputed_tensor_is_counted(case: Planning, level: str) -> None:
    """Between tanh and sigmoid, which both run again, a redistribution sends, so it does not: before it is there
    nothing is kept between them, with it its result is, from the forward pass to sigmoid's turn in the backward pass.
    Where backward repeats the redistribution, it is there in the running copy alone."""
    alike = _kept(case, _chosen(case, level, (S(0),)), SIGMOID)
    moved = _kept(case, _chosen(case, level, (S(1),)), SIGMOID)
    again = _kept(case, _chosen(case, level, (S(1),), again=True), SIGMOID)
    (between,) = (edge for edge in case.problem.edges if edge.consumer == case.problem.index[SIGMOID])
    size = layout_bytes(case.problem.groups[between.group], (S(1),), MESH)
    assert size == ROWS * WIDTH * 4 * LAYERS / 2
    block, here = case.problem.nodes[between.consumer].block, between.consumer
    stays = (LiveRange(Phase.FORWARD, block, here), size)
    runs = (LiveRange(Phase.COPY, block, here, here), size)
    is_passed = level in ("selective", "ops")
    assert moved.count(stays) - alike.count(stays) == is_passed
    assert again.count(stays) == alike.count(stays)
    assert again.count(runs) - alike.count(runs) == is_passed


@pytest.mark.parametrize("level", ["selective", "ops"])
def test_it_is_counted_at_the_points_before(case: Planning, level: str) -> None:
    """The bytes at every point of the backward pass before sigmoid's turn are more by what the redistribution gives of
    the copies that are still to run; after it, of these but the running one."""
    totals = []
    for layout in ((S(0),), (S(1),)):
        model, found = chosen_memory(case.problem, _chosen(case, level, layout))
        saved = [item for item in found if item.kind == "saved" and model.ranges[item.range].phase is Phase.FORWARD]
        totals.append(model.totals(saved))
    here = case.problem.index[SIGMOID]
    (region,) = case.folded.regions
    block = case.problem.blocks.index(region.name)
    size = ROWS * WIDTH * 4 * LAYERS / 2
    left = [
        size * (point.left + point.own * (point.op >= here))
        if point.block == block
        else size * (point.block is not None and point.block > block)
        for point in model.points
    ]
    np.testing.assert_allclose(totals[1] - totals[0], left)


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_below_the_least_of_each_node(seed: int) -> None:
    """A limit is refused because of the least bytes of each node by itself only if no choice keeps to it: random
    choices, with random redistributions made again, take as much at least."""
    case = random_planning(seed, blocks=(0, 2, 3)[seed % 3])
    configuration = zero_configuration(case, seed) if seed % 2 else random_configuration(case, seed)
    choose = random.Random(seed)
    solver = Solver(case.problem, case.cluster, Limits(float("inf"), STATES), configuration)
    for _ in range(12):
        picks = tuple(choose.randrange(len(node.strategies)) for node in case.problem.nodes)
        redone = case.changed_and_kept(picks, configuration)
        again = frozenset(choose.sample(redone, choose.randrange(len(redone) + 1)))
        taken = case.peak(Solution(picks, again, 0.0, 0.0, configuration))
        refuse_if_hopeless(replace(solver.instance, limits=Limits(taken * (1 + 1e-9), STATES)))
