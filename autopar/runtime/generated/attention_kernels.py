"""Kernels of attention that return the log-sum-exp of each row of scores, and take it in their backward pass.

`forward` takes query, key and value of equal width, [batch, heads, length, width], and the scores to compute: whether
they are causal, what is added to them, and their scale. It returns the result and the log-sum-exps, [batch, heads,
length]. `backward` also takes the gradient of the result, the result and the log-sum-exps. These may be over more keys
than `key`: it returns the part of these keys in the gradients. The log-sum-exp of a row whose scores are all minus
infinity is any number, and its result too.

Those of CUDA were run on an H200 with torch 2.11 (`tests/autopar/cuda/test_attention.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar._torch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
)
from passes._torch import EFFICIENT_ATTENTION, FLASH_ATTENTION

# Query, key and value, or their gradients; or the gradient of the result, the result, and the log-sum-exps.
Three = tuple[Tensor, Tensor, Tensor]


# The largest width of the flash kernel.
_WIDEST = 256


class Scores(NamedTuple):
    """Scores of a block: their scale, whether they are causal, and what is added to them, in the dtype of the query,
    [batch or 1, heads or 1, queries or 1, keys]."""

    scale: float
    causal: bool = False
    added: Tensor | None = None


class Kernel(NamedTuple):
    """A kernel's forward and backward pass."""

    forward: Callable[[Three, Scores], tuple[Tensor, Tensor]]
    backward: Callable[[Three, Three, Scores], Three]


def kernel_of(query: Tensor, *, adds: bool = False) -> Kernel:
    """The kernel for the device and the dtype of `query`; `adds`: whether something is added to scores."""
    if query.device.type != "cuda":
        return CPU
    if query.dtype in (torch.float16, torch.bfloat16):
        return EFFICIENT if adds or query.shape[-1] > _WIDEST else FLASH
    return EFFICIENT if query.dtype is torch.float32 else PLAIN


def _cpu(given: Three, scores: Scores) -> tuple[Tensor, Tensor]:
    result, statistics = CPU_ATTENTION(*given, 0.0, scores.causal, attn_mask=scores.added, scale=scores.scale)
    return result, statistics


def _cpu_backward(given: Three, rows: Three, scores: Scores) -> Three:
    gradient, *made = rows
    options = {"attn_mask": scores.added, "scale": scores.scale}
    found: Three = CPU_ATTENTION_BACKWARD(gradient, *given, *made, 0.0, scores.causal, **options)
    return found


def _flash(given: Three, scores: Scores) -> tuple[Tensor, Tensor]:
    result, statistics, *_ = FLASH_ATTENTION(*given, 0.0, scores.causal, scale=scores.scale)
    return result, statistics


def _flash_backward(given: Three, rows: Three, scores: Scores) -> Three:
    (query, key, value), (gradient, result, statistics) = given, rows
    # No packed sequences, and no dropout that would need the state of a generator.
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    lengths = None, None, query.shape[2], key.shape[2]
    queries, keys, values = FLASH_ATTENTION_BACKWARD(
        gradient, *given, result, statistics.contiguous(), *lengths, 0.0, scores.causal, none, none, scale=scores.scale
    )
    # The kernel may return the gradient of grouped heads for each query head.
    return queries, _grouped(keys, key).sum(2), _grouped(values, value).sum(2)


# The efficient kernel has its log-sum-exps in multiples of so many rows, and what is added begins a row at multiples of
# so many elements.
_ROWS, _COLUMNS = 32, 16


def _efficient(given: Three, scores: Scores) -> tuple[Tensor, Tensor]:
    query, key, value = given
    results, statistics = [], []
    for part, added in zip(_grouped(query, key).unbind(2), _biases(query, key, scores), strict=True):
        result, own, *_ = EFFICIENT_ATTENTION(part, key, value, added, True, 0.0, scores.causal, scale=scores.scale)
        results.append(result)
        statistics.append(own[:, :, : query.shape[2]])
    return torch.stack(results, 2).flatten(1, 2), torch.stack(statistics, 2).flatten(1, 2)


def _efficient_backward(given: Three, rows: Three, scores: Scores) -> Three:
    (query, key, value), (gradient, result, statistics) = given, rows
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    each = (query, gradient, result, pad(statistics, (0, -statistics.shape[2] % _ROWS)))
    queries, keys, values = [], torch.zeros_like(key), torch.zeros_like(value)
    groups = (*(_grouped(one, key).unbind(2) for one in each), _biases(query, key, scores))
    for part, own, made, sums, added in zip(*groups, strict=True):
        outside = added, _by_rows(made), sums.contiguous(), none, none, 0.0, [True, True, True, False], scores.causal
        found = EFFICIENT_ATTENTION_BACKWARD(own, part, key, value, *outside, scale=scores.scale)
        queries.append(found[0])
        keys += found[1]
        values += found[2]
    return torch.stack(queries, 2).flatten(1, 2), keys, values


def _by_rows(result: Tensor) -> Tensor:
    """`result` with the heads of a row next to each other in memory. In half precision the kernel's backward pass takes
    a result for one of its forward pass, which has these strides, whatever strides it has."""
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _biases(query: Tensor, key: Tensor, scores: Scores) -> Sequence[Tensor | None]:
    """The masks of numbers for the scores of each query head of a group, of their size; views where they can be."""
    groups = query.shape[1] // key.shape[1]
    if scores.added is None:
        return [None] * groups
    added = pad(scores.added, (0, -key.shape[2] % _COLUMNS))[..., : key.shape[2]]
    every = _grouped(added.expand(*query.shape[:3], key.shape[2]), key)
    return every.unbind(2)


def _grouped(each: Tensor, key: Tensor) -> Tensor:
    """[batch, key heads, groups, ...]: the heads of `each` by the key head that they read."""
    return torch.unflatten(each, 1, (key.shape[1], -1))


def _plain(given: Three, scores: Scores) -> tuple[Tensor, Tensor]:
    """Without a fused kernel: the scores of a block are made whole."""
    query, key, value = given
    made = _made(query, key, scores)
    statistics = made.logsumexp(-1)
    result = (made - statistics.unsqueeze(-1)).exp() @ value.unsqueeze(2)
    return result.flatten(1, 2), statistics.flatten(1, 2)


def _plain_backward(given: Three, rows: Three, scores: Scores) -> Three:
    query, key, value = given
    gradient, result, statistics = (_grouped(each, key) for each in rows)
    parts = (_made(query, key, scores) - statistics.unsqueeze(-1)).exp()
    of_parts = gradient @ value.unsqueeze(2).mT
    of_scores = parts * (of_parts - (gradient * result).sum(-1, keepdim=True)) * scores.scale
    return (
        (of_scores @ key.unsqueeze(2)).flatten(1, 2),
        (of_scores.mT @ _grouped(query, key)).sum(2),
        (parts.mT @ gradient).sum(2),
    )


def _made(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    """[batch, key heads, groups, queries, keys]."""
    made: Tensor = _grouped(query, key) @ key.unsqueeze(2).mT * scores.scale
    if scores.added is not None:
        made += _grouped(scores.added.expand(*query.shape[:3], key.shape[2]), key)
    if not scores.causal:
        return made
    later = torch.ones(made.shape[-2:], dtype=torch.bool, device=made.device).triu(1)
    return made.masked_fill(later, float("-inf"))


CPU = Kernel(_cpu, _cpu_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)
PLAIN = Kernel(_plain, _plain_backward)
