"""Attention whose keys are split as its queries are: keys and values travel around the ranks.

Each rank attends to the keys that it holds while it sends them on and receives those of the rank before it (Liu et al.
2023, arXiv 2310.01889). In the backward pass the gradients of keys and values travel with them, back to the rank that
they belong to. Nothing is made of queries by keys of more than a block, and the results of blocks are merged as in
`attention.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.generated.attention import (
    Documents,
    Merged,
    add_gradients,
    block_result,
    masks_of,
    padded,
    same_width,
)
from autopar.runtime.generated.blocks import Block, blocks_of
from autopar.runtime.generated.collectives import start_shift
from autopar.runtime.generated.digits import Digits, places
from autopar.runtime.generated.masks import Masks, visible
from passes.ir.bands import Band, band_of


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Digits,
    queries: Digits = (),
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of a part of the queries to all keys, which are split alike on the axes of `digits`. Where other axes
    split the queries, too, of which ranks have the same keys, `queries` are the digits of all.

    query: [batch, heads, queries of this rank, width]; key: [batch, key heads, keys of this rank, width]; value:
    [batch, key heads, keys of this rank, value width]; result: [batch, heads, queries of this rank, value width];
    `mask` and the second of `documents` are of all keys (see `Masks`). In stripes, all ranks compute as much where it
    is `causal`; in order, the last rank computes most. In order, keys that are before the `window` of causal attention
    on all ranks do not travel. Grouped heads travel once.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    route = _Route(tuple(digits), tuple(queries) or tuple(digits), band_of(causal, window))
    given = *same_width(query, key, value), *masks_of(mask, documents), route, scale
    result: Tensor = _RingAttention.apply(*given)  # type: ignore[no-untyped-call]
    return result if value.shape[-1] == result.shape[-1] else result[..., : value.shape[-1]]


# The shift of what a rank holds: an axis by its place among the digits, and by how many ranks.
Shift = tuple[int, int]


def shifts(sizes: Sequence[int], rounds: int | None = None) -> tuple[list[Shift], list[Shift]]:
    """Shifts after which a rank has held what each rank of axes of these `sizes` has, and those that bring it back.

    The innermost axis is gone around first; then what is held there moves along the axis before it, and so on. Of the
    first axis so many ranks are come to as there are `rounds`; None: all.
    """
    inner = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    steps = inner[0] * (sizes[0] if rounds is None else rounds)
    every = [next((place, 1) for place in range(len(sizes)) if not step % inner[place]) for step in range(1, steps)]
    moved = [sum(place == other for other, _ in every) % size for place, size in enumerate(sizes)]
    return every, [(place, -by) for place, by in enumerate(moved) if by]


def rounds_of(count: int, digits: Digits, band: Band) -> int | None:
    """The ranks of the first axis that have keys in the `band` of a rank's queries, which are at places of its `count`
    keys; None: all, or not known.

    Ranks with keys in order attend to keys of those before them, as many as the band reaches.
    """
    majors = [prod(axis.size for axis, _ in digits[:place]) for place in range(len(digits))]
    if band.before is None or band.after != 0 or majors != [major for _, major in digits]:
        return None
    ranks = -(-band.before // count)
    return min(digits[0][0].size, 1 - (-ranks // prod(axis.size for axis, _ in digits[1:])))


@lru_cache(maxsize=512)
def held_blocks(count: int, keys: int, digits: Digits, source: Digits, band: Band) -> tuple[Block, ...]:
    """The blocks of `count` queries of the rank at `digits` and `keys` of the rank at `source`."""
    if band.is_full:
        return (Block(slice(0, count), slice(0, keys)),)
    size = count * prod(axis.size for axis, _ in digits)
    return blocks_of(places(count, size, digits), places(keys, size, source), band)


class _Route(NamedTuple):
    """The axes that keys go around with the digits of these, the digits of the `queries`, and their band."""

    digits: Digits
    queries: Digits
    band: Band


class _Ring:
    """Goes around the ranks of a route, as far as queries attend to their keys.

    `parts` are the blocks of what is held and its masks, one rank's after the other's.
    """

    def __init__(self, query: Tensor, key: Tensor, masks: Masks, route: _Route) -> None:
        digits, queries, band = route
        self.digits, self.axes = digits, [axis for axis, _ in digits]
        self.shifts, self.home = shifts([axis.size for axis in self.axes], rounds_of(key.shape[2], digits, band))
        counts = query.shape[2], key.shape[2]
        self.parts: list[tuple[Sequence[Block], Masks]] = []
        for source in self._sources():
            own = masks
            if masks.hides:
                there = torch.from_numpy(places(counts[1], counts[1] * prod(axis.size for axis in self.axes), source))
                own = masks.with_keys(there.to(query.device))
            self.parts.append((held_blocks(*counts, queries, source, band), own))

    def _sources(self) -> Iterator[Digits]:
        """The digits of the ranks that keys come from."""
        ranks = [axis.rank for axis in self.axes]
        for place, by in ((0, 0), *self.shifts):
            ranks[place] = (ranks[place] - by) % self.axes[place].size
            held = (replace(axis, rank=rank) for axis, rank in zip(self.axes, ranks, strict=True))
            yield tuple(zip(held, (major for _, major in self.digits), strict=True))

    def around(self, blocks: Sequence[Sequence[Block]]) -> Iterator[tuple[Sequence[Block], Masks, Shift | None]]:
        """The `blocks` of what is held, its masks, and the shift to the next rank's."""
        for own, (_, masks), shift in zip(blocks, self.parts, (*self.shifts, None), strict=True):
            yield own, masks, shift

    def start(self, tensor: Tensor, shift: Shift) -> Callable[[], Tensor]:
        """Begin to send a tensor on."""
        place, by = shift
        return start_shift(tensor, self.axes[place], by)


