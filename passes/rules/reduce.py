"""Sums, means and other reductions, and running ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from passes.ir.program import Op, TensorType
from passes.ir.rule import Factor, Part, Role, Rule, Saved
from passes.rules.parts import broadcast, dim_argument, dims_argument, factors, linear_in, named, one, rule_for


@dataclass(frozen=True)
class Reduction:
    """The role of the dims that an op reduces, its linear sets of operands, and its saved tensors."""

    role: Role
    linear: tuple[frozenset[int], ...] = ()
    saved: tuple[Saved, ...] = ()


_FIRST = (frozenset({0}),)
_BOTH = (Saved(0), Saved(0, result=True))
_EXTREMA = ("max", "min")

TABLE: Mapping[str, Reduction] = {
    "sum": Reduction(Role.SUM, _FIRST),
    "mean": Reduction(Role.SUM, _FIRST),
    # Pending sums do not pass through these.
    "nansum": Reduction(Role.SUM, saved=(Saved(0),)),
    "count_nonzero": Reduction(Role.SUM),
    **dict.fromkeys(("all", "any", "argmax", "argmin"), Reduction(Role.WHOLE)),
    **dict.fromkeys(
        ("amax", "amin", *_EXTREMA, "prod", "std", "linalg_vector_norm", "norm"), Reduction(Role.WHOLE, saved=_BOTH)
    ),
    "var": Reduction(Role.WHOLE, saved=(Saved(0),)),
    **dict.fromkeys(("var_mean", "std_mean", "aminmax"), Reduction(Role.WHOLE, saved=(*_BOTH, Saved(1, result=True)))),
}


@rule_for(*TABLE)
def reduction(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Parts of summed dims give pending sums; a mean divides the sum of a part by the size of the whole."""
    if len(op.operands) != 1:
        return None
    spec = TABLE[op.kind]
    operand = types[op.operands[0]].shape
    reduced = dims_argument(op.arguments.get("dim"), len(operand)) if operand else ()
    dims = [one(f"in{dim}" if dim in reduced else f"d{dim}", size) for dim, size in enumerate(operand)]
    kept = [() if dim in reduced else parts for dim, parts in enumerate(dims)]
    if not op.arguments.get("keepdim"):
        kept = [parts for dim, parts in enumerate(kept) if dim not in reduced]
    found = factors(tuple(dims), roles={f"in{dim}": spec.role for dim in reduced})
    forms = {f"in{dim}": "mean" for dim in reduced if f"in{dim}" in found and op.kind == "mean"}
    # If indices are a result too, only they are saved.
    saved = (Saved(1, result=True),) if len(op.results) == 2 and op.kind in _EXTREMA else spec.saved
    results = (tuple(kept),) * len(op.results)
    return Rule(found, (tuple(dims),), results, linear=spec.linear, forms=forms, saved=saved)


@rule_for("histc")
def histogram(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The counts of the parts sum to the counts, if the ends of the bins do not depend on the values."""
    least, most = op.arguments["min"], op.arguments["max"]
    if not isinstance(least, (int, float)) or not isinstance(most, (int, float)) or least >= most:
        return None
    operand = named(types[op.operands[0]].shape)
    roles = {part.factor: Role.SUM for parts in operand for part in parts}
    result = ((Part("bins", types[op.results[0]].shape[0]),),)
    return Rule(factors(operand, result, roles={**roles, "bins": Role.WHOLE}), (operand,), (result,))


@rule_for("cosine_similarity")
def cosine_similarity(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The reduced dim stays whole."""
    shapes = [types[name].shape for name in op.operands]
    wide = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    dim = dim_argument(op.arguments["dim"], len(wide))
    operands = tuple(broadcast(shape, wide) for shape in shapes)
    result = (*named(wide)[:dim], *named(wide)[dim + 1 :])
    return Rule(
        factors(*operands, result, roles={f"d{dim}": Role.WHOLE}), operands, (result,), saved=(Saved(0), Saved(1))
    )


@rule_for("cumsum")
def cumsum(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Along a split dim each rank adds the total of the ranks before it."""
    shape = types[op.operands[0]].shape
    dim = dim_argument(op.arguments["dim"], len(shape))
    dims = list(named(shape))
    if dims:
        dims[dim] = one("along", shape[dim])
    found = factors(tuple(dims))
    forms = {}
    if "along" in found:
        found["along"] = Factor(shape[dim], ordered=True)
        forms["along"] = "cumsum"
    return Rule(found, (tuple(dims),), (tuple(dims),), linear=linear_in(op, types, 0), forms=forms)
