"""Timelines against published formulas, by hand and against the bound."""

import random

import pytest

from passes.cost.schedules import (
    SCHEDULES,
    Action,
    StageSeconds,
    Timeline,
    rank_of_stage,
    schedule_actions,
    simulate,
    step_bound,
)
from passes.ir.configuration import IN_A_V, SPLITTING
from passes.ir.errors import PipelineError

# Sizes that suit a schedule with `per_rank` stages on each of 4 ranks.
PER_RANK = {name: kind.most or 3 for name, kind in SCHEDULES.items()}


def _equal(schedule: str, ranks: int, micro_batches: int, seconds: StageSeconds) -> Timeline:
    stages = ranks * PER_RANK[schedule]
    actions, stage_ranks = (
        schedule_actions(schedule, ranks, stages, micro_batches),
        rank_of_stage(schedule, ranks, stages),
    )
    return simulate(actions, stage_ranks, [seconds] * stages, [0.0] * (stages - 1), [0.0] * (stages - 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seconds", [StageSeconds(1.0, 1.0, 1.0), StageSeconds(1.0, 1.25, 0.75)])
def test_bubbles_are_those_of_the_papers(ranks: int, seconds: StageSeconds) -> None:
    # Qi et al. 2023, table 1: (p - 1)(F + B + W), and (p - 1)(F + B - W) for ZB-H1. GPipe: Huang et al. 2019.
    forward, backward, weight = seconds.forward, seconds.backward, seconds.weight
    expected = {
        "gpipe": (ranks - 1) * (forward + backward + weight),
        "1f1b": (ranks - 1) * (forward + backward + weight),
        "zb_h1": (ranks - 1) * (forward + backward - weight),
    }
    for schedule, bubble in expected.items():
        timeline = _equal(schedule, ranks, 4 * ranks, seconds)
        assert [timeline.bubble_s(rank) for rank in range(ranks)] == pytest.approx([bubble] * ranks, rel=1e-12)


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    # Narayanan et al. 2021, section 2.2: the stages of a rank together take as long as one stage without.
    for seconds in (StageSeconds(1.0, 2.0), StageSeconds(1.0, 1.7)):
        timeline = _equal("interleaved_1f1b", 4, 16, seconds)
        expected = 3 * (seconds.forward + seconds.backward)
        assert [timeline.bubble_s(rank) for rank in range(4)] == pytest.approx([expected] * 4, rel=1e-12)


def test_bubble_of_the_v_schedules() -> None:
    # Qi et al. 2024: no bubble but before the first passes and after the last, where F, B and W take the same.
    timeline = _equal("zbv", 4, 16, StageSeconds(1.0, 1.0, 1.0))
    assert timeline.bubble_s(0) == pytest.approx(3.0)
    assert timeline.step_s == pytest.approx(2 * 3 * 16 + 3)


def test_sends_take_place_beside_computation() -> None:
    seconds, sends = [StageSeconds(1.0, 2.0), StageSeconds(3.0, 4.0)], ([0.5], [0.25])
    timeline = simulate(schedule_actions("gpipe", 2, 2, 2), (0, 1), seconds, *sends)
    assert timeline.starts == ((0.0, 1.0, 11.75, 15.75), (1.5, 4.5, 7.5, 11.5))
    assert timeline.ends == ((1.0, 2.0, 13.75, 17.75), (4.5, 7.5, 11.5, 15.5))
    assert (timeline.step_s, timeline.busy_s) == (17.75, (6.0, 14.0))
    assert timeline.bubble_s(0) == 11.75
    assert timeline.in_flight == (2, 2)


def test_nothing_is_sent_within_a_rank() -> None:
    actions = schedule_actions("zbv", 1, 2, 2)
    timeline = simulate(actions, (0, 0), [StageSeconds(1.0, 1.0, 1.0)] * 2, [100.0], [100.0])
    assert timeline.step_s == 12.0


def test_drawing() -> None:
    timeline = simulate(schedule_actions("gpipe", 2, 2, 1), (0, 1), [StageSeconds(1.0, 2.0)] * 2, [0.0], [0.0])
    assert timeline.drawn(7 + 12) == "rank 0 FF......BBBB\nrank 1 ..FFBBBB...."
    assert {len(row) for row in _equal("zbv", 4, 9, StageSeconds(1.0, 2.0, 0.5)).drawn(1000).splitlines()} == {120}


def test_actions_that_wait_for_each_other_are_refused() -> None:
    actions = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(PipelineError, match="rank 0 waits for ever before action 0B0"):
        simulate(actions, (0, 1), [StageSeconds(1.0, 1.0)] * 2, [0.0], [0.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_takes_less_than_the_bound(schedule: str) -> None:
    chance = random.Random(schedule)
    tight = 0
    for number in range(40):
        ranks = chance.choice((2, 3, 4))
        stages = PER_RANK[schedule] * ranks
        micro_batches = ranks * chance.choice((2, 3, 5))
        seconds = [
            StageSeconds(*(chance.choice((0.5, 1.0, 3.0) if number else (1.0,)) for _ in range(3)))
            for _ in range(stages)
        ]
        stage_ranks = rank_of_stage(schedule, ranks, stages)
        sends = [chance.choice((0.0, 0.0, 0.3) if number else (0.0,)) for _ in range(stages - 1)]
        bound = step_bound(schedule, ranks, seconds, micro_batches)
        for other, kind in SCHEDULES.items():
            # The orders of all schedules that place the stages so, and split weights or not alike.
            same = (kind.least, other in IN_A_V, other in SPLITTING) == (
                SCHEDULES[schedule].least,
                schedule in IN_A_V,
                schedule in SPLITTING,
            )
            if same:
                actions = schedule_actions(other, ranks, stages, micro_batches)
                step_s = simulate(actions, stage_ranks, seconds, sends, sends).step_s
                assert step_s >= bound * (1 - 1e-12)
                tight += step_s <= bound * (1 + 1e-9)
    # A bound that is never reached would also hold if it were 0.
    assert tight > 0
