"""Blocks of attention against the scores that they are to cover, entry by entry."""

import numpy as np
import pytest

from autopar.runtime.generated.blocks import Block, blocks_of
from autopar.runtime.generated.digits import places
from passes.ir.arrays import Integers
from passes.ir.bands import Band
from tests.autopar.runtime.generated.splits import SIZE, SPLITS, ranks

BANDS = [
    Band(before, after)
    for before in (None, 0, 1, 3, 4, 7, 8, 11, 12, 22, 23, 40)
    for after in (None, 0, 1, 3, 8, 30)
]  # fmt: skip


def covered(blocks: tuple[Block, ...], queries: int, keys: int) -> Integers:
    """The number of blocks that have each score: [queries, keys]."""
    found = np.zeros((queries, keys), dtype=np.int64)
    for block in blocks:
        rows, columns = np.arange(queries)[block.queries], np.arange(keys)[block.keys]
        for row, column in zip(np.split(rows, block.pieces), np.split(columns, block.pieces), strict=True):
            own, other = row[: block.size], column[: block.size]
            assert len(own)
            assert len(other)
            assert not block.causal or len(own) == len(other)
            triangle = np.tri(len(own), dtype=np.int64)
            seen = np.ones((len(own), len(other)), dtype=np.int64) if not block.causal else triangle
            found[np.ix_(own, other)] += seen.T if block.flipped else seen
    return found


def seen(own: Integers, other: Integers, band: Band) -> Integers:
    """The same by definition."""
    after = other - own[:, None]
    allowed = (after >= -(SIZE if band.before is None else band.before)) & (
        after <= (SIZE if band.after is None else band.after)
    )
    return allowed.astype(np.int64)


@pytest.mark.parametrize("name", SPLITS)
def test_blocks_cover_what_queries_attend_to_once(name: str) -> None:
    """Of all keys, and of those of each rank; and nothing else. Causal blocks are square, and none is empty."""
    every = []
    count = SIZE // len(ranks(SPLITS[name]))
    for digits in ranks(SPLITS[name]):
        own = places(count, SIZE, digits)
        every += own.tolist()
        for other in (np.arange(SIZE), *(places(count, SIZE, source) for source in ranks(SPLITS[name]))):
            for band in BANDS:
                blocks = blocks_of(own, other, band)
                assert (covered(blocks, count, len(other)) == seen(own, other, band)).all(), (band, digits)
    assert sorted(every) == list(range(SIZE))


def test_a_window_is_few_blocks() -> None:
    """However many windows long the sequence is: what grows is the number of pieces."""
    place = np.arange(4096)
    blocks = blocks_of(place, place, Band(15, 0))
    assert [(block.pieces, block.size, block.flipped) for block in blocks] == [
        (1, None, False),
        (255, None, False),
        (255, 15, True),
    ]
