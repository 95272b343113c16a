"""Helpers of the tests of the passes: programs from small modules, and all ranks of a mesh simulated in one process."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.codegen import Naming, emit
from passes.ir.layout import Layout, Placement, S, digits, fits
from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh
from passes.ir.program import Op, Program
from passes.ir.redistribution import RedistributionStep
from passes.normalize import normalize
from passes.variables import name_variables

Coordinate = tuple[int, ...]
Values = dict[Coordinate, Tensor]


def mesh_of(**sizes: int) -> Mesh:
    """A mesh from sizes by axis."""
    return Mesh(tuple(sizes), tuple(sizes.values()))


# --- programs ------------------------------------------------------------------------------------------------------


def captured(module: nn.Module, training: bool = True, **inputs: object) -> Program:
    """The program of `module(**inputs)`, traced for training."""
    return capture(module, inputs, Tracing(training, True, contextlib.nullcontext()))


def normalized(module: nn.Module, training: bool = True, **inputs: object) -> Program:
    """The same in normal form."""
    return normalize(captured(module, training, **inputs))


def printed(program: Program) -> list[str]:
    """The lines of a program as it prints, without the comments."""
    return [line.split("  #")[0] for line in str(program).splitlines()]


def op_lines(ops: Program | Sequence[Op]) -> list[str]:
    """The ops of a program as they print."""
    return [str(op) for op in (ops.ops if isinstance(ops, Program) else ops)]


def source_of(lowered: Stage, mesh: Mesh, name: str = "Model") -> str:
    """The source that is generated for a lowered program, with a class called `name`."""
    return emit(lowered, name_variables(lowered, mesh), mesh, Naming(name, f"{name} on a mesh."))


class Apply(nn.Module):
    """A module without parameters that computes what `forward` is given as: a function of named inputs."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.forward = function


# --- all ranks in one process ----------------------------------------------------------------------------------------


