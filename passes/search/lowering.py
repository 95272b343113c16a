"""From a solution to the program of one rank, and the seconds of its step."""

from dataclasses import dataclass

from passes.clock import Clock
from passes.cost.cluster import Cluster
from passes.cost.step import Seconds
from passes.cost.walk import Optimizer, walk
from passes.engines import engines
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.lowered import Group, Lowered
from passes.ir.mesh import Mesh
from passes.ir.program import Folded
from passes.lower import Casts, lower
from passes.recompute import recompute
from passes.search.space import Space


@dataclass(frozen=True)
class Target:
    """The devices that a program is lowered for, and the dtypes of stored parameters and reduced gradients. `units`
    are the FSDP units that hold the parameters already, if it is not the first program of its model."""

    mesh: Mesh
    cluster: Cluster
    casts: Casts
    optimizer_states: int
    units: tuple[Group, ...] | None = None

    @classmethod
    def of(cls, space: Space, mesh: Mesh) -> "Target":
        """The target of a space on `mesh`."""
        return cls(mesh, space.cluster, space.casts, space.optimizer_states, space.decisions.units)


def lower_solution(folded: Folded, problem: Problem, solution: Solution, target: Target, clock: Clock) -> Lowered:
    """The program of one rank under `solution`: straight code, then what the backward pass computes again, then the
    parameters that FSDP units gather."""
    configuration = solution.configuration
    with clock("lower"):
        lowered = lower(folded, problem, solution, target.mesh, target.casts)
    with clock("recompute"):
        lowered = recompute(lowered, configuration.recompute)
    with clock("engines"):
        return engines(lowered, target.mesh, target.units, configuration.gather_once)


def step_seconds(lowered: Lowered, folded: Folded, target: Target, configuration: Configuration) -> Seconds:
    """Seconds of a step of `lowered`, all micro-batches and the optimizer included."""
    optimizer = Optimizer(target.optimizer_states, target.casts.master)
    return walk(lowered, folded, target.cluster, optimizer, configuration)