class _RingAttention(torch.autograd.Function):
    """Attention of a ring."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """The result, in the dtype of the query; `given` are query, key and value, masks, route, and scale."""
        (query, key, value), masks, (route, scale) = given[:3], Masks(*given[3:6]), given[6:]
        ring, merged, held = _Ring(query, key, masks, route), Merged(query, hides=masks.hides), _packed(key, value)
        seen = visible(ring.parts)
        for blocks, own, shift in ring.around(seen):
            coming = ring.start(held, shift) if shift else None
            whole = query, *_unpacked(held, key, value)
            for block in blocks:
                merged.add(block, *block_result(block, whole, own, scale), last=False)
            held = coming() if coming else held
        result, statistics = merged.finished()
        ctx.save_for_backward(query, key, value, *masks, result, statistics)
        ctx.about = route, scale, seen
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, row, queries, keys, result, statistics = ctx.saved_tensors
        route, scale, seen = ctx.about
        ring, held = _Ring(query, key, Masks(row, queries, keys), route), _packed(key, value)
        every = padded(gradient, gradient.shape[-1]), result, statistics
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        # The gradients of what is held, on their way with it.
        arriving: Callable[[], Tensor] | None = None
        for blocks, masks, shift in ring.around(seen):
            coming = ring.start(held, shift) if shift else None
            of_held = torch.zeros_like(held, dtype=wide)
            found = of_query, *_unpacked(of_held, key, value)
            add_gradients(found, (query, *_unpacked(held, key, value)), masks, every, blocks, scale)
            if arriving is not None:
                of_held += arriving()
            arriving = ring.start(of_held, shift) if shift else None
            held = coming() if coming else held
        for shift in ring.home:
            of_held = ring.start(of_held, shift)()
        of_key, of_value = _unpacked(of_held, key, value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), *[None] * 5


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(held: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, or their gradients, of the shapes of `key` and `value`."""
    return held[: key.numel()].view(key.shape), held[key.numel() :].view(value.shape)
