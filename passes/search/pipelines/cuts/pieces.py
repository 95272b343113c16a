"""A program in positions as arrays, and the pipeline's step as the longest of many linear costs of its cuts.

The step of a pipeline is the length of the longest path through its actions. What a path takes is linear in the seconds
of stages and boundaries: a `Path` counts how often it passes each. So the cost of any path, and of any mean of paths,
is a lower bound on the step, and splits into a sum over stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.schedules import (
    Action,
    ActionGraph,
    Held,
    StageSeconds,
    action_graph,
    rank_of_stage,
    schedule_actions,
)
from passes.ir.arrays import Flags, Floats, Integers


@dataclass(frozen=True)
class Position:
    """A piece of a program that cannot be cut."""

    seconds: StageSeconds


@dataclass(frozen=True)
class Boundary:
    """A place before a position where a program may be cut: seconds to send what crosses it for one micro-batch, and
    its gradient back."""

    send_s: float
    gradient_send_s: float


# Whether positions first to last (exclusive) fit as a stage, with these micro-batches that hold tensors at a time.
Fits = Callable[[int, int, int, Sequence[Held]], bool]
# How often a path passes each stage: rows are forward, backward, weights, the send into it, the gradient's out of it.
# Shape [5, stages].
Path = Floats


@dataclass(frozen=True)
class Pieces:
    """Positions as arrays: `sums[part, i]` are the seconds of all positions before i (parts: forward, backward,
    weights), `sends[part, i]` those of a cut before i (parts: send, gradient's), 0 at the ends; `may_cut[i]` is true
    where a cut is allowed."""

    sums: Floats
    sends: Floats
    may_cut: Flags

    @property
    def count(self) -> int:
        """The number of positions."""
        return len(self.may_cut) - 1

    def stages(self, cuts: Integers) -> tuple[Floats, Floats]:
        """Seconds [3, stages] of the stages between cuts (0 and the number of positions included), and seconds
        [2, stages] of the cuts before them."""
        return np.diff(self.sums[:, cuts], axis=1), self.sends[:, cuts[:-1]]

    def features(self, cuts: Integers) -> Floats:
        """Factors of the counts of a path (seconds), [..., 5, stages], for cuts of shape [..., stages + 1]."""
        seconds = np.diff(np.moveaxis(self.sums[:, cuts], 0, -2), axis=-1)
        return np.concatenate([seconds, np.moveaxis(self.sends[:, cuts[..., :-1]], 0, -2)], axis=-2)


def pieces_of(positions: Sequence[Position], boundaries: Sequence[Boundary | None]) -> Pieces:
    """The arrays of a program in positions."""
    if len(positions) != len(boundaries):
        raise ValueError(f"{len(positions)} positions have as many boundaries before them, but {len(boundaries)} came")
    seconds = [(each.seconds.forward, each.seconds.backward, each.seconds.weight) for each in positions]
    sums = np.zeros((3, len(positions) + 1))
    sums[:, 1:] = np.cumsum(np.array(seconds).reshape(-1, 3), axis=0).T
    inner = [None, *boundaries[1:], None]
    sends = np.array([(0.0, 0.0) if each is None else (each.send_s, each.gradient_send_s) for each in inner]).T
    return Pieces(sums, sends, np.array([each is not None for each in inner]))


_KINDS = ("F", "B", "I", "W")


class Pipeline:
    """The actions of a schedule, prepared to be simulated with many seconds."""

    def __init__(self, schedule: str, ranks: int, stages: int, micro_batches: int) -> None:
        self.ranks, self.stages, self.micro_batches = ranks, stages, micro_batches
        self.actions: tuple[tuple[Action, ...], ...] = schedule_actions(schedule, ranks, stages, micro_batches)
        self.stage_ranks = rank_of_stage(schedule, ranks, stages)
        graph = action_graph(self.actions, self.stage_ranks)
        self._rows = self._prepared(graph)

    @property
    def size(self) -> int:
        """The number of actions."""
        return len(self._rows)

    def _prepared(self, graph: ActionGraph) -> list[tuple[int, int, int, int]]:
        """For each action: its kind and stage as one number, the actions before it (0: none, else from 1), and the
        number of the transfer: the stage that it goes into or comes out of, behind all stages if back, 0 if none."""
        rows = []
        for action, before, source, link in zip(graph.actions, graph.before, graph.inputs, graph.links, strict=True):
            code = _KINDS.index(action.kind) * self.stages + action.stage
            crossed = 0 if link < 0 else link + 1 + (0 if action.kind == "F" else self.stages)
            rows.append((code, before + 1, source + 1, crossed))
        return rows

    def longest(self, seconds: Floats, sends: Floats) -> tuple[float, Path]:
        """The step (seconds) and a path of actions that takes as long. `seconds` [3, stages] and `sends` [2, stages] as
        `Pieces.stages` gives them."""
        forward, backward, weight = seconds
        takes = np.concatenate([forward, backward + weight, backward, weight]).tolist()
        crossing = sends.ravel().tolist()
        ends = [0.0]
        for code, before, source, crossed in self._rows:
            free, arrived = ends[before], ends[source] + crossing[crossed]
            ends.append((free if free > arrived else arrived) + takes[code])
        number = int(np.argmax(ends))
        counts, crossings = [0] * len(takes), [0] * len(crossing)
        step_s = ends[number]
        while number:
            code, before, source, crossed = self._rows[number - 1]
            counts[code] += 1
            number = before
            if ends[source] + crossing[crossed] > ends[before]:
                number = source
                crossings[crossed] += 1
        f, b, i, w = np.array(counts, dtype=np.float64).reshape(4, -1)
        sent = np.array(crossings, dtype=np.float64).reshape(2, -1)
        return step_s, np.vstack([f, b + i, b + w, sent])
