"""Local forms: functions that run on a shard where the op itself would be incorrect, and the collectives inside them.

The runtime has a function for each; generated code calls it with the axes that split its factors.

Scaled dot-product attention runs a fused kernel, or products and a softmax on whole scores. torch chooses by device,
dtype, shapes and mask (`sdp_utils.cpp` of its CUDA and CPU kernels, versions 2.11 to 2.13).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

import torch

from passes.ir.bands import CHUNK, TILE, kernel_width
from passes.ir.figures import least
from passes.ir.layout import I, P, Placement, R, S, Shape
from passes.ir.linear_loss import AT_ONCE, SPLIT, SPLIT_AT_ONCE, LinearLoss, token_chunks
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Factor, Rule


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


class Split(NamedTuple):
    """A split of a factor on one axis: into `ways` parts of each of its `major` first parts."""

    ways: int
    major: int


class FormStep(NamedTuple):
    """A collective inside a local form, and whether a gradient flows through it."""

    step: RedistributionStep
    flows: bool = True


@dataclass(frozen=True)
class FormContext:
    """A local form of `op` on one axis, or on several that split a factor one after the other.

    - `span`, `ways`: the axes, by their number in `Mesh.spans`, and the product of their sizes.
    - `operands`: the local shapes of the operands; `dtype` and `wide` the dtype of the first, and of the statistics.
    - `rows`: the number of local elements of the first operand for each combination of dims that are not reduced.
    - `dim`, `before`, `after`: the dim of the first operand that is split, and the number of its parts that other axes
      have gathered before this one, and that they gather after it.
    - `reach`: the numbers of elements that the form needs of the ranks before and after.
    - `in_order`: whether the ranks of all these axes hold parts that follow each other.
    - `in_stripes`: whether every rank has every n-th entry of the factor, n being all ranks that split it.
    - `device`: the type of the device, "cpu" or "cuda".
    """

    op: Op
    span: int
    ways: int
    operands: tuple[Shape, ...]
    dtype: torch.dtype
    rows: int
    dim: int = 0
    before: int = 1
    after: int = 1
    reach: tuple[int, int] = (0, 0)
    in_order: bool = True
    in_stripes: bool = False
    device: str = "cuda"

    @property
    def size(self) -> float:
        """Bytes of the first operand."""
        return prod(self.operands[0]) * self.dtype.itemsize

    @property
    def is_half(self) -> bool:
        """Whether the first operand is in half precision, of which statistics are computed in single."""
        return self.dtype in (torch.float16, torch.bfloat16)


Steps = tuple[FormStep, ...]
# Numbers of shifts, and the bytes that each rank sends in each of them.
Shifts = tuple[tuple[float, float], ...]


class MoreWork(NamedTuple):
    """The work of a form besides a rank's part of the op: multiplications of both passes, relative to those of that
    part, and kernels."""

    forward: float = 0.0
    backward: float = 0.0
    forward_kernels: float = 0
    backward_kernels: float = 0


# Bytes that autograd saves besides what the rule says, and bytes of the temporaries of the backward pass.
Workspace = tuple[float, float]


def runs_in_blocks(op: Op) -> bool:
    """Whether an op of attention runs in blocks also where its queries are not split."""
    return op.target == "autopar.scaled_dot_product_attention.default" or runs_in_chunks(op)


def runs_in_chunks(op: Op) -> bool:
    """Whether an op of attention makes scores, of a chunk of queries at a time."""
    return op.kind == "chunked_attention"


def _even(splits: Sequence[Split]) -> float:
    return 1 / prod(split.ways for split in splits)


def _share(splits: Sequence[Split], factor: Factor) -> float:
    return _even(splits)


def _banded(splits: Sequence[Split], factor: Factor) -> float:
    """The rank whose queries have most keys, of queries that reach some keys before and after their place.

    Of causal attention it is the one with the last queries: the mean number of keys of one of these, relative to that
    of all queries, times its part of the queries. In a window the first queries alone have fewer keys than others.
    """
    even, (before, after), size = _even(splits), factor.reach, factor.size
    uneven = sum((split.ways - 1) / (split.ways * split.major) for split in splits)
    if not before + after:
        return even
    if before >= size - 1:
        return (1 + uneven) * even
    whole = size * (before + after + 1)
    scores = whole - ((before + 1) ** 2 + after**2) / 2
    most = even * whole / scores
    return most if after else least((most, even * (1 + uneven * whole / 2 / scores)))


def _none(context: FormContext) -> Steps:
    return ()


def _nothing(context: FormContext) -> Workspace:
    return 0.0, 0.0


def _statistics(target: Placement, *flows: bool) -> Callable[[FormContext], Steps]:
    """Statistics of each row, reduced to `target`, one for each of `flows`: whether it has a gradient."""

    def inside(context: FormContext) -> Steps:
        rows = (context.rows,)
        return tuple(FormStep(RedistributionStep(context.span, P, target, rows, rows), each) for each in flows)

    return inside


def _gathered(context: FormContext, count: int) -> Steps:
    """`count` elements of every rank's block."""
    shape, dim = context.operands[0], context.dim
    part = (*shape[:dim], count * context.before, *shape[dim + 1 :])
    whole = (*shape[:dim], count * context.before * context.ways, *shape[dim + 1 :])
    return (FormStep(RedistributionStep(context.span, S(dim), R, part, whole)),)


