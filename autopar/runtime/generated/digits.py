"""Places in a dim that mesh axes split, and in a rank's part of it.

`digits` describes the split: for every axis that splits the dim the axis and its major, in the order of majors.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autopar.runtime.state import Axis

Digits = Sequence[tuple[Axis, int]]


def _units(size: int, digits: Digits) -> list[tuple[Axis, int]]:
    """For each axis that splits a dim of `size`, the number of consecutive entries that one of its ranks takes."""
    units = []
    taken = 1
    for axis, major in digits:
        units.append((axis, size // (major // taken * axis.size)))
        size //= axis.size
        taken *= axis.size
    return units


def to_local(index: Tensor, size: int, digits: Digits) -> tuple[Tensor, Tensor]:
    """Indices into a whole dim of `size` as indices into this rank's part, and which of them lie in it."""
    mine = torch.ones_like(index, dtype=torch.bool)
    for axis, unit in _units(size, digits):
        mine &= (index // unit) % axis.size == axis.rank
        index = index // (unit * axis.size) * unit + index % unit
    return torch.where(mine, index, 0), mine


def places(count: int, size: int, digits: Digits) -> npt.NDArray[np.int64]:
    """The places of this rank's `count` entries in a whole dim of `size`; the inverse of `to_local`."""
    index = np.arange(count)
    for axis, unit in reversed(_units(size, digits)):
        index = index // unit * (unit * axis.size) + axis.rank * unit + index % unit
    return index
