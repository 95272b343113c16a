"""Lower bounds on the steps of pipelines over programs that could be cut anywhere."""

import random

import pytest

from passes.cost.schedules import StageSeconds, rank_of_stage, schedule_actions, simulate
from passes.ir.configuration import SPLITTING
from passes.ir.errors import PipelineError
from passes.search.pipelines.cuts import least_step, simple_least_step

# Schedule, ranks, stages, micro-batches.
PIPELINES = [
    ("gpipe", 2, 2, 2),
    ("gpipe", 4, 4, 2),
    ("1f1b", 4, 4, 4),
    ("1f1b", 4, 4, 20),
    ("interleaved_1f1b", 4, 8, 8),
    ("zb_h1", 4, 4, 8),
    ("zbv", 3, 6, 6),
]


def step_s(schedule: str, ranks: int, micro_batches: int, seconds: list[StageSeconds]) -> float:
    """The simulator's step."""
    actions = schedule_actions(schedule, ranks, len(seconds), micro_batches)
    nothing = [0.0] * (len(seconds) - 1)
    return simulate(actions, rank_of_stage(schedule, ranks, len(seconds)), seconds, nothing, nothing).step_s


def divided(total: float, parts: int, draw: random.Random) -> list[float]:
    """A number in parts drawn at random, some of them 0."""
    weights = [draw.random() * (draw.random() < 0.8) for _ in range(parts)]
    return [total * weight / (sum(weights) or 1.0) for weight in weights] if sum(weights) else [total / parts] * parts


@pytest.mark.parametrize(("schedule", "ranks", "stages", "count"), PIPELINES)
def test_no_stages_take_less(schedule, ranks, stages, count):
    """Stages with parts of the program that are drawn at random never take less than the bound, nor do equal ones;
    and the bound is at least the computation of a rank."""
    draw, forward, backward = random.Random(0), 1.0, 2.0
    bound = least_step(schedule, ranks, stages, count, forward / (forward + backward)).of(forward, backward)
    assert bound >= max(count / ranks, 1.0) * (forward + backward) * (1 - 1e-9)
    equal = [StageSeconds(forward / stages, backward / stages)] * stages
    assert bound <= step_s(schedule, ranks, count, equal) * (1 + 1e-9)
    for _ in range(40):
        ahead, back = divided(forward, stages, draw), divided(backward, stages, draw)
        weight = [part * draw.random() if schedule in SPLITTING else 0.0 for part in back]
        seconds = [StageSeconds(one, two - later, later) for one, two, later in zip(ahead, back, weight, strict=True)]
        assert bound <= step_s(schedule, ranks, count, seconds) * (1 + 1e-9)


def test_bounds_have_the_bubble():
    """With as many micro-batches as ranks, the bound is far above the computation of a rank, and near equal stages."""
    assert least_step("gpipe", 2, 2, 2, 1 / 3).of(1.0, 2.0) == pytest.approx(4.5)
    bound = least_step("1f1b", 8, 8, 32, 1 / 3).of(1.0, 2.0)
    assert 0.98 * 39 / 8 * 3 <= bound <= 39 / 8 * 3


def test_many_micro_batches_take_the_formula():
    """If the simulation would be long, the bound is that of the busiest rank, and of the stages before it."""
    bound = least_step("1f1b", 16, 16, 4096, 1 / 3)
    assert bound.forward == bound.backward == pytest.approx(1 / (1 - (1 - 1 / 4096) ** 16))
    assert least_step("interleaved_1f1b", 16, 32, 4096, 1 / 3).forward == 256.0
    assert bound == simple_least_step("1f1b", 16, 16, 4096)


def test_schedules_are_checked():
    """A schedule that does not suit the sizes is an error."""
    with pytest.raises(PipelineError):
        least_step("1f1b", 4, 4, 2, 1 / 3)