def _multiples(
    saved: float, backward: float, saved_half: float = 0.0, backward_half: float = 0.0
) -> Callable[[FormContext], Workspace]:
    """Workspace in multiples of the first operand, and what is added to them in half precision."""

    def workspace(context: FormContext) -> Workspace:
        half = context.is_half
        return (saved + half * saved_half) * context.size, (backward + half * backward_half) * context.size

    return workspace


def _norm(context: FormContext) -> Workspace:
    """The centred operand and the normal one; without a weight the latter is the result."""
    is_scaled = len(context.operands) > 1
    return (_multiples(1, 2, 2, 3) if is_scaled else _multiples(0, 3, 1, 4))(context)


def _embedding(context: FormContext) -> Workspace:
    """A flag for each id that has its row here; the gradient of the result, masked."""
    rows, ids = context.operands[0], prod(context.operands[1])
    return ids, ids * rows[1] * context.dtype.itemsize


def _halo(context: FormContext) -> Workspace:
    """The block with its edges is saved in place of the block."""
    shape = context.operands[0]
    edges = context.size // shape[context.dim] * sum(context.reach)
    return edges, context.size + edges


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
    saved = rows * _single(context) + (padded + rows * (wide - value[3])) * itemsize
    # Of a narrow value also the gradient of the result is padded.
    return saved, (padded + (rows * wide if value[3] < wide else 0)) * itemsize


def _single(context: FormContext) -> int:
    """Bytes of an element in single precision, or that of the operands if that is higher."""
    return max(torch.float32.itemsize, context.dtype.itemsize)


def _blocks(context: FormContext) -> Workspace:
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
    if _has_documents(context):
        queries, keys = min(queries, TILE), min(keys, TILE)
    itemsize, single = context.dtype.itemsize, _single(context)
    block = (prod(query[:2]) * queries + 2 * prod(key[:2]) * keys) * width * itemsize
    most = max(block + _hidden(context, queries, keys, block), _flipped(context))
    several = before + after and (query[2] != key[2] or context.op.arguments.get("window") is not None)
    if single > itemsize and (several or queries < query[2] or keys < key[2]):
        every = (prod(query[:3]) + 2 * prod(key[:3])) * width
        most = max(most + every * (single - itemsize), every * single)
    return saved, padded + most


def _has_documents(context: FormContext) -> bool:
    return context.op.arguments.get("query_documents") is not None


