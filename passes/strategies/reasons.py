"""Reasons why a tensor or an op is not split as a constraint requires, for the errors that say so."""

from collections.abc import Collection, Mapping

from passes.ir.constraints import Constraint
from passes.ir.layout import Placement, Shape
from passes.ir.mesh import Mesh
from passes.ir.rule import Factor
from passes.rules.strategies import OpContext

# What to do where a factor does not divide, besides another size.
_ADVICE: Mapping[str, str] = dict.fromkeys(
    ("queries", "keys"), ", with labels of -100 and an attention mask for the padding"
)


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


def missing(context: OpContext, demand: Constraint, available: Collection[str], mesh: Mesh) -> str:
    """The reason why the method of a constraint is not among the `available` ones of an op; "" if it is."""
    if demand.method in available:
        return ""
    methods = ", ".join(sorted(available))
    return withheld(context, demand, mesh) or f"it has no such method; its methods on this axis are {methods}"


def withheld(context: OpContext, demand: Constraint, mesh: Mesh) -> str:
    """The reason why an op cannot use the method of a constraint with these sizes; "" if it has no such method."""
    size, name = mesh.sizes[demand.axis], demand.method.partition("@")[0]
    rule = context.rule
    if rule is not None and name in rule.withheld:
        return rule.withheld[name]
    begins = demand.method.partition("@")[2] or "1"
    method = None if rule is None else rule.method(name)
    if rule is not None and method is not None and begins.isdecimal():
        for factor in method.factors:
            reason = _indivisible_factor(factor, rule.factors[factor], max(int(begins), 1), size)
            if reason:
                return reason
    return ""


def _indivisible_factor(name: str, factor: Factor, major: int, size: int) -> str:
    """The reason why `factor` is not split into `size` parts below its `major` first ones; "" if it can be."""
    parts, written = major * size, f"{name} of size {factor.size}"
    ways = f"{size} devices" if major == 1 else f"{major} x {size} parts"
    if factor.size % parts:
        padded = -(-factor.size // parts) * parts
        return f"{written} is not divisible into {ways}: pad to {padded}{_ADVICE.get(name, '')}, or use another method"
    if factor.size // parts < factor.least:
        return (
            f"{written} leaves {factor.size // parts} to each of {ways}, and the ranks beside one need {factor.least}: "
            f"use at least {factor.least * parts}, or fewer devices"
        )
    return ""
