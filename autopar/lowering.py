"""From what was decided to what one rank runs, and the seconds that a step of it takes."""

import torch

from autopar.clock import Clock
from autopar.request import Request
from passes.cost.step import Seconds
from passes.cost.walk import Optimizer, walk
from passes.engines import engines
from passes.ir.choices import Problem, Solution
from passes.ir.lowered import Group, Lowered
from passes.ir.program import Folded
from passes.ir.regime import Regime
from passes.lower import Casts, lower
from passes.recompute import recompute


def lowered_as(
    solution: Solution,
    folded: Folded,
    problem: Problem,
    request: Request,
    master: torch.dtype | None,
    clock: Clock,
    groups: tuple[Group, ...] | None = None,
) -> Lowered:
    """`folded` as one rank runs it on the request's mesh where `problem` is decided as `solution` has it.

    Floating parameters are stored in `master`, or where it is None in what they are computed with. `groups` hold the
    model's parameters already, if this is not its first program.
    """
    mesh, casts = request.mesh, Casts(master, request.precision.reduce)
    plain = clock("lower", lambda: lower(folded, problem, solution, mesh, casts))
    marked = clock("recompute", lambda: recompute(plain, solution.regime.recompute))
    return clock("engines", lambda: engines(marked, mesh, groups, solution.regime.gather_once))


def step_seconds(
    lowered: Lowered, folded: Folded, request: Request, master: torch.dtype | None, regime: Regime
) -> Seconds:
    """Seconds of a step of `lowered` on the request's mesh, micro-batches and optimizer included."""
    optimizer = Optimizer(request.optimizer_states, master)
    return walk(lowered, folded, request.cluster, request.mesh, optimizer, regime)
