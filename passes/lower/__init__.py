"""lower: lowers a solution to the statements that a rank runs.

There is one pipeline stage. It is straight code first (`straight`): every op on its shard, every redistribution as its
steps. Two passes then mark the tensors that the backward pass recomputes (`recompute`) and the parameters that FSDP
units gather in place of the code (`units`). A last one says how the other steps over several axes run (`collectives`).
The cost model, the memory simulator and the code generator all read the result.
"""

from collections.abc import Sequence

from passes.clock import Clock
from passes.cost.cluster import Cluster
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Problem, Solution
from passes.ir.folded import Folded
from passes.ir.lowered import FSDPUnit, Lowered
from passes.lower.collectives import fastest_collectives
from passes.lower.recompute import recompute
from passes.lower.straight import Casts, straight_code
from passes.lower.units import fsdp_units

__all__ = ["Casts", "lower"]


def lower(
    folded: Folded,
    problem: Problem,
    solution: Solution,
    casts: Casts,
    cluster: Cluster,
    clock: Clock,
    units: Sequence[FSDPUnit] | None = None,
) -> Lowered:
    """The program under `solution`, in one pipeline stage. `units` are the existing FSDP units of the model's
    parameters, if it is not the first program of its model."""
    configuration = solution.configuration
    with clock("lower"):
        stage = straight_code(folded, problem, solution, configuration.mesh, casts)
    with clock("recompute"):
        stage = recompute(stage, configuration.recompute)
    with clock("fsdp_units"):
        stage = fsdp_units(stage, configuration.mesh, units, configuration.gather_once)
    with clock("collectives"):
        stage = fastest_collectives(stage, StepCosts(cluster, configuration.mesh))
    return Lowered(folded.program, (stage,))
