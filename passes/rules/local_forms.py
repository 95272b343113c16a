"""Local forms: functions that run on a shard where the op itself would be incorrect, and the collectives inside them.

The runtime has a function for each; generated code calls it with the axes that split its factors.

Scaled dot-product attention runs a fused kernel, or products and a softmax on whole scores. torch chooses by device,
dtype, shapes and mask (`sdp_utils.cpp` of its CUDA and CPU kernels, versions 2.11 to 2.13).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

import torch

from passes.ir.layout import I, P, Placement, R, S, Shape
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep


class Kernel(Enum):
    """A kernel of attention. `MATH` makes the scores of all heads, and autograd saves them."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


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
    fits = query[1] == key[1] and dtype in (*_HALF, torch.float32)
    return Kernel.EFFICIENT if fits else Kernel.MATH


def attention_workspace(
    kernel: Kernel, dtype: torch.dtype, operands: tuple[Shape, ...], *, mask: int, dropout: bool
) -> tuple[float, float]:
    """Bytes that autograd saves besides query, key, value and result, and bytes of temporaries of the backward pass.

    A fused kernel saves a statistic per query, and a mask of `mask` numbers. Without one, operands, scores and their
    gradients are at least in single precision, and the result is not saved; dropout saves its own mask and result.
    """
    query, key, value = operands[:3]
    if kernel is not Kernel.MATH:
        return prod(query[:-1]) * torch.float32.itemsize + mask * dtype.itemsize, 0.0
    itemsize = max(dtype.itemsize, torch.float32.itemsize)
    keys = prod(query[:-2]) * key[-2]
    scores, rows = keys * query[-2], prod(query[:-1])
    read = (prod(query) + prod(key) + prod(value)) * dtype.itemsize
    wide = itemsize * (prod(query) + keys * (key[-1] + value[-1]))
    saved, live = (3, 1) if dropout else (1, 2)
    result = rows * value[-1] * dtype.itemsize
    return saved * scores * itemsize + wide - read - result, live * scores * itemsize - read


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
    """A local form of `op` on one axis.

    - `axis`, `ways`: the axis and its size.
    - `operands`: the local shapes of the operands; `dtype` and `wide` the dtype of the first, and of the statistics.
    - `rows`: the number of local elements of the first operand for each combination of dims that are not reduced.
    - `dim`, `before`: the dim of the first operand that is split, and the number of its parts that other axes have
      gathered before this one.
    - `reach`: the numbers of elements that the form needs of the ranks before and after.
    - `device`: the type of the device, "cpu" or "cuda".
    """

    op: Op
    axis: int
    ways: int
    operands: tuple[Shape, ...]
    dtype: torch.dtype
    rows: int
    dim: int = 0
    before: int = 1
    reach: tuple[int, int] = (0, 0)
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
# Bytes that autograd saves besides what the rule says, and bytes of the temporaries of the backward pass.
Workspace = tuple[float, float]


def _even(splits: Sequence[Split]) -> float:
    return 1 / prod(split.ways for split in splits)


def _causal(splits: Sequence[Split]) -> float:
    """The rank with the last queries: the mean number of keys of one of these, relative to that of all queries, times
    its part of the queries."""
    return (1 + sum((split.ways - 1) / (split.ways * split.major) for split in splits)) * _even(splits)


def _none(context: FormContext) -> Steps:
    return ()


def _nothing(context: FormContext) -> Workspace:
    return 0.0, 0.0


def _statistics(target: Placement, *flows: bool) -> Callable[[FormContext], Steps]:
    """Statistics of each row, reduced to `target`, one for each of `flows`: whether it has a gradient."""

    def inside(context: FormContext) -> Steps:
        rows = (context.rows,)
        return tuple(FormStep(RedistributionStep(context.axis, P, target, rows, rows), each) for each in flows)

    return inside


def _edges(context: FormContext) -> Steps:
    """Both edges of every rank's block."""
    return _gathered(context, sum(context.reach))


