"""Sizes of programs as formulas, from programs of a few sizes."""

import contextlib
from collections.abc import Mapping

import pytest
import sympy
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.dynamic_shapes.generalize import alike, corners, generalize
from passes.ir.errors import ExpressionError
from passes.ir.figures import formula
from passes.ir.folded import Folded
from passes.normalize import normalize
from passes.regions import fold

B, S = sympy.Symbol("batch"), sympy.Symbol("sequence")
PLANNED, OTHERS = {"batch": 4, "sequence": 6}, {"batch": 8, "sequence": 10}


class Flat(nn.Module):
    """Tokens one after the other, but the first of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of all samples."""
        return self.layer(x[:, 1:].reshape(-1, 3))


class Pairs(nn.Module):
    """All pairs of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores, in a row."""
        return (x @ x.transpose(1, 2)).reshape(-1)


class Deep(nn.Module):
    """More ops for long sequences."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice where it is long."""
        return x.relu().neg() if x.shape[1] > 6 else x.relu()


def folded(module: nn.Module, sizes: Mapping[str, int]) -> Folded:
    """The folded program for a batch of sequences."""
    inputs = {"x": torch.empty(sizes["batch"], sizes["sequence"], 3)}
    return fold(normalize(capture(module, inputs, Tracing(False, False, contextlib.nullcontext()))))


def samples(module: nn.Module) -> list[tuple[Mapping[str, int], Folded]]:
    """The program at the corners, and at one more point."""
    points = [*corners(PLANNED, OTHERS), {"batch": 12, "sequence": 7}]
    return [(point, folded(module, point)) for point in points]


def test_corners_begin_with_what_is_planned() -> None:
    """All combinations of the planned and the other sizes."""
    points = corners(PLANNED, OTHERS)
    assert points[0] == PLANNED
    assert points[-1] == OTHERS
    assert len(points) == 4


def test_sizes_become_formulas() -> None:
    """Products and differences of sizes; what does not vary stays a number."""
    found = generalize(samples(Flat()))
    shapes = {name: [formula(size) for size in type.shape] for name, type in found.types.items()}
    assert shapes["x"] == [B, S, 3]
    rows = [shape[0] for shape in shapes.values() if len(shape) == 2 and shape[1] == 5 and shape[0] != 5]
    assert any(sympy.expand(size - B * (S - 1)) == 0 for size in rows)
    assert [formula(size) for size in found.program.inputs[0].type.shape] == [B, S, 3]
    assert alike(found, folded(Flat(), PLANNED))


def test_other_sizes_are_refused() -> None:
    """A square of a size is not linear in it."""
    with pytest.raises(ExpressionError, match="is not linear"):
        generalize(samples(Pairs()))


def test_other_programs_are_refused() -> None:
    """A program that differs at other sizes has no formula for all."""
    with pytest.raises(ExpressionError, match="another one at other sizes"):
        generalize(samples(Deep()))
