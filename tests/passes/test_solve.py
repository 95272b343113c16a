"""The solver against trying every choice; costs and memory of a choice come from the program that it stands for."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from passes.ir.choices import Solution
from passes.ir.errors import InfeasibleError
from passes.solve import Limits, solve
from tests.passes.planning import STATES, Planning, random_planning, random_regime, thinned

UNLIMITED = 1e30


def _solve(case: Planning, memory: float = UNLIMITED) -> Solution:
    return solve(case.problem, case.cluster, case.mesh, Limits(memory, STATES))


@pytest.mark.parametrize("seed", range(24))
def test_solver_equals_brute_force(seed: int) -> None:
    """No choice is faster than the solver's, and what the solver says it takes, it takes."""
    case = random_planning(seed, blocks=3 if seed % 4 == 3 else 0)
    case = replace(case, problem=thinned(case.problem, 400, random.Random(seed)))
    solution = _solve(case)
    assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
    assert solution.seconds * (1 - 1e-6) <= solution.bound <= solution.seconds * (1 + 1e-12)
    best = min(case.seconds(choice) for choice in case.choices(again=False))
    assert solution.seconds == pytest.approx(best, rel=1e-9)


def _small(case: Planning, seed: int) -> Planning:
    """The case with few strategies, so that there are at most 500 solutions and ways to make things again."""
    for budget in (48, 24, 12, 6, 3):
        small = replace(case, problem=thinned(case.problem, budget, random.Random(seed)))
        if sum(1 for _ in islice(small.choices(again=True), 501)) <= 500:
            return small
    return replace(case, problem=thinned(case.problem, 1, random.Random(seed)))


@pytest.mark.parametrize("seed", range(12))
def test_solver_equals_brute_force_within_memory(seed: int) -> None:
    """The same where memory is short: between what the fastest choice takes and what the smallest one does. Both may
    make redistributions again in the backward pass instead of keeping what they give."""
    case = _small(random_planning(100 + seed, blocks=2 if seed % 4 == 3 else 0), seed)
    every = [(case.peak(choice), case.seconds(choice)) for choice in case.choices(again=True)]
    peaks = sorted({peak for peak, _ in every})
    fastest = min(every, key=lambda item: (item[1], item[0]))
    for limit in {peaks[0], peaks[len(peaks) // 3], (peaks[0] + fastest[0]) / 2, fastest[0] * 0.999}:
        fitting = [seconds for peak, seconds in every if peak <= limit]
        if not fitting:
            continue
        solution = _solve(case, limit)
        assert case.peak(solution) <= limit
        assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
        assert solution.seconds == pytest.approx(min(fitting), rel=1e-6)
        assert min(fitting) * (1 - 2e-6) <= solution.bound <= min(fitting) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(16))
def test_solver_equals_brute_force_in_every_regime(seed: int) -> None:
    """The same where parts run again, the batch comes in parts, and parameters travel once or with each part."""
    case = _small(random_planning(300 + seed, blocks=2 + seed % 2), seed)
    regime = random_regime(case, seed)
    every = [(case.peak(choice), case.seconds(choice)) for choice in case.choices(again=True, regime=regime)]
    peaks = sorted({peak for peak, _ in every})
    for limit in {peaks[0], peaks[len(peaks) // 3], UNLIMITED}:
        fitting = min(seconds for peak, seconds in every if peak <= limit)
        solution = solve(case.problem, case.cluster, case.mesh, Limits(limit, STATES), regime)
        assert case.peak(solution) <= limit
        assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
        assert solution.seconds == pytest.approx(fitting, rel=1e-6)
        assert fitting * (1 - 2e-6) <= solution.bound <= fitting * (1 + 1e-9)


def test_too_little_memory_is_refused() -> None:
    """A limit below the smallest choice is refused with what is missing and what takes most."""
    case = _small(random_planning(100), 0)
    least = min(case.peak(choice) for choice in case.choices(again=True))
    with pytest.raises(InfeasibleError, match="no plan fits the memory limit"):
        _solve(case, least * 0.9)


def test_equal_problems_give_equal_solutions() -> None:
    """The same problem is solved the same way every time."""
    first, second = (_solve(random_planning(7)) for _ in range(2))
    assert first == second
