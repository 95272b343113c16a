"""Redistributions, run on all ranks of a simulated mesh."""

import random
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch

from passes.ir.layout import I, Layout, P, Placement, R, S, fits, gradient, local_shape
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep, redistribution, step_in_parts
from tests.passes.helpers import (
    assert_lies,
    axes_with,
    layouts_on,
    mesh_of,
    pairing,
    part,
    run_step,
    run_steps,
    spread,
)

# DESIGN.md, section 3: from, to, what runs forward and backward. "convert" is local.
TABLE = [
    (R, I, "convert", "convert"),
    (R, S(0), "convert", "convert"),
    (R, P, "convert", "convert"),
    (I, R, "convert", "all_reduce"),
    (I, S(0), "convert", "all_gather"),
    (I, P, "convert", "convert"),
    (S(0), R, "all_gather", "reduce_scatter"),
    (S(0), I, "all_gather", "convert"),
    (S(0), S(1), "all_to_all", "all_to_all"),
    (S(0), P, "convert", "convert"),
    (P, R, "all_reduce", "all_reduce"),
    (P, I, "all_reduce", "convert"),
    (P, S(0), "reduce_scatter", "all_gather"),
]


def whole_tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 100, shape, generator=generator).double()


def check(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[RedistributionStep, ...]:
    """Assert that the steps bring a tensor from `source` to `target`, and its gradient back, also where those over
    several axes are cut."""
    steps = redistribution(source, target, shape, mesh)
    ways = [mesh.partitions(step.span) for step in steps]
    for number in range(max(map(len, ways), default=1)):
        parts = [own[min(number, len(own) - 1)] for own in ways]
        cut = [part for step, own in zip(steps, parts, strict=True) for part in step_in_parts(step, own, mesh)]
        assert number or tuple(cut) == steps
        _check_steps(cut, source, target, shape, mesh)
    return steps


def _check_steps(
    steps: Sequence[RedistributionStep], source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh
) -> None:
    generator = torch.Generator().manual_seed(1)
    whole, cotangent = whole_tensor(shape), whole_tensor(shape, 1)
    values = spread(whole, source, mesh, generator)
    arrived = run_steps(steps, values, mesh)
    assert_lies(arrived, whole, target, mesh)
    gradients = spread(cotangent, gradient(target), mesh, generator)
    returned = run_steps([step.backward for step in reversed(steps)], gradients, mesh)
    assert_lies(returned, cotangent, gradient(source), mesh)
    product_of_wholes = float((whole * cotangent).sum())
    assert pairing(arrived, gradients, target, mesh) == pytest.approx(product_of_wholes, rel=1e-12, abs=1e-6)
    assert pairing(values, returned, source, mesh) == pytest.approx(product_of_wholes, rel=1e-12, abs=1e-6)


@pytest.mark.parametrize("ways", [2, 3])
def test_one_axis_all_placements(ways: int) -> None:
    """Every change of placement on one axis, strided splits among them: values arrive and gradients return."""
    mesh = mesh_of(a=ways)
    placements = [R, I, P, S(0), S(1), S(0, 2), S(0, 3), S(1, 2)]
    for source, target in product(layouts_on((36, 12), placements, mesh), repeat=2):
        steps = check(source, target, (36, 12), mesh)
        both_split_one_dim = source[0].kind == target[0].kind == "S" and source[0].dim == target[0].dim
        assert len(steps) == (source != target) or both_split_one_dim


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_two_axes_all_placements(first: int, second: int) -> None:
    """Every change between layouts on two axes, with both on one dim in either order. Axes of sizes 2 and 3 are fast
    in the random layouts on three."""
    mesh = mesh_of(a=first, b=second)
    placements = [R, I, P, S(0), S(1), S(0, 2), S(0, 3)]
    layouts = list(layouts_on((12, 6), placements, mesh))
    assert (S(0), S(0, 2)) in layouts
    assert (S(0, 2), S(0)) in layouts or first != second
    for source, target in product(layouts, repeat=2):
        check(source, target, (12, 6), mesh)


@pytest.mark.parametrize("seed", range(6))
def test_three_axes_random_layouts(seed: int) -> None:
    """Random layouts on three axes of sizes 2 and 3, mostly with several digits on one dim."""
    choose = random.Random(seed)
    sizes = tuple(choose.choice([2, 3]) for _ in range(3))
    mesh = Mesh(("a", "b", "c"), sizes)
    shape = (36, 24)

    def layout() -> Layout:
        while True:
            placements = tuple(
                choose.choice([R, I, P, *[S(choose.randrange(2), choose.choice([1, 2, 3, 4, 6])) for _ in range(5)]])
                for _ in sizes
            )
            if fits(shape, placements, mesh):
                return placements

    for _ in range(60):
        check(layout(), layout(), shape, mesh)


def test_digits_that_change_places_go_through_r() -> None:
    """Two axes that want each other's digit: one of them goes through R, and the change still arrives."""
    mesh = mesh_of(a=2, b=2)
    steps = check((S(0), S(0, 2)), (S(0, 2), S(0)), (8,), mesh)
    assert [step.target.kind for step in steps].count("R") == 1
    assert len(steps) == 3


def test_shrinking_steps_come_first_and_growing_ones_last() -> None:
    """Steps that make a tensor smaller run before steps that make it larger, so that fewer bytes travel."""
    mesh = mesh_of(a=2, b=2)
    assert [step.span for step in redistribution((S(0), R), (R, S(1)), (8, 8), mesh)] == [1, 0]
    assert [step.span for step in redistribution((R, S(1)), (S(0), R), (8, 8), mesh)] == [0, 1]


def test_outer_axis_gathers_first_and_scatters_last() -> None:
    """The outermost axis has the slowest link: it works on the tensor while it is small."""
    mesh = mesh_of(a=2, b=2)
    gathers = redistribution((S(0), S(1)), (R, R), (8, 8), mesh)
    scatters = redistribution((P, P), (S(0), S(1)), (8, 8), mesh)
    assert [step.span for step in gathers] == [0, 1]
    assert [step.span for step in scatters] == [1, 0]


@pytest.mark.parametrize(("source", "target", "forward", "backward"), TABLE, ids=lambda item: str(item))
def test_table_of_collectives(source: Placement, target: Placement, forward: str, backward: str) -> None:
    """Each entry of the design's table runs the collective that it names, forward and backward."""
    (step,) = redistribution((source,), (target,), (4, 4), mesh_of(a=2))
    assert step.collective == forward
    assert step.backward.collective == backward
    assert (step.backward.source, step.backward.target) == (target.gradient, source.gradient)
    assert step.moves == (forward != "convert")


def test_table_is_complete() -> None:
    """The table above holds every change between different placements."""
    kinds = {(source.kind, target.kind) for source, target, _, _ in TABLE}
    expected = {(a, b) for a, b in product("RISP", repeat=2) if a != b or a == "S"}
    assert kinds == expected


@pytest.mark.parametrize(("source", "target"), [(item[0], item[1]) for item in TABLE], ids=lambda item: str(item))
def test_local_conversions_need_no_other_rank(source: Placement, target: Placement) -> None:
    """Steps that the table calls local do not change when the other ranks hold something else; the others do."""
    mesh, whole = mesh_of(a=2), whole_tensor((4, 4))
    (step,) = redistribution((source,), (target,), (4, 4), mesh)
    values = spread(whole, (source,), mesh, torch.Generator().manual_seed(0))
    disturbed = {**values, (1,): values[1,] + 1000}
    same = torch.equal(run_step(step, values, mesh)[0,], run_step(step, disturbed, mesh)[0,])
    assert same == (not step.moves)


def test_same_layout_needs_no_steps() -> None:
    """Nothing happens where nothing changes."""
    layout = (S(0), P)
    assert redistribution(layout, layout, (4,), mesh_of(a=2, b=2)) == ()


def _lies_in_pieces(layout: Layout, shape: tuple[int, ...], mesh: Mesh, axis: int) -> bool:
    """Whether what a rank has after a further split on `axis` is not one piece of what it had before."""
    before = (*layout[:axis], R, *layout[axis + 1 :])
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    own = part(places, before, (0,) * len(mesh.sizes), mesh).flatten().tolist()
    taken = part(places, layout, (0,) * len(mesh.sizes), mesh).flatten().tolist()
    positions = [own.index(place) for place in taken]
    return positions != list(range(positions[0], positions[0] + len(positions)))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_scattered_parts(sizes: tuple[int, int]) -> None:
    """A part is copied before it is sent just where it does not lie in one piece in memory, found by listing places."""
    mesh = Mesh(("a", "b"), sizes)
    placements = [R, S(0), S(1), S(0, 2), S(0, 3), S(1, 2)]
    for layout in layouts_on((12, 12), placements, mesh):
        for axis in axes_with(layout, "S"):
            expected = _lies_in_pieces(layout, (12, 12), mesh, axis)
            whole = (*layout[:axis], R, *layout[axis + 1 :])
            (step,) = redistribution(whole, layout, (12, 12), mesh)
            assert step.cut == expected, layout


def test_strided_tensors_are_always_copied() -> None:
    """A tensor that does not lie in the order of its dims has to be copied around a collective."""
    (step,) = redistribution((S(0),), (R,), (4, 4), mesh_of(a=2), strided=True)
    assert step.join
    (step,) = redistribution((S(0),), (R,), (4, 4), mesh_of(a=2))
    assert not step.join
    (step,) = redistribution((S(1),), (R,), (4, 4), mesh_of(a=2))
    assert step.join
    assert step.backward.cut


def test_shapes_of_steps_are_those_of_the_layouts() -> None:
    """Steps begin and end with the local shapes of source and target."""
    mesh = mesh_of(a=2, b=3)
    source, target = (S(0), P), (R, S(1))
    steps = redistribution(source, target, (12, 6), mesh)
    assert steps[0].before == local_shape((12, 6), source, mesh)
    assert steps[-1].after == local_shape((12, 6), target, mesh)
    assert all(one.after == other.before for one, other in pairwise(steps))
