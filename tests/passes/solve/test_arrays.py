"""Decisions that equal layers share: as many as there are different layers, and the best of all such choices."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from passes.cost.memory import memory_model
from passes.cost.redistributions import RedistributionCosts
from passes.ir.choices import Solution
from passes.ir.mesh import Mesh
from passes.solve import solve
from passes.solve.arrays import SharedDecisions, arrays, find_uses, shared_decisions
from passes.solve.limits import Limits
from tests.autopar.comparing import marked
from tests.passes.planning import STATES, Planning, planning


class Layer(nn.Module):
    """A linear layer with a residual; some have a relu before it."""

    def __init__(self, gate: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + self.linear(x.relu() if self.gate else x)


class Alternating(nn.Module):
    """`count` layers, of which every third has a relu."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index % 3 == 2) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _planning(count: int) -> Planning:
    with torch.device("meta"):
        return planning(Alternating(count), {"x": torch.empty(512, 64)}, Mesh(("a",), (4,)), "h100")


def _shared(case: Planning) -> SharedDecisions:
    uses = find_uses(case.problem, RedistributionCosts(case.cluster, case.mesh))
    model = memory_model(case.problem, case.configuration, [each.tensor for each in uses])
    return shared_decisions(case.problem, arrays(case.problem, uses, case.configuration), model)


def test_the_number_of_decisions_is_constant_in_depth() -> None:
    """7 and 31 layers have equally many decisions; 32 have one more, on the tensor between two layers left over."""
    few, many, two = (_shared(_planning(count)) for count in (7, 31, 32))
    assert len(few.nodes) == len(many.nodes) == len(two.nodes) - 1
    assert len(few.groups) == len(many.groups)


def test_what_is_expanded_reduces_to_itself() -> None:
    """The strategies of all nodes follow from those of decisions."""
    case = _planning(8)
    shared = _shared(case)
    picks = tuple(range(len(shared.nodes)))
    rerun = frozenset((group, case.problem.nodes[0].strategies[0].results[0]) for group in range(len(shared.groups)))
    every, reruns = shared.expanded(picks, rerun)
    assert len(every) == len(case.problem.nodes)
    assert shared.reduced(every, reruns) == (picks, rerun)


def _few(case: Planning, choose: random.Random, most: int) -> Planning:
    """The case with some strategies of every node, the same for those that share a decision: so many choices."""
    shared = _shared(case)
    nodes = list(case.problem.nodes)
    count = 1
    for numbers in choose.sample(shared.nodes, len(shared.nodes)):
        strategies = len(nodes[numbers[0]].strategies)
        kept = min(strategies, 1 + (count * 2 <= most) * choose.randrange(1, 3))
        picks = sorted(choose.sample(range(strategies), kept))
        count *= kept
        for number in numbers:
            nodes[number] = nodes[number].only(picks)
    return replace(case, problem=replace(case.problem, nodes=nodes))


def _choices(case: Planning) -> Iterator[Solution]:
    """Every choice in which equal layers do the same."""
    shared = _shared(case)
    sizes = [range(len(case.problem.nodes[numbers[0]].strategies)) for numbers in shared.nodes]
    for own in product(*sizes):
        picks = shared.expanded(own, ())[0]
        again = sorted(shared.reduced(picks, case.changed_and_kept(picks))[1])
        for count in range(len(again) + 1):
            for some in combinations(again, count):
                yield Solution(*shared.expanded(own, some), 0.0, 0.0, case.configuration)


@pytest.mark.long
@pytest.mark.parametrize("seed", marked(range(4), {2}))
def test_the_choice_is_the_best_of_those_in_which_equal_layers_do_the_same(seed: int) -> None:
    """Without a limit of memory, and within some; seconds and bytes are those of the program."""
    case = _few(_planning(7 + seed % 2), random.Random(seed), 40)
    every = [(case.peak(choice), case.seconds(choice)) for choice in _choices(case)]
    peaks = sorted({peak for peak, _ in every})
    for limit in (1e30, peaks[0], (peaks[0] + peaks[-1]) / 2):
        solution = solve(case.problem, case.cluster, Limits(limit, STATES), case.configuration)
        best = min(seconds for peak, seconds in every if peak <= limit)
        assert case.peak(solution) <= limit
        assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
        assert solution.seconds == pytest.approx(best, rel=1e-6)
        assert best * (1 - 2e-6) <= solution.bound <= best * (1 + 1e-9)
