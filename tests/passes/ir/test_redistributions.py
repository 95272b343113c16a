"""The steps of all pairs of layouts at once, and of one pair, against steps written plainly."""

from dataclasses import replace
from math import prod

import pytest

from passes.ir.layout import I, Layout, P, R, S, Shape
from passes.ir.mesh import Mesh
from passes.ir.redistribution import redistribution
from passes.ir.redistributions import KINDS, Pairs, all_steps
from tests.passes.helpers import layouts_on, mesh_of, some_layouts
from tests.passes.ir.plain_redistribution import plain_redistribution

# (span, kind before, kind after, elements before, elements after, cut, join)
Row = tuple[int, str, str, int, int, bool, bool]

# Mesh, what all digits divide, and shapes: some that divide, some that do not, some without dims or elements.
CASES: list[tuple[Mesh, Shape, list[Shape]]] = [
    (mesh_of(a=4), (32, 8), [(32, 8), (33, 9), (0, 8), (1, 1)]),
    (mesh_of(a=1, b=3), (9, 6, 3), [(9, 6, 3), (10, 5, 2)]),
    (mesh_of(a=3, b=2), (36, 24), [(36, 24), (35, 1)]),
    (mesh_of(a=2, b=2, c=3), (48, 24, 12), [(48, 24, 12), (7, 50, 13)]),
    (mesh_of(a=2, b=4, c=2, d=3), (192, 96), [(192, 96), (191, 97)]),
    (mesh_of(a=2, b=2, c=2, d=2), (32, 16, 16), [(32, 16, 16), (31, 1, 17)]),
]


def _rows(tensors: list[Pairs], mesh: Mesh) -> list[list[Row]]:
    """The steps of every pair, in order."""
    found: list[list[Row]] = [[] for pairs in tensors for _ in range(len(pairs.sources) * len(pairs.targets))]
    for steps in all_steps(tensors, mesh):
        parts = (steps.span, steps.source, steps.target, steps.before, steps.after, steps.cut, steps.join)
        columns = [part.tolist() for part in parts]
        for pair, span, source, target, *rest in zip(steps.pair.tolist(), *columns, strict=True):
            found[pair].append((span, KINDS[source], KINDS[target], *rest))
    return found


# Every mesh is fast once, and both orders in memory on one axis and on several.
@pytest.mark.parametrize(
    ("mesh", "whole", "shapes", "strided"),
    [
        pytest.param(*case, strided, marks=[] if number % 2 == strided else pytest.mark.slow, id=f"{case[0]}-{strided}")
        for number, case in enumerate(CASES)
        for strided in (False, True)
    ],
)
def test_every_pair_takes_the_steps_of_its_redistribution(
    mesh: Mesh, whole: Shape, shapes: list[Shape], strided: bool
) -> None:
    """Random layouts of every kind of placement: the same steps in the same order, of the same sizes."""
    sources, targets = some_layouts(whole, mesh, 30, seed=1), some_layouts(whole, mesh, 25, seed=2)
    longest = 0
    for shape in shapes:
        found = _rows([Pairs(sources, targets, shape, strided)], mesh)
        for pair, steps in enumerate(found):
            row, column = divmod(pair, len(targets))
            expected = plain_redistribution(sources[row], targets[column], shape, mesh, strided=strided)
            assert redistribution(sources[row], targets[column], shape, mesh, strided=strided) == expected
            assert steps == [
                (s.span, s.source.kind, s.target.kind, prod(s.before), prod(s.after), s.cut, s.join) for s in expected
            ], (sources[row], targets[column], shape)
            longest = max(longest, len(steps) - sum(a != b for a, b in zip(sources[row], targets[column], strict=True)))
    # Without digits that all wait for each other nothing would be asked of what goes through R.
    assert longest > 0


def test_tensors_together_take_the_steps_of_each() -> None:
    """Of tensors with different numbers of dims, layouts and order in memory, more pairs than are followed at once."""
    mesh = mesh_of(a=2, b=2, c=3)
    whole = (48, 24, 12)
    many = some_layouts(whole, mesh, 100, seed=5), some_layouts(whole, mesh, 90, seed=6)
    plain = list(layouts_on((), [R, I, P], mesh))
    tensors = [
        Pairs(*many, whole),
        Pairs(plain, plain[:5], ()),
        Pairs(many[1][:7], many[0][:8], (7, 50, 13), strided=True),
        Pairs(some_layouts((36, 24), mesh, 9, seed=7), [(R, R, R), (I, P, R)], (36, 24)),
    ]
    alone = [row for pairs in tensors for row in _rows([pairs], mesh)]
    assert len(alone) > 1 << 13
    assert _rows(tensors, mesh) == alone


@pytest.mark.parametrize("cut", [(0, 2, 3), (1, 3, 2)])
def test_a_finer_mesh_takes_the_steps_of_the_coarser_one(cut: tuple[int, int, int]) -> None:
    """An axis cut in two changes in one step over both parts, of the same kind and sizes."""
    axis, outer, inner = cut
    sizes = [4, 4]
    sizes[axis] = outer * inner
    coarse = Mesh(("a", "b"), tuple(sizes))
    fine = Mesh(("a", "b", "c"), (*sizes[:axis], outer, inner, *sizes[axis + 1 :]))

    def spread(layout: Layout) -> Layout:
        first = layout[axis]
        second = first._replace(major=first.major * outer) if first.kind == "S" else first
        return (*layout[:axis], first, second, *layout[axis + 1 :])

    whole, several = (48, 96), 0
    for source in some_layouts(whole, coarse, 25, seed=8):
        for target in some_layouts(whole, coarse, 25, seed=9):
            expected = redistribution(source, target, whole, coarse)
            if len(expected) > sum(a != b for a, b in zip(source, target, strict=True)):
                # Digits of smaller axes may not be in each other's way where those of larger ones are.
                continue
            steps = redistribution(spread(source), spread(target), whole, fine)
            assert [replace(step, span=0) for step in steps] == [replace(step, span=0) for step in expected]
            several += sum(len(fine.spans[step.span]) > 1 for step in steps)
    assert several > 50


def test_tensors_without_dims() -> None:
    """A number changes between R, I and P alone."""
    mesh = mesh_of(a=2, b=2)
    layouts = list(layouts_on((), [R, I, P], mesh))
    found = _rows([Pairs(layouts, layouts, ())], mesh)
    for pair, steps in enumerate(found):
        row, column = divmod(pair, len(layouts))
        expected = redistribution(layouts[row], layouts[column], (), mesh)
        assert [row[:5] for row in steps] == [(s.span, s.source.kind, s.target.kind, 1, 1) for s in expected]


def test_a_digit_that_is_in_its_own_way_goes_through_replication() -> None:
    """There is no all-to-all between digits of one dim that overlap."""
    mesh = mesh_of(a=4)
    found = _rows([Pairs([(S(0),)], [(S(0, 2),)], (16,))], mesh)
    assert found == [[(0, "S", "R", 4, 16, True, False), (0, "R", "S", 16, 4, True, False)]]
