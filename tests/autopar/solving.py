"""Plans that a solver of the test's own chooses."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from autopar.ways import Tried, Ways
from passes.ir.choices import Solution
from passes.ir.regime import Regime
from passes.recompute import levels
from passes.solve import Solver
from passes.solving.limits import Limits

Solve = Callable[..., Solution]


@contextlib.contextmanager
def solved_by(solver: Solve, *, gather_once: bool = False, reduce_once: bool = False) -> Iterator[None]:
    """Plans take the strategies that `solver` gives for a problem, on the mesh, in the micro-batches and with the
    recompute that is asked for, and parameters travel as is said here."""

    def best(ways: Ways) -> tuple[Tried, Solution]:
        request = ways.request
        part = ways.pieces.of(request.micro_batches or 1, is_asked=True)
        assert part is not None
        problem, demands = ways.problem(request.mesh, part)
        limits = Limits(request.memory_limit, request.optimizer_states)
        again = levels([region.name for region in part.folded.regions], request.recompute or {})
        regime = Regime(request.micro_batches or 1, again, gather_once, reduce_once)
        solution = solver(problem, request.cluster, request.mesh, limits)
        tried = Tried(request.mesh, part, demands, Solver(problem, request.cluster, request.mesh, limits, regime))
        return tried, replace(solution, regime=regime)

    with mock.patch("autopar.build.best", best), mock.patch("autopar.build.solve", solver):
        yield
