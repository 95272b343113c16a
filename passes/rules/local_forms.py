"""Local forms: functions that run on a shard where the op itself would be incorrect, and the collectives inside them.

The runtime has a function for each; generated code calls it with the axes that split its factors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from passes.ir.layout import I, P, Placement, R, S, Shape
from passes.ir.redistribution import RedistributionStep


@dataclass(frozen=True)
class FormContext:
    """The inputs to the collectives inside a local form, for an op on one axis: the axis and its size (`ways`), the
    local shapes of the operands, the local sizes of the first operand's dims that are not reduced (`rows`), the dim of
    it that is split, and the numbers of elements that the form needs of the ranks before and after (`reach`)."""

    axis: int
    ways: int
    operands: tuple[Shape, ...]
    rows: Shape
    dim: int
    reach: tuple[int, int]


def _even(ways: int) -> float:
    return 1 / ways


def _causal(ways: int) -> float:
    """The last of `ways` equal blocks of queries has (2 ways - 1) / ways**2 of all causal scores."""
    return (2 * ways - 1) / ways**2


def _none(context: FormContext) -> tuple[RedistributionStep, ...]:
    return ()


def _statistics(count: int, target: Placement) -> Callable[[FormContext], tuple[RedistributionStep, ...]]:
    """`count` numbers for every row."""

    def inside(context: FormContext) -> tuple[RedistributionStep, ...]:
        return (RedistributionStep(context.axis, P, target, context.rows, context.rows),) * count

    return inside


def _classes(context: FormContext) -> tuple[RedistributionStep, ...]:
    """Per token: the largest logit, the sum of exponentials, the logit of the label."""
    tokens = context.operands[1]
    return (RedistributionStep(context.axis, P, I, tokens, tokens),) * 3


def _edges(context: FormContext) -> tuple[RedistributionStep, ...]:
    """Both edges of every rank's block."""
    shape = context.operands[0]
    edges = (*shape[: context.dim], sum(context.reach), *shape[context.dim + 1 :])
    return (_gathered(context, edges),)


def _totals(context: FormContext) -> tuple[RedistributionStep, ...]:
    """The sum of each rank's part."""
    shape = context.operands[0]
    return (_gathered(context, (*shape[: context.dim], 1, *shape[context.dim + 1 :])),)


def _gathered(context: FormContext, shape: Shape) -> RedistributionStep:
    whole = (*shape[: context.dim], shape[context.dim] * context.ways, *shape[context.dim + 1 :])
    return RedistributionStep(context.axis, S(context.dim), R, shape, whole)


def _channels(context: FormContext) -> tuple[RedistributionStep, ...]:
    """Two numbers for every channel."""
    channels = context.operands[0][1:2]
    return (RedistributionStep(context.axis, P, R, channels, channels),) * 2


def _groups(context: FormContext) -> tuple[RedistributionStep, ...]:
    """Two numbers for every sample and group."""
    groups = (prod(context.rows),)
    return (RedistributionStep(context.axis, P, R, groups, groups),) * 2


@dataclass(frozen=True)
class LocalForm:
    """A local form on one axis.

    `forward` and `backward` give the collectives inside its passes, in order; `share` the part of the op's work that
    the busiest of so many ranks has; `overlap` the part of the collectives' time that its own computation hides.
    """

    forward: Callable[[FormContext], tuple[RedistributionStep, ...]] = _none
    backward: Callable[[FormContext], tuple[RedistributionStep, ...]] = _none
    share: Callable[[int], float] = _even
    overlap: float = 0.0

    @property
    def communicates(self) -> bool:
        """Whether there are collectives inside."""
        return self.forward is not _none or self.backward is not _none


LOCAL_FORMS: Mapping[str, LocalForm] = {
    "mean": LocalForm(),
    "vocabulary_embedding": LocalForm(),
    "vocabulary_cross_entropy": LocalForm(_classes),
    "causal_attention": LocalForm(share=_causal),
    "haloed": LocalForm(_edges),
    "layer_norm": LocalForm(_statistics(2, R)),
    "rms_norm": LocalForm(_statistics(1, R)),
    "softmax": LocalForm(_statistics(2, R)),
    "log_softmax": LocalForm(_statistics(2, R)),
    "logsumexp": LocalForm(_statistics(2, I)),
    "group_norm": LocalForm(_groups),
    "batch_norm": LocalForm(_channels),
    "cumsum": LocalForm(_totals),
}
