"""Splits of a sequence."""

from collections.abc import Sequence

import numpy as np

from autopar.runtime.state import Axis

SIZE = 24
# Splits of a sequence of 24: (ways, major) by axis, in the order of the majors.
SPLITS = {
    "plain": ((2, 1),),
    "plain, four": ((4, 1),),
    "plain, eight": ((8, 1),),
    "stripes": ((2, 12),),
    "stripes of three": ((3, 8),),
    "blocks": ((2, 3),),
    "two axes": ((2, 1), (3, 2)),
    "two axes in stripes": ((2, 4), (3, 8)),
    "stripes within blocks": ((2, 1), (3, 8)),
    "one query": ((24, 1),),
}


def ranks(split: Sequence[tuple[int, int]]) -> list[tuple[tuple[Axis, int], ...]]:
    """The digits of every rank."""
    return [
        tuple((Axis("", ways, rank, ""), major) for (ways, major), rank in zip(split, own, strict=True))
        for own in np.ndindex(*(ways for ways, _ in split))
    ]
