"""Copies of regions that are cut: where, and into which loops."""

import pytest
import torch
from torch import Tensor, nn

from passes.cost.liveness import MemoryPeak
from passes.ir.errors import PipelineError
from passes.ir.lowered import Compute, Loop, Stage
from passes.ir.plan import Block
from passes.lower.loops import copy_pieces, part_of_copy, piece_keys, piece_name
from passes.lower.positions import named_starts, positions
from passes.lower.same_stages import near_starts
from passes.lower.stages import crossings, cut
from passes.record import record_stage
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of
from tests.passes.planning import STATES, Planning, planning

MESH = mesh_of(dp=2)
WIDTH, COUNT = 8, 4


class Half(nn.Module):
    """A layer with a wider middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, width]."""
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    """Two halves, each beside the residual stream; both read what is not the layer's own."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.first, self.second = Half(), Half()
        self.scaled = scaled

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """x: [rows, width]; scale: [width]."""
        x = x + self.first(x * scale if self.scaled else x)
        return x + self.second(x) * scale


class Model(nn.Module):
    """Equal layers, or two kinds in turn."""

    def __init__(self, alternate: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(alternate and bool(number % 2)) for number in range(COUNT))
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        scale = self.scale(x).sum(0)
        for layer in self.layers:
            x = layer(x, scale)
        return {"loss": x.sum()}


def whole_of(alternate: bool) -> tuple[Planning, Stage]:
    """The case and its program in one stage."""
    case = planning(Model(alternate), {"x": torch.ones(64, WIDTH)}, MESH)
    return case, case.lowered(solve(case.problem, case.cluster, Limits(1e30, STATES), case.configuration))


@pytest.fixture(scope="module")
def case() -> tuple[Planning, Stage]:
    return whole_of(alternate=False)


def named(stage: Stage) -> list[str]:
    """The positions in copies."""
    return [item.name for item in positions(stage) if item.copy is not None]


def keys(loop: Loop) -> list[str]:
    """The ops of a loop's body without the region's name."""
    return [item.op.key.split("*")[-1] for item in loop.body.statements if isinstance(item, Compute)]


def test_copies_are_cut_between_their_modules(case: tuple[Planning, Stage]) -> None:
    """Cuts lie where one tensor of the carried size is live: not inside of the halves, which are wider there."""
    _, whole = case
    expected = [[f"layers.{number}", f"layers.{number}.second.up"] for number in range(COUNT)]
    assert named(whole) == [name for names in expected for name in names]


def test_copies_of_several_layers_are_cut_between_them() -> None:
    """Layers that alternate are copies of two; a stage can begin with either."""
    _, whole = whole_of(alternate=True)
    (loop,) = whole.loops
    assert len(loop.copies) == COUNT // 2
    expected = [[f"layers.{number}", f"layers.{number}.second.up"] for number in range(COUNT)]
    assert named(whole) == [name for names in expected for name in names]
    first, second = cut(whole, named_starts(whole, ["layers.1"]), frozenset(), MESH)
    assert [loop.layers for loop in (*first.loops, *second.loops)] == [1, 1, 2]


@pytest.mark.parametrize("alternate", [False, True])
def test_pieces_know_their_ops_in_the_program(alternate: bool) -> None:
    """The keys of all pieces of all copies are those of the program's ops in layers, in order."""
    planned, whole = whole_of(alternate)
    (loop,) = whole.loops
    found = [key for copy in loop.copies for inside in copy_pieces(loop) for key in piece_keys(loop, copy, inside)]
    assert found == [op.key for op in planned.folded.program.ops if op.module.startswith("layers")]


