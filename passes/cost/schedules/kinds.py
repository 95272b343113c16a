"""The pipeline schedules: what each one asks of ranks, stages and micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from passes.ir.configuration import SPLITTING, stage_places
from passes.ir.errors import PipelineError


@dataclass(frozen=True)
class ScheduleKind:
    """Limits and properties of a schedule of any size.

    A rank has `least` to `most` stages (None: any number). `fills`: as many micro-batches as stages are needed.
    `rounds`: micro-batches come in max(1, micro_batches // ranks) rounds of equal size. `sends_alone`: messages are
    actions of their own, rather than sent together with what is received.
    """

    least: int = 1
    most: int | None = 1
    fills: bool = False
    rounds: bool = False
    sends_alone: bool = True

    def has(self, per_rank: int) -> bool:
        """Whether a rank may have so many stages."""
        return self.least <= per_rank and (self.most is None or per_rank <= self.most)


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "gpipe": ScheduleKind(sends_alone=False),
        "1f1b": ScheduleKind(fills=True, sends_alone=False),
        "interleaved_1f1b": ScheduleKind(least=2, most=None, rounds=True),
        "zb_h1": ScheduleKind(rounds=True),
        "interleaved_zero_bubble": ScheduleKind(least=2, most=None, rounds=True),
        "zbv": ScheduleKind(least=2, most=2),
        "dualpipev": ScheduleKind(least=2, most=2, fills=True),
    }
)
assert SCHEDULES.keys() >= SPLITTING


def _kind(schedule: str) -> ScheduleKind:
    if schedule not in SCHEDULES:
        raise PipelineError(f"There is no pipeline schedule '{schedule}': use one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[schedule]


def _check_stages(schedule: str, ranks: int, stages: int) -> None:
    kind = _kind(schedule)
    if ranks < 1:
        raise PipelineError(f"A pipeline has at least 1 rank, but {ranks} are given.")
    if kind.most is not None and stages != kind.most * ranks:
        raise PipelineError(
            f"The schedule {schedule} has {kind.most} stage(s) on each rank, so {kind.most * ranks} on {ranks} ranks, "
            f"but {stages} are given: interleaved_1f1b has several on a rank."
        )
    if stages < kind.least * ranks or stages % ranks:
        raise PipelineError(
            f"The schedule {schedule} has the same number of stages on each rank, at least {kind.least}, but "
            f"{stages} are given for {ranks} ranks: use a multiple of {ranks} from {kind.least * ranks} on."
        )


def rank_of_stage(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank that holds each stage. Raises PipelineError where the schedule does not suit ranks and stages."""
    _check_stages(schedule, ranks, stages)
    return stage_places(schedule, ranks, stages)


def rounds_of(ranks: int, micro_batches: int) -> int:
    """The number of rounds in which interleaved schedules run their micro-batches."""
    return max(1, micro_batches // ranks)


def messages_held(schedule: str, ranks: int, micro_batches: int) -> tuple[int, int]:
    """The number of micro-batches whose tensors a stage has sent, and of those whose gradients, that are held in memory
    although the stage itself does not need them any more, at the most. (Where they are sent alone, a gradient is
    until the stage hears of its arrival: `arrivals`.)"""
    return (0, min(ranks, micro_batches)) if _kind(schedule).sends_alone else (1, 1)


def check_schedule(schedule: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise PipelineError where the schedule does not suit ranks, stages and micro-batches."""
    _check_stages(schedule, ranks, stages)
    kind = SCHEDULES[schedule]
    if micro_batches < 1:
        raise PipelineError(f"A pipeline has at least 1 micro-batch, but {micro_batches} are given.")
    if kind.fills and micro_batches < stages:
        raise PipelineError(
            f"The schedule {schedule} needs at least as many micro-batches as stages, but {micro_batches} are given "
            f"for {stages} stages: use {stages} or more."
        )
    rounds = rounds_of(ranks, micro_batches)
    if kind.rounds and micro_batches % rounds:
        more = next(count for count in range(micro_batches + 1, 3 * (micro_batches + ranks)) if count % ranks == 0)
        raise PipelineError(
            f"The schedule {schedule} runs {micro_batches} micro-batches on {ranks} ranks in {rounds} rounds, which "
            f"must be equally long: use {more} micro-batches, or another multiple of {ranks}."
        )
