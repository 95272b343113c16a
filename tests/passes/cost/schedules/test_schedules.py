"""Orders of actions against those of torch's schedules, and what a schedule asks for."""

from collections.abc import Sequence
from functools import cache
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from passes.cost.schedules import (
    SCHEDULES,
    Action,
    Held,
    action_graph,
    check_schedule,
    held_together,
    in_flight,
    rank_of_stage,
    schedule_actions,
)
from passes.cost.schedules.actions import Actions
from passes.ir.errors import PipelineError

CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb_h1": torch_schedules.ScheduleInterleavedZeroBubble,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _stages_of(schedule: str, ranks: int) -> list[int]:
    kind = SCHEDULES[schedule]
    return [each * ranks for each in range(kind.least, (kind.most or 3) + 1)]


def _accepts(schedule: str, ranks: int, stages: int, micro_batches: int) -> bool:
    try:
        check_schedule(schedule, ranks, stages, micro_batches)
    except PipelineError:
        return False
    return True


SIZES = [
    (schedule, ranks, stages, micro_batches)
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 4)
    for stages in _stages_of(schedule, ranks)
    for micro_batches in (1, 2, 3, 4, 5, 7, 8, 9, 12)
]
ACCEPTED = [size for size in SIZES if _accepts(*size)]


@cache
def _stage() -> mock.NonCallableMagicMock:
    return mock.create_autospec(PipelineStage, instance=True)


