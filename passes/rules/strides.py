"""Strided tensors: those whose memory is not in the order of their dims, because a view permuted or dropped some.

A collective copies such a tensor first, and a reshape of one copies it. Pointwise ops keep the order of what they read;
attention returns its result in the order batch, queries, heads, width.
"""

from collections.abc import Iterable, Mapping, Sequence

from passes.ir.program import Folded, Op, Region, TensorType
from passes.rules.pointwise import TABLE

_MOVES_DIMS = {"transpose", "permute"}
_LEAVES_OUT = {"slice", "select", "expand"}
_KEEPS = {*TABLE, "to", "where"}


def strided(folded: Folded) -> frozenset[str]:
    """The names of all such tensors."""
    found: set[str] = set()
    for item in folded.items:
        ops: Iterable[Op] = item.ops if isinstance(item, Region) else (item,)
        for op in ops:
            if _is_strided(op, found, folded.types):
                found.update(op.results)
        if isinstance(item, Region):
            for export in item.exports:
                if export.value in found:
                    found.update(name for name in export.names if name)
    return frozenset(found)


def _is_strided(op: Op, strided: set[str], types: Mapping[str, TensorType]) -> bool:
    if op.kind in _MOVES_DIMS:
        # Permuting dims back is assumed to restore the order.
        return op.operands[0] not in strided
    if op.kind in _LEAVES_OUT:
        return True
    if op.kind == "scaled_dot_product_attention":
        return True
    if op.kind in _KEEPS:
        return any(name in strided for name in _whole(op.operands, types[op.results[0]], types))
    return False


def _whole(operands: Sequence[str], result: TensorType, types: Mapping[str, TensorType]) -> list[str]:
    """The operands that are as large as the result, which determine its strides."""
    return [name for name in operands if types[name].shape == result.shape]
