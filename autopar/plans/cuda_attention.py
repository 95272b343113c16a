"""Attention on tensors without values that stand for those of a CUDA device.

torch chooses the kernel by the device, so on fake CPU tensors it would be one of the CPU's.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from passes._torch import EFFICIENT_ATTENTION, FLASH_ATTENTION
from passes.rules.attention_forms import Kernel, attention_kernel


class CudaAttention(TorchFunctionMode):
    """Runs the kernel of attention that a CUDA device would run."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run a function of torch."""
        run: Callable[..., object] = _attention if func is scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel of CUDA; a fused one of the CPU stands for it where there is one.

    Those of the CPU give masks no gradients, so there one that has a gradient is attended to without a fused kernel.
    """
    about = query.dtype, tuple(tuple(each.shape) for each in (query, key, value))
    masked, dropout = attn_mask is not None, dropout_p > 0
    kernel = attention_kernel("cuda", *about, masked=masked, dropout=dropout)
    on_cpu = attention_kernel("cpu", *about, masked=masked, dropout=dropout)
    if attn_mask is not None and attn_mask.requires_grad:
        on_cpu = Kernel.MATH
    alike = (kernel is Kernel.MATH) == (on_cpu is Kernel.MATH)
    if alike or kernel is Kernel.MATH:
        with nullcontext() if alike else sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if kernel is Kernel.FLASH:
        results = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        if attn_mask is not None:
            bias = attn_mask.to(query.dtype) if attn_mask.dtype is torch.bool else attn_mask
            attn_mask = bias.expand(*query.shape[:-1], key.shape[-2])
        results = EFFICIENT_ATTENTION(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    attended: Tensor = results[0]
    return attended
