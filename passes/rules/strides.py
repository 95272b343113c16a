"""Strided tensors: those whose memory is not in the order of their dims, because a view permuted or dropped some.

A collective copies such a tensor first, and a reshape of one copies it. Pointwise ops keep the order of what they read;
attention returns its result in the order batch, queries, heads, width.
"""

from collections.abc import Container, Iterable, Mapping

from passes.ir.program import Folded, Op, Region, TensorType
from passes.rules.pointwise import TABLE

_MOVES_DIMS = {"transpose", "permute"}
_MAKES = {"slice", "select", "expand", "scaled_dot_product_attention"}
_KEEPS = {*TABLE, "to"}


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


def must_copy(op: Op, strided: Container[str]) -> bool:
    """Whether `op` is a view that must copy its operand, which is among the `strided` tensors."""
    return op.kind == "reshape" and op.operands[0] in strided


def _is_strided(op: Op, strided: set[str], types: Mapping[str, TensorType]) -> bool:
    if op.kind in _MOVES_DIMS:
        # Permuting dims back is assumed to restore the order.
        return op.operands[0] not in strided
    # Operands that are as large as the result determine its strides.
    shape = types[op.results[0]].shape
    kept = op.kind in _KEEPS and any(name in strided and types[name].shape == shape for name in op.operands)
    return op.kind in _MAKES or kept
