"""Attention on one rank: the kernel that runs on its part of queries, keys and values, and the work of that kernel."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from passes.cost.compute import Work
from passes.ir.choices import Strategy
from passes.ir.layout import Shape, local_shape
from passes.ir.mesh import Mesh
from passes.rules.attention_forms import Kernel, attention_kernel, block_attention, runs_in_blocks, runs_in_chunks
from passes.rules.strategies import Choice, OpContext

# The kinds of ops that are attention.
ATTENTION = ("scaled_dot_product_attention", "chunked_attention")
# Passes over scores without a fused kernel: the first product writes them, the softmax reads and writes, the second
# product reads them. A mask is read, and added to them. The backward pass has twice the products.
_FORWARD_PASSES, _MASK_PASSES, _BACKWARD_PASSES = 4, 3, 6
# A soft cap divides, bends and multiplies them; what hides keys or is added is read, too.
_CAP_PASSES = 6


class Attention(NamedTuple):
    """Attention on one rank: the kernel, the local query, key and value, and whether scores are masked; those in chunks
    all are, of these whether they have a soft cap."""

    kernel: Kernel
    operands: tuple[Shape, ...]
    is_masked: bool


def local_attention(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Attention | None:
    """The attention that a rank computes; None for other ops."""
    if context.op.kind not in ATTENTION:
        return None
    shapes = tuple(
        local_shape(type.shape, layout, mesh)
        for type, layout in zip(context.operands[:3], strategy.operands[:3], strict=True)
    )
    masked = len(context.operands) > 3
    if runs_in_chunks(context.op):
        return Attention(Kernel.CHUNKS, shapes, context.op.arguments["soft_cap"] is not None)
    if runs_in_blocks(context.op) or any(choice.form for choice in choices):
        shapes = block_attention(shapes, context.operands[1].shape[-2], device)
    dropout = bool(context.op.arguments["dropout_p"])
    kernel = attention_kernel(device, context.operands[0].dtype, shapes, masked=masked, dropout=dropout)
    return Attention(kernel, shapes, masked or bool(context.op.arguments["is_causal"]))


def attention_work(work: Work, attention: Attention) -> Work:
    """`work` as the kernel does it: without a fused one as products and passes over whole scores, at least in single
    precision. Tiles of fused ones are as wide as the widths on average."""
    query, key, value = attention.operands
    if attention.kernel is Kernel.CHUNKS:
        return _chunked_work(work, attention)
    if attention.kernel is not Kernel.MATH:
        return replace(work, width=(query[-1] + value[-1]) / 2)
    scores = prod(query[:-1]) * key[-2]
    dtype = work.dtype if work.dtype.itemsize >= torch.float32.itemsize else torch.float32
    forward = 2.0 * scores * (query[-1] + value[-1])
    parts = sum(work.backward)
    passed = scores * dtype.itemsize
    return replace(
        work,
        dtype=dtype,
        reads=work.reads + (_FORWARD_PASSES + _MASK_PASSES * attention.is_masked) * passed,
        back=work.back + _BACKWARD_PASSES * passed,
        forward=forward,
        backward=[2 * forward * part / parts for part in work.backward] if parts else work.backward,
        elements=scores,
        unaligned=False,
        batched=True,
    )


def _chunked_work(work: Work, attention: Attention) -> Work:
    """`work` in chunks: passes over the scores that are computed, and in the backward pass those of the forward pass
    again, whose products the rule counts as those of fused kernels, which make them again, too."""
    query, _, value = attention.operands
    dtype = work.dtype if work.dtype.itemsize >= torch.float32.itemsize else torch.float32
    scores = work.forward / 2 / (query[-1] + value[-1])
    passes = _FORWARD_PASSES + _MASK_PASSES + _CAP_PASSES * attention.is_masked
    passed = scores * dtype.itemsize
    back = (passes + _BACKWARD_PASSES + _CAP_PASSES // 2 * attention.is_masked) * passed
    back = back if work.back else 0.0
    return replace(work, reads=work.reads + passes * passed, back=work.back + back)
