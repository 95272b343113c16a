"""Masks that do not depend on places: rows of hidden keys, and documents, without scores of all keys.

A block adds minus infinity to the scores of hidden keys: one row for all of its queries, or with documents a tile of
queries by keys. Tiles without a document of both are left out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.generated.blocks import Block
from passes._torch import DataDependentOutputException
from passes.ir.bands import TILE


class Masks(NamedTuple):
    """Each is None where nothing is hidden by it.

    - `row`: flags of the keys that are attended to, [batch or 1, heads or 1, 1, keys].
    - `queries`, `keys`: the numbers of the documents that they are in, [batch or 1, heads or 1, queries, 1] and
      [..., 1, keys]. A query attends to the keys of its own document.
    """

    row: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None

    @property
    def hides(self) -> bool:
        """Whether there is any."""
        return self.row is not None or self.queries is not None

    def with_keys(self, places: Tensor) -> "Masks":
        """The masks for the keys at `places` alone."""
        row, keys = (None if each is None else each[..., places] for each in (self.row, self.keys))
        return self._replace(row=row, keys=keys)


def spread(tensor: Tensor, where: slice, block: Block) -> Tensor:
    """The entries of a block along the third dim of a tensor, as a view: [batch, heads, pieces, size, ...]."""
    return torch.unflatten(tensor[:, :, where], 2, (block.pieces, -1))[:, :, :, : block.size]


def part_of(tensor: Tensor, where: slice, block: Block) -> Tensor:
    """Those entries as the kernel takes them, each piece as a sample: [batch * pieces, heads, size, ...]."""
    found = spread(tensor, where, block).transpose(1, 2).flatten(0, 1)
    return found.flip(2) if block.flipped else found


def back(part: Tensor, block: Block) -> Tensor:
    """The result of a kernel for a block, in the shape of `spread`."""
    part = part.flip(2) if block.flipped else part
    return torch.unflatten(part, 0, (-1, block.pieces)).transpose(1, 2)


def hidden(block: Block, masks: Masks, query: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of numbers that is added to the scores of a block of a `query` tensor, and flags of the rows that see no
    key of it, [batch * pieces, heads or 1, queries or 1]."""

    def keys_of(row: Tensor) -> Tensor:
        every = row.expand(query.shape[0], -1, -1, -1).transpose(2, 3)
        return part_of(every, block.keys, block).transpose(2, 3)

    seen = None if masks.row is None else keys_of(masks.row)
    if masks.queries is not None and masks.keys is not None:
        own = part_of(masks.queries.expand(query.shape[0], -1, -1, -1), block.queries, block)
        same = own == keys_of(masks.keys)
        seen = same if seen is None else seen & same
    assert seen is not None, "nothing is hidden"
    added = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
    if not block.causal:
        return added, ~seen.any(-1)
    if seen.shape[2] == 1:
        return added, seen.squeeze(2).cumsum(-1) == 0
    return added, ~seen.tril().any(-1)


def visible(parts: Sequence[tuple[Sequence[Block], Masks]]) -> Sequence[Sequence[Block]]:
    """Of each part the blocks, or with documents tiles of them, without those that no query and key of one document are
    in. Values are read once for all parts: with documents the host waits for the device."""
    if not any(masks.queries is not None for _, masks in parts):
        return [blocks for blocks, _ in parts]
    tiles = [[tile for block in blocks for tile in _tiles(block)] for blocks, _ in parts]
    flags = [
        _apart(masks.queries.squeeze(3)[..., tile.queries], masks.keys.squeeze(2)[..., tile.keys])
        for own, (_, masks) in zip(tiles, parts, strict=True)
        if masks.queries is not None and masks.keys is not None
        for tile in own
    ]
    try:
        apart = iter(torch.stack(flags).tolist() if flags else ())
    except DataDependentOutputException:
        # Tensors without values: all are computed.
        return tiles
    return [[tile for tile in own if not next(apart)] for own in tiles]


def _apart(queries: Tensor, keys: Tensor) -> Tensor:
    """Whether in all samples the documents of queries are all before those of keys, or all behind."""
    before = queries.amax(-1) < keys.amin(-1)
    return (before | (keys.amax(-1) < queries.amin(-1))).all()


def _tiles(block: Block) -> Iterator[Block]:
    """A block as blocks of at most `TILE` queries and keys in a piece."""
    queries, keys = _length(block.queries), _length(block.keys)
    if max(queries, keys) // block.pieces <= TILE:
        yield block
        return
    for piece in range(block.pieces):
        rows, columns = _piece(block.queries, block, piece), _piece(block.keys, block, piece)
        for row in _cuts(rows):
            for column in _cuts(columns):
                start, other = _offset(rows, row), _offset(columns, column)
                if not block.causal:
                    yield Block(row, column)
                elif start == other:
                    yield Block(row, column, causal=True, flipped=block.flipped)
                elif (start < other) == block.flipped:
                    yield Block(row, column)


def _piece(where: slice, block: Block, piece: int) -> slice:
    step = where.step or 1
    length = _length(where) // block.pieces
    start = where.start + piece * length * step
    return slice(start, start + (length if block.size is None else block.size) * step, step)


def _cuts(where: slice) -> Iterator[slice]:
    step = where.step or 1
    for start in range(where.start, where.stop, TILE * step):
        yield slice(start, min(start + TILE * step, where.stop), step)


def _offset(whole: slice, part: slice) -> int:
    return _length(slice(whole.start, part.start, whole.step))


def _length(where: slice) -> int:
    return len(range(where.start, where.stop, where.step or 1))
