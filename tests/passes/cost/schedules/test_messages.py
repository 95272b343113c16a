"""Messages that have arrived for certain, against what happens in random orders of the ranks' actions."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from passes.cost.schedules import (
    SCHEDULES,
    Action,
    Message,
    action_graph,
    arrivals,
    messages_held,
    rank_of_stage,
    schedule_actions,
)

ALONE = [name for name, kind in SCHEDULES.items() if kind.sends_alone]


def _sizes(name: str, most_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Ranks, stages and numbers of micro-batches."""
    for ranks in range(2, most_ranks + 1):
        for per_rank in (1, 2, 4):
            if SCHEDULES[name].has(per_rank):
                yield from ((ranks, per_rank * ranks, count) for count in (2 * per_rank * ranks, 8 * per_rank * ranks))


def _actions(name: str, ranks: int, stages: int, count: int) -> tuple[Sequence[Sequence[Action]], tuple[int, ...]]:
    return schedule_actions(name, ranks, stages, count), rank_of_stage(name, ranks, stages)


def _sent(action: Action, places: Sequence[int]) -> Message | None:
    """The message that an action sends to another rank."""
    other = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= other < len(places) or places[other] == places[action.stage]:
        return None
    return Message("F" if action.kind == "F" else "B", action.stage, action.micro_batch)


@pytest.mark.parametrize("name", ALONE)
def test_what_is_certain_has_happened_in_any_order(name: str) -> None:
    """Ranks go on at random, as far as they have what they wait for: whenever an action begins, its messages have been
    read by actions of other ranks that have ended."""
    generator = random.Random(0)
    for ranks, stages, count in _sizes(name, 4):
        actions, places = _actions(name, ranks, stages, count)
        graph = action_graph(actions, places)
        certain = [arrivals(actions, places, rank) for rank in range(ranks)]
        number_of = {action: number for number, action in enumerate(graph.actions)}
        # Messages by the action that reads them.
        read = {
            number: _sent(graph.actions[source], places)
            for number, (source, link) in enumerate(zip(graph.inputs, graph.links, strict=True))
            if link >= 0
        }
        orders = [[number_of[action] for action in order] for order in actions]
        done = {-1}
        ended: set[Message] = set()
        while any(orders):
            ready = [order for order in orders if order and graph.inputs[order[0]] in done]
            number = generator.choice(ready).pop(0)
            action = graph.actions[number]
            assert set(certain[graph.ranks[number]].get(action, ())) <= ended
            done.add(number)
            ended |= {message for message in (read.get(number),) if message is not None}


@pytest.mark.parametrize("most_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALONE)
def test_few_messages_are_under_way(name: str, most_ranks: int) -> None:
    """Tensors have arrived before the backward pass of their micro-batch; of each stage as many gradients are under way
    as are counted, at most. Each message is let go of once, all but those of the end."""
    for ranks, stages, count in _sizes(name, most_ranks):
        actions, places = _actions(name, ranks, stages, count)
        sent, held = messages_held(name, ranks, count)
        assert sent == 0
        for rank, order in enumerate(actions):
            certain = arrivals(actions, places, rank)
            under_way: Counter[Message] = Counter()
            for action in order:
                under_way.subtract(certain.get(action, ()))
                assert min(under_way.values(), default=0) >= 0
                if action.kind in "BI":
                    assert not under_way[Message("F", action.stage, action.micro_batch)]
                gradients = Counter(message.stage for message in +under_way if message.kind == "B")
                assert max(gradients.values(), default=0) <= held
                message = _sent(action, places)
                if message is not None:
                    under_way[message] += 1
