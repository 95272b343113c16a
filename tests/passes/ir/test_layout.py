"""Placements and layouts: how they are written, when they fit, and which of them DTensor can express."""

import logging
from itertools import permutations, product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.state import from_local, local_part, mesh_of
from autopar.testing.ranks import run_ranks
from passes.ir.layout import (
    I,
    Layout,
    P,
    Placement,
    R,
    S,
    Shape,
    digits,
    fits,
    format_layout,
    gradient,
    is_dtensor,
    local_major,
    local_shape,
    parse_placement,
    split_ways,
)
from passes.ir.mesh import Mesh
from tests.passes import helpers


@pytest.mark.parametrize("placement", [R, I, P, S(0), S(3), S(0, 3), S(12, 40)])
def test_letters_read_as_they_print(placement: Placement) -> None:
    """The text of a placement is read back as that placement."""
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("text", "placement"), [(" R ", R), ("S( 1 )", S(1)), ("S(0,3)", S(0, 3)), ("S(2 , 4)", S(2, 4)), ("S(1, 1)", S(1))]
)
def test_spaces_do_not_matter(text: str, placement: Placement) -> None:
    """Spaces around and inside a placement are read over."""
    assert parse_placement(text) == placement


@pytest.mark.parametrize("text", ["", "X", "r", "S", "S()", "S(-1)", "S(0, 0)", "S(0, 1, 2)", "RR", "S(0) R", "S(a)"])
def test_what_is_no_letter_is_refused(text: str) -> None:
    """Anything else is refused with the text itself and what could be written."""
    with pytest.raises(ValueError, match=r"is no layout: write 'R', 'I', 'P', 'S\(dim\)' or") as caught:
        parse_placement(text)
    assert repr(text) in str(caught.value)


def test_gradients_of_placements() -> None:
    """R and P are each other's gradient; I and S are their own."""
    assert gradient((R, I, S(1, 2), P)) == (P, I, S(1, 2), R)


MESH = Mesh(("a", "b", "c"), (2, 3, 2))


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((4,), (S(0), R, R), True),
        ((5,), (S(0), R, R), False),
        ((4,), (S(1), R, R), False),
        ((0,), (S(0), R, R), False),
        ((4,), (S(0, 2), R, R), True),
        ((6,), (S(0, 2), R, R), False),
        ((12,), (S(0), S(0, 2), S(0, 6)), True),
        ((12,), (S(0, 6), S(0), S(0, 3)), True),
        ((12,), (S(0), S(0), R), False),
        ((24,), (S(0, 2), S(0), R), False),
        ((24,), (S(0), R, S(0, 3)), False),
        ((24,), (S(0), R, S(0, 4)), True),
        ((), (R, I, P), True),
    ],
    ids=str,
)
def test_fits(shape: Shape, layout: Layout, expected: bool) -> None:
    """A layout fits if every split divides and no digits overlap, on axes of sizes 2, 3 and 2."""
    assert fits(shape, layout, MESH) == expected


