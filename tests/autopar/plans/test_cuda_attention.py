"""Attention on tensors without values, by the kernels that a CUDA device would run."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from autopar.plans.cuda_attention import CudaAttention

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 64, 16


@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_keeps_no_scores(learned: bool) -> None:
    """A bias for all samples, as relative positions make it, is kept once and without scores, learned or not: CUDA has
    a fused kernel for both, the CPU for one that is not learned alone."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with FakeTensorMode():
        shape = (BATCH, HEADS, LENGTH, WIDTH)
        query, key, value = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        bias = torch.empty(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16, requires_grad=learned)
        with CudaAttention(), saved_tensors_hooks(keep, lambda tensor: tensor):
            scaled_dot_product_attention(query, key, value, attn_mask=bias)
    assert max(kept) == HEADS * LENGTH * LENGTH * torch.bfloat16.itemsize
