"""Effort is counted, so that it is the same on every machine and in every run."""

from dataclasses import replace

import pytest

from passes.ir.configuration import Configuration
from passes.ir.errors import InfeasibleError
from passes.solve.limits import Limits
from passes.solve.solver import Solver
from tests.passes.planning import STATES, Planning, random_planning

TIGHT = 0.9


def solver(case: Planning, memory: float) -> Solver:
    """A solver that has raised its bound as far as prices do."""
    found = Solver(case.problem, case.cluster, Limits(memory, STATES), Configuration(case.mesh))
    found.begin()
    while found.climb():
        pass
    return found


def tight(seed: int) -> tuple[Planning, float]:
    """A random program, and less memory than its fastest choice takes."""
    case = random_planning(seed, blocks=2)
    free = solver(case, 1e30)
    return case, TIGHT * case.peak(free.solution())


def test_effort_is_the_same_in_every_run() -> None:
    """Equal problems take equal effort, some of it for the bound and some for closing the gap."""
    case, memory = tight(3)
    spent = []
    for _ in range(2):
        found = solver(case, memory)
        before = found.effort.spent
        found.close()
        spent.append((before, found.effort.spent, found.solution()))
    assert spent[0] == spent[1]
    assert 0 < spent[0][0] < spent[0][1]


def test_allowed_effort_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch and bound stops where the allowed effort is spent, and the bound says what is not proven; with no choice
    at hand the error says that the search was ended."""
    monkeypatch.setattr("passes.solve.pareto.frontiers.ROWS", 0)
    case, memory = tight(3)
    whole, stopped = solver(case, memory), solver(case, memory)
    whole.close()
    stopped.close(allowance=0.0)
    assert stopped.effort.spent < whole.effort.spent
    assert stopped.solution().bound <= whole.solution().bound <= whole.solution().seconds <= stopped.solution().seconds
    blind = solver(case, memory)
    blind.gap.best = None
    with pytest.raises(InfeasibleError, match="with the effort allowed no plan was found"):
        blind.close(allowance=0.0)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_guess_excludes_what_it_proves_and_changes_nothing_else(seed: int) -> None:
    """The multipliers of a problem exclude choices below its bound at once. Where they do not exclude all, the solver
    begins as without them."""
    case, memory = tight(seed)
    known = solver(case, memory)
    bound, guess = known.gap.bound, known.guess
    assert any(guess.bytes.values())
    limits, configuration = Limits(memory, STATES), Configuration(case.mesh)
    excluded, plain, guessed = (Solver(case.problem, case.cluster, limits, configuration) for _ in range(3))
    excluded.begin(bound * (1 - 1e-6), guess)
    assert not excluded.has_begun
    assert bound * (1 - 3e-6) <= excluded.gap.bound <= bound * (1 + 1e-9)
    cutoff = known.gap.least * (1 + 1e-3)
    plain.begin(cutoff)
    guessed.begin(cutoff, replace(guess, bound=cutoff))
    while plain.climb(cutoff):
        assert guessed.climb(cutoff)
    assert not guessed.climb(cutoff)
    assert (guessed.gap.bound, guessed.guess, guessed.gap.least) == (plain.gap.bound, plain.guess, plain.gap.least)
