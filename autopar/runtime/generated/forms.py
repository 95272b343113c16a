"""Local forms: functions that generated code calls on a shard where the op itself would give a wrong result.

`digits` describes the split of a dim: for every axis that splits it the axis and its major, in the order of majors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.collectives import all_gather, all_reduce, reduce_largest
from passes.ir.layout import I, P, R, S

Digits = Sequence[tuple[Axis, int]]


def _to_local(index: Tensor, size: int, digits: Digits) -> tuple[Tensor, Tensor]:
    """Indices into a whole dim of `size` as indices into this rank's part, and which of them lie in it."""
    mine = torch.ones_like(index, dtype=torch.bool)
    taken = 1
    for axis, major in digits:
        unit = size // (major // taken * axis.size)
        mine &= (index // unit) % axis.size == axis.rank
        index = index // (unit * axis.size) * unit + index % unit
        size //= axis.size
        taken *= axis.size
    return torch.where(mine, index, 0), mine


def _positions(count: int, digits: Digits, device: torch.device) -> Tensor:
    """The places in the whole dim of this rank's `count` entries."""
    size = count
    for axis, _ in digits:
        size *= axis.size
    places = torch.arange(size, device=device)
    taken = 1
    for axis, major in digits:
        places = places.reshape(major // taken, axis.size, -1)[:, axis.rank].reshape(-1)
        taken *= axis.size
    return places


def _last_position(count: int, digits: Digits) -> int:
    """The last of `_positions`, as a number: no device is asked for it."""
    size = count
    for axis, _ in digits:
        size *= axis.size
    cuts = []
    taken = 1
    for axis, major in digits:
        cuts.append((axis, size // (major // taken * axis.size)))
        size //= axis.size
        taken *= axis.size
    place = count - 1
    for axis, unit in reversed(cuts):
        place = place // unit * unit * axis.size + axis.rank * unit + place % unit
    return place


def _rank(digits: Digits) -> tuple[int, int]:
    """This rank's number among those that have a dim in their order, and how many there are."""
    number, count = 0, 1
    for axis, _ in digits:
        number, count = number * axis.size + axis.rank, count * axis.size
    return number, count


def _everywhere(x: Tensor, dim: int, digits: Digits) -> Tensor:
    """Gather the parts of all ranks, concatenated along `dim`."""
    for axis, _ in reversed(digits):
        x = all_gather(x, axis, src=S(dim), dst=R)
    return x


def with_halo(x: Tensor, dim: int, *, before: int, after: int, digits: Digits, value: float = 0.0) -> Tensor:
    """This rank's block with `before` elements of the block before it and `after` of the one after it, along `dim`.

    x: [..., block, ...]; result: [..., before + block + after, ...]. At both ends of the whole stands `value`.
    """
    rank, count = _rank(digits)
    size = x.shape[dim]
    edges = torch.cat([x.narrow(dim, 0, after), x.narrow(dim, size - before, before)], dim)
    every = _everywhere(edges, dim, digits)
    width = before + after

    def neighbour(number: int, start: int, length: int) -> Tensor:
        # Also where there is none something is read, and put out of sight: all ranks must gather in backward too.
        read = every.narrow(dim, number % count * width + start, length)
        return read if 0 <= number < count else read.masked_fill(torch.ones_like(read, dtype=torch.bool), value)

    return torch.cat([neighbour(rank - 1, after, before), x, neighbour(rank + 1, 0, after)], dim)


def split_cumsum(x: Tensor, dim: int, *, digits: Digits, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums along a split dim: this rank's, and the totals of the ranks before it. x: [..., block, ...]."""
    rank, _ = _rank(digits)
    own = x.cumsum(dim, dtype=dtype)
    totals = _everywhere(own.narrow(dim, own.shape[dim] - 1, 1), dim, digits)
    return own + totals.narrow(dim, 0, rank).sum(dim, keepdim=True, dtype=own.dtype)


def vocabulary_embedding(ids: Tensor, weight: Tensor, *, size: int, digits: Digits, padding_idx: int = -1) -> Tensor:
    """Look up `ids` in a table whose rows are split: zeros for rows of other ranks, so the result is a pending sum.

    ids: [...], the same on every rank of the axes; weight: [rows of this rank, features]; result: [..., features].
    """
    rows, mine = _to_local(ids, size, digits)
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
    axes = [axis for axis, _ in digits]
    largest = reduce_largest(logits.detach().amax(-1), axes)
    shifted = logits - largest.unsqueeze(-1)
    counted = target != ignore_index
    classes, mine = _to_local(torch.where(counted, target, 0), size, digits)
    total = shifted.exp().sum(-1)
    picked = torch.where(mine, shifted.gather(-1, classes.unsqueeze(-1)).squeeze(-1), 0.0)
    for axis in axes:
        total = all_reduce(total, axis, src=P, dst=I)
        picked = all_reduce(picked, axis, src=P, dst=I)
    each = torch.where(counted, total.log() - picked, 0.0)
    return each.sum() if summed else each


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Digits,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention for a part of the queries and all keys.

    query: [batch, heads, queries of this rank, width]; key, value: [batch, heads, keys, width]. A query attends to the
    keys up to its place in the whole sequence; keys after the last of them are left out.
    """
    places = _positions(query.shape[2], digits, query.device)
    last = min(_last_position(query.shape[2], digits) + 1, key.shape[2])
    allowed = torch.arange(last, device=query.device) <= places.unsqueeze(-1)
    # Copies, also where all keys are needed: what shares memory must be the same on all ranks.
    key, value = key[:, :, :last].clone(), value[:, :, :last].clone()
    return scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )
