"""Local forms: functions that run on a shard where the op itself would be incorrect, and the collectives inside them.

The runtime has a function for each; generated code calls it with the axes that split its factors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from passes.ir.layout import I, P, Placement, R, S, Shape
from passes.ir.linear_loss import AT_ONCE, SPLIT, SPLIT_AT_ONCE, LinearLoss, token_chunks
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Factor, Rule
from passes.rules.attention_blocks import chunks_traffic, gathered_traffic, ring_traffic
from passes.rules.attention_forms import (
    all_but_one,
    banded_share,
    blocks_workspace,
    chunks_workspace,
    ring_shifts,
    ring_workspace,
)
from passes.rules.form_context import (
    FormContext,
    FormStep,
    MoreWork,
    Shifts,
    Split,
    Steps,
    Traffic,
    Workspace,
    even_share,
)
from passes.rules.scan_forms import (
    scan_steps,
    scan_work,
    scan_workspace,
    selective_backward,
    selective_steps,
    selective_work,
    selective_workspace,
)


def _share(splits: Sequence[Split], factor: Factor) -> float:
    return even_share(splits)


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


@dataclass(frozen=True)
class LocalForm:
    """A local form on the axes that split its factors.

    - `forward`: the collectives inside its forward pass on one axis, in order.
    - `backward`: those of its backward pass; None: the conjugates of those that a gradient flows through, in reverse.
    - `repeats`: how often those of the forward pass run; None: once.
    - `shifts`: those to the next rank on one axis, forward and backward.
    - `share`: the part of the op's work that the busiest rank has, by the splits of a factor.
    - `more`: what it computes besides a rank's part of the op, by the parts that each factor is split into.
    - `traffic`: the passes over memory and the kernels that it runs besides; that of the outermost axes that split it
      speaks for all.
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
    traffic: Callable[[FormContext], Traffic] | None = None
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
    "blockwise_attention": LocalForm(share=banded_share, traffic=gathered_traffic, workspace=blocks_workspace),
    "chunked_attention": LocalForm(share=banded_share, traffic=chunks_traffic, workspace=chunks_workspace),
    # Of a ring's queries each rank may have a part.
    "ring_attention": LocalForm(
        shifts=ring_shifts,
        share=banded_share,
        traffic=ring_traffic,
        overlap=all_but_one,
        workspace=ring_workspace,
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
    "delta_scan": LocalForm(scan_steps, more=scan_work, workspace=scan_workspace),
    "selective_scan": LocalForm(
        selective_steps, selective_backward, more=selective_work, workspace=selective_workspace, is_wide=True
    ),
}


def form_that_runs(forms: Iterable[str]) -> str | None:
    """The local form of an op whose axes have these `forms`: the one, or that which includes the others. "" for the op
    itself; None where no form does what all do."""
    own = {form for form in forms if form}
    if len(own) < 2:
        return next(iter(own), "")
    return next((form for form in sorted(own) if own - {form} <= LOCAL_FORMS[form].includes), None)
