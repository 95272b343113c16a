"""Ops that move elements but compute nothing: reshape, permute, expand, slice, select, cat, stack, pad."""

from collections.abc import Mapping
from math import prod

from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType, has_gradient
from passes.ir.rule import Dims, Part, Role, Rule, Saved
from passes.rules.parts import common_unit, dim_argument, dims_argument, factors, named, one, shapes, unit_parts
from passes.rules.registry import rule_for

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


def _permuted(op: Op, types: Mapping[str, TensorType], order: list[int]) -> Rule:
    operand = named(types[op.operands[0]].shape)
    return _view(op, types, operand, tuple(operand[dim] for dim in order))


@rule_for("transpose")
def transpose(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Two dims are swapped."""
    rank = len(types[op.operands[0]].shape)
    first, second = (dim_argument(op.arguments[name], rank) for name in ("dim0", "dim1"))
    order = list(range(rank))
    if order:
        order[first], order[second] = second, first
    return _permuted(op, types, order)


@rule_for("permute")
def permute(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Dims are permuted."""
    rank = len(types[op.operands[0]].shape)
    return _permuted(op, types, list(dims_argument(op.arguments["dims"], rank)))


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
    if op.arguments["step"] != 1:
        taken, left = (one(f"{side}{dim}", shape[dim]) for side, shape in (("to", result), ("from", operand)))
        dims, made = list(named(operand)), list(named(result))
        dims[dim], made[dim] = left, taken
        return _view(op, types, tuple(dims), tuple(made), dict.fromkeys((f"to{dim}", f"from{dim}"), Role.WHOLE))
    unit = common_unit(operand[dim], start, result[dim])
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
    unit = common_unit(*(shape[dim] for shape in operands))
    if unit == 0:
        return None
    tensors = []
    for number, shape in enumerate((*operands, result)):
        dims = list(named(shape))
        dims[dim] = unit_parts(shape[dim], unit, f"whole{number}", f"d{dim}")
        tensors.append(tuple(dims))
    roles = {f"whole{number}": Role.WHOLE for number in range(len(tensors))}
    every = frozenset(range(len(operands)))
    linear = (every,) if types[op.results[0]].dtype.is_floating_point else ()
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
    linear = (frozenset(range(count)),) if types[op.results[0]].dtype.is_floating_point else ()
    return Rule(factors(tuple(dims), roles=_WHOLE), (operand,) * count, (tuple(dims),), linear=linear)


@rule_for("pad", "constant_pad_nd")
def pad(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Padded dims stay whole; a pending sum passes if zeros are added, or elements of the operand."""
    operand, result = shapes((op.operands[0], op.results[0]), types)
    before, after = list(named(operand)), list(named(result))
    roles = {}
    amounts = op.arguments["pad"]
    assert isinstance(amounts, tuple)
    for dim, (size, padded) in enumerate(zip(operand, result, strict=True)):
        place = 2 * (len(operand) - 1 - dim)
        if any(amounts[place : place + 2]):
            before[dim], after[dim] = (Part(f"from{dim}", size),), (Part(f"to{dim}", padded),)
            roles.update({f"from{dim}": Role.WHOLE, f"to{dim}": Role.WHOLE})
    exact = op.arguments.get("mode", "constant") != "constant" or not op.arguments["value"]
    zero = exact and has_gradient(types[op.results[0]].dtype)
    tensors = tuple(before), tuple(after)
    found = factors(*tensors, roles=roles)
    saved = (Saved(0),) if op.arguments.get("mode", "constant") != "constant" else ()
    return Rule(found, tensors[:1], tensors[1:], linear=_LINEAR if zero else (), saved=saved)
