"""Sources that are never better than another one."""

import random

import numpy as np
import pytest

from passes.cost.memory import memory_model
from passes.cost.redistributions import RedistributionCosts
from passes.solve.arrays import arrays, find_uses
from passes.solve.instance import undominated
from tests.passes.planning import Planning, random_planning


def _left(case: Planning, choose: random.Random) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """All strategies of every node, of ops two at most, and those that are left."""
    uses = find_uses(case.problem, RedistributionCosts(case.cluster, case.mesh))
    found = arrays(case.problem, uses, case.configuration)
    every = {node: np.arange(len(costs)) for node, costs in enumerate(found.costs)}
    for node, labels in every.items():
        if case.problem.nodes[node].kind == "op":
            every[node] = np.sort(choose.sample(labels.tolist(), min(2, len(labels))))
    return every, undominated(found, memory_model(case.problem, case.configuration), every)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_dropped_is_never_needed(seed: int) -> None:
    """For any choice of other nodes, one of the strategies that are left takes no more seconds and no more bytes."""
    case = random_planning(seed)
    choose = random.Random(seed)
    every, left = _left(case, choose)
    dropped = [(node, pick) for node in every for pick in every[node] if pick not in left[node]]
    assert dropped
    for node, pick in choose.sample(dropped, min(12, len(dropped))):
        picks = [int(choose.choice(labels)) for labels in every.values()]
        picks[node] = int(pick)
        worse = case.with_picks(picks)
        others = [case.with_picks([*picks[:node], int(other), *picks[node + 1 :]]) for other in left[node]]
        assert any(
            case.seconds(other) <= case.seconds(worse) * (1 + 1e-9) and case.peak(other) <= case.peak(worse)
            for other in others
        )


def test_what_ops_may_do_stays() -> None:
    """Only sources are looked at: whether an op is better depends on what is around it."""
    case = random_planning(0)
    every, left = _left(case, random.Random(0))
    for node, labels in every.items():
        if case.problem.nodes[node].kind == "op":
            assert left[node].tolist() == labels.tolist()
        assert len(left[node])
