"""Attention of a part of the queries to all keys, without scores of all of them.

Fused kernels run on blocks that are causal or full, and return the log-sum-exp of each row of scores, by which the
results of several blocks are merged (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135,
appendix B). The backward pass of a block takes the result and the log-sum-exp of all blocks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from autopar.runtime.generated.attention_kernels import Scores, Three, kernel_of
from autopar.runtime.generated.blocks import Block, back, blocks_of, part_of, spread
from autopar.runtime.generated.digits import Digits, places
from autopar.runtime.generated.masks import Masks, hidden, visible
from passes.ir.bands import Band, band_of, kernel_width

Documents = tuple[Tensor, Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Digits = (),
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of a part of the queries to all keys.

    query: [batch, heads, queries of this rank, width]; key: [batch, key heads, keys, width]; value: [batch, key heads,
    keys, value width]; result: [batch, heads, queries of this rank, value width]. Where it is `causal` or has a
    `window`, of so many keys before and after a query's place, there are as many keys as queries on all ranks. `mask`
    and `documents` hide keys (see `Masks`); the result of a query without keys is zero. Grouped heads are not repeated.
    """
    given = same_width(query, key, value)
    blocks = _blocks(query.shape[2], key.shape[2], tuple(digits), band_of(causal, window))
    masks = masks_of(mask, documents)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    (seen,) = visible([(blocks, masks)])
    result: Tensor = _BlockAttention.apply(*given, *masks, seen, scale)  # type: ignore[no-untyped-call]
    return result if value.shape[-1] == result.shape[-1] else result[..., : value.shape[-1]]


def masks_of(mask: Tensor | None, documents: Documents | None) -> Masks:
    """Masks of what is given."""
    return Masks(mask, *(documents or (None, None)))


@lru_cache(maxsize=128)
def _blocks(count: int, size: int, digits: Digits, band: Band) -> tuple[Block, ...]:
    """The blocks of this rank's `count` queries and all `size` keys."""
    if band.is_full:
        return (Block(slice(0, count), slice(0, size)),)
    return blocks_of(places(count, size, digits), np.arange(size), band)


def same_width(query: Tensor, key: Tensor, value: Tensor) -> Three:
    """Query, key and value as kernels take them, of equal widths. Zeros add nothing to scores, and make columns of the
    result that are not read."""
    wide = kernel_width(query.shape[-1], value.shape[-1], query.device.type)
    return padded(query, wide), padded(key, wide), padded(value, wide)


def padded(each: Tensor, width: int) -> Tensor:
    """With rows of `width` elements, one after another."""
    if each.shape[-1] < width:
        return pad(each, (0, width - each.shape[-1]))
    return each if each.stride(-1) == 1 else each.contiguous()


class Merged:
    """The results of blocks, merged: of several results of a row their sum, weighted by the exponentials of their
    log-sum-exps. Where something `hides` keys, a block may have rows without any."""

    def __init__(self, query: Tensor, *, hides: bool) -> None:
        self.result = self.statistics = query[..., :0]
        self.query, self.hides = query, hides

    def add(self, block: Block, found: Tensor, own: Tensor, *, last: bool) -> None:
        """Add the result and the log-sum-exps of a block; of all blocks together in half precision where it is the
        only one."""
        wide = torch.promote_types(found.dtype, torch.float32)
        if not self.result.numel():
            if found.shape == self.query.shape:
                found, own = (back(each, block).squeeze(2) for each in (found, own))
                self.result, self.statistics = (found if last else found.to(wide)), own
                return
            self._begin(wide)
        result, before = (spread(each, block.queries, block) for each in (self.result, self.statistics))
        found, own = back(found, block), back(own, block)
        after = torch.logaddexp(before, own)
        # Rows without keys so far are zeros.
        shift = after.masked_fill(after == float("-inf"), 0.0) if self.hides else after
        result.mul_((before - shift).exp_().unsqueeze(-1)).addcmul_(found, (own - shift).exp_().unsqueeze(-1))
        before.copy_(after)

    def finished(self) -> tuple[Tensor, Tensor]:
        """The result in the dtype of the query, and the log-sum-exps, as the backward pass of kernels takes them."""
        if not self.result.numel():
            self._begin(torch.promote_types(self.query.dtype, torch.float32))
        statistics = self.statistics
        return self.result.to(self.query.dtype), statistics.masked_fill(statistics == float("-inf"), 0.0)

    def _begin(self, wide: torch.dtype) -> None:
        self.result = torch.zeros_like(self.query, dtype=wide)
        self.statistics = self.query.new_full(self.query.shape[:-1], float("-inf"), dtype=wide)


class _BlockAttention(torch.autograd.Function):
    """Attention over blocks of queries of this rank and keys that are all there."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """The result, in the dtype of the query; `given` are query, key and value, masks, the blocks, and the scale."""
        whole, masks, blocks, scale = given[:3], Masks(*given[3:6]), given[6], given[7]
        merged = Merged(whole[0], hides=masks.hides)
        for block in blocks:
            merged.add(block, *block_result(block, whole, masks, scale), last=len(blocks) == 1)
        result, statistics = merged.finished()
        ctx.save_for_backward(*whole, *masks, result, statistics)
        ctx.about = blocks, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        *whole, row, queries, keys, result, statistics = ctx.saved_tensors
        blocks, scale = ctx.about
        # Rounding errors of many blocks would add up in half precision.
        wide = torch.promote_types(result.dtype, torch.float32) if len(blocks) > 1 else result.dtype
        found = [torch.zeros_like(each, dtype=wide) for each in whole]
        every = padded(gradient, gradient.shape[-1]), result, statistics
        add_gradients(found, whole, Masks(row, queries, keys), every, blocks, scale)
        return (*(each.to(result.dtype) for each in found), *[None] * 5)


def block_result(block: Block, whole: Sequence[Tensor], masks: Masks, scale: float) -> tuple[Tensor, Tensor]:
    """The result of a block of query, key and value (`whole`), and its log-sum-exps, as `part_of` has them."""
    part = _part(block, whole)
    if not masks.hides:
        return kernel_of(part[0]).forward(part, Scores(scale, block.causal))
    added, blind = hidden(block, masks, whole[0])
    result, statistics = kernel_of(part[0], adds=True).forward(part, Scores(scale, block.causal, added))
    return result.masked_fill(blind.unsqueeze(-1), 0.0), statistics.masked_fill(blind, float("-inf"))


def add_gradients(
    found: Sequence[Tensor],
    whole: Sequence[Tensor],
    masks: Masks,
    every: Sequence[Tensor],
    blocks: Sequence[Block],
    scale: float,
) -> None:
    """Add to `found`, the gradients of query, key and value (`whole`), those of blocks. `every` are the gradient of the
    result, the result, and the log-sum-exps."""
    for block in blocks:
        rows = part_of(every[0], block.queries, block), part_of(every[1], block.queries, block)
        given = *rows, part_of(every[2], block.queries, block)
        added = hidden(block, masks, whole[0])[0] if masks.hides else None
        scores = Scores(scale, block.causal, added)
        own = kernel_of(whole[0], adds=masks.hides).backward(_part(block, whole), given, scores)
        for each, part, where in zip(found, own, (block.queries, block.keys, block.keys), strict=True):
            spread(each, where, block).add_(back(part, block))
        # They are freed before those of the next block are there.
        del own, part, rows, given, added, scores


def _part(block: Block, whole: Sequence[Tensor]) -> Three:
    query, key, value = whole
    return part_of(query, block.queries, block), part_of(key, block.keys, block), part_of(value, block.keys, block)
