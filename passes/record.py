"""record: records the decisions and the lowered program as the program's part of the plan."""

from collections.abc import Iterator, Mapping

from passes.cost.liveness import MemoryPeak
from passes.cost.step import Seconds
from passes.ir.choices import Problem, Solution
from passes.ir.decisions import Decisions
from passes.ir.layout import Layout, format_layout
from passes.ir.lowered import Body, Compute, Loop, Lowered, Redistribution
from passes.ir.mesh import Mesh
from passes.ir.plan import Block, ProgramPlan, Row, Stage
from passes.ir.program import Folded, dependents
from passes.rules import find_rule, written_rule


def record(
    folded: Folded,
    problem: Problem,
    solution: Solution,
    lowered: Lowered,
    seconds: Seconds,
    memory: MemoryPeak,
    mesh: Mesh,
    seconds_on_one: float,
    gap: float,
) -> ProgramPlan:
    """The plan of one program: every decision, the resulting statements, and their costs.

    `seconds_on_one` is the computation time of the step on one device, `gap` its relative optimality gap.
    """
    decisions = {
        node.key: node.strategies[pick].methods for node, pick in zip(problem.nodes, solution.picks, strict=True)
    }
    loops = [item for item in lowered.body.statements if isinstance(item, Loop)]
    recompute = {loop.region.name: loop.recompute for loop in loops if loop.recompute != "none"}
    stage = Stage(decisions, tuple(_again(problem, solution)), tuple(_blocks(lowered.body, mesh)), recompute)
    return ProgramPlan(
        (stage,),
        "none",
        solution.configuration.micro_batches,
        solution.configuration.gather_once,
        solution.configuration.reduce_once,
        seconds.spent(),
        memory.kinds(),
        memory.moment,
        gap,
        seconds.hidden_communication,
        seconds_on_one,
        by_clock=solution.by_clock,
    )


def decisions_of(plan: ProgramPlan, mesh: Mesh) -> Decisions:
    """The decisions that replaying the plan of one program needs: the inverse of `record`."""
    stages = plan.stages
    methods = {key: each for stage in stages for key, each in stage.decisions.items()}
    uses = tuple(use for stage in stages for use in stage.regathered)
    return Decisions(plan.configuration(mesh), methods=methods, regathered=uses, gap=plan.gap)


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


def idle_axes(problem: Problem, solution: Solution, mesh: Mesh) -> list[int]:
    """Axes of more than one device on which no op and no parameter is split."""
    used: set[int] = set()
    for index, node in enumerate(problem.nodes):
        strategy = solution.strategy(problem, index)
        layouts: tuple[Layout, ...] = (*strategy.operands, *strategy.results)
        if node.kind in ("op", "parameter"):
            used.update(axis for layout in layouts for axis, placement in enumerate(layout) if placement.kind == "S")
    return [axis for axis in mesh.dimensions if axis not in used and mesh.sizes[axis] > 1]


def _again(problem: Problem, solution: Solution) -> Iterator[tuple[str, int]]:
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
    last = "before"
    for statement in body.statements:
        if not isinstance(statement, Loop):
            rows.append(_row(statement, body, mesh, makers))
            continue
        yield Block(last, 1, tuple(rows))
        inner = dict(makers)
        inner.update({carry.argument: f"{statement.region.name}/carry" for carry in statement.region.carries})
        region_rows = [
            _row(item, statement.body, mesh, inner) for item in statement.body.statements if not isinstance(item, Loop)
        ]
        region_rows += [_row(change, statement.body, mesh, inner) for change in statement.between if change is not None]
        yield Block(statement.region.name, statement.region.count, tuple(region_rows))
        for value, names in statement.exports:
            makers.update({name: inner[value.partition("~")[0]] for name in names if name})
        last, rows = f"after {statement.region.name}", []
    yield Block(last, 1, tuple(rows))


def _row(statement: Compute | Redistribution, body: Body, mesh: Mesh, makers: dict[str, str]) -> Row:
    """One statement; `makers` maps each value to the key of the op that computed it, and is updated."""
    if isinstance(statement, Redistribution):
        name = makers.get(statement.source.partition("~")[0], statement.source)
        makers[statement.result] = name
        how = ", ".join(f"{step.collective} {mesh.names[step.axis]}" for step in statement.steps)
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
