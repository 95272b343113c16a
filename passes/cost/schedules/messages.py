"""Messages between the stages of a pipeline: which have arrived for certain when an action begins.

A rank knows of another one's actions by the messages that it gets: who sends has ended all that it did before (vector
clocks; Fidge 1988, Mattern 1989). What another rank computes with has arrived there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from passes.cost.schedules.actions import Action, ActionGraph, Actions, action_graph


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors that a stage sends for a micro-batch: "F" forward to the next stage, "B" their gradients back to the
    stage before."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


def arrivals(actions: Actions, stage_ranks: Sequence[int], rank: int) -> Mapping[Action, tuple[Message, ...]]:
    """For forward and backward passes of `rank`, the messages of this rank that have arrived for certain when they
    begin, and of which this was not certain before."""
    graph = action_graph(actions, stage_ranks)
    positions, clocks = _clocks(graph, len(actions))
    # By the action that sends: the rank that computes with the message, and the number of that computation there.
    read = {
        source: (graph.ranks[number], positions[number])
        for number, (source, link) in enumerate(zip(graph.inputs, graph.links, strict=True))
        if link >= 0
    }
    found: dict[Action, tuple[Message, ...]] = {}
    waiting: dict[Message, tuple[int, int]] = {}
    for number, action in enumerate(graph.actions):
        if graph.ranks[number] != rank or action.kind == "W":
            continue
        ended = clocks[number]
        due = tuple(message for message, (other, place) in waiting.items() if ended[other] > place)
        if due:
            found[action] = due
            for message in due:
                del waiting[message]
        if number in read:
            kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
            waiting[Message(kind, action.stage, action.micro_batch)] = read[number]
    return found


def _clocks(graph: ActionGraph, ranks: int) -> tuple[list[int], np.ndarray]:
    """For each action its number on its rank, and how many actions of each rank have ended for certain when it has."""
    clocks = np.zeros((len(graph.actions), ranks), np.int32)
    positions: list[int] = []
    for number, (rank, before, source, link) in enumerate(
        zip(graph.ranks, graph.before, graph.inputs, graph.links, strict=True)
    ):
        own = clocks[number]
        if before >= 0:
            own[:] = clocks[before]
        if link >= 0:
            np.maximum(own, clocks[source], out=own)
        positions.append(int(own[rank]))
        own[rank] += 1
    return positions, clocks
