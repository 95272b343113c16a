"""Kernels and bytes of attention in blocks, in chunks and in a ring besides its first kernel: the passes over memory
that merge results and gradients of blocks, and the kernels of all blocks but one.

The runtime computes blocks whose queries attend to all of their keys, or form a triangle with them
(`autopar/runtime/generated/blocks.py`), and adds up results and gradients in at least single precision
(`attention.py`, `ring_attention.py` there).
"""

from math import prod
from typing import NamedTuple

from passes.ir.bands import CHUNK, TILE, kernel_width
from passes.ir.figures import largest, least
from passes.rules.attention_forms import has_documents, visited
from passes.rules.form_context import FormContext, Traffic, single_itemsize

# Kernels of attention for a block.
_ATTENTION = 1, 3
# Other kernels: of a block that is merged, and of the first one with what begins and ends all; of a first block that
# lacks some of the queries.
_MERGED, _ENDS, _PARTIAL = (8, 3), (4, 9), 9
# Where keys are hidden: flags of them, and of rows that see none, which are two passes more over results to merge.
_HIDING, _SEEN = (7, 5), (2, 0)
# A block of a window that the kernel takes in the other order.
_FLIPPED = 5, 9
# Tensors of a statistic per row that are read or written to merge a block.
_STATISTICS = 14
# Kernels of a chunk, by what is done to its scores: nothing; keys hidden on one side, or on both; a soft cap, a bias, a
# sink, a mask of flags, documents.
_CHUNK, _ENDING = (6, 20), (0, 5)
_SIDE, _OTHER_SIDE, _CAP, _BIAS, _SINK, _FLAGS, _DOCUMENTS = (5, 5), (3, 3), (3, 4), (1, 4), (1, 8), (10, 3), (2, 2)


class Blocks(NamedTuple):
    """The blocks of the busiest rank: their number, how often they read its queries, and the keys that it has, and
    whether the first one has all queries."""

    number: float
    queries: float
    keys: float = 1
    is_whole: bool = True


def gathered_blocks(context: FormContext) -> Blocks:
    """The blocks of queries of which all keys are there.

    Queries at a distance of `stride` have a triangle of every `stride`-th key, and a block of the keys before, which
    there is not in stripes over all ranks.
    """
    queries, keys = context.operands[0][2], context.operands[1][2]
    before, after = context.reach
    if not before + after:
        return _tiled(context, Blocks(1, 1), queries * keys)
    runs, stride = context.runs, context.stride
    if _has_window(context):
        return _window_blocks(context, before + after + 1)
    is_all = queries == keys
    each = stride + (0 if context.in_stripes or is_all else 1)
    scores = queries * keys / (2 if context.in_stripes or is_all else 1)
    # Each run reads the keys before it: half of them on average.
    return _tiled(context, Blocks(runs * each, each, (runs + 1) / 2, is_whole=runs == 1), scores)


