"""The solver against trying every choice; costs and memory of a choice come from the program that it stands for."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import InfeasibleError
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.planning import (
    STATES,
    Planning,
    random_configuration,
    random_planning,
    stored_both_ways,
    thinned,
    zero_configuration,
)

UNLIMITED = 1e30


def _seeds(first: int, count: int, fast: set[int]) -> list[object]:
    """Seeds of random programs, of which some are fast: 200 in all."""
    seeds = range(first, first + count)
    return [seed if seed in fast else pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


def _solve(case: Planning, memory: float = UNLIMITED) -> Solution:
    return solve(case.problem, case.cluster, Limits(memory, STATES), Configuration(case.mesh))


@pytest.mark.parametrize("seed", _seeds(0, 60, {4}))
def test_solver_equals_brute_force(seed: int) -> None:
    """No choice is faster than the solver's, and what the solver says it takes, it takes."""
    case = random_planning(seed, blocks=3 if seed % 4 == 3 else 0)
    case = replace(case, problem=thinned(case.problem, 400, random.Random(seed)))
    solution = _solve(case)
    assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
    assert solution.seconds * (1 - 1e-6) <= solution.bound <= solution.seconds * (1 + 1e-12)
    best = min(case.seconds(choice) for choice in case.choices(again=False))
    assert solution.seconds == pytest.approx(best, rel=1e-9)


def _small(case: Planning, seed: int, stored: int = 0) -> Planning:
    """The case with few strategies, so that there are at most 500 solutions and ways to make things again; `stored`
    parameters may be whole or in parts."""
    for budget in (48, 24, 12, 6, 3):
        choose = random.Random(seed)
        given = stored_both_ways(case, choose, stored)
        small = replace(case, problem=thinned(case.problem, budget, choose, given))
        if sum(1 for _ in islice(small.choices(again=True), 501)) <= 500:
            return small
    return _small(case, seed, stored - 1) if stored else replace(case, problem=thinned(case.problem, 1, choose))


def _against_all(case: Planning, configuration: Configuration | None = None) -> None:
    """Hold the solver against every choice: without a limit, at limits between what the smallest choice takes and what
    the fastest one does, and below the smallest one."""
    configuration = configuration or case.configuration
    every = [
        (case.peak(choice), case.seconds(choice)) for choice in case.choices(again=True, configuration=configuration)
    ]
    peaks = sorted({peak for peak, _ in every})
    fastest = min(every, key=lambda item: (item[1], item[0]))
    limits = {peaks[0], peaks[len(peaks) // 3], (peaks[0] + fastest[0]) / 2, fastest[0] * 0.999, UNLIMITED}
    for limit in sorted(limits | {peaks[0] * 0.99}):
        fitting = [seconds for peak, seconds in every if peak <= limit]
        bounds = Limits(limit, STATES)
        if not fitting:
            with pytest.raises(InfeasibleError, match="no plan fits the memory limit"):
                solve(case.problem, case.cluster, bounds, configuration)
            continue
        solution = solve(case.problem, case.cluster, bounds, configuration)
        best = min(fitting)
        assert case.peak(solution) <= limit
        assert case.seconds(solution) == pytest.approx(solution.seconds, rel=1e-9)
        assert solution.seconds == pytest.approx(best, rel=1e-6)
        assert best * (1 - 2e-6) <= solution.bound <= best * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", _seeds(100, 50, {101}))
def test_solver_equals_brute_force_within_memory(seed: int) -> None:
    """The same where memory is short. Both may make redistributions again in the backward pass instead of keeping what
    they give."""
    _against_all(_small(random_planning(seed, blocks=2 if seed % 4 == 3 else 0), seed - 100))


@pytest.mark.long
@pytest.mark.parametrize("seed", _seeds(300, 50, {302}))
def test_solver_equals_brute_force_in_every_configuration(seed: int) -> None:
    """The same where parts run again, the batch comes in parts, and parameters travel once or with each part."""
    case = _small(random_planning(seed, blocks=2 + seed % 2), seed - 300)
    _against_all(case, random_configuration(case, seed - 300))


@pytest.mark.long
@pytest.mark.parametrize("seed", _seeds(600, 40, {600}))
def test_solver_equals_brute_force_in_storing_parameters(seed: int) -> None:
    """The same where parameters may be stored whole or in parts, and are then gathered and reduced for every
    micro-batch or once for all; what is gathered in the forward pass is kept or gathered again."""
    case = _small(random_planning(seed, blocks=(0, 2, 3)[seed % 3]), seed, stored=2)
    _against_all(case, zero_configuration(case, seed))


@pytest.mark.parametrize("small", [0, 10**9])
@pytest.mark.parametrize("seed", _seeds(100, 10, set()) + _seeds(300, 10, {302}) + _seeds(600, 10, set()))
def test_branches_and_integer_programs_find_the_best(seed: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where frontiers are too large: all that is open is branched over, down to one strategy each, or goes to
    an integer program at once."""
    monkeypatch.setattr("passes.solve.pareto.frontiers.ROWS", 0)
    monkeypatch.setattr("passes.solve.solver.SMALL", small)
    case = _small(random_planning(seed, blocks=2 + seed % 2), seed, stored=seed % 3)
    _against_all(case, zero_configuration(case, seed) if seed > 600 else random_configuration(case, seed))


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
