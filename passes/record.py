"""record: records the decisions and the lowered program as the program's part of the plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from passes.cost.liveness import MemoryPeak
from passes.cost.step import Seconds
from passes.ir.choices import Problem, Solution
from passes.ir.decisions import Decisions
from passes.ir.errors import PlanMismatchError
from passes.ir.folded import Folded, dependents
from passes.ir.grouping import grouped
from passes.ir.layout import Layout, S, format_layout
from passes.ir.levels import of_runs
from passes.ir.lowered import BEFORE, Body, Compute, Loop, Redistribution, Stage, after
from passes.ir.mesh import Mesh
from passes.ir.plan import Block, ProgramPlan, Row, StagePlan
from passes.ir.work import IdleAxes, Work
from passes.rules import find_rule, written_rule

# An axis that splits less of the computation is idle.
_LEAST_SPLIT = 0.25


def record(
    stages: Sequence[StagePlan],
    solution: Solution,
    seconds: Seconds,
    seconds_on_one: float,
    gap: float,
    work: Work,
    complete: bool = True,
    bound_s: float = 0.0,
) -> ProgramPlan:
    """The plan of one program from those of its stages, the costs of its step, and its work.

    `seconds_on_one` is the computation time of the step on one device, `gap` its relative optimality gap
    over all plans that were offered if `complete`; none of these takes less than `bound_s`.
    """
    configuration = solution.configuration
    return ProgramPlan(
        tuple(stages),
        configuration.pipeline.schedule,
        configuration.micro_batches,
        configuration.gather_once,
        configuration.reduce_once,
        seconds.spent(),
        gap,
        seconds.hidden_communication,
        seconds_on_one,
        work=work,
        complete=complete,
        bound_s=bound_s,
        ranks=configuration.pipeline.ranks,
        cuts=configuration.pipeline.cuts,
    )


def record_stage(
    problem: Problem, solution: Solution, stage: Stage, seconds: Sequence[float], memory: MemoryPeak
) -> StagePlan:
    """The plan of one stage: every decision of its problem, the resulting statements with the seconds of their blocks,
    and its memory."""
    blocks = zip(_blocks(stage.body, solution.configuration.mesh), seconds, strict=True)
    decisions = {
        node.key: node.strategies[pick].methods for node, pick in zip(problem.nodes, solution.picks, strict=True)
    }
    runs = grouped((loop.region.name, (loop.recompute, len(loop.copies))) for loop in stage.loops)
    levels = {name: of_runs(own) for name, own in runs.items()}
    return StagePlan(
        decisions,
        tuple(_regathered(problem, solution)),
        {name: level for name, level in levels.items() if level != "none"},
        tuple(
            replace(block, seconds=spent, bytes=float(memory.bytes_by_block.get(block.name, 0)))
            for block, spent in blocks
        ),
        memory.kinds(),
        memory.moment,
    )


def decisions_of(plan: ProgramPlan, mesh: Mesh) -> Decisions:
    """The decisions that replaying the plan of one program needs: the inverse of `record`.

    Raises PlanMismatchError where stages do not agree: all have the decisions of the program.
    """
    first = plan.stages[0]
    for number, stage in enumerate(plan.stages):
        if (stage.decisions, stage.regathered) != (first.decisions, first.regathered):
            raise PlanMismatchError(f"the plan is damaged: stage {number} has other decisions than stage 0; plan anew")
    return Decisions(
        plan.configuration(mesh),
        methods=first.decisions,
        regathered=first.regathered,
        gap=plan.gap,
        complete=plan.complete,
        bound_s=plan.bound_s,
        single_s=plan.single_s,
    )


def whole_ops(folded: Folded) -> tuple[str, ...]:
    """Ops on the batch or on parameters that have no rule, so that they are never split."""
    depends = dependents(folded)
    return tuple(
        op.key
        for op in folded.ops
        if find_rule(op, folded.types, folded.program.rules) is None and any(name in depends for name in op.operands)
    )


def discovered_ops(folded: Folded) -> tuple[str, ...]:
    """Ops without a written rule whose rule was discovered by running them."""
    return tuple(
        op.key
        for op in folded.ops
        if written_rule(op, folded.types) is None and find_rule(op, folded.types, folded.program.rules) is not None
    )


def idle_axes(problem: Problem, solution: Solution, seconds: Mapping[str, float], samples: int) -> IdleAxes | None:
    """The axes of more than one device that split less than `_LEAST_SPLIT` of the computation; None where all split
    more.

    `seconds` are those of each op on one device, by key; `samples` is the size of the batch.
    """
    mesh = solution.configuration.mesh
    split = [0.0] * len(mesh.sizes)
    batch_ways = 1
    for index, node in enumerate(problem.nodes):
        strategy = solution.strategy(problem, index)
        for axis in mesh.dimensions:
            placements = [layout[axis] for layout in (*strategy.operands, *strategy.results)]
            if node.kind == "op" and any(placement.kind == "S" for placement in placements):
                split[axis] += seconds[node.key]
        if node.kind == "input":
            firsts = (
                size for size, placement in zip(mesh.sizes, strategy.results[0], strict=True) if placement == S(0)
            )
            batch_ways = max(batch_ways, prod(firsts))
    least = _LEAST_SPLIT * sum(seconds.values())
    idle = [axis for axis in mesh.dimensions if mesh.sizes[axis] > 1 and split[axis] < least]
    if not idle:
        return None
    size = prod(mesh.sizes[axis] for axis in idle)
    below = samples // (size * batch_ways) * size * batch_ways
    batches = () if below == samples else tuple(batch for batch in (below, below + size * batch_ways) if batch)
    return IdleAxes(tuple(mesh.names[axis] for axis in idle), mesh.size // size, batches)


def _regathered(problem: Problem, solution: Solution) -> Iterator[tuple[str, int]]:
    """One use for every redistribution that the backward pass repeats."""
    seen = set()
    for edge in problem.edges:
        target = solution.strategy(problem, edge.consumer).operands[edge.operand]
        place = (edge.group, target)
        source = solution.strategy(problem, edge.producer).results[edge.result]
        if place in solution.regathered and place not in seen and source != target:
            seen.add(place)
            yield problem.nodes[edge.consumer].key, edge.operand


def _blocks(body: Body, mesh: Mesh) -> Iterator[Block]:
    """The statements outside of the regions in sequences, and each region."""
    makers: dict[str, str] = {}
    rows: list[Row] = []
    last = BEFORE
    for statement in body.statements:
        if not isinstance(statement, Loop):
            rows.append(_row(statement, body, mesh, makers))
            continue
        yield Block(last, 1, tuple(rows))
        inner = makers | {carry.argument: f"{statement.region.name}/carry" for carry in statement.region.carries}
        inside = (item for item in (*statement.body.statements, *statement.between) if item is not None)
        region_rows = [_row(item, statement.body, mesh, inner) for item in inside if not isinstance(item, Loop)]
        count, level = len(statement.copies), statement.recompute
        yield Block(statement.block, count, tuple(region_rows), region=statement.region.name, recompute=level)
        for value, names in statement.exports:
            makers.update({name: inner[value.partition("~")[0]] for name in names if name})
        last, rows = after(statement.block), []
    yield Block(last, 1, tuple(rows))


def _row(statement: Compute | Redistribution, body: Body, mesh: Mesh, makers: dict[str, str]) -> Row:
    """One statement; `makers` maps each value to the key of the op that computed it, and is updated."""
    if isinstance(statement, Redistribution):
        name = makers.get(statement.source.partition("~")[0], statement.source)
        makers[statement.result] = name
        how = ", ".join(f"{step.collective} {mesh.label(step.span)}" for step in statement.steps)
        before, after = (format_layout(layout, mesh) for layout in (statement.before, statement.after))
        return Row("change", name, how, (before,), (after,), str(statement.type), statement.regathered)
    op = statement.op
    makers.update(dict.fromkeys(op.results, op.key))
    how = ", ".join(f"{axis} {method}" for axis, method in zip(mesh.names, statement.strategy.methods, strict=True))
    if len(set(statement.strategy.methods)) == 1 and statement.strategy.methods[0] in ("R", "I"):
        how = "whole"
    if statement.body:
        how += f" ({statement.body})"
    return Row(
        "op",
        op.key,
        how,
        tuple(format_layout(layout, mesh) for layout in statement.strategy.operands),
        tuple(format_layout(layout, mesh) for layout in statement.strategy.results),
        ", ".join(str(body.types[name]) for name in op.results),
        statement.recomputed,
    )


def layout_texts(layout: Layout, mesh: Mesh) -> Mapping[str, str]:
    """A layout as placements by axis."""
    return {name: str(placement) for name, placement in zip(mesh.names, layout, strict=True)}
