"""Numbers of tensors that share a collective where collectives do not overlap computation."""

from dataclasses import replace

import pytest
import torch

from passes.ir.choices import EdgeGroup
from passes.ir.exchanges import ALONE, Sharing
from passes.ir.layout import I, R, S
from passes.ir.lowered import Redistribution
from passes.ir.program import TensorType
from passes.ir.redistribution import redistribution
from passes.strategies import connections
from tests.passes.helpers import mesh_of

TYPE = TensorType((8, 4), torch.float32)
# 128 bytes each: three copies of two parameters, and one that is alone.
INSIDE = EdgeGroup("w", TYPE, 3, 1, True, 4, True, False)
ALONE_IN_BLOCK = replace(INSIDE, tensor="head", count=1, block=2)
ACTIVATION = replace(INSIDE, tensor="x", parameter=False)


def test_parameters_share_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven gradients of 896 bytes fill two batches of 400; parameters are gathered with those of their block. Those
    that are cast are reduced with their block too."""
    monkeypatch.setattr(connections, "REDUCTION_BYTES", 400)
    cast = replace(ALONE_IN_BLOCK, tensor="cast", gradient_itemsize=8)
    found = connections.share_collectives([INSIDE, replace(INSIDE, tensor="v"), ALONE_IN_BLOCK, cast, ACTIVATION])
    assert [group.joined for group in found] == [Sharing(3, 2), Sharing(3, 2), Sharing(3, 2), Sharing(2, 2), ALONE]


def test_gradients_of_gathered_parameters_are_reduced_by_unit() -> None:
    """Stored in parts over one axis and equal over another, and equal over both."""
    mesh = mesh_of(a=2, b=2)
    for stored, expected in (((S(0), I), Sharing(2, 2)), ((I, I), Sharing(9, 2))):
        steps = redistribution(stored, (R, R), TYPE.shape, mesh)
        change = Redistribution("w", "w~0", TYPE, stored, (R, R), steps, True, 4, parameter=True, joined=Sharing(9, 2))
        assert change.sharing == expected
