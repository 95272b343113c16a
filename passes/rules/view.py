"""Ops that move elements but compute nothing: reshape, contiguous, permute, expand, slice, select, cat, stack, pad."""

from collections.abc import Mapping
from math import gcd, prod

from passes.ir.arguments import listed
from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType, has_gradient
from passes.ir.rule import Dims, Part, Role, Rule, Saved
from passes.rules.parts import (
    dim_argument,
    dims_argument,
    factors,
    linear_in,
    named,
    rule_for,
    shapes,
    unit_parts,
    without,
)

_LINEAR = (frozenset({0}),)
_WHOLE = {"whole": Role.WHOLE}


def _view(
    op: Op, types: Mapping[str, TensorType], operand: Dims, result: Dims, roles: Mapping[str, Role] | None = None
) -> Rule:
    found = factors(operand, result, roles=roles)
    linear = _LINEAR if has_gradient(types[op.results[0]].dtype) else ()
    return Rule(found, (operand,), (result,), linear=linear, moves=False)


@rule_for("reshape")
def reshape(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """One factor, the flat index: a dim is the range of its digits between the product of the dims before and after.

    A split propagates if its digit is within one dim on both sides: prod(shape[:dim]) * major stays the same.
    """
    operand, result = shapes((op.operands[0], op.results[0]), types)
    if prod(result) == 0:
        return None

    def flat(shape: Shape) -> Dims:
        return tuple((Part("flat", size, prod(shape[:dim])),) if size != 1 else () for dim, size in enumerate(shape))

    return _view(op, types, flat(operand), flat(result))


@rule_for("contiguous")
def contiguous(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The same tensor with its memory in the order of its dims: a view where it is so already."""
    dims = named(types[op.operands[0]].shape)
    return _view(op, types, dims, dims)


@rule_for("transpose", "permute")
def permute(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Dims are permuted; `transpose` swaps two."""
    operand = named(types[op.operands[0]].shape)
    rank = len(operand)
    order = list(dims_argument(op.arguments.get("dims"), rank))
    if op.kind == "transpose" and order:
        first, second = (dim_argument(op.arguments[name], rank) for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    return _view(op, types, operand, tuple(operand[dim] for dim in order))


@rule_for("expand")
def expand(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """A repeated dim is a factor that the operand does not have."""
    operand, result = shapes((op.operands[0], op.results[0]), types)
    dims = named(result)
    offset = len(result) - len(operand)
    return _view(op, types, tuple(dims[dim + offset] if size != 1 else () for dim, size in enumerate(operand)), dims)


@rule_for("slice")
def slice_(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The sliced dim can be split within units that the slice takes or leaves as a whole."""
    operand, result = shapes((op.operands[0], op.results[0]), types)
    dim = dim_argument(op.arguments["dim"], len(operand))
    start = op.arguments["start"] or 0
    if not isinstance(start, int) or result[dim] == 0:
        return None
    unit = gcd(operand[dim], start, result[dim]) if op.arguments["step"] == 1 else 1
    before, after = list(named(operand)), list(named(result))
    before[dim] = unit_parts(operand[dim], unit, "whole", f"d{dim}")
    after[dim] = unit_parts(result[dim], unit, "kept", f"d{dim}")
    return _view(op, types, tuple(before), tuple(after), {"whole": Role.WHOLE, "kept": Role.WHOLE})


@rule_for("select")
def select(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The selected dim stays whole."""
    operand = types[op.operands[0]].shape
    dim = dim_argument(op.arguments["dim"], len(operand))
    dims = list(named(operand))
    dims[dim] = (Part("whole", operand[dim]),)
    return _view(op, types, tuple(dims), tuple(dims[:dim] + dims[dim + 1 :]), _WHOLE)


@rule_for("cat")
def cat(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The concatenated dim can be split within units of which every operand has a whole number."""
    operands = shapes(op.operands, types)
    result = types[op.results[0]].shape
    if len({len(shape) for shape in operands}) != 1 or prod(result) == 0:
        return None
    dim = dim_argument(op.arguments["dim"], len(result))
    unit = gcd(*(shape[dim] for shape in operands))
    if unit == 0:
        return None
    tensors = []
    for number, shape in enumerate((*operands, result)):
        dims = list(named(shape))
        dims[dim] = unit_parts(shape[dim], unit, f"whole{number}", f"d{dim}")
        tensors.append(tuple(dims))
    roles = {f"whole{number}": Role.WHOLE for number in range(len(tensors))}
    linear = linear_in(op, types, *range(len(operands)))
    return Rule(factors(*tensors, roles=roles), tuple(tensors[:-1]), (tensors[-1],), linear=linear)


@rule_for("stack")
def stack(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """A new dim, which stays whole."""
    result = types[op.results[0]].shape
    dim = dim_argument(op.arguments["dim"], len(result))
    dims = list(named(result))
    dims[dim] = (Part("whole", result[dim]),)
    operand = tuple(dims[:dim] + dims[dim + 1 :])
    count = len(op.operands)
    linear = linear_in(op, types, *range(count))
    return Rule(factors(tuple(dims), roles=_WHOLE), (operand,) * count, (tuple(dims),), linear=linear)


@rule_for("pad", "constant_pad_nd")
def pad(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Padded dims stay whole; a pending sum passes if zeros are added, or elements of the operand."""
    operand, result = shapes((op.operands[0], op.results[0]), types)
    amounts = listed(op.arguments["pad"])
    last = len(operand) - 1
    padded = [dim for dim in range(len(operand)) if any(amounts[2 * (last - dim) : 2 * (last - dim) + 2])]
    before, roles = without(named(operand), padded, "from")
    after, more = without(named(result), padded, "to")
    copies = op.arguments.get("mode", "constant") != "constant"
    zero = (copies or not op.arguments["value"]) and has_gradient(types[op.results[0]].dtype)
    return Rule(
        factors(before, after, roles={**roles, **more}),
        (before,),
        (after,),
        linear=_LINEAR if zero else (),
        saved=(Saved(0),) if copies else (),
    )
