"""The order of every rank's actions.

GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019) have one stage per rank, interleaved 1F1B (Narayanan et al.
2021) several. ZB-H1 and its interleaved form (Qi et al. 2023) compute gradients of weights apart, and later; ZBV (Qi et
al. 2024) and DualPipeV (Liu et al. 2025, "cut in half") do so with two stages per rank in a V.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping

from passes.cost.schedules.actions import Action, Kind
from passes.cost.schedules.kinds import SCHEDULES, check_schedule, rounds_of

# The order of one rank: its number, the ranks, stages per rank, micro-batches.
Order = Callable[[int, int, int, int], list[Action]]


def _gpipe(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes."""
    kinds: tuple[Kind, ...] = ("F", "B")
    return [Action(kind, rank, each) for kind in kinds for each in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """As many forward passes as stages follow (this one included), then backward and forward in turns."""
    ahead = min(micro_batches, ranks - rank)
    order = [Action("F", rank, each) for each in range(ahead)]
    for each in range(micro_batches):
        order.append(Action("B", rank, each))
        if each + ahead < micro_batches:
            order.append(Action("F", rank, each + ahead))
    return order


def _turns(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[tuple[int, int, int]]:
    """Turn by turn, the stage that goes forward, the one that goes backward, and the micro-batch of both: all
    micro-batches of a round pass a rank's first stage, then its second, and so on; backward the last stage first."""
    rounds = rounds_of(ranks, micro_batches)
    long = micro_batches // rounds
    return [
        (each * ranks + rank, (per_rank - 1 - each) * ranks + rank, number * long + one)
        for number in range(rounds)
        for each in range(per_rank)
        for one in range(long)
    ]


def _ahead(rank: int, ranks: int, per_rank: int, micro_batches: int, hop: int) -> int:
    """Turns that a rank goes forward before its first backward pass: `hop` more for each rank that follows."""
    long = micro_batches // rounds_of(ranks, micro_batches)
    return min((per_rank - 1) * long + hop * (ranks - 1 - rank), micro_batches * per_rank)


def _interleaved(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """Forward passes ahead, then forward and backward in turns, then the backward passes that are left."""
    turns, ahead = _turns(rank, ranks, per_rank, micro_batches), _ahead(rank, ranks, per_rank, micro_batches, 2)
    order = [Action("F", stage, each) for stage, _, each in turns[:ahead]]
    for number, (_, stage, each) in enumerate(turns):
        if number + ahead < len(turns):
            forward, _, later = turns[number + ahead]
            order.append(Action("F", forward, later))
        order.append(Action("B", stage, each))
    return order


def _zero_bubble(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """As interleaved, with fewer passes ahead. Gradients of weights come `rank` turns after those of inputs, so that
    the ranks which wait longest at the end have most of them left to fill the time with."""
    turns, ahead = _turns(rank, ranks, per_rank, micro_batches), _ahead(rank, ranks, per_rank, micro_batches, 1)
    order = [Action("F", stage, each) for stage, _, each in turns[:ahead]]
    for number in range(len(turns) + rank):
        if number + ahead < len(turns):
            order.append(Action("F", turns[number + ahead][0], turns[number + ahead][2]))
        if number < len(turns):
            order.append(Action("I", *turns[number][1:]))
        if 0 <= number - rank < len(turns):
            order.append(Action("W", *turns[number - rank][1:]))
    return order


class _Written:
    """A rank's order as it is written: each action takes the next micro-batch of its kind and stage."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.count = Counter[tuple[Kind, int]]()
        # Gradients of weights that are due, oldest first.
        self.due = deque[tuple[int, int]]()

    def add(self, stage: int, kinds: str) -> None:
        """Append actions of a stage, one for each letter."""
        for kind in kinds:
            if kind == "F":
                self._append("F", stage)
            elif kind == "I":
                self.due.append((stage, self.count["I", stage]))
                self._append("I", stage)
            elif kind == "W":
                self._append("W", stage)
            else:
                self.order.append(Action("B", stage, self.count["I", stage]))
                self.count["I", stage] += 1

    def _append(self, kind: Kind, stage: int) -> None:
        self.order.append(Action(kind, stage, self.count[kind, stage]))
        self.count[kind, stage] += 1

    def add_due(self) -> None:
        """Append the oldest gradients of weights that are due, if any are."""
        if self.due:
            self.order.append(Action("W", *self.due.popleft()))


def _zbv(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """Written for as many micro-batches as fill the pipeline; those that there are not are left out."""
    down, up = rank, 2 * ranks - 1 - rank
    written, full = _Written(), max(2 * ranks - 1, micro_batches)
    written.add(down, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        written.add(up, "F")
        written.add(down, "F")
    for _ in range(ranks - rank):
        written.add(up, "FIW")
    while written.count["F", up] < full:
        written.add(down, "FIW" if written.count["F", down] < full else "IW")
        written.add(up, "FIW")
    for _ in range(rank):
        written.add(down, "I")
        written.add(up, "I")
    for _ in range(ranks - rank):
        written.add(down, "IW")
    for stage in (up, down):
        written.add(stage, "W" * (full - written.count["W", stage]))
    return [action for action in written.order if action.micro_batch < micro_batches]


def _dualpipev(rank: int, ranks: int, per_rank: int, micro_batches: int) -> list[Action]:
    """The steps of DualPipeV; a forward and a backward pass that it overlaps come one after the other."""
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    written = _Written()
    written.add(down, "F" * (2 * after))
    for _ in range(rank + 1):
        written.add(down, "F")
        written.add(up, "F")
    for _ in range(after):
        written.add(up, "I")
        written.add_due()
        written.add(up, "F")
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        for forward, backward in ((down, up), (up, down)):
            written.add(forward, "F")
            written.add(backward, "B")
    for _ in range(after):
        written.add(up, "BF")
        written.add(down, "B")
    # The first half of these are whole; the other half leave gradients of weights to fill the rest.
    for number in range(2 * rank + 2):
        written.add((up, down)[number % 2], "B" if number <= rank else "I")
    for _ in range(after):
        written.add_due()
        written.add(down, "I")
    while written.due:
        written.add_due()
    return written.order


_ORDERS: Mapping[str, Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "zb_h1": _zero_bubble,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
assert _ORDERS.keys() == SCHEDULES.keys()


def schedule_actions(schedule: str, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, in order. Raises PipelineError where the schedule does not suit the sizes."""
    check_schedule(schedule, ranks, stages, micro_batches)
    order = _ORDERS[schedule]
    return tuple(tuple(order(rank, ranks, stages // ranks, micro_batches)) for rank in range(ranks))