def test_cuts_of_another_program_are_before_the_next_op_that_both_have(case: tuple[Planning, Stage]) -> None:
    """That may begin a position, or be within a piece, which the stage then begins after; a stage may be empty."""
    planned, whole = case
    names, ops = [item.name for item in positions(whole)], [op.key for op in planned.folded.program.ops]
    up, down = ops.index("layers.2.second.up/linear"), ops.index("layers.2.second.down/linear")
    order = [*ops[:up], "layers.2.drop/dropout", *ops[up:down], "layers.2.second.drop/dropout", *ops[down:], "/scaled"]

    def begun(*cuts: str) -> list[str]:
        return [names[number] for number in near_starts(whole, cuts, order)]

    assert begun("layers.1", "layers.2.second.up") == ["layers.1", "layers.2.second.up"]
    assert begun("layers.2.drop/dropout", "layers.3") == ["layers.2.second.up", "layers.3"]
    assert begun("layers.2.drop", "layers.2.second.drop") == ["layers.2.second.up", "layers.3"]
    assert begun("layers.2.second.drop", "layers.3") == ["layers.3", "layers.3"]
    assert begun("layers.3", "/scaled") == ["layers.3", names[-1]]
    with pytest.raises(PipelineError, match=r"'layers.2.drop/dropout' names no module"):
        named_starts(whole, ["layers.2.drop/dropout"])


def test_parts_make_the_copy(case: tuple[Planning, Stage]) -> None:
    """Each op is in one part; what crosses is exported by the first and carried into the second."""
    _, whole = case
    (loop,) = whole.loops
    first, second = (part_of_copy(loop, 1, inside) for inside in copy_pieces(loop))
    assert keys(first) + keys(second) == keys(loop)
    assert [op.key for op in (*first.region.ops, *second.region.ops)] == [op.key for op in loop.region.ops]
    ((value, (outside,)),) = first.exports
    assert value in first.body.results
    assert outside in second.initial
    assert {*first.owned, *second.owned} == set(loop.owned)
    assert not set(first.owned) & set(second.owned)
    assert (first.block, second.block) == (
        "layers.1 up to layers.1.second.up",
        "layers.1 from layers.1.second.up",
    )
    assert piece_name(loop, 1, copy_pieces(loop)[1].start) == "layers.1.second.up"


def test_stages_begin_and_end_within_copies(case: tuple[Planning, Stage]) -> None:
    """A stage runs the rest of a copy, whole copies, and the beginning of another one."""
    planned, whole = case
    cuts = ["layers.0.second.up", "layers.2.second.up"]
    stages = cut(whole, named_starts(whole, cuts), planned.folded.flowing, MESH)
    assert [[loop.block for loop in stage.loops] for stage in stages] == [
        ["layers.0 up to layers.0.second.up"],
        ["layers.0 from layers.0.second.up", "layers.*", "layers.2 up to layers.2.second.up"],
        ["layers.2 from layers.2.second.up", "layers.*"],
    ]
    assert [sum(loop.layers for loop in stage.loops) for stage in stages] == [1, 2, 1]
    names = {name for stage in stages for name in stage.parameters}
    assert names == set(whole.parameters)
    assert "layers.0.second.up.weight" not in stages[0].parameters
    assert "layers.0.first.up.weight" not in stages[1].parameters
    # The scale is computed from a parameter, so it is handed on with the residual stream.
    assert [len(stage.sent) for stage in stages] == [2, 2, 0]


def test_blocks_of_parts_know_their_region(case: tuple[Planning, Stage]) -> None:
    """Plans count every op once, and keep the region that a part is of."""
    planned, whole = case
    solution = solve(planned.problem, planned.cluster, Limits(1e30, STATES), planned.configuration)
    stages = cut(whole, named_starts(whole, ["layers.1.second.up"]), planned.folded.flowing, MESH)
    blocks: list[Block] = []
    for stage in stages:
        seconds = [0.0] * (2 * len(stage.loops) + 1)
        blocks += record_stage(planned.problem, solution, stage, seconds, MemoryPeak({}, "", {})).blocks
    ops = sum(block.count * sum(row.kind == "op" for row in block.rows) for block in blocks)
    assert ops == len(whole.program.ops)
    assert {block.region for block in blocks if "layers" in block.name and "after" not in block.name} == {"layers.*"}


def test_crossings_are_priced_within_copies(case: tuple[Planning, Stage]) -> None:
    """The values that cross a cut within a copy are no larger than those that cross one between copies."""
    planned, whole = case
    sent = crossings(whole, planned.folded.flowing, MESH)
    inner = {item.name: crossing.bytes for item, crossing in zip(positions(whole)[1:], sent, strict=True) if item.copy}
    assert inner["layers.1.second.up"] == inner["layers.2"] == inner["layers.2.second.up"]
