"""Prices of all pairs of layouts at once, against the steps of each pair."""

import pytest
import torch

from passes.cost.cluster import CLUSTERS
from passes.cost.communication import redistribution_seconds
from passes.ir.choices import Group
from passes.ir.layout import I, P, R, S, Shape
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.ir.redistribution import redistribution
from passes.solving.prices import Prices
from tests.passes.helpers import layouts_on, mesh_of

MESHES = [mesh_of(a=2), mesh_of(a=2, b=2), mesh_of(a=2, b=3)]
LETTERS = [R, I, P, S(0), S(1), S(0, 2), S(0, 3), S(1, 2)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("cluster", ["cpu", "h100"])
def test_every_pair_costs_what_its_steps_do(mesh: Mesh, cluster: str, strided: bool) -> None:
    """One price object for tensors of several shapes and sizes: each entry is the sum of the steps of its pair."""
    prices = Prices(CLUSTERS[cluster], mesh)
    shapes: list[tuple[Shape, torch.dtype, int]] = [
        ((12, 36), torch.float32, 4),
        ((36, 24), torch.bfloat16, 4),
        ((1, 12), torch.float64, 8),
    ]
    for shape, dtype, gradient_itemsize in shapes:
        for gradient in (True, False):
            group = Group("x", TensorType(shape, dtype), 3, 0, gradient, gradient_itemsize, False, strided)
            layouts = list(layouts_on(shape, LETTERS, mesh))
            forward, backward = prices.matrices(group, layouts, layouts)
            for row, source in enumerate(layouts):
                for column, target in enumerate(layouts):
                    steps = redistribution(source, target, shape, mesh, strided=strided)
                    expected = redistribution_seconds(
                        steps, dtype.itemsize, gradient_itemsize, gradient, CLUSTERS[cluster], mesh
                    )
                    found = forward[row, column], backward[row, column]
                    assert found == pytest.approx(expected, rel=1e-9, abs=1e-18), (source, target, shape)


def test_three_axes() -> None:
    """The same with three digits on one dim, where changes can be in each other's way."""
    mesh = mesh_of(a=2, b=2, c=2)
    prices = Prices(CLUSTERS["h100"], mesh)
    shape = (16, 8)
    group = Group("x", TensorType(shape, torch.float32), 1, 0, True, 4, False, False)
    layouts = list(layouts_on(shape, [R, P, S(0), S(0, 2), S(0, 4), S(1)], mesh))
    forward, backward = prices.matrices(group, layouts, layouts)
    for row, source in list(enumerate(layouts))[::3]:
        for column, target in list(enumerate(layouts))[1::2]:
            steps = redistribution(source, target, shape, mesh)
            expected = redistribution_seconds(steps, 4, 4, True, CLUSTERS["h100"], mesh)
            found = forward[row, column], backward[row, column]
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-18), (source, target)
