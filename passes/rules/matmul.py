"""Matrix products."""

from collections.abc import Mapping
from math import prod

from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Part, Role, Rule, Saved, parts_of
from passes.rules.parts import broadcast, factors, is_tensor, named, one, rule_for

_SUMMED = {"in": Role.SUM}


def _product(left: Dims, right: Dims, result: Dims, bias: Dims | None, first: bool) -> Rule:
    """A product of two operands, and a bias that is added to it and stands first or last among the operands."""
    at = 1 if bias is not None and first else 0
    operands = [left, right]
    if bias is not None:
        operands.insert(0 if first else 2, bias)
    added = frozenset() if bias is None else frozenset({0 if first else 2})
    found = factors(*operands, result, roles=_SUMMED)
    return Rule(
        found,
        tuple(operands),
        (result,),
        added=added,
        linear=(frozenset({at}) | added, frozenset({at + 1}) | added),
        multiplications=2.0 * prod(factor.size for factor in found.values()),
        backward=tuple(0.0 if slot in added else 1.0 for slot in range(len(operands))),
        saved=(Saved(at, needed_by=(at + 1,)), Saved(at + 1, needed_by=(at,))),
    )


@rule_for("linear")
def linear(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """rows in, out in, out -> rows out. The rows are all dims of the input but the last: d0, d1, …"""
    shape = types[op.operands[0]].shape
    weight = types[op.operands[1]].shape
    rows = named(shape[:-1])
    bias: Dims | None = ((Part("out", weight[0]),),) if is_tensor(op, "bias") else None
    inner, outer = (Part("in", shape[-1]),), (Part("out", weight[0]),)
    return _product((*rows, inner), (outer, inner), (*rows, outer), bias, first=False)


@rule_for("addmm")
def addmm(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """bias + rows in, in out -> rows out."""
    bias, left, right = (types[name].shape for name in op.operands)
    inner = (Part("in", left[1]),)
    result: Dims = ((Part("d0", left[0]),), (Part("out", right[1]),))
    added = tuple(result[2 - len(bias) + dim] if size != 1 else () for dim, size in enumerate(bias))
    return _product((result[0], inner), (inner, result[1]), result, added, first=True)


@rule_for("matmul", "bmm", "mm")
def matmul(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch rows in, batch in out -> batch rows out, batch dims broadcast: d0, d1, …, then rows and out."""
    left, right = (types[name].shape for name in op.operands)
    result = types[op.results[0]].shape
    if len(left) < 2 or len(right) < 2:
        return None
    batch = result[:-2]
    rows, inner, outer = (Part("rows", left[-2]),), (Part("in", left[-1]),), (Part("out", right[-1]),)
    return _product(
        (*broadcast(left[:-2], batch), rows, inner),
        (*broadcast(right[:-2], batch), inner, outer),
        (*named(batch), rows, outer),
        None,
        first=False,
    )


@rule_for("einsum")
def einsum(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The factors are the placements of the equation; what the result lacks is summed over."""
    equation = op.arguments["equation"]
    assert isinstance(equation, str)
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    shapes = [types[name].shape for name in op.operands]
    if "." in left or len(terms) != len(shapes):
        return None
    if not arrow:
        right = "".join(placement for placement in sorted(set(left) - {","}) if left.count(placement) == 1)
    operands = tuple(
        tuple(one(placement, size) for placement, size in zip(term, shape, strict=True))
        for term, shape in zip(terms, shapes, strict=True)
    )
    sizes = {**dict.fromkeys("".join(terms), 1), **{part.factor: part.size for part in parts_of(*operands)}}
    result = tuple(one(placement, sizes[placement]) for placement in right)
    roles = {placement: Role.SUM for placement in sizes if placement not in right}
    # Twice in one operand is its diagonal; a placement of size 1 in one operand and not in another is repeated.
    twice = {placement for term in terms for placement in term if term.count(placement) > 1}
    roles.update(dict.fromkeys(twice, Role.WHOLE))
    found = factors(*operands, result, roles=roles)
    count = len(terms)
    others = {slot: tuple(other for other in range(count) if other != slot) for slot in range(count)}
    return Rule(
        found,
        operands,
        (result,),
        linear=tuple(frozenset({slot}) for slot in range(count)),
        multiplications=2.0 * prod(sizes.values()) if count > 1 else 0.0,
        backward=(1.0,) * count if count > 1 else (),
        saved=tuple(Saved(slot, needed_by=others[slot]) for slot in range(count)) if count > 1 else (),
    )


# Rows of the operands of a grouped product begin at multiples of so many bytes.
_ALIGNMENT = 16


def _aligned(name: str, type: TensorType, dim: int) -> tuple[Part, ...]:
    """A dim of a grouped product: a factor of units that begin at multiples of 16 bytes, and what a unit holds."""
    size, unit = type.shape[dim], _ALIGNMENT // type.dtype.itemsize
    return one(name, size) if size % unit else (*one(name, size // unit), *one(f"{name}_unit", unit))


def _grouped(op: Op, types: Mapping[str, TensorType], last: Dims, rows: Role, saved: tuple[Saved, ...]) -> Rule | None:
    """rows in, groups in out, and a third operand of dims `last` -> rows out."""
    left, right = (types[name] for name in op.operands[:2])
    if len(left.shape) != 2 or len(right.shape) != 3 or len(op.operands) != 3:
        return None
    inner, outer = _aligned("in", right, 1), _aligned("out", right, 2)
    operands: tuple[Dims, ...] = ((one("rows", left.shape[0]), inner), (one("groups", right.shape[0]), inner, outer))
    result: Dims = (one("rows", left.shape[0]), outer)
    roles = {"in": Role.SUM, "rows": rows, **dict.fromkeys(("groups", "in_unit", "out_unit"), Role.WHOLE)}
    return Rule(
        factors(*operands, last, result, roles=roles),
        (*operands, last),
        (result,),
        linear=(frozenset({0}), frozenset({1})),
        multiplications=2.0 * prod(left.shape) * right.shape[2],
        backward=(1.0, 1.0, 0.0),
        saved=saved,
    )


@rule_for("_grouped_mm", "grouped_mm_fallback")
def grouped(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """rows in, groups in out, groups -> rows out: rows are sorted by group, and stay whole."""
    last: Dims = (one("groups", types[op.operands[1]].shape[0]),)
    saved = (Saved(0, needed_by=(1,)), Saved(1, needed_by=(0,)), Saved(2))
    return _grouped(op, types, last, Role.WHOLE, saved)


@rule_for("routed_mm")
def routed(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """rows in, groups in out, rows -> rows out: each row is multiplied with the matrix of its own group.

    The rows are saved in the order of their groups, with that order and its inverse.
    """
    last: Dims = (one("rows", types[op.operands[0]].shape[0]),)
    saved = (Saved(0, needed_by=(1,), copy=True), Saved(1, needed_by=(0,)), Saved(2, copy=True), Saved(2, copy=True))
    return _grouped(op, types, last, Role.FREE, saved)
