"""Local forms: what runs on a shard where the op itself would not be right, and the collectives inside.

The runtime has a function for each; generated code calls it with the axes that split the factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from passes.ir.layout import I, Letter, P, R, S, Shape
from passes.ir.redistribution import Step


@dataclass(frozen=True)
class Inside:
    """What the collectives inside depend on: the axis, the local shapes of the operands, the local sizes of the first
    operand's dims that are not reduced (`rows`), the dim of it that is split, and how far the form reaches."""

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


def _none(about: Inside) -> tuple[Step, ...]:
    return ()


def _statistics(count: int, target: Letter) -> Callable[[Inside], tuple[Step, ...]]:
    """`count` numbers for every row."""

    def inside(about: Inside) -> tuple[Step, ...]:
        return (Step(about.axis, P, target, about.rows, about.rows),) * count

    return inside


def _classes(about: Inside) -> tuple[Step, ...]:
    """Per token: the largest logit, the sum of exponentials, the logit of the label."""
    tokens = about.operands[1]
    return (Step(about.axis, P, I, tokens, tokens),) * 3


def _edges(about: Inside) -> tuple[Step, ...]:
    """Both edges of every rank's block."""
    shape = about.operands[0]
    edges = (*shape[: about.dim], sum(about.reach), *shape[about.dim + 1 :])
    return (_gathered(about, edges),)


def _totals(about: Inside) -> tuple[Step, ...]:
    """What every rank's part sums to."""
    shape = about.operands[0]
    return (_gathered(about, (*shape[: about.dim], 1, *shape[about.dim + 1 :])),)


def _gathered(about: Inside, shape: Shape) -> Step:
    whole = (*shape[: about.dim], shape[about.dim] * about.ways, *shape[about.dim + 1 :])
    return Step(about.axis, S(about.dim), R, shape, whole)


def _channels(about: Inside) -> tuple[Step, ...]:
    """Two numbers for every channel."""
    channels = about.operands[0][1:2]
    return (Step(about.axis, P, R, channels, channels),) * 2


def _groups(about: Inside) -> tuple[Step, ...]:
    """Two numbers for every sample and group."""
    groups = (prod(about.rows),)
    return (Step(about.axis, P, R, groups, groups),) * 2


@dataclass(frozen=True)
class Body:
    """A local form: `inside` gives its collectives on one axis, `share` the part of the work that the busiest rank
    has."""

    inside: Callable[[Inside], tuple[Step, ...]] = _none
    share: Callable[[int], float] = _even

    @property
    def communicates(self) -> bool:
        """Whether there are collectives inside."""
        return self.inside is not _none


BODIES: Mapping[str, Body] = {
    "mean": Body(),
    "vocabulary_embedding": Body(),
    "vocabulary_cross_entropy": Body(inside=_classes),
    "causal_attention": Body(share=_causal),
    "haloed": Body(inside=_edges),
    "layer_norm": Body(inside=_statistics(2, R)),
    "rms_norm": Body(inside=_statistics(1, R)),
    "softmax": Body(inside=_statistics(2, R)),
    "log_softmax": Body(inside=_statistics(2, R)),
    "logsumexp": Body(inside=_statistics(2, I)),
    "group_norm": Body(inside=_groups),
    "batch_norm": Body(inside=_channels),
    "cumsum": Body(inside=_totals),
}
