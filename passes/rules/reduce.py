"""Sums, means and other reductions, and running ones."""

from collections.abc import Mapping

from passes.ir.program import Op, TensorType
from passes.ir.rule import Factor, Part, Role, Rule, Saved
from passes.rules.parts import broadcast, broadcast_shapes, dim_argument, dims_argument, factors, named, one
from passes.rules.registry import rule_for


def _reduced(op: Op, types: Mapping[str, TensorType], role: Role) -> Rule:
    operand = types[op.operands[0]].shape
    reduced = dims_argument(op.arguments.get("dim"), len(operand)) if operand else ()
    dims = list(named(operand))
    for dim in reduced:
        dims[dim] = (Part(f"in{dim}", operand[dim]),) if operand[dim] != 1 else ()
    kept = [() if dim in reduced else parts for dim, parts in enumerate(dims)]
    if not op.arguments.get("keepdim"):
        kept = [parts for dim, parts in enumerate(kept) if dim not in reduced]
    roles = {f"in{dim}": role for dim in reduced}
    return Rule(factors(tuple(dims), roles=roles), (tuple(dims),), (tuple(kept),) * len(op.results))


@rule_for("sum")
def sum_(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The parts sum to the result."""
    rule = _reduced(op, types, Role.SUM)
    return Rule(rule.factors, rule.operands, rule.results, linear=(frozenset({0}),))


@rule_for("nansum", "count_nonzero")
def counted(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The parts sum to the result, but pending sums do not pass."""
    rule = _reduced(op, types, Role.SUM)
    return Rule(rule.factors, rule.operands, rule.results, saved=(Saved(0),) if op.kind == "nansum" else ())


@rule_for("histc")
def histogram(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The counts of the parts sum to the counts, if the ends of the bins do not depend on the values."""
    least, most = op.arguments["min"], op.arguments["max"]
    if not isinstance(least, (int, float)) or not isinstance(most, (int, float)) or least >= most:
        return None
    operand = named(types[op.operands[0]].shape)
    roles = {part.factor: Role.SUM for parts in operand for part in parts}
    result = ((Part("bins", types[op.results[0]].shape[0]),),)
    found = factors(operand, result, roles={**roles, "bins": Role.WHOLE})
    return Rule(found, (operand,), (result,))


@rule_for("mean")
def mean(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Over a split dim: the sum of the part, divided by the size of the whole."""
    rule = _reduced(op, types, Role.SUM)
    forms = {name: "mean" for name, factor in rule.factors.items() if factor.role is Role.SUM}
    return Rule(rule.factors, rule.operands, rule.results, linear=(frozenset({0}),), forms=forms)


_BOTH = (Saved(0), Saved(0, result=True))

# Saved tensors of reductions whose reduced dims stay whole.
_WHOLE: dict[str, tuple[Saved, ...]] = {
    **dict.fromkeys(("all", "any", "argmax", "argmin"), ()),
    **dict.fromkeys(("amax", "amin", "max", "min", "prod", "std", "linalg_vector_norm", "norm"), _BOTH),
    "var": (Saved(0),),
    **dict.fromkeys(("var_mean", "std_mean"), (Saved(0), Saved(0, result=True), Saved(1, result=True))),
    "aminmax": (Saved(0), Saved(0, result=True), Saved(1, result=True)),
}


@rule_for(*_WHOLE)
def whole(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Reduced dims stay whole."""
    if len(op.operands) != 1:
        return None
    rule = _reduced(op, types, Role.WHOLE)
    # If indices are a result too, only they are saved.
    places = len(op.results) == 2 and op.kind in ("max", "min")
    kept = (Saved(1, result=True),) if places else _WHOLE[op.kind]
    return Rule(rule.factors, rule.operands, rule.results, saved=kept)


@rule_for("cosine_similarity")
def cosine_similarity(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The reduced dim stays whole."""
    shapes = [types[name].shape for name in op.operands]
    wide = broadcast_shapes(*shapes)
    dim = dim_argument(op.arguments["dim"], len(wide))
    operands = tuple(broadcast(shape, wide) for shape in shapes)
    result = (*named(wide)[:dim], *named(wide)[dim + 1 :])
    found = factors(*operands, result, roles={f"d{dim}": Role.WHOLE})
    return Rule(found, operands, (result,), saved=(Saved(0), Saved(1)))


@rule_for("cumsum")
def cumsum(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Along a split dim each rank adds the total of the ranks before it."""
    shape = types[op.operands[0]].shape
    dim = dim_argument(op.arguments["dim"], len(shape))
    dims = list(named(shape))
    if dims:
        dims[dim] = one("along", shape[dim])
    floating = types[op.results[0]].dtype.is_floating_point
    found = factors(tuple(dims))
    forms = {}
    if "along" in found:
        found["along"] = Factor(shape[dim], ordered=True)
        forms["along"] = "cumsum"
    linear = (frozenset({0}),) if floating else ()
    return Rule(found, (tuple(dims),), (tuple(dims),), linear=linear, forms=forms)
