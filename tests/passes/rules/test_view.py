"""Splits through views: which digit of the result a digit of the operand is."""

import pytest
import torch

from passes.ir.layout import Placement, R, S, Shape
from passes.ir.rule import Rule
from passes.rules.strategies import digit, split
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample


def through(sample: Sample, placement: Placement, ways: int) -> Placement | None:
    """The placement of the result when the operand has `placement`; None if the split does not pass."""
    rule = one_op(sample).rule
    assert isinstance(rule, Rule)
    found = digit(rule.operands[0], placement, ways)
    choice = split(rule, *found, ways) if found else None
    return choice.results[0] if choice else None


@pytest.mark.parametrize(
    ("shape", "result", "placement", "expected"),
    [
        ((4, 12), (48,), S(0), S(0)),
        ((4, 12), (48,), S(1), S(0, 4)),
        ((4, 12), (48,), S(1, 3), S(0, 12)),
        ((48,), (4, 12), S(0), S(0)),
        ((48,), (4, 12), S(0, 2), S(0, 2)),
        ((48,), (4, 12), S(0, 4), S(1)),
        ((48,), (4, 12), S(0, 12), S(1, 3)),
        ((48,), (3, 16), S(0), None),
        ((6, 8), (4, 12), S(0), S(0)),
        ((6, 8), (4, 12), S(0, 3), None),
        ((2, 1, 8), (2, 8), S(2), S(1)),
        ((2, 8, 6), (16, 6), S(1), S(0, 2)),
        ((2, 8, 6), (16, 6), S(2), S(1)),
        ((16, 6), (2, 8, 3, 2), S(1, 3), S(3)),
    ],
    ids=str,
)
def test_reshape(shape: Shape, result: Shape, placement: Placement, expected: Placement | None) -> None:
    """A digit passes a reshape where it lies within one dim on both sides; its place in the flat index stays."""
    sample = Sample("aten.reshape.default", (torch.zeros(shape), list(result)), {})
    assert through(sample, placement, 2) == expected


@pytest.mark.parametrize(
    ("start", "end", "placement", "expected"),
    [
        (0, 12, S(1), None),
        (0, 12, S(1, 3), S(1)),
        (12, 24, S(1, 3), S(1)),
        (12, 36, S(1, 3), S(1, 2)),
        (0, 12, S(1, 6), S(1, 2)),
        (0, 35, S(1), None),
        (0, 12, S(0), S(0)),
    ],
    ids=str,
)
def test_slices_of_fused_projections(start: int, end: int, placement: Placement, expected: Placement | None) -> None:
    """A slice of 36 divides the major by the units that it leaves out: a third of (3, 12) keeps the split of 12."""
    sample = Sample("aten.slice.Tensor", (torch.zeros(4, 36), 1, start, end), {})
    assert through(sample, placement, 2) == expected


@pytest.mark.parametrize(
    ("placement", "expected"), [(S(1), S(1, 3)), (S(1, 2), S(1, 6)), (S(0), S(0)), (S(1, 12), None)], ids=str
)
def test_cat_multiplies_majors(placement: Placement, expected: Placement | None) -> None:
    """Three parts of 12 joined: a split of each is a split after three."""
    sample = Sample("aten.cat.default", ([torch.zeros(4, 12) for _ in range(3)], 1), {})
    assert through(sample, placement, 2) == expected


def test_heads_that_an_axis_does_not_divide() -> None:
    """With fewer key heads than the axis is wide, queries are split by group, and keys and values are whole."""
    query, key = torch.zeros(2, 6, 4, 8), torch.zeros(2, 2, 4, 8)
    sample = Sample("aten.scaled_dot_product_attention.default", (query, key, key), {"enable_gqa": True})
    mesh = mesh_of(a=3)
    by_method = {strategy.methods[0]: strategy for strategy in one_op(sample).strategies(mesh)}
    assert "heads" not in by_method
    assert by_method["groups"].operands == ((S(1, 2),), (R,), (R,))
    assert by_method["groups"].results == ((S(1, 2),),)
