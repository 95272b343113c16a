"""Programs that are cut as the first program of their model is; buffers that a call updates, in stages."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.ir.configuration import Configuration
from passes.ir.decisions import FirstProgram
from passes.ir.errors import PipelineError
from passes.ir.lowered import Stage
from passes.lower.positions import named_starts, positions
from passes.lower.same_stages import cut_alike
from passes.lower.stages import crossings, cut
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of
from tests.passes.planning import STATES, planning

MESH = mesh_of(dp=1)
WIDTH = 8


class Model(nn.Module):
    """Three layers, and two buffers that calls update: one before the first, and one around the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        self.count += 1
        x = self.second(self.first(x).sin()).sin() - self.seen
        y = self.third(x)
        self.seen.copy_(y.detach().mean(0))
        return {"loss": (y.sin() * self.count).sum()}


@pytest.fixture(scope="module")
def whole() -> Stage:
    """The program in one stage."""
    case = planning(Model(), {"x": torch.ones(8, WIDTH)}, MESH, "ideal")
    return case.lowered(solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(MESH)))


FLOWING = frozenset[str]()


def parameters(stages: tuple[Stage, ...]) -> list[list[str]]:
    """The parameters of each stage."""
    return [sorted(stage.parameters) for stage in stages]


def first(**holders: tuple[int, ...]) -> FirstProgram:
    """A first program, by the stages of its layers; the buffers are on the first and the last stage."""
    weights = {f"{name}.weight": stages for name, stages in holders.items()}
    return FirstProgram((), {**weights, "count": (0,), "seen": (1,)})


def test_stages_keep_their_parameters(whole: Stage) -> None:
    """A cut that would part a stage from its parameters is moved."""
    for asked in ("second/linear", "third/linear"):
        for second in (0, 1):
            found = cut_alike(whole, [asked], first(first=(0,), second=(second,), third=(1,)), FLOWING, MESH)
            expected = [[], []]
            for name, number in (("first", 0), ("second", second), ("third", 1)):
                expected[number].append(f"{name}.weight")
            assert parameters(found) == expected


def test_stages_that_cannot_keep_their_parameters_are_refused(whole: Stage) -> None:
    """A copy of them would not be trained."""
    with pytest.raises(PipelineError, match=r"stage \d would read '\w+.weight', which is on stage \d in the model's"):
        cut_alike(whole, ["second/linear"], first(first=(1,), second=(0,)), FLOWING, MESH)
    for holders in ({}, {"third.weight": (1,)}, {"third.weight": (0,)}):
        with pytest.raises(PipelineError, match="the buffer 'seen' is updated"):
            cut_alike(whole, ["third/linear"], FirstProgram((), {**holders, "count": (0,)}), FLOWING, MESH)


def test_unread_parameters_stay_where_they_are(whole: Stage) -> None:
    """Those that only another program reads are on its stages; others on the first."""
    program, layouts = whole.program, whole.parameters
    more = replace(program.parameters[0], names=("extra",))
    wider = replace(
        whole,
        program=replace(program, parameters=(*program.parameters, more)),
        parameters={**layouts, "extra": layouts["first.weight"]},
    )
    starts = named_starts(wider, ["second/linear"])
    for holders, expected in (({}, 0), ({"extra": (1,)}, 1)):
        stages = cut(wider, starts, FLOWING, MESH, holders)
        assert [number for number, stage in enumerate(stages) if "extra" in stage.parameters] == [expected]


def test_values_of_updated_buffers_are_sent(whole: Stage) -> None:
    """The stage that updates a buffer computes what is made of it."""
    before, after = cut(whole, named_starts(whole, ["second/linear"]), FLOWING, MESH)
    assert [name for name, _ in before.updates] == ["count"]
    assert [name for name, _ in after.updates] == ["seen"]
    assert [item.name for item in before.program.buffers] == ["count"]
    assert [item.name for item in after.program.buffers] == ["seen"]
    assert len(before.sent) == 2


def test_no_stage_begins_between_uses_of_an_updated_buffer(whole: Stage) -> None:
    """The copy that is not updated would have an old value."""
    parted = [crossing.parted for crossing in crossings(whole, FLOWING, MESH)]
    names = [item.name for item in positions(whole)]
    at = names.index("third/linear")
    assert parted[at - 1] == {"seen"}
    assert not parted[names.index("second/linear") - 1]
    with pytest.raises(PipelineError, match=r"the buffer 'seen' is updated, so that one stage .* stages 0 and 1 do"):
        cut(whole, (at,), FLOWING, MESH)
