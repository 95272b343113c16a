"""The time that a pipeline takes: a simulation of its actions, and a bound on all orders of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from passes.cost.schedules.actions import PARTS, Action, ActionGraph, Actions, action_graph, in_flight
from passes.cost.schedules.kinds import rank_of_stage
from passes.ir.configuration import SPLITTING

_COLUMNS = 120


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage for one micro-batch: the forward pass, the backward pass without gradients of weights, and
    those. A whole backward pass takes the sum of both, so that where a schedule does not split them, `weight` may be
    part of `backward`."""

    forward: float
    backward: float
    weight: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When each action of a pipeline starts and ends (seconds from the start of the step), by rank and in its order.

    `busy_s` are the seconds in which each rank computes. `in_flight` is, for each stage, the most micro-batches whose
    forward pass has begun and whose last backward action has not ended.
    """

    step_s: float
    busy_s: tuple[float, ...]
    actions: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    in_flight: tuple[int, ...]

    def bubble_s(self, rank: int) -> float:
        """Seconds of the step in which a rank does not compute."""
        return self.step_s - self.busy_s[rank]

    def drawn(self, columns: int = _COLUMNS) -> str:
        """The timeline as text: a row for each rank, a column for each equal part of the step. A column has the kind
        of the action (F, B, I, W) that the rank computes in its middle, "." where the rank waits."""
        names = [f"rank {rank}" for rank in range(len(self.actions))]
        room = max((len(name) for name in names), default=0) + 1
        width = max(1, min(columns, _COLUMNS) - room)
        rows = []
        for name, *row in zip(names, self.actions, self.starts, self.ends, strict=True):
            cells = ["."] * width
            for action, start, end in zip(*row, strict=True):
                for cell in range(int(start / self.step_s * width), width) if self.step_s else ():
                    middle = (cell + 0.5) / width * self.step_s
                    if middle >= end:
                        break
                    if middle >= start:
                        cells[cell] = action.kind
            rows.append(name.ljust(room) + "".join(cells))
        return "\n".join(rows)


def action_ends(
    graph: ActionGraph, seconds: Sequence[StageSeconds], sends: Sequence[float], gradient_sends: Sequence[float]
) -> tuple[list[float], list[float]]:
    """When each action of the graph starts and ends (seconds): as soon as its rank is free and its input is there."""
    parts = [(each.forward, each.backward, each.weight) for each in seconds]
    takes = {kind: [sum(each[part] for part in own) for each in parts] for kind, own in PARTS.items()}
    starts, ends = list[float](), list[float]()
    for action, before, source, link in zip(graph.actions, graph.before, graph.inputs, graph.links, strict=True):
        start = ends[before] if before >= 0 else 0.0
        if source >= 0:
            arrived = ends[source]
            if link >= 0:
                arrived += sends[link] if action.kind == "F" else gradient_sends[link]
            start = max(start, arrived)
        starts.append(start)
        ends.append(start + takes[action.kind][action.stage])
    return starts, ends


def simulate(
    actions: Actions,
    stage_ranks: Sequence[int],
    seconds: Sequence[StageSeconds],
    sends: Sequence[float],
    gradient_sends: Sequence[float],
) -> Timeline:
    """Simulate a pipeline.

    An action starts when its rank is free, in the rank's order, and its input has arrived. What a stage makes is sent
    as soon as it is complete, beside all computation: `sends[s]` seconds from stage s to s + 1, `gradient_sends[s]`
    for the gradient on its way back. Between two stages of one rank nothing is sent.

    Args:
        actions: the actions of each rank, in order.
        stage_ranks: the rank of each stage.
        seconds: of each stage.
        sends: seconds of one micro-batch, for each stage but the last.
        gradient_sends: likewise, back.

    Raises PipelineError where actions wait for each other for ever.
    """
    graph = action_graph(actions, stage_ranks)
    starts, ends = action_ends(graph, seconds, sends, gradient_sends)
    by_rank: list[tuple[list[float], list[float]]] = [([], []) for _ in actions]
    for rank, start, end in zip(graph.ranks, starts, ends, strict=True):
        by_rank[rank][0].append(start)
        by_rank[rank][1].append(end)
    busy = [sum(end - start for start, end in zip(*both, strict=True)) for both in by_rank]
    return Timeline(
        max(ends, default=0.0),
        tuple(busy),
        tuple(tuple(each) for each in actions),
        tuple(tuple(each) for each, _ in by_rank),
        tuple(tuple(each) for _, each in by_rank),
        in_flight(actions, len(stage_ranks)),
    )


def step_bound(schedule: str, ranks: int, seconds: Sequence[StageSeconds], micro_batches: int) -> float:
    """A lower bound (seconds) on the step, in any order of the actions that keeps stages where the schedule puts them.

    Let s be the lowest stage of a rank. Proof of the bound for each rank:

    - The rank's first action is a forward pass, before which the micro-batch passed all stages below s, all of them on
      other ranks: `head` = sum of their forward seconds.
    - From then on the rank computes for at least `busy` = micro_batches * its stages' seconds: step >= head + busy.
    - The rank's last gradient of inputs (or whole backward pass) is one of stage s: after one of a higher stage, the
      micro-batch still has to come back to s. When it ends, the rank has computed all but some gradients of weights,
      and the micro-batch still passes back all stages below s, and has its gradients of weights computed in one of the
      stages up to s: the last of these ends no earlier than those of stage 0, which follow the whole way back.
      Hence step >= head + (busy without weights) + `tail`, with tail = sum of backward seconds below s, and weight
      seconds of stage 0. Without a split, a whole backward pass comes before the next stage's, so that every stage's
      weights count in both sums.

    Sends are left out, and a micro-batch's way through all stages and back is one more bound.
    """
    if schedule not in SPLITTING:
        seconds = [StageSeconds(each.forward, each.backward + each.weight) for each in seconds]
    stage_ranks = rank_of_stage(schedule, ranks, len(seconds))
    bound = sum(each.forward + each.backward for each in seconds) + seconds[0].weight
    for rank in range(ranks):
        lowest = stage_ranks.index(rank)
        own = [each for each, other in zip(seconds, stage_ranks, strict=True) if other == rank]
        head = sum(each.forward for each in seconds[:lowest])
        tail = sum(each.backward for each in seconds[:lowest]) + seconds[0].weight
        most = sum(each.forward + each.backward for each in own) * micro_batches
        bound = max(bound, head + most + tail, head + most + sum(each.weight for each in own) * micro_batches)
    return bound