def _window_blocks(context: FormContext, length: int) -> Blocks:
    """The blocks of queries that attend to a window of this `length`: triangles of the keys at both of its ends, for
    all pieces as long as the window together, and for the queries that are left, which have a block between. The first
    queries of a sequence have one triangle."""
    queries, keys = context.operands[0][2], context.operands[1][2]
    first = least((length, queries)) if queries == keys else 0
    own, reached = (queries - first) / context.runs, -(-length // context.stride)
    whole = own // reached * reached
    rest = own - whole
    each = 2 * (whole > 0) + 3 * (rest > 0)
    number = (first > 0) + each * context.runs * context.stride
    read = (first + (2 * whole + 3 * rest) * context.runs * context.stride) / queries
    return _tiled(context, Blocks(number, read, 2, is_whole=False), queries * length)


def ring_blocks(context: FormContext) -> Blocks:
    """The blocks of queries and of the keys that come around: one for each rank; two in a window. Where queries are
    split further, there are as many more in stripes, and in order one of the rank's own keys before."""
    queries, keys = context.operands[0][2], context.operands[1][2]
    ranks = prod(visited(context)) * context.before
    scores = ranks * queries * keys
    if not any(context.reach):
        return _tiled(context, Blocks(ranks, ranks, ranks), scores)
    if _has_window(context):
        return _tiled(context, Blocks(2 * ranks, 2 * ranks, 2 * ranks, is_whole=False), scores)
    if context.in_stripes:
        each = ranks * keys / queries
        return _tiled(context, Blocks(each, each, ranks), scores / 2)
    more = 1 if queries < keys else 0
    blocks = Blocks(ranks * context.runs + more, ranks + more, ranks, is_whole=context.runs == 1)
    return _tiled(context, blocks, scores)


def _has_window(context: FormContext) -> bool:
    return context.op.arguments.get("window") is not None


def _tiled(context: FormContext, blocks: Blocks, scores: float) -> Blocks:
    """`blocks`, which have so many `scores`, or tiles of them where documents hide keys."""
    if not has_documents(context):
        return blocks
    queries, keys = context.operands[0][2], context.operands[1][2]
    tall, wide = least((TILE, queries)), least((TILE, keys))
    number = largest(blocks.number, scores / (tall * wide))
    return Blocks(number, number * tall / queries, number * wide / keys, is_whole=False)


def gathered_traffic(context: FormContext) -> Traffic:
    """The traffic of merging the blocks of queries of which all keys are there."""
    return _merging(context, gathered_blocks(context), 1)


def ring_traffic(context: FormContext) -> Traffic:
    """The traffic of merging the blocks of a ring. Keys and values are packed; the gradients of each rank's begin with
    zeros, and are added to those that arrive with them."""
    ranks = prod(visited(context)) * context.before
    found, held = _merging(context, ring_blocks(context), ranks), _elements(context)[1]
    packed, arrived = 2 * held * context.dtype.itemsize, 3 * (ranks - 1) * held * single_itemsize(context)
    return Traffic(
        found.forward + packed,
        found.backward + packed + arrived,
        found.forward_kernels + 1,
        found.backward_kernels + 2 * (ranks - 1),
    )


def _elements(context: FormContext) -> tuple[float, float]:
    """The numbers of elements of the queries, and of keys and values together, as kernels take them."""
    query, key, value = context.operands[:3]
    wide = kernel_width(query[3], value[3], context.device)
    return prod(query[:3]) * wide, 2 * prod(key[:3]) * wide


def _merging(context: FormContext, blocks: Blocks, times: float) -> Traffic:
    """The traffic of merging `blocks`; of the gradients of keys and values there are new ones so many `times`."""
    itemsize, (own, keys) = context.dtype.itemsize, _elements(context)
    if blocks.number == 1:
        # Nothing is merged; gradients are added to zeros.
        return Traffic(0.0, 4 * (own + keys) * itemsize, 2, 6)
    single, rows = single_itemsize(context), prod(context.operands[0][:3])
    again = blocks.queries - (1 if blocks.is_whole else 0)
    forward = again * (own * (4 * single + itemsize) + _STATISTICS * rows * single) + 2 * own * (single + itemsize)
    backward = (own * blocks.queries + keys * blocks.keys) * (2 * single + itemsize)
    backward += (own + keys * times) * single + (own + keys) * (single + itemsize)
    flipped = blocks.number / 2 if _has_window(context) else 0
    kernels = [
        (blocks.number - 1) * (attention + merged) + ends + back * flipped
        for attention, merged, ends, back in zip(_ATTENTION, _MERGED, _ENDS, _FLIPPED, strict=True)
    ]
    first = 0 if blocks.is_whole else 1
    if len(context.operands) > 3:
        merged = blocks.number - 1 + first
        kernels = [kernels[each] + blocks.number * _HIDING[each] + merged * _SEEN[each] for each in (0, 1)]
    return Traffic(forward, backward, kernels[0] + first * _PARTIAL, kernels[1])


def chunks_traffic(context: FormContext) -> Traffic:
    """The kernels of attention in chunks; what passes over their scores take is in its work."""
    given, operands = context.op.arguments, len(context.operands)
    others = [_CAP] * (given["soft_cap"] is not None) + [_BIAS] * (given["bias"] is not None)
    others += [_SINK] * (given["sink"] is not None) + [_DOCUMENTS] * has_documents(context)
    if any(context.reach):
        others += [_SIDE] + [_OTHER_SIDE] * _has_window(context)
    if operands > 3 + sum(given[name] is not None for name in ("bias", "sink")) + 2 * has_documents(context):
        others.append(_FLAGS)
    chunks = -(-context.operands[0][2] // CHUNK)
    forward, backward = (
        chunks * (_CHUNK[number] + sum(other[number] for other in others)) + _ENDING[number] for number in (0, 1)
    )
    return Traffic(0.0, 0.0, forward - 1, backward - 3)
