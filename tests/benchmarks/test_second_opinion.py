"""The solver against HiGHS on whole problems, written from the costs of all strategies."""

from dataclasses import replace

import pytest

from benchmarks.second_opinion import CASES, Opinions, opinions, planned
from tests.passes.planning import random_planning


@pytest.mark.parametrize("limit", [None, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int, limit: float | None) -> None:
    """Both find the same optimum, with and without a memory limit."""
    case = random_planning(seed, blocks=3)
    found = opinions(case, case.configuration, limit, seconds=120.0)
    assert found.finished
    assert found.agree, found


def test_opinions_that_differ_do_not_agree() -> None:
    """A finished optimum differs by a millionth at most; without one ours is between the bound and the incumbent."""
    same = Opinions(1.0, 0.0, 1.0, 1.0, True, 1, 0.0)
    assert same.agree
    assert not replace(same, own_s=1.00001).agree
    assert not replace(same, own_s=0.99999).agree
    open_ = replace(same, finished=False, bound_s=0.9, incumbent_s=1.1)
    assert open_.agree
    assert replace(open_, incumbent_s=None).agree
    assert not replace(open_, own_s=1.2).agree
    assert not replace(open_, own_s=0.8).agree


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_whole_problems(case) -> None:
    """Both solvers find the same optimum, or our choice lies between the bound and the incumbent of HiGHS."""
    found = opinions(*planned(case), case.limit, seconds=600.0)
    assert found.agree, found
