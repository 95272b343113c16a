"""The actions of a pipeline, and what each one waits for."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.ir.errors import PipelineError

Kind = Literal["F", "B", "I", "W"]
# What an action does to its stage, as the figures of `StageSeconds` that its time is the sum of.
FORWARD, BACKWARD, WEIGHT = 0, 1, 2
PARTS: dict[str, tuple[int, ...]] = {"F": (FORWARD,), "B": (BACKWARD, WEIGHT), "I": (BACKWARD,), "W": (WEIGHT,)}


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch: "F" its forward pass, "B" its whole backward pass, "I" the gradients of its
    inputs alone, "W" those of its weights."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class ActionGraph:
    """All actions in an order in which they may be computed: each one after those that it waits for.

    Action n is `actions[n]`, on rank `ranks[n]`. It waits for `before[n]`, the action before it on its rank, and
    for `inputs[n]`, which makes its input in another stage (-1: for none). That input is sent forward over the boundary
    after stage `links[n]` where the action is a forward pass, and else back over it (-1: not sent at all, since both
    stages are on one rank or there is no input).
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[int, ...]
    inputs: tuple[int, ...]
    links: tuple[int, ...]


def _needs(action: Action, stages: int) -> tuple[tuple[str, int, int], ...]:
    """Actions that come before an action, as (group of kinds, stage, micro-batch); the input comes first."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return (("F", stage - 1, micro_batch),) if stage else ()
    if action.kind == "W":
        return (("I", stage, micro_batch),)
    own = ("F", stage, micro_batch)
    return (own,) if stage == stages - 1 else (("I", stage + 1, micro_batch), own)


def action_graph(actions: Actions, stage_ranks: Sequence[int]) -> ActionGraph:
    """The graph of the actions of all ranks. Raises PipelineError where they wait for each other for ever, so that
    the pipeline would never end."""
    stages = len(stage_ranks)
    done = dict[tuple[str, int, int], int]()
    ordered: list[tuple[Action, int, int, int, int]] = []
    last, cursors = [-1] * len(actions), [0] * len(actions)
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(len(actions)))
    while ready:
        rank = ready.pop()
        while cursors[rank] < len(actions[rank]):
            action = actions[rank][cursors[rank]]
            needs = _needs(action, stages)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            source, link = -1, -1
            if needs and needs[0][1] != action.stage:
                source, other = done[needs[0]], needs[0][1]
                link = -1 if stage_ranks[other] == stage_ranks[action.stage] else min(other, action.stage)
            number = len(ordered)
            ordered.append((action, rank, last[rank], source, link))
            last[rank] = number
            key = ("I" if action.kind == "B" else action.kind, action.stage, action.micro_batch)
            done[key] = number
            ready += waiting.pop(key, ())
            cursors[rank] += 1
    for rank, cursor in enumerate(cursors):
        if cursor < len(actions[rank]):
            raise PipelineError(
                f"The pipeline would never end: rank {rank} waits for ever before action {actions[rank][cursor]}."
            )
    columns = tuple(zip(*ordered, strict=True)) or ((),) * 5
    return ActionGraph(*columns)


def in_flight(actions: Actions, stages: int) -> tuple[int, ...]:
    """For each stage, the most micro-batches whose forward pass has begun and whose last backward action has not ended.

    The actions of a stage are on one rank, one after the other, so that their order alone tells it, whatever they take.
    """
    most = [0] * stages
    for order in actions:
        last = {(action.stage, action.micro_batch): action for action in order}
        alive = [0] * stages
        for action in order:
            if action.kind == "F":
                alive[action.stage] += 1
                most[action.stage] = max(most[action.stage], alive[action.stage])
            if last[action.stage, action.micro_batch] is action:
                alive[action.stage] -= 1
    return tuple(most)


@dataclass(frozen=True, slots=True)
class Held:
    """Micro-batches of a stage that hold tensors at a time: those with tensors `saved` for their backward pass (the one
    that runs among them), and those whose gradients of weights are `left` to compute."""

    saved: int
    left: int = 0

    def __le__(self, other: "Held") -> bool:
        return self.saved <= other.saved and self.left <= other.left


def held_together(actions: Actions, weights: Sequence[float]) -> tuple[tuple[Held, ...], ...]:
    """For each stage, the micro-batches that hold tensors while a forward or backward pass runs on its rank.

    Of a rank's only stage these are all counts that no other is at least as large as in both respects. Stages of one
    rank are not all fullest at once: of several, the counts are those of the moment when the rank holds most, by the
    sum over its stages of their micro-batches times `weights`, and one for a stage that then holds none.
    """
    found: list[tuple[Held, ...]] = [()] * len(weights)
    for order in actions:
        moments = list(_held(order))
        stages = set().union(*moments)
        if len(stages) == 1:
            (stage,) = stages
            found[stage] = tuple(_most([counts[stage] for counts in moments]))
            continue
        sums = [sum(weights[at] * (item.saved + item.left) for at, item in counts.items()) for counts in moments]
        fullest = moments[sums.index(max(sums))]
        for stage in stages:
            counts = fullest.get(stage, Held(0))
            found[stage] = (counts if counts.saved + counts.left else Held(1),)
    return tuple(found)


def _held(order: Sequence[Action]) -> Iterator[Mapping[int, Held]]:
    """By stage the micro-batches that hold tensors, for each forward and backward pass of a rank."""
    saved, left = Counter[int](), Counter[int]()
    for action in order:
        stage = action.stage
        saved[stage] += action.kind == "F"
        left[stage] -= action.kind == "W"
        if action.kind != "W":
            yield {at: Held(saved[at], left[at]) for at in saved}
        saved[stage] -= action.kind in "BI"
        left[stage] += action.kind == "I"


def _most(every: Sequence[Held]) -> list[Held]:
    """Those that no other is at least as many as."""
    distinct = list(dict.fromkeys(every))
    return [item for item in distinct if not any(item <= other and item != other for other in distinct)]
