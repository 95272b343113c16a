"""lower: lowers a solution to the statements that a rank runs.

It is straight code first (`straight`): every op on its shard, every redistribution as its steps. That is cut into the
stages of the configuration's pipeline (`stages`). Of each stage, passes mark the tensors that the backward pass
recomputes (`recompute`), the products whose weight gradients a schedule computes apart (`deferred`), and the parameters
that FSDP units gather in place of the code (`units`); a last one says how the other steps over several axes run
(`collectives`). The cost model, the memory simulator and the code generator all
read the result.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import combinations

from passes.clock import Clock
from passes.cost.cluster import Cluster
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration, Staging
from passes.ir.decisions import FirstProgram
from passes.ir.folded import Folded
from passes.ir.lowered import FSDPUnit, Lowered, Stage
from passes.lower.collectives import fastest_collectives
from passes.lower.deferred import deferred
from passes.lower.positions import in_order, named_starts
from passes.lower.recompute import recompute
from passes.lower.same_stages import cut_alike
from passes.lower.stages import cut
from passes.lower.straight import Casts, straight_code
from passes.lower.units import fsdp_units

__all__ = ["Casts", "finished", "lower", "whole_code"]


def lower(
    folded: Folded,
    problem: Problem,
    solution: Solution,
    casts: Casts,
    cluster: Cluster,
    clock: Clock,
    units: Sequence[Sequence[FSDPUnit]] | None = None,
    first: FirstProgram | None = None,
) -> Lowered:
    """The program under `solution`, in the stages of its pipeline. If it is not the `first` program of its model,
    `units` are the existing FSDP units of the model's parameters, by stage.

    Raises PipelineError for cuts that the program does not have.
    """
    configuration = solution.configuration
    mesh, cuts, by_stage = configuration.mesh, configuration.pipeline.cuts, configuration.pipeline.recompute
    with clock("lower"):
        whole = whole_code(folded, problem, solution, casts)
        if not cuts:
            stages: tuple[Stage, ...] = (whole,)
        elif first is None:
            stages = cut(whole, named_starts(whole, cuts), folded.flowing, mesh)
        else:
            stages = cut_alike(whole, cuts, first, folded.flowing, mesh)
    existing = [None] * len(stages) if units is None else units
    apart = _in_several_places(stages, configuration.pipeline)
    return Lowered(
        folded.program,
        tuple(
            finished(
                stage,
                own,
                replace(configuration, recompute=dict(by_stage[number])) if by_stage else configuration,
                folded.flowing,
                cluster,
                clock,
                apart,
            )
            for number, (stage, own) in enumerate(zip(stages, existing, strict=True))
        ),
    )


def _in_several_places(stages: Sequence[Stage], pipeline: Staging) -> frozenset[str]:
    """The parameters that several stages of one rank read: a unit would belong to one of them."""
    found = (
        set(stage.parameters) & set(other.parameters)
        for (stage, place), (other, another) in combinations(zip(stages, pipeline.places, strict=True), 2)
        if place == another
    )
    return frozenset[str]().union(*found)


def whole_code(folded: Folded, problem: Problem, solution: Solution, casts: Casts) -> Stage:
    """The program under `solution` in one stage that can be cut, without recompute and FSDP units."""
    return in_order(straight_code(folded, problem, solution, solution.configuration.mesh, casts))


def finished(
    stage: Stage,
    units: Sequence[FSDPUnit] | None,
    configuration: Configuration,
    flowing: Set[str],
    cluster: Cluster,
    clock: Clock,
    apart: frozenset[str] = frozenset(),
) -> Stage:
    """`stage` with recompute, FSDP units and the ways of its collectives; its statements keep their places. Values in
    `flowing` take gradients. Parameters in `apart` are in no unit."""
    with clock("recompute"):
        stage = recompute(stage, configuration.recompute)
    if configuration.pipeline.splits:
        stage = deferred(stage, flowing)
    with clock("fsdp_units"):
        stage = fsdp_units(stage, configuration.mesh, units, configuration.gather_once, apart)
    with clock("collectives"):
        return fastest_collectives(stage, StepCosts(cluster, configuration.mesh))
