"""The kernels of flash attention as their documentation defines them, in plain ops."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """Samples of one length: [batch, tokens, heads, width]. Distances are counted from the last query and key."""
    assert dropout_p == 0.0, "no random numbers"
    groups = q.shape[2] // k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    before, after = window_size[0], 0 if causal else window_size[1]
    apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    hidden = ((apart < -before) & (before >= 0)) | ((apart > after) & (after >= 0))
    scores = scores.masked_fill(hidden, float("-inf"))
    if learnable_sink is not None:
        scores = torch.cat([scores, learnable_sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0) if after else scores.softmax(-1)
    return (weights[..., : k.shape[2]] @ v).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """Documents one after another: [tokens, heads, width]."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, learnable_sink
    found = [
        flash_attn_func(q[None, start:stop], k[None, first:last], v[None, first:last], *options)[0]
        for start, stop, first, last in zip(
            *(ends.tolist()[side:][: len(ends) - 1] for ends in (cu_seqlens_q, cu_seqlens_k) for side in (0, 1)),
            strict=True,
        )
    ]
    return torch.cat(found)


@contextmanager
def with_kernels() -> Iterator[None]:
    """Let models of `transformers` find them."""
    utils = modeling_flash_attention_utils
    found = flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
    with (
        mock.patch.object(utils, "_lazy_imports", return_value=found),
        mock.patch.object(utils, "_loaded_implementation", None),
    ):
        yield
