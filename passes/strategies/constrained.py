"""Constraints on ops: the strategies that meet them, and errors for those that none meets."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from passes.ir.choices import Strategy
from passes.ir.constraints import Constraint, PlacedConstraints
from passes.ir.errors import ConstraintError
from passes.ir.layout import Placement, Shape
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType
from passes.rules.strategies import OpContext


def indivisible(placement: Placement | None, shape: Shape, mesh: Mesh, axis: int) -> str:
    """The reason why a tensor of `shape` cannot be split as `placement` says on `axis`; "" if it can."""
    if placement is None or placement.kind != "S":
        return ""
    if placement.dim >= len(shape):
        return f"it has no dim {placement.dim}"
    parts = placement.major * mesh.sizes[axis]
    if shape[placement.dim] % parts == 0:
        return ""
    ways = f"{mesh.sizes[axis]} devices" if placement.major == 1 else f"{placement.major} x {mesh.sizes[axis]} parts"
    return f"its dim {placement.dim} of size {shape[placement.dim]} is not divisible into {ways}"


def _missing(context: OpContext, demand: Constraint, available: Collection[str], mesh: Mesh) -> str:
    """The reason why the method of a constraint is not among the `available` ones of an op; "" if it is."""
    if demand.method in available:
        return ""
    size = mesh.sizes[demand.axis]
    rule = context.rule
    method = None if rule is None else rule.method(demand.method.partition("@")[0])
    if rule is not None and method is not None:
        extents = ((factor, rule.factors[factor].size) for factor in method.factors)
        for factor, extent in extents:
            if extent % size:
                return f"{factor} of size {extent} is not divisible into {size} devices"
    return f"it has no such method; its methods on this axis are {', '.join(sorted(available))}"


def demanded_splits(
    ops: Sequence[Op], demands: PlacedConstraints, names: Mapping[str, str], mesh: Mesh, size: int
) -> dict[str, list[Placement]]:
    """The splits of the tensors of `ops` that constraints require, by name, on axes of `size`. `names` maps names in a
    region to names in the program."""
    found: dict[str, list[Placement]] = {}

    def add(name: str, wanted: Mapping[int, Constraint]) -> None:
        for axis, demand in wanted.items():
            placement = demand.placement
            if placement is not None and placement.kind == "S" and mesh.sizes[axis] == size:
                found.setdefault(name, []).append(placement)

    for op in ops:
        first = op.results[0]
        for slot, name in enumerate(op.operands):
            add(name, demands.at("in", first, str(slot)))
            add(name, demands.at("used", names.get(name, name)))
        for number, name in enumerate(op.results):
            add(name, demands.at("out", first, str(number)))
    return found


def meeting(
    context: OpContext,
    strategies: list[Strategy],
    demands: PlacedConstraints,
    names: Mapping[str, str],
    mesh: Mesh,
    followed: dict[Constraint, set[str]],
) -> list[Strategy]:
    """The strategies that meet the constraints on an op and on the parameters it uses.

    `names` maps names in a region to names in the program. A method that is required of a whole module applies to the
    ops that have it; `followed` records the methods that ops of the module have.
    Raises ConstraintError if no strategy is left.
    """
    op, first = context.op, context.op.results[0]

    def keep(demand: Constraint, met: Iterable[bool], reason: str) -> list[Strategy]:
        kept = [strategy for strategy, good in zip(strategies, met, strict=True) if good]
        if not kept:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, {demand.what} {demand.method} on axis {mesh.names[demand.axis]!r} "
                f"cannot be met at {op.key}: "
                f"{reason or 'no strategy has it together with the other constraints'}"
            )
        return kept

    def at(demand: Constraint, type: TensorType, name: str) -> str:
        reason = indivisible(demand.placement, type.shape, mesh, demand.axis)
        return reason and f"{name} of shape {list(type.shape)} cannot be split so, because {reason}"

    available = [{strategy.methods[axis] for strategy in strategies} for axis in mesh.dimensions]
    for axis, demand in demands.at("method", first).items():
        met = [strategy.methods[axis] == demand.method for strategy in strategies]
        strategies = keep(demand, met, _missing(context, demand, available[axis], mesh))
    for axis, demand in demands.at("method within", first).items():
        followed.setdefault(demand, set()).update(strategy.methods[axis] for strategy in strategies)
        strategies = [strategy for strategy in strategies if strategy.methods[axis] == demand.method] or strategies
    for slot, name in enumerate(op.operands):
        wanted = {**demands.at("used", names.get(name, name)), **demands.at("in", first, str(slot))}
        for axis, demand in wanted.items():
            flows = context.flowing_operands[slot]
            met = [demand.is_met(strategy.operands[slot][axis], flows) for strategy in strategies]
            strategies = keep(demand, met, at(demand, context.operands[slot], names.get(name, name)))
    for number in range(len(op.results)):
        for axis, demand in demands.at("out", first, str(number)).items():
            flows = context.flowing_results[number]
            met = [demand.is_met(strategy.results[number][axis], flows) for strategy in strategies]
            strategies = keep(demand, met, at(demand, context.results[number], "its result"))
    return strategies


def refuse_unfollowed(followed: Mapping[Constraint, Set[str]], mesh: Mesh) -> None:
    """Raise ConstraintError if no op of a module has the method that a constraint requires of it."""
    for demand, methods in followed.items():
        if demand.method not in methods:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, method {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
                f"met: no op of the module has that method; they have {', '.join(sorted(methods))}"
            )
