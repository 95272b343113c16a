"""Masks that do not depend on places: rows of hidden keys, and documents, without scores of all keys.

A block adds minus infinity to the scores of hidden keys: one row for all of its queries, or with documents a tile of
queries by keys. Tiles without a document of both are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.generated.blocks import Block, part_of, tiles
from passes._torch import DataDependentOutputException


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
    cut = [[tile for block in blocks for tile in tiles(block)] for blocks, _ in parts]
    flags = [
        _apart(masks.queries.squeeze(3)[..., tile.queries], masks.keys.squeeze(2)[..., tile.keys])
        for own, (_, masks) in zip(cut, parts, strict=True)
        if masks.queries is not None and masks.keys is not None
        for tile in own
    ]
    try:
        apart = iter(torch.stack(flags).tolist() if flags else ())
    except DataDependentOutputException:
        # Tensors without values: all are computed.
        return cut
    return [[tile for tile in own if not next(apart)] for own in cut]


def _apart(queries: Tensor, keys: Tensor) -> Tensor:
    """Whether in all samples the documents of queries are all before those of keys, or all behind."""
    before = queries.amax(-1) < keys.amin(-1)
    return (before | (keys.amax(-1) < queries.amin(-1))).all()