def _hidden(context: FormContext, queries: int, keys: int, gradients: float) -> float:
    """Bytes of what is added to the scores of a block, which documents make of queries by keys; more where the flags
    that it is made of are larger than the `gradients` of the block."""
    if not _has_documents(context):
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
    return (4 * rows + 2 * held) * wide * itemsize + rows * _single(context)


def _chunks(context: FormContext) -> Workspace:
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
    return 0.0, max(chunk + sums * (_single(context) - itemsize), sums * _single(context) * context.is_half)


def linear_loss(
    op: Op, operands: Sequence[Shape], dtype: torch.dtype, flows: Sequence[bool], form: str | None
) -> LinearLoss:
    """A linear layer and its cross entropy with operands of these local shapes, in a local form."""
    (tokens, width), (classes, _) = operands[:2]
    given = op.arguments
    own = given["dtype"] if isinstance(given["dtype"], torch.dtype) else dtype
    return LinearLoss(
        tokens,
        width,
        classes,
        1 if form in (AT_ONCE, SPLIT_AT_ONCE) else token_chunks(tokens, width),
        dtype,
        torch.promote_types(own, torch.float32),
        (flows[0], flows[1], any(flows[3:])),
        given["scale"] != 1.0,
        given["soft_cap"] is not None,
        form in (SPLIT, SPLIT_AT_ONCE),
    )


def _ring_blocks(context: FormContext) -> Workspace:
    """In the backward pass keys and values are held and received while the first block has gradients, and from three
    ranks on those of others are sent and received meanwhile, which of two are at the second block. Or at the end
    gradients are sent, received and added."""
    query, key, value = context.operands[:3]
    saved, padded = _attention(context)
    wide, itemsize, single = kernel_width(query[3], value[3], context.device), context.dtype.itemsize, _single(context)
    rows, held = prod(query[:3]) * wide, 2 * prod(key[:3]) * wide
    gradients = (rows + held) * itemsize
    hidden = _hidden(context, min(query[2], TILE), min(key[2], TILE), gradients)
    meanwhile = 3 if prod(_visited(context)) * context.before > 2 else 1
    first = 2 * held * itemsize + (rows + meanwhile * held) * single + max(hidden, _flipped(context) - gradients)
    second = held * itemsize + (rows + 2 * held) * single + hidden
    # In stripes a block has as many keys as queries, which other axes may split further.
    is_striped = context.in_stripes and any(context.reach) and context.op.arguments.get("window") is None
    others = held // key[2] * (key[2] - query[2]) * itemsize if is_striped else 0
    return saved, padded + max(max(first, second) - others, (rows + 3 * held) * single - rows * itemsize)


def _ring_shifts(context: FormContext) -> tuple[Shifts, Shifts]:
    """Keys and values go around the axis, once for each rank of the axes outside, as far as windows reach; backward
    once more, and with them their gradients in at least single precision, which then return to their ranks."""
    _, key, value = context.operands[:3]
    held = 2 * prod(key[:3]) * max(key[3], value[3])
    ranks, rounds = _visited(context)
    around = rounds * (ranks - 1)
    home = 1 if around % context.ways else 0
    forward = around, held * context.dtype.itemsize
    return (forward,), (forward, (around + home, held * _single(context)))


