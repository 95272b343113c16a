"""Local forms: functions that generated code calls on a shard where the op itself would give a wrong result.

`digits` describes the split of a dim (see `digits.py`).
Normalization and softmax reduce their statistics over `axes`, those that split what is reduced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from autopar.runtime.generated.collectives import all_gather, reduce_largest, reduce_sum
from autopar.runtime.generated.digits import Digits, to_local
from autopar.runtime.state import Axis, rank_along
from passes.ir.layout import I, Placement, R, S


def _everywhere(x: Tensor, dim: int, digits: Digits) -> Tensor:
    """Gather the parts of all ranks, concatenated along `dim`."""
    for axis, _ in reversed(digits):
        x = all_gather(x, axis, src=S(dim), dst=R)
    return x


def with_halo(x: Tensor, dim: int, *, before: int, after: int, digits: Digits, value: float = 0.0) -> Tensor:
    """This rank's block with `before` elements of the block before it and `after` of the one after it, along `dim`.

    x: [..., block, ...]; result: [..., before + block + after, ...]. At both ends of the whole stands `value`.
    """
    rank, count = rank_along([axis for axis, _ in digits])
    edges = torch.cat([x.narrow(dim, 0, after), x.narrow(dim, x.shape[dim] - before, before)], dim)
    every = _everywhere(edges, dim, digits)
    width = before + after

    def neighbour(number: int, start: int, length: int) -> Tensor:
        # Also where there is none something is read, and put out of sight: all ranks must gather in backward too.
        read = every.narrow(dim, number % count * width + start, length)
        return read if 0 <= number < count else read.masked_fill(torch.ones_like(read, dtype=torch.bool), value)

    return torch.cat([neighbour(rank - 1, after, before), x, neighbour(rank + 1, 0, after)], dim)


def split_cumsum(x: Tensor, dim: int, *, digits: Digits, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums along a split dim: this rank's, and the totals of the ranks before it. x: [..., block, ...]."""
    rank, _ = rank_along([axis for axis, _ in digits])
    own = x.cumsum(dim, dtype=dtype)
    totals = _everywhere(own.narrow(dim, own.shape[dim] - 1, 1), dim, digits)
    return own + totals.narrow(dim, 0, rank).sum(dim, keepdim=True, dtype=own.dtype)


def vocabulary_embedding(ids: Tensor, weight: Tensor, *, size: int, digits: Digits, padding_idx: int = -1) -> Tensor:
    """Look up `ids` in a table whose rows are split: zeros for rows of other ranks, so the result is a pending sum.

    ids: [...], the same on every rank of the axes; weight: [rows of this rank, features]; result: [..., features].
    """
    rows, mine = to_local(ids, size, digits)
    found = embedding(rows, weight)
    if padding_idx != -1:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(~mine.unsqueeze(-1), 0.0)


def vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, *, size: int, digits: Digits, ignore_index: int = -100, summed: bool = True
) -> Tensor:
    """Cross entropies of tokens whose classes are split, or their sum; the same on every rank of the axes.

    logits: [tokens, classes of this rank]; target: [tokens]. Each rank reduces its classes; the largest logit, the sum
    of exponentials and the logit of the label are then reduced over the axes (Megatron-LM, arXiv 1909.08053, 3).
    """
    counted = target != ignore_index
    classes, mine = to_local(torch.where(counted, target, 0), size, digits)
    axes = [axis for axis, _ in digits]
    losses: Tensor = _SplitLosses.apply(logits, classes, mine, axes)  # type: ignore[no-untyped-call]
    each = torch.where(counted, losses, 0.0)
    return each.sum() if summed else each


class _SplitLosses(torch.autograd.Function):
    """The cross entropy of each token, whose class is number `classes` of this rank where it is `mine`. One tensor of
    the size of the logits is made in each pass: it saves their exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor, mine: Tensor, axes: Sequence[Axis]) -> Tensor:
        """logits: [tokens, classes of this rank]; classes, mine, result: [tokens]."""
        shifted = logits - reduce_largest(logits.amax(-1), axes).unsqueeze(-1)
        picked = torch.where(mine, shifted.gather(-1, classes.unsqueeze(-1)).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        total = reduce_sum(exponentials.sum(-1), axes, I)
        ctx.save_for_backward(exponentials, total, classes, mine)
        return total.log() - reduce_sum(picked, axes, I)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """gradient: [tokens], the same on every rank of the axes."""
        exponentials, total, classes, mine = ctx.saved_tensors
        found = exponentials * (gradient / total).unsqueeze(-1)
        picked = torch.where(mine, gradient, 0.0).neg()
        return found.scatter_add_(-1, classes.unsqueeze(-1), picked.unsqueeze(-1)), None, None, None


# --- normalization and softmax ---------------------------------------------------------------------------------------

Axes = Sequence[Axis]


def _wide(x: Tensor) -> Tensor:
    """Statistics of half precision are computed in single."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _moments(wide: Tensor, dims: list[int], size: int, axes: Axes) -> tuple[Tensor, Tensor, Tensor]:
    """`wide` minus its mean over `dims`, the mean, and the variance (by `size`); statistics keep their dims."""
    mean = reduce_sum(wide.sum(dims, keepdim=True), axes, R) / size
    centred = wide - mean
    return centred, mean, reduce_sum(centred.square().sum(dims, keepdim=True), axes, R) / size


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def split_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, rank: int, size: int, eps: float, axes: Axes
) -> Tensor:
    """Layer norm over the last `rank` dims, `size` elements in all (Ba et al., arXiv 1607.06450, 3).

    x: [..., this rank's part of the inner dims]; weight, bias: that part.
    """
    centred, _, variance = _moments(_wide(x), list(range(-rank, 0)), size, axes)
    return _scaled(centred * torch.rsqrt(variance + eps), weight, bias).to(x.dtype)


