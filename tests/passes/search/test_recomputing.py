"""Lower bounds on steps with recompute, from one without."""

from dataclasses import replace
from itertools import product

import pytest

from passes.ir.configuration import RECOMPUTE
from passes.search.recomputing import recompute_bounds
from passes.solve import solve
from passes.solve.limits import Limits
from passes.solve.solver import Solver
from tests.passes.planning import STATES, random_configuration, random_planning

LIMITS = Limits(float("inf"), STATES)


@pytest.mark.parametrize("seed", range(8))
def test_no_step_with_recompute_is_shorter(seed: int) -> None:
    """At every level of recompute of each region, before and after the bound without recompute was raised."""
    case = random_planning(seed, blocks=2 + seed % 2)
    names = [region.name for region in case.folded.regions]
    assert names
    none = replace(random_configuration(case, seed), recompute=dict.fromkeys(names, "none"))
    relaxed = Solver(case.problem, case.cluster, LIMITS, none)
    relaxed.begin()
    first = recompute_bounds(relaxed)
    while relaxed.climb():
        pass
    raised = recompute_bounds(relaxed)
    for levels in product(RECOMPUTE, repeat=len(names)):
        configuration = replace(none, recompute=dict(zip(names, levels, strict=True)))
        best = solve(case.problem, case.cluster, LIMITS, configuration).seconds
        assert max(first.of(configuration), raised.of(configuration)) <= best * (1 + 1e-9)
    assert first.of(replace(none, recompute=dict.fromkeys(names, "full"))) > first.of(none)
