"""The order of tensors in memory: which are strided, and which views of these must copy.

Strides are those of whole tensors, computed op by op as torch does. A part of a tensor has its elements in the same
order. Pointwise ops and attention keep the order of what they read. Results of all other ops, and the arguments of
regions, are taken to be in the order of their dims.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from passes.ir.arguments import integer, listed
from passes.ir.figures import as_float
from passes.ir.folded import Folded, Region
from passes.ir.program import Op, TensorType
from passes.rules.parts import dim_argument, dims_argument
from passes.rules.pointwise import TABLE

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class MemoryOrder:
    """Names of tensors: those that are `strided`, of which a collective copies the elements first, as they are not in
    the order of their dims or have gaps; and the results of reshapes that are `copied`."""

    strided: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()


def memory_order(folded: Folded) -> MemoryOrder:
    """The order of all tensors of `folded` in memory."""
    strides: dict[str, Sizes] = {}
    copied: set[str] = set()
    for item in folded.items:
        ops: Iterable[Op] = item.ops if isinstance(item, Region) else (item,)
        for op in ops:
            shapes = [_sizes(folded.types[name]) for name in op.operands]
            operands = [strides.get(name, _in_order(shape)) for name, shape in zip(op.operands, shapes, strict=True)]
            result = _sizes(folded.types[op.results[0]])
            if op.kind in ("reshape", "contiguous"):
                viewed = _reshaped(shapes[0], operands[0], result)
                if viewed is None or (op.kind == "contiguous" and not _is_in_order(result, viewed)):
                    copied.add(op.results[0])
                else:
                    strides[op.results[0]] = viewed
            elif op.kind in _STRIDES:
                strides[op.results[0]] = _STRIDES[op.kind](op, shapes, operands, result)
        if isinstance(item, Region):
            for export in item.exports:
                if export.value in strides:
                    strides.update((name, strides[export.value]) for name in export.names if name)
    strided = (name for name, own in strides.items() if not _is_in_order(_sizes(folded.types[name]), own))
    return MemoryOrder(frozenset(strided), frozenset(copied))


def _sizes(type: TensorType) -> Sizes:
    return tuple(int(as_float(size)) for size in type.shape)


def _in_order(shape: Sizes) -> Sizes:
    """The strides of a tensor whose elements are in the order of its dims."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_in_order(shape: Sizes, strides: Sizes) -> bool:
    pairs = zip(shape, strides, _in_order(shape), strict=True)
    return all(size == 1 or own == step for size, own, step in pairs)


def _reshaped(before: Sizes, strides: Sizes, after: Sizes) -> Sizes | None:
    """The strides of a view of another shape; None where there is none, as dims are merged between which there are
    gaps."""
    if 0 in before:
        return _in_order(after)
    # Dims without a gap between them are one: its size, and the stride of the last.
    merged: list[tuple[int, int]] = []
    for size, step in zip(before, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = merged[-1][0] * size, step
        else:
            merged.append((size, step))
    found, left = list[int](), 1
    for size in reversed(after):
        if size == 1:
            found.append(left)
            continue
        if left == 1:
            if not merged:
                return None
            left, step = merged.pop()
        if left % size:
            return None
        found.append(step)
        left, step = left // size, step * size
    return tuple(reversed(found)) if left == 1 and not merged else None


# The strides of the first result of an op, from the shapes and strides of its operands and the shape of that result.
_Strides = Callable[[Op, Sequence[Sizes], Sequence[Sizes], Sizes], Sizes]


def _permuted(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    rank = len(result)
    order = list(dims_argument(op.arguments.get("dims"), rank))
    if op.kind == "transpose" and order:
        first, second = (dim_argument(op.arguments[name], rank) for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    return tuple(operands[0][dim] for dim in order)


def _sliced(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    dim = dim_argument(op.arguments["dim"], len(result))
    step = integer(op.arguments["step"])
    return tuple(own * step if number == dim else own for number, own in enumerate(operands[0]))


def _selected(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    dim = dim_argument(op.arguments["dim"], len(shapes[0]))
    return (*operands[0][:dim], *operands[0][dim + 1 :])


def _expanded(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    return _broadcast(shapes[0], operands[0], result)


def _broadcast(shape: Sizes, strides: Sizes, result: Sizes) -> Sizes:
    """The strides of a tensor that is repeated to the shape of a result."""
    new = len(result) - len(shape)
    kept = (own if size == wide else 0 for size, wide, own in zip(shape, result[new:], strides, strict=True))
    return (*(0,) * new, *kept)


def _kept(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    """The result of a pointwise op: without gaps, its dims in the order of the first operand that tells two of them
    apart."""
    given = [_broadcast(shape, own, result) for shape, own in zip(shapes, operands, strict=True)]

    def outer(first: int, second: int) -> int:
        for own in given:
            if own[first] and own[second] and own[first] != own[second]:
                return 1 if own[first] < own[second] else -1
        return -1 if first < second else 1

    order = sorted(range(len(result)), key=cmp_to_key(outer))
    steps = dict(zip(order, _in_order(tuple(result[dim] for dim in order)), strict=True))
    return tuple(steps[dim] for dim in range(len(result)))


def _attended(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    """[batch, heads, queries, width], as flash attention on CUDA returns it: in the order of the queries; or where its
    width is not theirs, as efficient attention does, in memory batch, queries, heads, width."""
    if shapes[0] == result:
        return _kept(op, shapes[:1], operands[:1], result)
    *batch, heads, queries, width = result
    *outer, by_query, by_head, last = _in_order((*batch, queries, heads, width))
    return (*outer, by_head, by_query, last)


def _convolved(op: Op, shapes: Sequence[Sizes], operands: Sequence[Sizes], result: Sizes) -> Sizes:
    """[batch, channels, length], cut out of a longer one."""
    before, after = (integer(size) for size in listed(op.arguments["padding"]))
    return _in_order((*result[:-1], result[-1] + abs(before - after)))


_STRIDES: Mapping[str, _Strides] = {
    **dict.fromkeys((*TABLE, "to"), _kept),
    **dict.fromkeys(("transpose", "permute"), _permuted),
    "slice": _sliced,
    "select": _selected,
    "expand": _expanded,
    "padded_conv1d": _convolved,
    "scaled_dot_product_attention": _attended,
}
