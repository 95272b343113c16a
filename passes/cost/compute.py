"""Seconds for one op on one device: a roofline of its multiplications and of the bytes that it reads and writes.

The achieved fraction of the peak depends on the shape:

- A product with `elements` in its result that sums over k takes 2 (elements + fill) (k + depth) / rate: tiles of the
  result are made in waves over all multiprocessors, of which the last leaves some idle (half of them on average: fill),
  and each tile has a prologue and an epilogue (depth). So small results and short sums reach less. Tile and wave
  quantisation are as in NVIDIA's matrix multiplication guide, smoothed: libraries choose tiles by shape.
- Tensor cores are fed 16 bytes at a time. Where a row of an operand or of the result does not begin at a multiple of
  that (an odd vocabulary, heads of 108 elements in two bytes), libraries take slower kernels. A head of 128,003 classes
  takes three times as long as one of 128,064 (Netflix on post-training, 2026); products in batches run as without
  tensor cores, which NVIDIA's guide has as the rule of cuBLAS before 11.0, and the BLOOM runs show for 11.5.
- Attention runs at a part of its own, the less the narrower its heads, because exponentials cost each score the same
  (FlashAttention-2, Dao 2023, and -3, Shah et al. 2024, tables of heads of 64, 128, 256). Its tiles are as wide as a
  head. The backward pass of its fused kernels makes 2.5 times the multiplications of the forward pass.

Skinny products need no term of their own: they are bound by memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from passes.cost.hardware import Device
from passes.ir.figures import largest

# How wide the tiles of products are, in elements of the result's last dim: attention's are as wide as its heads.
_TILE = 256


@dataclass(frozen=True, slots=True)
class Work:
    """The share of an op that one rank computes.

    - `dtype`: of its multiplications.
    - `reads`, `writes`: bytes of operands and results that the forward pass reads and writes.
    - `back`: bytes that the backward pass reads and writes: the gradients of the results, what was saved, and the
      gradients of the operands.
    - `kernels`: the number of kernels that the forward and the backward pass launch.
    - `forward`: multiplications of the forward pass, a multiply-add counted as two; `backward` those of the gradients
      of operands.
    - `elements`: the number of elements of the results; `gradients` the operands whose gradients `backward` counts.
    - `width`: the width of attention heads; 0 for other ops.
    - `unaligned`: whether rows of operands or results do not begin at multiples of 16 bytes; `batched` whether it is a
      batched product.
    """

    dtype: torch.dtype
    reads: float
    writes: float
    back: float = 0.0
    kernels: tuple[float, float] = (1, 0)
    forward: float = 0.0
    backward: Sequence[float] = ()
    elements: float = 0.0
    gradients: Sequence[float] = ()
    width: float = 0.0
    unaligned: bool = False
    batched: bool = False


def compute_seconds(work: Work, device: Device) -> tuple[float, float]:
    """Seconds forward and backward.

    The gradient of each operand of a product is a product of its own; those of attention come from one.
    """
    forward, backward = (work.reads + work.writes) / device.stream, work.back / device.stream
    if work.forward:
        forward = largest(forward, _multiplying(work.forward, work.elements, work, device))
        shapes = zip(work.backward, work.gradients, strict=True)
        backward = largest(
            backward, sum(_multiplying(flops, elements, work, device) for flops, elements in shapes if flops)
        )
    before, after = work.kernels
    return before * device.launch + forward, after * device.launch + backward


def product_seconds(
    flops: float, elements: float, dtype: torch.dtype, device: Device, unaligned: bool = False, batched: bool = False
) -> float:
    """Seconds of a product of `flops` whose result has `elements`. The prologue and epilogue of a tile do not depend on
    whether rows are `unaligned`."""
    rate = device.rate(dtype)
    if unaligned:
        flops = flops * (rate / device.unaligned_rate(dtype, batched))
    return (flops + 2 * elements * device.depth) * (elements + device.fill) / (elements * rate)


def attention_seconds(flops: float, elements: float, width: float, dtype: torch.dtype, device: Device) -> float:
    """Seconds of fused attention with heads of `width` for `flops`, with `elements` in its result."""
    rate = device.attention * device.peak(dtype)
    return flops * (1 + device.softmax / width) * (1 + attention_fill(width, device) / elements) / rate


def attention_fill(width: float, device: Device) -> float:
    """The idle part of the last wave of attention's tiles, as a number of additional elements in its result."""
    return device.fill * min(1.0, width / _TILE)


def _multiplying(flops: float, elements: float, work: Work, device: Device) -> float:
    if work.width:
        return attention_seconds(flops, elements, work.width, work.dtype, device)
    return product_seconds(flops, elements, work.dtype, device, work.unaligned, work.batched)