def split_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, rank: int, size: int, eps: float | None = None, axes: Axes
) -> Tensor:
    """Root mean square norm over the last `rank` dims (Zhang and Sennrich, arXiv 1910.07467, 4); shapes as above."""
    wide = _wide(x)
    mean = reduce_sum(wide.square().sum(list(range(-rank, 0)), keepdim=True), axes, R) / size
    smallest = torch.finfo(wide.dtype).eps if eps is None else eps
    return _scaled(wide * torch.rsqrt(mean + smallest), weight, None).to(x.dtype)


def split_group_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    groups: int,
    size: int,
    eps: float,
    axes: Axes,
) -> Tensor:
    """Group norm over channels and space, `size` elements per sample and group (Wu and He, arXiv 1803.08494, 3.1).

    x: [batch, channels, ...]; weight, bias: [channels]; `groups` are those of this rank.
    """
    centred, _, variance = _moments(_wide(x).reshape(x.shape[0], groups, -1), [-1], size, axes)
    normal = (centred * torch.rsqrt(variance + eps)).reshape(x.shape)
    return _scaled(normal, _column(weight, x), _column(bias, x)).to(x.dtype)


def _column(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Reshape [channels] so that it broadcasts with [batch, channels, ...]."""
    return None if weight is None else weight.reshape(-1, *(1,) * (x.dim() - 2))


def split_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, size: int, eps: float, axes: Axes
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm over batch and space, `size` elements per channel (Ioffe and Szegedy, arXiv 1502.03167, 3).

    x: [batch, channels, ...]; returns the result, and mean and variance (by `size`) of each channel.
    """
    centred, mean, variance = _moments(_wide(x), [dim for dim in range(x.dim()) if dim != 1], size, axes)
    normal = _scaled(centred * torch.rsqrt(variance + eps), _column(weight, x), _column(bias, x))
    return normal.to(x.dtype), mean.detach().flatten(), variance.detach().flatten()


def split_updating_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    size: int,
    eps: float,
    axes: Axes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm, and what the running statistics are afterwards: (result, mean, 1 / deviation, mean, variance)."""
    result, mean, variance = split_batch_norm(x, weight, bias, size=size, eps=eps, axes=axes)
    unbiased = variance * (size / max(size - 1, 1))
    new_mean = running_mean + momentum * (mean.to(running_mean.dtype) - running_mean)
    new_var = running_var + momentum * (unbiased.to(running_var.dtype) - running_var)
    return result, mean, torch.rsqrt(variance + eps), new_mean, new_var


def split_softmax(x: Tensor, dim: int, *, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax along a split dim. x: [..., this rank's part, ...]."""
    shifted, _, total = _exponentials(x if dtype is None else x.to(dtype), dim, axes, R)
    return (shifted.exp() / total).to(dtype or x.dtype)


def split_log_softmax(x: Tensor, dim: int, *, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """Log of softmax along a split dim."""
    shifted, _, total = _exponentials(x if dtype is None else x.to(dtype), dim, axes, R)
    return (shifted - total.log()).to(dtype or x.dtype)


def split_logsumexp(x: Tensor, dim: int, *, axes: Axes, keepdim: bool = False) -> Tensor:
    """Log of the sum of exponentials along a split dim; the same on every rank of the axes."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    _, largest, total = _exponentials(x, dim, axes, I)
    result = (total.log() + largest).to(x.dtype)
    return result if keepdim else result.squeeze(dim)


def _exponentials(x: Tensor, dim: int, axes: Axes, target: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """`x` minus its maximum along `dim`, the maximum (0 where all is minus infinity), and the sum of exponentials."""
    wide = _wide(x)
    largest = reduce_largest(wide.detach().amax(dim, keepdim=True), axes)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    shifted = wide - largest
    return shifted, largest, reduce_sum(shifted.exp().sum(dim, keepdim=True), axes, target)
