"""Attention: explicit causal masks become `is_causal`, and masks that hide nothing are removed."""

from math import prod

import torch

from passes.ir.program import Argument, Op, Ref
from passes.normalize.constants import constant
from passes.normalize.rewriter import KEEP, Rewriter

# Larger masks are not computed here.
_LARGEST = 2**28


def attention(rewriter: Rewriter, op: Op) -> Argument:
    """A mask that is the same for every batch: dropped if it hides nothing, `is_causal` if it hides just what follows.

    Masks of numbers that are added are known by zeros and by the least number of their dtype, which softmax makes
    exactly zero.
    """
    mask = op.arguments["attn_mask"]
    if not isinstance(mask, Ref) or op.arguments["is_causal"]:
        return KEEP
    type = rewriter.type(mask)
    queries, keys = (rewriter.type(op.arguments[name]).shape[-2] for name in ("query", "key"))
    if len(type.shape) < 2 or type.shape[-2:] != (queries, keys) or prod(type.shape) > _LARGEST:
        return KEEP
    values = constant(rewriter, mask.name)
    if values is None:
        return KEEP
    allowed = values if values.dtype == torch.bool else values == 0
    hidden = ~allowed
    if values.dtype != torch.bool and not bool((values[hidden] <= torch.finfo(values.dtype).min).all()):
        return KEEP
    if bool(allowed.all()):
        known: dict[str, Argument] = {"attn_mask": None}
    elif queries == keys and bool((allowed == torch.ones(queries, keys, dtype=torch.bool).tril()).all()):
        known = {"attn_mask": None, "is_causal": True}
    else:
        return KEEP
    return rewriter.write(op, op.target, rewriter.types[op.results[0]], **{**op.arguments, **known})