def test_fits_is_what_cuts_into_equal_disjoint_parts() -> None:
    """For every layout of one dim: it fits just if picking indices by its digits gives every rank a part of its own of
    equal size, and together all of them."""
    mesh = Mesh(("a", "b"), (2, 3))
    size = 24
    for first, second in product([S(0, major) for major in range(1, 9)], repeat=2):
        layout = (first, second)
        whole = torch.arange(size)
        if any(size % (placement.major * ways) for placement, ways in zip(layout, mesh.sizes, strict=True)):
            assert not fits((size,), layout, mesh)
            continue
        parts = [helpers.part(whole, layout, coordinate, mesh) for coordinate in mesh.coordinates()]
        exact = all(len(part) == size // mesh.size for part in parts)
        low, high = sorted((placement.major, ways) for placement, ways in zip(layout, mesh.sizes, strict=True))
        nested = high[0] % (low[0] * low[1]) == 0
        assert fits((size,), layout, mesh) == (exact and nested), layout
        if exact and nested:
            assert sorted(torch.cat(parts).tolist()) == whole.tolist()


def test_local_shapes_and_majors() -> None:
    """Several axes on one dim: how many parts, in which order, and what is left of a major where others took theirs."""
    layout = (S(0, 6), S(0, 2), S(0))
    assert digits(layout, 0, MESH) == [(1, 2, 2), (2, 3, 1), (6, 2, 0)]
    assert split_ways(layout, 0, MESH) == 12
    assert split_ways(layout, 1, MESH) == 1
    assert local_shape((24, 5), layout, MESH) == (2, 5)
    assert local_major(layout[0], layout, MESH) == 1
    assert local_major(S(0, 12), (R, S(0, 2), R), MESH) == 4


@pytest.mark.parametrize(
    ("layout", "text"),
    [((R, R, R), "R"), ((S(0), R, P), "a S(0), b R, c P"), ((S(0), S(0), S(0)), "a S(0), b S(0), c S(0)")],
)
def test_layouts_for_people(layout: Layout, text: str) -> None:
    """One placement where all axes agree on one that needs no dim, else the placements by axis."""
    assert format_layout(layout, MESH) == text


def _full_tensors(sizes: tuple[int, ...], shape: Shape, layouts: list[Layout]) -> list[bool]:
    """Runs on every rank: for each layout whether `full_tensor` of the local parts is the whole."""
    logging.disable(logging.WARNING)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    mesh = mesh_of(device_mesh)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    exact = []
    for layout in layouts:
        local = local_part(whole, layout, coordinate, mesh)
        try:
            found = from_local(local, layout, shape, device_mesh, mesh).full_tensor()
        except (RuntimeError, ValueError):
            found = whole - 1
        exact.append(torch.equal(found, whole))
    return exact


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3)], ids=str)
@pytest.mark.slow
def test_dtensor_expresses_what_is_said_on_two_axes(sizes: tuple[int, ...]) -> None:
    """On gloo ranks: every layout that `is_dtensor` allows gives the whole tensor from `full_tensor`, and every other
    one something else."""
    mesh = Mesh(("a", "b"), sizes)
    placements = [R, *(S(0, major) for major in (1, 2, 3, 4, 6)), S(1)]
    layouts = list(helpers.layouts_on((24, 6), placements, mesh))
    allowed = [is_dtensor(layout, mesh) for layout in layouts]
    assert True in allowed
    assert False in allowed
    exact = run_ranks(_full_tensors, mesh.size, sizes, (24, 6), layouts)
    for layout, good, *found in zip(layouts, allowed, *exact, strict=True):
        assert all(found) == good, layout


@pytest.mark.slow
def test_dtensor_expresses_what_is_said_on_three_axes() -> None:
    """The same for all orders of three digits, with and without gaps between them."""
    mesh = Mesh(("a", "b", "c"), (2, 2, 2))
    layouts = []
    for majors in [(1, 2, 4), (2, 4, 8), (1, 4, 8), (1, 2, 8)]:
        layouts += [tuple(S(0, major) for major in order) for order in permutations(majors)]
    allowed = [is_dtensor(layout, mesh) for layout in layouts]
    exact = run_ranks(_full_tensors, mesh.size, mesh.sizes, (16,), layouts)
    wrong = [layout for layout, good, *found in zip(layouts, allowed, *exact, strict=True) if good and not all(found)]
    assert not wrong
    assert sum(allowed) >= 6


@pytest.mark.slow
def test_dtensor_expresses_what_is_said_of_two_dims_on_three_axes() -> None:
    """The same where two dims are split, one of them in another order than the mesh has."""
    mesh = Mesh(("a", "b", "c"), (2, 2, 2))
    placements = [R, *(S(0, major) for major in (1, 2, 4)), *(S(1, major) for major in (1, 2, 3))]
    layouts = list(helpers.layouts_on((8, 24), placements, mesh))
    allowed = [is_dtensor(layout, mesh) for layout in layouts]
    exact = run_ranks(_full_tensors, mesh.size, mesh.sizes, (8, 24), layouts)
    for layout, good, *found in zip(layouts, allowed, *exact, strict=True):
        assert all(found) == good, layout
