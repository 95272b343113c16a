"""The blocks of scores that attention computes: full ones and triangles, which cover what queries attend to once.

Queries and keys are given by their places in the sequence. What a run of queries attends to begins and ends at keys
that advance by equally many from query to query. Of every so many keys, what advances is a triangle, and what does not
is a full block. A window that is shorter than the run is cut into pieces as long as it is, each with a triangle of the
keys up to its own, and one of the keys before; all pieces together are one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from passes.ir.arrays import Integers
from passes.ir.bands import TILE, Band


class Block(NamedTuple):
    """Local queries that attend to some of the keys: to all of these, or where `causal`, which needs as many of both,
    the query at a place to the keys up to that place, or where also `flipped`, to those from that place on.

    Queries and keys are cut into equal `pieces`; those of a piece attend to the keys of the same piece. The first
    `size` of each are in the block; None: all.
    """

    queries: slice
    keys: slice
    causal: bool = False
    flipped: bool = False
    pieces: int = 1
    size: int | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Queries from `start` on, `count` of them, of which number t attends to the keys from `first` + t `begins` to
    before `last` + t `ends`."""

    start: int
    count: int
    first: int
    begins: int
    last: int
    ends: int


def blocks_of(own: Integers, other: Integers, band: Band) -> tuple[Block, ...]:
    """The blocks of queries at the places `own` and keys at the places `other`, both ascending; none is empty. Each
    query that attends to its own key is first in a block that has it."""
    if band.is_full:
        return (Block(slice(0, len(own)), slice(0, len(other))),)
    zero, size = np.zeros(len(own), dtype=np.int64), len(other)
    first = zero if band.before is None else np.searchsorted(other, own - band.before)
    last = zero + size if band.after is None else np.searchsorted(other, own + band.after, side="right")
    return tuple(block for run in _runs(first, last) for block in _of_run(run))


def _runs(first: Integers, last: Integers) -> Iterator[_Run]:
    """Runs of queries that attend to any keys, whose first and last keys advance alike, or stay."""
    start = 0
    while start < len(first):
        begins, ends = (int(each[start + 1] - each[start]) if start + 1 < len(first) else 0 for each in (first, last))
        if begins and ends and begins != ends:
            # Both move, but not alike: a query by itself.
            begins = ends = 0
        jumps = np.flatnonzero((np.diff(first[start:]) != begins) | (np.diff(last[start:]) != ends))
        count = int(jumps[0]) + 1 if len(jumps) else len(first) - start
        if int(last[start] - first[start]) + (count - 1) * max(ends - begins, 0) > 0:
            yield _Run(start, count, int(first[start]), begins, int(last[start]), ends)
        start += count


def _of_run(run: _Run) -> Iterator[Block]:
    """The blocks of a run, of every `step`-th key each."""
    step = max(run.begins, run.ends)
    rows = slice(run.start, run.start + run.count)
    if not step:
        yield Block(rows, slice(run.first, run.last))
        return
    # Where they begin at the same key, all queries attend to those before the last ones of the first query.
    first = run.first if run.begins else max(run.first, run.last - step)
    own = (run.last - 1 - first) % step
    for base in (first + (own + other) % step for other in range(step)):
        stop = -((base - run.last) // step)
        for block in _of_every(run.count, bool(run.begins), stop, bool(run.ends)):
            queries = slice(run.start + block.queries.start, run.start + block.queries.stop)
            keys = slice(base + step * block.keys.start, base + step * (block.keys.stop - 1) + 1, step)
            yield block._replace(queries=queries, keys=keys)
    if first > run.first:
        yield Block(rows, slice(run.first, first))


def _of_every(count: int, begins: bool, stop: int, ends: bool) -> Iterator[Block]:
    """The blocks of `count` queries, of which number t attends to the keys from 0, or t where that `begins` so, to
    before `stop`, or `stop` + t where that `ends` so."""
    if not begins:
        # The keys up to the own one, of all queries or of those but the first, and the keys before.
        start = max(0, 1 - stop)
        stop += start
        if start < count:
            yield Block(slice(start, count), slice(stop - 1, stop - 1 + count - start), causal=True)
            if stop > 1:
                yield Block(slice(start, count), slice(0, stop - 1))
    elif not ends:
        # The keys from the own one on, and the keys behind those of the last query.
        count = min(count, stop)
        if count > 0:
            yield Block(slice(0, count), slice(0, count), causal=True, flipped=True)
            if stop > count:
                yield Block(slice(0, count), slice(count, stop))
    elif stop > 0:
        yield from _of_window(count, stop)


def _of_window(count: int, length: int) -> Iterator[Block]:
    """The blocks of `count` queries, of which number t attends to the `length` keys from t on."""
    pieces, rest = divmod(count, length)
    whole, behind = pieces * length, length - 1
    if pieces:
        yield Block(slice(0, whole), slice(behind, behind + whole), causal=True, pieces=pieces)
        if behind:
            yield Block(slice(0, whole), slice(0, whole), True, True, pieces, behind)
    if rest:
        yield Block(slice(whole, count), slice(whole + behind, count + behind), causal=True)
        yield Block(slice(whole, count), slice(whole + rest - 1, whole + behind))
        if rest > 1:
            yield Block(slice(whole, count - 1), slice(whole, whole + rest - 1), causal=True, flipped=True)


def tiles(block: Block) -> Iterator[Block]:
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