def _visited(context: FormContext) -> tuple[float, float]:
    """The ranks of the axis whose keys come around, and how often they do. In order, keys before the window do not
    travel along the outermost axis."""
    before, after = context.reach
    if not before or after or not context.in_order:
        return context.ways, context.after
    ranks = -(-before // context.operands[1][2])
    if context.after == 1:
        return least((context.ways, 1 - (-ranks // context.before))), 1
    return context.ways, least((context.after, 1 - (-ranks // (context.before * context.ways))))


def _carries(context: FormContext) -> Steps:
    """Of every rank's chunks of a scan, what they do to a state."""
    query, _, values = context.operands[:3]
    above, carried = query[:2], (query[4], query[4] + values[4])
    ranks = context.before
    part, whole = (*above, ranks, *carried), (*above, ranks * context.ways, *carried)
    return (FormStep(RedistributionStep(context.span, S(2), R, part, whole)),)


def _scan(context: FormContext) -> Workspace:
    """Saved is what the chunks of all ranks do to a state, and the state before all. In the backward pass gradients of
    all ranks are sent, or what comes before each chunk is there again, with the gradients of what its places add."""
    query, _, values = context.operands[:3]
    batch, heads, chunks, places, width = query
    itemsize, wide = context.dtype.itemsize, width + values[4]
    one, ranks = batch * heads * width * wide * itemsize, context.before * context.ways * context.after
    state = batch * heads * width * values[4] * itemsize
    sent = (2 * ranks + 1) * one
    again = (chunks + 4) * one + 2 * batch * heads * places * wide * itemsize
    return ranks * one + (state if len(context.operands) > 6 else 0.0), max(sent, again)


# Kernels of `passes.scans.carry` and its gradients for each chunk, and of the states between ranks for each rank.
_CARRY_KERNELS, _BETWEEN_KERNELS = (6, 21), (2, 5)


def _carrying(rule: Rule, ways: Mapping[str, int]) -> MoreWork:
    """The work of what chunks do to a state: two products each with a matrix as wide as a state and the identity
    together, backward those again, but of the last one, and five more. And the states between ranks: a product each,
    backward again with two more. Relative to the products of the op: three with a state of each chunk, one of its
    places."""
    sizes = {name: factor.size // ways.get(name, 1) for name, factor in rule.factors.items()}
    width, out, places, chunks = (sizes.get(name, 1) for name in ("width", "out", "places", "chunks"))
    ranks, wide = ways["chunks"], (width + out) / out
    forward, backward = 3 + places / width, 7 + 2 * places / width
    between = 2 * ranks * width / (2 * places * chunks)
    kernels = (each * chunks + more * ranks for each, more in zip(_CARRY_KERNELS, _BETWEEN_KERNELS, strict=True))
    return MoreWork((2 * wide + between) / forward, ((7 - 2 / chunks) * wide + 3 * between) / backward, *kernels)


def _all_but_one(context: FormContext) -> float:
    """Of as many blocks as ranks the last one has no shift beside it."""
    blocks = prod(_visited(context)) * context.before
    return (blocks - 1) / blocks


@dataclass(frozen=True)
class LocalForm:
    """A local form on the axes that split its factors.

    - `forward`: the collectives inside its forward pass on one axis, in order.
    - `backward`: those of its backward pass; None: the conjugates of those that a gradient flows through, in reverse.
    - `repeats`: how often those of the forward pass run; None: once.
    - `shifts`: those to the next rank on one axis, forward and backward.
    - `share`: the part of the op's work that the busiest rank has, by the splits of a factor.
    - `more`: what it computes besides a rank's part of the op, by the parts that each factor is split into.
    - `overlap`: the part of its own computation beside which its collectives run.
    - `workspace`: what it saves and its temporaries.
    - `is_wide`: whether statistics of half precision are in single.
    - `includes`: the forms that it does, too, on other axes.
    """

    forward: Callable[[FormContext], Steps] = _none
    backward: Callable[[FormContext], tuple[RedistributionStep, ...]] | None = None
    repeats: Callable[[FormContext], float] | None = None
    shifts: Callable[[FormContext], tuple[Shifts, Shifts]] | None = None
    share: Callable[[Sequence[Split], Factor], float] = _share
    more: Callable[[Rule, Mapping[str, int]], MoreWork] | None = None
    overlap: Callable[[FormContext], float] | None = None
    workspace: Callable[[FormContext], Workspace] = _nothing
    is_wide: bool = False
    includes: frozenset[str] = frozenset()

    @property
    def communicates(self) -> bool:
        """Whether there are collectives inside."""
        return self.forward is not _none or self.shifts is not None

    def steps(self, context: FormContext) -> tuple[RedistributionStep, ...]:
        """The collectives of the forward pass."""
        return tuple(step for step, _ in self.forward(context))

    def backward_steps(self, context: FormContext) -> tuple[RedistributionStep, ...]:
        """The collectives of the backward pass."""
        if self.backward is not None:
            return self.backward(context)
        return tuple(step.backward for step, flows in reversed(self.forward(context)) if flows)

    def itemsize(self, context: FormContext) -> int:
        """Bytes of an element that is sent."""
        return torch.float32.itemsize if self.is_wide and context.is_half else context.dtype.itemsize


def _split_loss(form: str, includes: Iterable[str] = ()) -> LocalForm:
    """The form of a loss with split classes. Of each chunk ranks exchange the largest log-sum-exps, and the sums of
    exponentials with the logits of labels; gradients need nothing. Its workspace is that of `LinearLoss`."""

    def sizes(context: FormContext) -> LinearLoss:
        return linear_loss(context.op, context.operands, context.dtype, (False,) * len(context.operands), form)

    def inside(context: FormContext) -> Steps:
        loss = sizes(context)
        rows = -(-loss.tokens // loss.chunks)
        steps = (RedistributionStep(context.span, P, I, (count, rows), (count, rows)) for count in (1, 2))
        return tuple(FormStep(step, flows=False) for step in steps)

    return LocalForm(inside, repeats=lambda context: sizes(context).chunks, is_wide=True, includes=frozenset(includes))


_MOMENTS = LocalForm(_statistics(R, True, True), workspace=_norm, is_wide=True)
# Their maximum has no gradient.
_SOFTMAX = _statistics(R, False, True)
LOCAL_FORMS: Mapping[str, LocalForm] = {
    "mean": LocalForm(),
    "vocabulary_embedding": LocalForm(workspace=_embedding),
    # The largest logit, the sum of exponentials and the logit of the label. What it saves the rule counts.
    "vocabulary_cross_entropy": LocalForm(_statistics(I, False, True, True)),
    SPLIT: _split_loss(SPLIT),
    AT_ONCE: LocalForm(),
    SPLIT_AT_ONCE: _split_loss(SPLIT_AT_ONCE, includes=[AT_ONCE]),
    "blockwise_attention": LocalForm(share=_banded, workspace=_blocks),
    "chunked_attention": LocalForm(share=_banded, workspace=_chunks),
    # Of a ring's queries each rank may have a part.
    "ring_attention": LocalForm(
        shifts=_ring_shifts,
        share=_banded,
        overlap=_all_but_one,
        workspace=_ring_blocks,
        includes=frozenset({"blockwise_attention"}),
    ),
    # Both edges of every rank's block.
    "haloed": LocalForm(lambda context: _gathered(context, sum(context.reach)), workspace=_halo),
    "layer_norm": _MOMENTS,
    "rms_norm": LocalForm(_statistics(R, True), workspace=_norm, is_wide=True),
    "softmax": LocalForm(_SOFTMAX, workspace=_multiples(1, 3, 2, 6), is_wide=True),
    "log_softmax": LocalForm(_SOFTMAX, workspace=_multiples(0, 0, 1, 3), is_wide=True),
    "logsumexp": LocalForm(_statistics(I, False, True), workspace=_multiples(0, 0, 1, 1), is_wide=True),
    "group_norm": _MOMENTS,
    "batch_norm": _MOMENTS,
    # The sum of each rank's part.
    "cumsum": LocalForm(lambda context: _gathered(context, 1), workspace=_multiples(0, 3)),
    "delta_scan": LocalForm(_carries, more=_carrying, workspace=_scan),
}


def form_that_runs(forms: Iterable[str]) -> str | None:
    """The local form of an op whose axes have these `forms`: the one, or that which includes the others. "" for the op
    itself; None where no form does what all do."""
    own = {form for form in forms if form}
    if len(own) < 2:
        return next(iter(own), "")
    return next((form for form in sorted(own) if own - {form} <= LOCAL_FORMS[form].includes), None)
