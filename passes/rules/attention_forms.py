"""The kernels of scaled dot-product attention, and its local forms: in blocks, in chunks, and in a ring.

Attention runs a fused kernel, or products and a softmax on whole scores. torch chooses by device, dtype, shapes and
mask (`sdp_utils.cpp` of its CUDA and CPU kernels, versions 2.11 to 2.13).
"""

from collections.abc import Sequence
from enum import Enum
from math import prod

import torch

from passes.ir.bands import CHUNK, TILE, kernel_width
from passes.ir.figures import least
from passes.ir.layout import Shape
from passes.ir.program import Op
from passes.ir.rule import Factor
from passes.rules.form_context import FormContext, Shifts, Split, Workspace, even_share, single_itemsize


class Kernel(Enum):
    """A kernel of attention. `MATH` makes the scores of all heads, and autograd saves them; `CHUNKS` makes those of a
    chunk of queries, and makes them again in the backward pass."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    CHUNKS = "chunks"


_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256


def attention_kernel(
    device: str, dtype: torch.dtype, operands: tuple[Shape, ...], *, masked: bool, dropout: bool
) -> Kernel:
    """The kernel for query, key and value of these shapes, [batch, heads, length, width], on "cpu" or "cuda".

    On CUDA, flash attention takes half precision and equal widths, but no mask; efficient attention takes no grouped
    heads. On a CPU one kernel takes masks and grouped heads, but neither unequal widths nor dropout.
    """
    query, key, value = operands[:3]
    if len(query) != 4:
        return Kernel.MATH
    equal = query[3] == value[3]
    if device == "cpu":
        return Kernel.FLASH if equal and not dropout else Kernel.MATH
    if dtype in _HALF and equal and not masked and query[3] <= _WIDEST:
        return Kernel.FLASH
    return Kernel.EFFICIENT if query[1] == key[1] and dtype in (*_HALF, torch.float32) else Kernel.MATH


def attention_workspace(
    kernel: Kernel, dtype: torch.dtype, operands: tuple[Shape, ...], device: str, *, mask: int, dropout: bool
) -> tuple[float, float]:
    """Bytes that autograd saves besides query, key, value and result, and bytes of temporaries of the backward pass.

    A fused kernel saves a statistic per query, and a mask of `mask` numbers. Without one, operands, scores and their
    gradients are at least in single precision, and the result is not saved; dropout saves its own result and mask,
    on CUDA in bytes.
    """
    query, key, value = operands[:3]
    if kernel is not Kernel.MATH:
        return prod(query[:-1]) * torch.float32.itemsize + mask * dtype.itemsize, 0.0
    itemsize = max(dtype.itemsize, torch.float32.itemsize)
    keys = prod(query[:-2]) * key[-2]
    scores, rows = keys * query[-2], prod(query[:-1])
    read = (prod(query) + prod(key) + prod(value)) * dtype.itemsize
    wide = itemsize * (prod(query) + keys * (key[-1] + value[-1]))
    saved, live = (2 * itemsize + (1 if device == "cuda" else itemsize), 1) if dropout else (itemsize, 2)
    result = rows * value[-1] * dtype.itemsize
    return saved * scores + wide - read - result, live * scores * itemsize - read


def runs_in_blocks(op: Op) -> bool:
    """Whether an op of attention runs in blocks also where its queries are not split."""
    return op.target == "autopar.scaled_dot_product_attention.default" or runs_in_chunks(op)


def runs_in_chunks(op: Op) -> bool:
    """Whether an op of attention makes scores, of a chunk of queries at a time."""
    return op.kind == "chunked_attention"


def banded_share(splits: Sequence[Split], factor: Factor) -> float:
    """The rank whose queries have most keys, of queries that reach some keys before and after their place.

    Of causal attention it is the one with the last queries: the mean number of keys of one of these, relative to that
    of all queries, times its part of the queries. In a window the first queries alone have fewer keys than others.
    """
    even, (before, after), size = even_share(splits), factor.reach, factor.size
    uneven = sum((split.ways - 1) / (split.ways * split.major) for split in splits)
    if not before + after:
        return even
    if before >= size - 1:
        return (1 + uneven) * even
    whole = size * (before + after + 1)
    scores = whole - ((before + 1) ** 2 + after**2) / 2
    most = even * whole / scores
    return most if after else least((most, even * (1 + uneven * whole / 2 / scores)))


def block_attention(operands: Sequence[Shape], keys: int, device: str) -> tuple[Shape, Shape, Shape]:
    """The shapes of query, key and value that the kernels of attention in blocks read together: padded to the same
    width, and with all `keys`, also those that arrive from other ranks. A kernel without grouped heads runs once for
    each head of a group."""
    query, key, value = operands[:3]
    wide = kernel_width(query[3], value[3], device)
    return (*query[:3], wide), (key[0], query[1], keys, wide), (value[0], query[1], keys, wide)


def _attention(context: FormContext) -> Workspace:
    """Attention in blocks saves a log-sum-exp per query and the padding of its operands; gradients are padded, too."""
    query, key, value = context.operands[:3]
    wide, rows, itemsize = kernel_width(query[3], value[3], context.device), prod(query[:3]), context.dtype.itemsize
    padded = sum(prod(shape[:3]) * (wide - shape[3]) for shape in (query, key, value))
    saved = rows * single_itemsize(context) + (padded + rows * (wide - value[3])) * itemsize
    # Of a narrow value also the gradient of the result is padded.
    return saved, (padded + (rows * wide if value[3] < wide else 0)) * itemsize


def blocks_workspace(context: FormContext) -> Workspace:
    """In the backward pass the gradients of the largest block: of the keys before this rank's queries, or of as many as
    there are of these; and what the block takes in. Those of half precision are added up in single precision, where
    there are several blocks."""
    query, key, value = context.operands[:3]
    saved, padded = _attention(context)
    (before, after), width = context.reach, kernel_width(query[3], value[3], context.device)
    queries, keys = query[2], key[2]
    if before + after:
        # Figures of sizes are compared by their numbers alone.
        keys = max(key[2] - query[2] if before >= key[2] - query[2] else before + 1, query[2])
    if has_documents(context):
        queries, keys = min(queries, TILE), min(keys, TILE)
    itemsize, single = context.dtype.itemsize, single_itemsize(context)
    block = (prod(query[:2]) * queries + 2 * prod(key[:2]) * keys) * width * itemsize
    most = max(block + _hidden(context, queries, keys, block), _flipped(context))
    several = before + after and (query[2] != key[2] or context.op.arguments.get("window") is not None)
    if single > itemsize and (several or queries < query[2] or keys < key[2]):
        every = (prod(query[:3]) + 2 * prod(key[:3])) * width
        most = max(most + every * (single - itemsize), every * single)
    return saved, padded + most


def has_documents(context: FormContext) -> bool:
    """Whether documents hide keys."""
    return context.op.arguments.get("query_documents") is not None


def _hidden(context: FormContext, queries: int, keys: int, gradients: float) -> float:
    """Bytes of what is added to the scores of a block, which documents make of queries by keys; more where the flags
    that it is made of are larger than the `gradients` of the block."""
    if not has_documents(context):
        return 0.0
    tile = context.operands[0][0] * queries * keys
    return tile * context.dtype.itemsize + max(2 * tile - gradients, 0.0)


def _flipped(context: FormContext) -> float:
    """Bytes of the block of the keys where a window begins, which the kernel takes in the other order: query, key and
    value, the result, its gradient and its log-sum-exps, and the gradients."""
    query, key, value = context.operands[:3]
    if context.op.arguments.get("window") is None:
        return 0.0
    rows, held = prod(query[:3]), 2 * prod(key[:2]) * query[2]
    wide, itemsize = kernel_width(query[3], value[3], context.device), context.dtype.itemsize
    return (4 * rows + 2 * held) * wide * itemsize + rows * single_itemsize(context)


def chunks_workspace(context: FormContext) -> Workspace:
    """In the backward pass the weights of a chunk and their gradients, in the dtype of the softmax, with a soft cap its
    tangents, and with a sink the weights with its own; flags of hidden keys. Gradients that all chunks add to are at
    least in single precision, at the end beside the gradients themselves."""
    query, key, value = context.operands[:3]
    given, itemsize = context.op.arguments, context.dtype.itemsize
    (before, after), queries = context.reach, least((CHUNK, query[2]))
    keys = least((before + after + queries, key[2])) if before + after else key[2]
    scores = prod(query[:2]) * queries * keys
    wide = given["dtype"].itemsize if isinstance(given["dtype"], torch.dtype) else itemsize
    held = (2 * wide if given["sink"] is None else 3 * wide) + (itemsize if given["soft_cap"] is not None else 0)
    others = sum(given[name] is not None for name in ("bias", "sink"))
    masks = [prod(shape[:2]) for shape in context.operands[3 + others :]]
    flags = max(masks, default=1) * queries * keys if masks or before + after else 0
    sums = prod(key) + prod(value)
    chunk = scores * held + flags
    return 0.0, max(
        chunk + sums * (single_itemsize(context) - itemsize), sums * single_itemsize(context) * context.is_half
    )


def ring_workspace(context: FormContext) -> Workspace:
    """In the backward pass keys and values are held and received while the first block has gradients, and from three
    ranks on those of others are sent and received meanwhile, which of two are at the second block. Or at the end
    gradients are sent, received and added."""
    query, key, value = context.operands[:3]
    saved, padded = _attention(context)
    wide, itemsize, single = (
        kernel_width(query[3], value[3], context.device),
        context.dtype.itemsize,
        single_itemsize(context),
    )
    rows, held = prod(query[:3]) * wide, 2 * prod(key[:3]) * wide
    gradients = (rows + held) * itemsize
    hidden = _hidden(context, min(query[2], TILE), min(key[2], TILE), gradients)
    meanwhile = 3 if prod(visited(context)) * context.before > 2 else 1
    first = 2 * held * itemsize + (rows + meanwhile * held) * single + max(hidden, _flipped(context) - gradients)
    second = held * itemsize + (rows + 2 * held) * single + hidden
    # In stripes a block has as many keys as queries, which other axes may split further.
    is_striped = context.in_stripes and any(context.reach) and context.op.arguments.get("window") is None
    others = held // key[2] * (key[2] - query[2]) * itemsize if is_striped else 0
    return saved, padded + max(max(first, second) - others, (rows + 3 * held) * single - rows * itemsize)


def ring_shifts(context: FormContext) -> tuple[Shifts, Shifts]:
    """Keys and values go around the axis, once for each rank of the axes outside, as far as windows reach; backward
    once more, and with them their gradients in at least single precision, which then return to their ranks."""
    _, key, value = context.operands[:3]
    held = 2 * prod(key[:3]) * max(key[3], value[3])
    ranks, rounds = visited(context)
    around = rounds * (ranks - 1)
    home = 1 if around % context.ways else 0
    forward = around, held * context.dtype.itemsize
    return (forward,), (forward, (around + home, held * single_itemsize(context)))


def visited(context: FormContext) -> tuple[float, float]:
    """The ranks of the axis whose keys come around, and how often they do. In order, keys before the window do not
    travel along the outermost axis."""
    before, after = context.reach
    if not before or after or not context.in_order:
        return context.ways, context.after
    ranks = -(-before // context.operands[1][2])
    if context.after == 1:
        return least((context.ways, 1 - (-ranks // context.before))), 1
    return context.ways, least((context.after, 1 - (-ranks // (context.before * context.ways))))


def all_but_one(context: FormContext) -> float:
    """Of as many blocks as ranks the last one has no shift beside it."""
    blocks = prod(visited(context)) * context.before
    return (blocks - 1) / blocks