def _totals(context: FormContext) -> Steps:
    """The sum of each rank's part."""
    return _gathered(context, 1)


def _gathered(context: FormContext, count: int) -> Steps:
    """`count` elements of every rank's block."""
    shape, dim = context.operands[0], context.dim
    part = (*shape[:dim], count * context.before, *shape[dim + 1 :])
    whole = (*shape[:dim], count * context.before * context.ways, *shape[dim + 1 :])
    return (FormStep(RedistributionStep(context.axis, S(dim), R, part, whole)),)


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
    """Which ids have their row here; the gradient of the result, masked."""
    rows, ids = context.operands[0], prod(context.operands[1])
    return ids, ids * rows[1] * context.dtype.itemsize


def _halo(context: FormContext) -> Workspace:
    """The block with its edges is saved in place of the block."""
    shape = context.operands[0]
    edges = context.size // shape[context.dim] * sum(context.reach)
    return edges, context.size + edges


def _masked_attention(context: FormContext) -> Workspace:
    """Queries see keys through a mask, and grouped heads are repeated."""
    query, key, value = context.operands[:3]
    groups = query[1] // key[1]
    repeated = (query, *((shape[0], query[1], *shape[2:]) for shape in (key, value)))
    dropout = bool(context.op.arguments["dropout_p"])
    kernel = attention_kernel(context.device, context.dtype, repeated, masked=True, dropout=dropout)
    saved, backward = attention_workspace(kernel, context.dtype, repeated, mask=query[2] * key[2], dropout=dropout)
    copies = (groups - 1) * (prod(key) + prod(value)) * context.dtype.itemsize
    return saved + copies, backward + copies


@dataclass(frozen=True)
class LocalForm:
    """A local form on the axes that split its factors.

    - `forward`: the collectives inside its forward pass on one axis, in order.
    - `backward`: those of its backward pass; None: the conjugates of those that a gradient flows through, in reverse.
    - `share`: the part of the op's work that the busiest rank has.
    - `overlap`: the part of the collectives' time that its own computation hides, a constant.
    - `workspace`: what it saves and its temporaries.
    - `is_wide`: whether statistics of half precision are in single.
    """

    forward: Callable[[FormContext], Steps] = _none
    backward: Callable[[FormContext], tuple[RedistributionStep, ...]] | None = None
    share: Callable[[Sequence[Split]], float] = _even
    overlap: float = 0.0
    workspace: Callable[[FormContext], Workspace] = _nothing
    is_wide: bool = False

    @property
    def communicates(self) -> bool:
        """Whether there are collectives inside."""
        return self.forward is not _none or self.backward is not None

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


_MOMENTS = LocalForm(_statistics(R, True, True), workspace=_norm, is_wide=True)
# Their maximum has no gradient.
_SOFTMAX = _statistics(R, False, True)
LOCAL_FORMS: Mapping[str, LocalForm] = {
    "mean": LocalForm(),
    "vocabulary_embedding": LocalForm(workspace=_embedding),
    # The largest logit, the sum of exponentials and the logit of the label. It saves differences and their
    # exponentials, of which the rule counts one.
    "vocabulary_cross_entropy": LocalForm(_statistics(I, False, True, True), workspace=_multiples(1, 1)),
    "causal_attention": LocalForm(share=_causal, workspace=_masked_attention),
    "haloed": LocalForm(_edges, workspace=_halo),
    "layer_norm": _MOMENTS,
    "rms_norm": LocalForm(_statistics(R, True), workspace=_norm, is_wide=True),
    "softmax": LocalForm(_SOFTMAX, workspace=_multiples(1, 3, 2, 6), is_wide=True),
    "log_softmax": LocalForm(_SOFTMAX, workspace=_multiples(0, 0, 1, 3), is_wide=True),
    "logsumexp": LocalForm(_statistics(I, False, True), workspace=_multiples(0, 0, 1, 1), is_wide=True),
    "group_norm": _MOMENTS,
    "batch_norm": _MOMENTS,
    "cumsum": LocalForm(_totals, workspace=_multiples(0, 3)),
}
