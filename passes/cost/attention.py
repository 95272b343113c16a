"""The local part of scaled dot-product attention: its kernel, what that computes, and what it saves."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from passes.cost.compute import Work
from passes.ir.choices import Strategy
from passes.ir.layout import Shape, local_shape
from passes.ir.mesh import Mesh
from passes.rules.attention_kernels import Kernel, attention_kernel
from passes.rules.rule import Choice
from passes.rules.strategies import OpContext

# Passes over scores without a fused kernel: the first product writes them, the softmax reads and writes, the second
# product reads them. A mask is read, and added to them. The backward pass has twice the products.
_FORWARD_PASSES, _MASK_PASSES, _BACKWARD_PASSES = 4, 3, 6


class Attention(NamedTuple):
    """Attention on one rank: the kernel, the local query, key and value, and whether scores are masked."""

    kernel: Kernel
    operands: tuple[Shape, ...]
    is_masked: bool


def local_attention(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Attention | None:
    """The attention that a rank computes; None for other ops."""
    if context.op.kind != "scaled_dot_product_attention":
        return None
    shapes = tuple(
        local_shape(type.shape, layout, mesh)
        for type, layout in zip(context.operands[:3], strategy.operands[:3], strict=True)
    )
    masked = len(context.operands) > 3
    split = any(choice.form for choice in choices)
    if split:
        # The local form repeats grouped heads.
        query, keys = shapes[0], shapes[1:]
        shapes = (query, *((each[0], query[1], *each[2:]) for each in keys))
    kernel = attention_kernel(
        device,
        context.operands[0].dtype,
        shapes,
        masked=masked or split,
        dropout=bool(context.op.arguments["dropout_p"]),
    )
    return Attention(kernel, shapes, masked or split or bool(context.op.arguments["is_causal"]))


def attention_work(work: Work, attention: Attention) -> Work:
    """`work` as the kernel does it: without a fused one as products and passes over whole scores, at least in single
    precision. Tiles of fused ones are as wide as the widths on average."""
    query, key, value = attention.operands
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
