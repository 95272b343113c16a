"""Local forms: what runs on a shard where the op itself would not be right, and the collectives inside.

The runtime has a function for each; generated code calls it with the axes that split the factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from passes.ir.layout import I, P, Shape
from passes.ir.redistribution import Step


def _even(ways: int) -> float:
    return 1 / ways


def _causal(ways: int) -> float:
    """The last of `ways` equal blocks of queries has (2 ways - 1) / ways**2 of all causal scores."""
    return (2 * ways - 1) / ways**2


def _none(axis: int, operands: tuple[Shape, ...]) -> tuple[Step, ...]:
    return ()


def _statistics(axis: int, operands: tuple[Shape, ...]) -> tuple[Step, ...]:
    """Per token: the largest logit, the sum of exponentials, the logit of the label."""
    tokens = operands[1]
    return (Step(axis, P, I, tokens, tokens),) * 3


@dataclass(frozen=True)
class Body:
    """A local form: `inside` gives its collectives on one axis from the local shapes of the operands, `share` the part
    of the work that the busiest rank has."""

    inside: Callable[[int, tuple[Shape, ...]], tuple[Step, ...]] = _none
    share: Callable[[int], float] = _even


BODIES: Mapping[str, Body] = {
    "mean": Body(),
    "vocabulary_embedding": Body(),
    "vocabulary_cross_entropy": Body(inside=_statistics),
    "causal_attention": Body(share=_causal),
}
