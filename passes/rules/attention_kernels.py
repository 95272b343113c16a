"""The kernel that scaled dot-product attention runs: a fused one, or products and a softmax on whole scores.

torch chooses by device, dtype, shapes and mask (`sdp_utils.cpp` of its CUDA and CPU kernels, versions 2.11 to 2.13).
"""

from enum import Enum
from math import prod

import torch

from passes.ir.layout import Shape


class Kernel(Enum):
    """A kernel of attention. `MATH` makes the scores of all heads, and autograd saves them."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256


def attention_kernel(
    device: str, dtype: torch.dtype, operands: tuple[Shape, ...], *, masked: bool, dropout: bool
) -> Kernel:
    """The kernel for query, key and value of these shapes, [batch, heads, length, width], on "cpu" or "cuda".

    On CUDA, flash attention takes half precision and equal widths, but no mask; efficient attention takes no grouped
    heads. On a CPU one kernel takes masks and grouped heads, but neither unequal widths nor dropout.
    """
    query, key, value = operands[:3]
    if len(query) != 4:
        return Kernel.MATH
    equal = query[3] == value[3]
    if device == "cpu":
        return Kernel.FLASH if equal and not dropout else Kernel.MATH
    if dtype in _HALF and equal and not masked and query[3] <= _WIDEST:
        return Kernel.FLASH
    fits = query[1] == key[1] and dtype in (*_HALF, torch.float32)
    return Kernel.EFFICIENT if fits else Kernel.MATH


def attention_workspace(
    kernel: Kernel, dtype: torch.dtype, operands: tuple[Shape, ...], *, mask: int, dropout: bool
) -> tuple[float, float]:
    """Bytes that autograd saves besides query, key, value and result, and bytes of temporaries of the backward pass.

    A fused kernel saves a statistic per query, and a mask of `mask` numbers. Without one, operands, scores and their
    gradients are at least in single precision, and the result is not saved; dropout saves its own mask and result.
    """
    query, key, value = operands[:3]
    if kernel is not Kernel.MATH:
        return prod(query[:-1]) * torch.float32.itemsize + mask * dtype.itemsize, 0.0
    itemsize = max(dtype.itemsize, torch.float32.itemsize)
    keys = prod(query[:-2]) * key[-2]
    scores, rows = keys * query[-2], prod(query[:-1])
    read = (prod(query) + prod(key) + prod(value)) * dtype.itemsize
    wide = itemsize * (prod(query) + keys * (key[-1] + value[-1]))
    saved, live = (3, 1) if dropout else (1, 2)
    result = rows * value[-1] * dtype.itemsize
    return saved * scores * itemsize + wide - read - result, live * scores * itemsize - read