def part(whole: Tensor, layout: Layout, coordinate: Coordinate, mesh: Mesh) -> Tensor:
    """The part of `whole` that the splits of `layout` leave for the rank at `coordinate`, by picking single indices.

    Written from the definition: S(d, m) views dim d of the whole tensor as (m, n, rest) and takes index `coordinate` of
    n. An index i of the dim is kept if (i // (size / (m * n))) % n is the coordinate, for every digit.
    """
    for dim, size in enumerate(whole.shape):
        index = torch.arange(size)
        for major, ways, axis in digits(layout, dim, mesh):
            index = index[(index // (size // (major * ways))) % ways == coordinate[axis]]
        whole = whole.index_select(dim, index) if len(index) != size else whole
    return whole


def axes_with(layout: Layout, kinds: str) -> list[int]:
    """The axes whose placement is one of `kinds`."""
    return [axis for axis, placement in enumerate(layout) if placement.kind in kinds]


def spread(whole: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> Values:
    """`whole` on all ranks in `layout`; pending sums are random addends that sum to it (of whole numbers, exactly).

    The first rank has all of a pending sum of flags.
    """
    pending = axes_with(layout, "P")
    places = list(product(*(range(mesh.sizes[axis]) for axis in pending)))
    if whole.dtype == torch.bool:
        addends = [whole, *(torch.zeros_like(whole) for _ in places[1:])]
    else:
        addends = [torch.randint(-9, 10, whole.shape, generator=generator).to(whole.dtype) for _ in places[1:]]
        if whole.dtype == torch.float32:
            # Small ones, which leave little when they cancel.
            addends = [addend / 16 for addend in addends]
        addends.insert(0, whole - sum(addends, torch.zeros_like(whole)))
    by_place = dict(zip(places, addends, strict=True))
    return {
        coordinate: part(by_place[tuple(coordinate[axis] for axis in pending)], layout, coordinate, mesh)
        for coordinate in mesh.coordinates()
    }


def summed(values: Values, layout: Layout, mesh: Mesh) -> Values:
    """`values` with pending sums summed: what a rank has of the whole tensor according to its other placements."""
    for axis in axes_with(layout, "P"):
        values = {
            coordinate: torch.stack([values[other] for other in line(coordinate, axis, mesh)]).sum(0)
            for coordinate in values
        }
    return values


def line(coordinate: Coordinate, axis: int, mesh: Mesh) -> list[Coordinate]:
    """The ranks that lie with `coordinate` on `axis`."""
    return [(*coordinate[:axis], index, *coordinate[axis + 1 :]) for index in range(mesh.sizes[axis])]


def pairing(values: Values, gradients: Values, layout: Layout, mesh: Mesh) -> float:
    """The inner product of a tensor and its gradient from what the ranks have of both.

    Summed over all ranks; where a placement is I both are whole on every rank, which counts once.
    """
    total = sum(float((values[coordinate] * gradients[coordinate]).sum()) for coordinate in values)
    for axis in axes_with(layout, "I"):
        total /= mesh.sizes[axis]
    return total


def line_along(coordinate: Coordinate, span: int, mesh: Mesh) -> list[Coordinate]:
    """The ranks that lie with `coordinate` along a span of axes, in their order."""
    axes = mesh.spans[span]
    places = product(*(range(mesh.sizes[axis]) for axis in axes))
    return [(*coordinate[: axes[0]], *place, *coordinate[axes[-1] + 1 :]) for place in places]


def run_step(step: RedistributionStep, values: Values, mesh: Mesh) -> Values:
    """Run one step on all ranks; local shapes must be those that the step says."""
    result = {}
    for coordinate in values:
        others = line_along(coordinate, step.span, mesh)
        result[coordinate] = _run(step, [values[other] for other in others], others.index(coordinate))
        assert tuple(values[coordinate].shape) == step.before, step
        assert tuple(result[coordinate].shape) == step.after, step
    return result


def run_steps(steps: Sequence[RedistributionStep], values: Values, mesh: Mesh) -> Values:
    """Run steps one after the other on all ranks."""
    for step in steps:
        values = run_step(step, values, mesh)
    return values


def _run(step: RedistributionStep, given: list[Tensor], rank: int) -> Tensor:
    """The tensor of rank `rank` of an axis after a step, when the ranks of the axis have `given` before."""
    source, target, ways = step.source, step.target, len(given)
    own = given[rank]
    match source.kind + target.kind:
        case "RI" | "IR":
            return own
        case "RS" | "IS":
            return _take(own, target, ways, rank)
        case "RP" | "IP":
            return own if rank == 0 else torch.zeros_like(own)
        case "SR" | "SI":
            return _put(given, source)
        case "SS":
            return _put([_take(other, target, ways, rank) for other in given], source)
        case "SP":
            return _put([own if other == rank else torch.zeros_like(own) for other in range(ways)], source)
        case "PR" | "PI":
            return torch.stack(given).sum(0)
        case "PS":
            return _take(torch.stack(given).sum(0), target, ways, rank)
    raise AssertionError(step)


def _take(tensor: Tensor, placement: Placement, ways: int, rank: int) -> Tensor:
    """Part `rank` of the local `tensor` when its dim is viewed as (major, ways, rest)."""
    chunks = tensor.chunk(placement.major * ways, placement.dim)
    return torch.cat(chunks[rank::ways], placement.dim)


def _put(parts: list[Tensor], placement: Placement) -> Tensor:
    """The reverse of `_take`."""
    chunks = [part.chunk(placement.major, placement.dim) for part in parts]
    return torch.cat([own[place] for place in range(placement.major) for own in chunks], placement.dim)


def layouts_on(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh) -> Iterator[Layout]:
    """All layouts of a tensor of `shape` made of `placements` that divide."""
    for layout in product(placements, repeat=len(mesh.sizes)):
        if fits(tuple(shape), layout, mesh):
            yield layout


def some_layouts(shape: Sequence[int], mesh: Mesh, count: int, seed: int) -> list[Layout]:
    """`count` random layouts of a tensor of `shape`, of every kind of placement and with digits anywhere."""
    chosen = random.Random(seed)
    majors = [major for major in range(1, max(shape, default=1) + 1) if any(size % major == 0 for size in shape)]
    digits = [S(dim, major) for dim in range(len(shape)) for major in majors if shape[dim] % major == 0]
    found: list[Layout] = []
    while len(found) < count:
        kinds = chosen.choices(["R", "I", "P", "S"], weights=[2, 1, 1, 5], k=len(mesh.sizes))
        layout = tuple(chosen.choice(digits) if kind == "S" else Placement(kind) for kind in kinds)
        if fits(tuple(shape), layout, mesh):
            found.append(layout)
    return found


def assert_lies(values: Values, whole: Tensor, layout: Layout, mesh: Mesh, tolerance: float = 0.0) -> None:
    """Assert that `values` are `whole` in `layout`, on every rank."""
    for coordinate, value in summed(values, layout, mesh).items():
        expected = part(whole, layout, coordinate, mesh)
        assert value.shape == expected.shape, (layout, coordinate)
        if tolerance:
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, expected), (layout, coordinate)