def _torch_order(schedule: str, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of the class in torch. Stages are mocks, so that no process group is needed."""
    stage = _stage()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, stages, None
    single = issubclass(CLASSES[schedule], torch_schedules.PipelineScheduleSingle)
    made = CLASSES[schedule](stage if single else [stage] * (stages // ranks), micro_batches)
    order = made.pipeline_order if not single else made._get_pipeline_order()
    return tuple(tuple(_converted(order[rank])) for rank in range(ranks))


def _converted(order: list) -> list[Action]:
    flat = [each for action in order if action is not None for each in action.sub_actions or (action,)]
    computed = [each for each in flat if each.computation_type.name in KINDS]
    return [Action(KINDS[each.computation_type.name], each.stage_index, each.microbatch_index) for each in computed]


@pytest.mark.parametrize("schedule", CLASSES)
def test_orders_are_those_of_torch(schedule: str) -> None:
    sizes = [size for size in ACCEPTED if size[0] == schedule]
    assert len(sizes) > 10
    for size in sizes:
        assert schedule_actions(*size) == _torch_order(*size), size


@pytest.mark.parametrize("schedule", CLASSES)
def test_sizes_that_torch_refuses_are_refused(schedule: str) -> None:
    for size in SIZES:
        if size[0] == schedule and size not in ACCEPTED:
            with pytest.raises(ValueError, match=r"micro-?batches"):
                _torch_order(*size)


class _Recorded(torch_schedules.Schedule1F1B):
    """1F1B with a stage that records what it is told to compute. (What the class says of its order is wrong: its last
    rank would begin with the second micro-batch.)"""

    def _initialize_stage(self, *args: object) -> None:
        pass

    def _maybe_compute_loss(self, *args: object) -> None:
        pass

    def _maybe_get_loss(self, *args: object) -> None:
        return None


def test_1f1b_is_what_the_class_of_torch_runs() -> None:
    for schedule, ranks, stages, micro_batches in ACCEPTED:
        if schedule != "1f1b":
            continue
        expected = []
        for rank in range(ranks):
            stage = _stage()
            stage.stage_index, stage.num_stages, stage.has_backward, stage.is_last = rank, stages, True, False
            order = list[Action]()
            stage.forward_one_chunk.side_effect = lambda number, *_, o=order, r=rank, **__: o.append(
                Action("F", r, number)
            )
            stage.backward_one_chunk.side_effect = lambda number, o=order, r=rank, **_: o.append(Action("B", r, number))
            for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
                getattr(stage, name).return_value = []
            made = _Recorded(stage, micro_batches)
            made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
            expected.append(tuple(order))
        assert schedule_actions(schedule, ranks, stages, micro_batches) == tuple(expected)


def test_every_order_is_complete_and_ends() -> None:
    for size in ACCEPTED:
        schedule, ranks, stages, micro_batches = size
        actions = schedule_actions(*size)
        stage_ranks = rank_of_stage(schedule, ranks, stages)
        graph = action_graph(actions, stage_ranks)
        done = {(each.kind, each.stage, each.micro_batch) for each in graph.actions}
        assert len(done) == len(graph.actions)
        places = [(stage, each) for stage in range(stages) for each in range(micro_batches)]
        assert all(("F", *place) in done for place in places)
        assert all((("B", *place) in done) != ({("I", *place), ("W", *place)} <= done) for place in places)
        assert all(stage_ranks[each.stage] == rank for rank, order in enumerate(actions) for each in order)


def saved_together(actions: Actions, weights: Sequence[float]) -> tuple[int, ...]:
    """By stage the micro-batches with saved tensors, where each has one count."""
    return tuple(item.saved for (item,) in held_together(actions, weights))


def test_stages_of_a_rank_are_not_fullest_at_once() -> None:
    """Of 4 ranks with 3 stages each, rank r goes forward 8 + 2 (3 - r) times before it first goes back."""
    actions = schedule_actions("interleaved_1f1b", 4, 12, 12)
    together, most = saved_together(actions, [1.0] * 12), in_flight(actions, 12)
    assert [sum(together[rank::4]) for rank in range(4)] == [15, 13, 11, 9]
    assert all(own <= other for own, other in zip(together, most, strict=True))
    assert sum(together) < sum(most)
    # The stage that leaves more counts more.
    heavy = saved_together(actions, [1.0] * 4 + [0.0] * 8)
    assert heavy[:4] == most[:4]
    plain = schedule_actions("1f1b", 4, 4, 9)
    assert saved_together(plain, [1.0] * 4) == in_flight(plain, 4)


def test_micro_batches_in_flight() -> None:
    assert in_flight(schedule_actions("gpipe", 4, 4, 9), 4) == (9, 9, 9, 9)
    assert in_flight(schedule_actions("1f1b", 4, 4, 9), 4) == (4, 3, 2, 1)
    # ZB-H1 keeps the memory of 1F1B on its first rank, and takes no more on the others (Qi et al. 2023).
    assert in_flight(schedule_actions("zb_h1", 4, 4, 8), 4) == (4, 4, 4, 4)
    # The two stages of a rank hold as much together as p stages of 1F1B (Qi et al. 2024): 2 p half stages, and one
    # more where DualPipeV runs a forward and a backward pass at once.
    for stage, other in zip((8, 7, 6, 5), (1, 2, 3, 4), strict=True):
        counts = in_flight(schedule_actions("zbv", 4, 8, 12), 8)
        assert (counts[8 - stage], counts[8 - other]) == (stage, other)


def test_micro_batches_that_hold_tensors() -> None:
    """Those with saved tensors, and those whose gradients of weights are left, at the times of most of either."""
    assert held_together(schedule_actions("gpipe", 2, 2, 3), [1.0] * 2) == ((Held(3),), (Held(3),))
    # One micro-batch more waits on each further rank, and one less is saved.
    assert held_together(schedule_actions("zb_h1", 3, 3, 6), [1.0] * 3) == ((Held(3),), (Held(2, 1),), (Held(1, 2),))
    for size in ACCEPTED:
        actions = schedule_actions(*size)
        for most, every in zip(in_flight(actions, size[2]), held_together(actions, [1.0] * size[2]), strict=True):
            assert max(each.saved + each.left for each in every) <= most
            assert not any(one <= other for one in every for other in every if one != other)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (("2f2b", 2, 2, 2), r"no pipeline schedule '2f2b': use one of gpipe, 1f1b"),
        (("1f1b", 0, 0, 2), "at least 1 rank, but 0"),
        (("1f1b", 2, 4, 4), r"1 stage\(s\) on each rank, so 2 on 2 ranks, but 4"),
        (("zbv", 2, 6, 4), r"2 stage\(s\) on each rank, so 4 on 2 ranks, but 6"),
        (("interleaved_1f1b", 4, 4, 4), "at least 2, but 4 are given for 4 ranks: use a multiple of 4 from 8 on"),
        (("interleaved_1f1b", 4, 10, 4), "but 10 are given for 4 ranks: use a multiple of 4 from 8 on"),
        (("gpipe", 2, 2, 0), "at least 1 micro-batch, but 0"),
        (("1f1b", 4, 4, 3), "as many micro-batches as stages, but 3 are given for 4 stages: use 4 or more"),
        (("dualpipev", 2, 4, 3), "as many micro-batches as stages, but 3 are given for 4 stages: use 4 or more"),
        (("zb_h1", 4, 4, 9), r"9 micro-batches on 4 ranks in 2 rounds, which must be equally long: use 12"),
    ],
)
def test_what_does_not_suit_is_refused(size: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        check_schedule(*size)


def test_v_and_loop() -> None:
    assert rank_of_stage("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert rank_of_stage("interleaved_1f1b", 3, 6) == (0, 1, 2, 0, 1, 2)
