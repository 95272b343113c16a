"""The context of a local form: where it runs, and the terms in which forms say what they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from passes.ir.layout import Shape
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep


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
    - `runs`, `stride`: a rank's entries of the factor are so many runs, in each of which they follow each other at that
      distance.
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
    runs: int = 1
    stride: int = 1
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


class Traffic(NamedTuple):
    """Bytes that both passes of a form read and write besides those of the op, and its kernels."""

    forward: float = 0.0
    backward: float = 0.0
    forward_kernels: float = 0
    backward_kernels: float = 0


# Bytes that autograd saves besides what the rule says, and bytes of the temporaries of the backward pass.
Workspace = tuple[float, float]


def even_share(splits: Sequence[Split]) -> float:
    """The part of a rank where all have as much."""
    return 1 / prod(split.ways for split in splits)


def single_itemsize(context: FormContext) -> int:
    """Bytes of an element in single precision, or that of the operands if that is higher."""
    return max(torch.float32.itemsize, context.dtype.itemsize)
