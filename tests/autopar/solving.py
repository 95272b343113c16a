"""Plans that a solver of the test's own chooses."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.lower.recompute import levels
from passes.search.subproblems import Choice, Subproblem, Subproblems
from passes.solve.solver import Solver

Solve = Callable[..., Solution]


@contextlib.contextmanager
def solved_by(solver: Solve, *, gather_once: bool = False, reduce_once: bool = False) -> Iterator[None]:
    """Plans take the strategies that `solver` gives for a problem, on the given mesh, with the micro-batches and the
    recompute that are asked for; parameters are gathered and gradients reduced as given here."""

    def choose(subproblems: Subproblems) -> tuple[Subproblems, Choice]:
        space, mesh = subproblems.space, subproblems.space.mesh
        program = subproblems.programs.of(space.micro_batches or 1, is_given=True)
        assert program is not None
        problem = subproblems.problem(mesh, program)
        recompute = levels([region.name for region in program.folded.regions], space.recompute or {})
        configuration = Configuration(mesh, space.micro_batches or 1, recompute, gather_once, reduce_once)
        own = Solver(problem, space.cluster, subproblems.limits(configuration), configuration)
        solution = solver(problem, space.cluster, subproblems.limits(configuration), configuration)
        return subproblems, Choice(Subproblem(program, own), solution)

    with mock.patch("passes.search.choose", choose), mock.patch("passes.search.solve", solver):
        yield
