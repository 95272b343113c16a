"""The mesh as passes see it."""

import pytest

from passes.ir.errors import MeshError
from passes.ir.mesh import Mesh


def test_ranks_are_row_major() -> None:
    """The last axis varies fastest, and strides are distances in ranks."""
    mesh = Mesh(("a", "b", "c"), (2, 3, 4))
    assert mesh.size == 24
    assert list(mesh.dimensions) == [0, 1, 2]
    coordinates = mesh.coordinates()
    assert len(coordinates) == 24
    for axis in mesh.dimensions:
        origin = coordinates.index((0, 0, 0))
        neighbour = tuple(int(other == axis) for other in mesh.dimensions)
        assert coordinates.index(neighbour) - origin == mesh.stride(axis)


def test_axes_by_name() -> None:
    """An axis is found by its name; an unknown one is refused with those that there are."""
    mesh = Mesh.of({"dp": 2, "tp": 3})
    assert mesh == Mesh(("dp", "tp"), (2, 3))
    assert mesh.by_name == {"dp": 2, "tp": 3}
    assert mesh.index("tp") == 1
    assert str(mesh) == "dp 2 x tp 3"
    with pytest.raises(MeshError, match="no axis 'pp': its axes are dp, tp"):
        mesh.index("pp")


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        ((), (), "has no axes"),
        (("a b",), (2,), "'a b' must be named by an identifier"),
        ((3,), (2,), "3 must be named by an identifier"),
        (("tp", "all_gather"), (2, 2), "'all_gather' must be named by an identifier that generated code does not use"),
        (("a",), (0,), "size 0: it must be a positive integer"),
        (("a",), (True,), "size True: it must be a positive integer"),
        (("a",), (2.0,), "size 2.0: it must be a positive integer"),
        (("a", "a"), (2, 2), "different names, got a, a"),
    ],
)
def test_what_is_no_mesh_is_refused(names: tuple[str, ...], sizes: tuple[int, ...], message: str) -> None:
    """Each way to be no mesh is refused by its own message."""
    with pytest.raises(MeshError, match=message):
        Mesh(names, sizes)
