"""Decisions of a plan, applied at other sizes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.ir.choices import Node, Solution
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decided
from passes.lower.straight import Casts, straight_code
from passes.search.restrict import decided, restricted
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of
from tests.passes.planning import STATES, Planning, planning, random_planning


class Tokens(nn.Module):
    """A layer on samples and places, and one on all tokens in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, 8]."""
        hidden = torch.relu(self.up(x))
        return self.down(hidden.reshape(-1, 16)).square().sum()


CONSTRAINTS = {
    "up/linear": {"method": {"dp": "d0", "tp": "d1"}},
    "/relu": {"method": {"dp": "d0", "tp": "d1"}},
    "down/linear": {"method": {"dp": "d0", "tp": "d0@8"}},
}


def tokens_planning(batch: int, length: int, constraints: object = None) -> Planning:
    """The problem of `Tokens` on dp 2 x tp 2."""
    with torch.device("meta"):
        module = Tokens()
    inputs = {"x": torch.empty(batch, length, 8, device="meta")}
    return planning(module, inputs, mesh_of(dp=2, tp=2), "ideal", constraints or {})


def chosen(case: Planning) -> Solution:
    """The best solution."""
    return solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(case.mesh))


def methods(node: Node) -> set[tuple[str, ...]]:
    """The methods that a node is left with."""
    return {strategy.methods for strategy in node.strategies}


def held(batch: int, length: int) -> dict[str, set[tuple[str, ...]]]:
    """The strategies left to the nodes at these sizes by the decisions for 8 samples of 16, with sequences over tp."""
    before = tokens_planning(8, 16, CONSTRAINTS)
    decisions = decided(before.folded, before.problem, chosen(before))
    case = tokens_planning(batch, length)
    problem = restricted(case.folded, case.problem, decisions)
    assert [node.key for node in problem.nodes] == [node.key for node in case.problem.nodes]
    return {node.key: methods(node) for node in problem.nodes}


@pytest.mark.parametrize("seed", range(4))
def test_the_planned_sizes_hold_all(seed: int) -> None:
    """Every node keeps exactly what it does, with what that costs; so does a whole solution."""
    case = random_planning(seed, blocks=2 if seed == 3 else 0)
    solution = chosen(case)
    problem = restricted(case.folded, case.problem, decided(case.folded, case.problem, solution))
    for index, (node, before) in enumerate(zip(problem.nodes, case.problem.nodes, strict=True)):
        pick = solution.picks[index]
        assert node.strategies == before.strategies[pick : pick + 1]
        assert node.seconds == before.seconds[pick : pick + 1]
        assert node.memory == before.memory[pick : pick + 1]
    again = chosen(replace(case, problem=problem))
    assert again.seconds == pytest.approx(solution.seconds)
    assert straight_code(case.folded, problem, again, case.mesh, Casts()) == case.lowered(
        replace(solution, regathered=frozenset())
    )


@pytest.mark.parametrize(("batch", "length"), [(4, 16), (8, 12), (6, 4)])
def test_what_divides_is_done_as_planned(batch: int, length: int) -> None:
    left = held(batch, length)
    assert left["up/linear"] == {("d0", "d1")}
    assert left["/relu"] == {("d0", "d1")}
    assert left["x"] == {("S(0)", "S(1)")}


@pytest.mark.parametrize(("batch", "length"), [(4, 16), (6, 12), (16, 16)])
def test_a_digit_is_told_by_sizes(batch: int, length: int) -> None:
    """The dim of all tokens is (batch, length): its split over tp goes where the length begins now."""
    left = held(batch, length)
    assert left["/reshape"] == {("flat", f"flat@{batch}")}
    assert ("d0", f"d0@{batch}") in left["down/linear"]
    assert all(dp.startswith("d0") and tp.startswith("d0") for dp, tp in left["down/linear"])


def test_an_axis_that_does_not_divide_is_free() -> None:
    """Three samples: dp may do something else, tp does as planned."""
    left = held(3, 16)
    assert {tp for _, tp in left["up/linear"]} == {"d1"}
    assert {dp for dp, _ in left["up/linear"]} > {"R", "out"}


def test_where_nothing_divides_all_is_free() -> None:
    case = tokens_planning(3, 5)
    assert held(3, 5)["up/linear"] == methods(case.problem.nodes[case.problem.index["up/linear"]])


def test_other_nodes_are_free() -> None:
    """Nodes of which nothing was decided, and nodes of another form."""
    case = tokens_planning(8, 16)
    decisions = dict(decided(case.folded, case.problem, chosen(case)))
    del decisions["up/linear"]
    relu = decisions["/relu"]
    decisions["/relu"] = Decided(relu.strategy, ((8, 256),), ((8, 256),))
    problem = restricted(case.folded, case.problem, decisions)
    for key in ("up/linear", "/relu"):
        index = problem.index[key]
        assert problem.nodes[index] == case.problem.nodes[index]
