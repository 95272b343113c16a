"""Local forms of normalization and softmax over split dims: ranks reduce their statistics.

`axes` are those that split what is reduced.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.collectives import all_reduce, reduce_largest
from passes.ir.layout import I, P, Placement, R

Axes = Sequence[Axis]


def _wide(x: Tensor) -> Tensor:
    """Statistics of half precision are computed in single."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _summed(x: Tensor, axes: Axes, target: Placement = R) -> Tensor:
    for axis in axes:
        x = all_reduce(x, axis, src=P, dst=target)
    return x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def split_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, rank: int, size: int, eps: float, axes: Axes
) -> Tensor:
    """Layer norm over the last `rank` dims, `size` elements in all (Ba et al., arXiv 1607.06450, 3).

    x: [..., this rank's part of the inner dims]; weight, bias: that part.
    """
    dims = tuple(range(x.dim() - rank, x.dim()))
    wide = _wide(x)
    centred = wide - _summed(wide.sum(dims, keepdim=True), axes) / size
    variance = _summed(centred.square().sum(dims, keepdim=True), axes) / size
    return _scaled(centred * torch.rsqrt(variance + eps), weight, bias).to(x.dtype)


def split_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, rank: int, size: int, eps: float | None = None, axes: Axes
) -> Tensor:
    """Root mean square norm over the last `rank` dims (Zhang and Sennrich, arXiv 1910.07467, 4); shapes as above."""
    dims = tuple(range(x.dim() - rank, x.dim()))
    wide = _wide(x)
    mean = _summed(wide.square().sum(dims, keepdim=True), axes) / size
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
    wide = _wide(x).reshape(x.shape[0], groups, -1)
    centred = wide - _summed(wide.sum(-1, keepdim=True), axes) / size
    variance = _summed(centred.square().sum(-1, keepdim=True), axes) / size
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
    dims = tuple(dim for dim in range(x.dim()) if dim != 1)
    wide = _wide(x)
    mean = _summed(wide.sum(dims), axes) / size
    centred = wide - _plain(_column(mean, x))
    variance = _summed(centred.square().sum(dims), axes) / size
    normal = centred * torch.rsqrt(_plain(_column(variance, x)) + eps)
    return _scaled(normal, _column(weight, x), _column(bias, x)).to(x.dtype), mean.detach(), variance.detach()


def _plain(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


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
    shifted, total = _exponentials(x if dtype is None else x.to(dtype), dim, axes, R)
    return (shifted.exp() / total).to(x.dtype if dtype is None else dtype)


def split_log_softmax(x: Tensor, dim: int, *, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """Log of softmax along a split dim."""
    shifted, total = _exponentials(x if dtype is None else x.to(dtype), dim, axes, R)
    return (shifted - total.log()).to(x.dtype if dtype is None else dtype)


def split_logsumexp(x: Tensor, dim: int, *, axes: Axes, keepdim: bool = False) -> Tensor:
    """Log of the sum of exponentials along a split dim; the same on every rank of the axes."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    wide = _wide(x)
    largest = _largest(wide, dim, axes)
    total = _summed((wide - largest).exp().sum(dim, keepdim=True), axes, I)
    result = (total.log() + largest).to(x.dtype)
    return result if keepdim else result.squeeze(dim)


def _largest(x: Tensor, dim: int, axes: Axes) -> Tensor:
    """The maximum along `dim` over all ranks; zero where all values are minus infinity."""
    largest = reduce_largest(x.detach().amax(dim, keepdim=True), axes)
    return largest.masked_fill(largest == float("-inf"), 0.0)


def _exponentials(x: Tensor, dim: int, axes: Axes, target: Placement) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    shifted = wide - _largest(wide, dim, axes)
    return shifted, _summed(shifted.exp().sum(dim, keepdim=True), axes, target)
