"""Pipelines of runs: the layers of their stages, their schedules, and what software does otherwise than the product.

The product's stages are simulated again, in the product's simulator, where software orders them in another way or waits
for what it sends. Their seconds stay the product's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.models import Family
from benchmarks.replay.graphs import Forced
from benchmarks.replay.parts import parameter_elements
from benchmarks.replay.records import Run
from passes.cost.schedules import (
    Action,
    StageSeconds,
    Timeline,
    rank_of_stage,
    schedule_actions,
    simulate,
)

# Schedules that the simulator has under the same order, by the name that sources use; those whose stages the product
# does not run are planned as the second one.
_GPIPE, _PLAIN, _INTERLEAVED, _H1, _H2 = "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"
# Schedules that compute gradients of weights apart from those of inputs.
SPLIT = frozenset((_H1, _H2))


def stage_layers(layers: int, stages: int, fills: bool = False) -> list[int]:
    """The number of layers of each stage: equal, or one less in the first and last (beside the embedding and the head),
    or as equal as possible; with `fills` every stage has the maximum and the last one the rest."""
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if fills:
        each = -(-layers // stages)
        return [max(0, min(each, layers - each * stage)) for stage in range(stages)]
    each, more = divmod(layers, stages)
    return [each + (1 if 0 < stage <= more or (stage == 0 and more == stages) else 0) for stage in range(stages)]


def layers_of(run: Run) -> list[int]:
    """The number of layers of each stage of a run, several of which may be a rank's."""
    parallel = run.parallel
    return stage_layers(run.dimensions.layers, parallel.pipeline * parallel.chunks, run.software.fills)


def cuts_of(run: Run, family: Family) -> tuple[str, ...]:
    """The modules that the stages of a run begin with, but for the first one: layers, or what follows them."""
    layers = layers_of(run)
    starts = [sum(layers[:stage]) for stage in range(1, len(layers))]
    return tuple(
        family.after if start == run.dimensions.layers else family.layer.replace("[0-9]", str(start))
        for start in starts
    )


def schedule_of(run: Run) -> str:
    """The order in which stages take micro-batches. 1F1B of fewer micro-batches than stages begins with all of them, as
    GPipe does. ZB-1p is found by a search, which comes to the bubble of ZB-H1 (Qi et al. 2024, section 5.3); ZB-2p has
    the memory of ZB-H2."""
    parallel = run.parallel
    name = parallel.schedule.lower()
    if name.startswith("zb"):
        return _H2 if "2p" in name else _H1
    if parallel.chunks > 1:
        return _INTERLEAVED
    return _GPIPE if "gpipe" in name or run.micro_batches < parallel.pipeline else _PLAIN


def planned_schedule(run: Run) -> str:
    """The schedule that the product plans for a run: its own, or 1F1B where the product runs no such."""
    found = schedule_of(run)
    return _PLAIN if found in SPLIT else found


def elements_of(run: Run, forced: Forced) -> list[float]:
    """The elements of the parameters that each rank of a pipeline holds, when they are gathered over the data axis."""
    layer, rest = parameter_elements(forced)
    layers, ranks = layers_of(run), run.parallel.pipeline
    if len(layers) == 1:
        return [layers[0] * layer + rest]
    ends = run.dimensions.vocab * run.dimensions.hidden / run.parallel.tensor
    own = [count * layer for count in layers]
    own[0] += ends
    own[-1] += ends
    return [sum(own[rank::ranks]) for rank in range(ranks)]


@dataclass(frozen=True)
class Sent:
    """Seconds to send a micro-batch from a stage to the next, and its gradient back; by stage but the last."""

    forward: Sequence[float]
    backward: Sequence[float]


def exchanging(seconds: Sequence[StageSeconds], exchange_s: float) -> list[StageSeconds]:
    """Stages that compute nothing while they exchange a micro-batch or its gradient with a neighbour."""
    last = len(seconds) - 1
    return [
        replace(
            own,
            forward=own.forward + (exchange_s if stage < last else 0.0),
            backward=own.backward + (exchange_s if stage else 0.0),
        )
        for stage, own in enumerate(seconds)
    ]


def simulated(schedule: str, ranks: int, micro_batches: int, seconds: Sequence[StageSeconds], sent: Sent) -> Timeline:
    """The simulation of a schedule, `zb_h2` among them. Where it does not split backward passes, they are whole."""
    if schedule == _H2:
        actions: Sequence[Sequence[Action]] = [_h2(rank, ranks, micro_batches) for rank in range(ranks)]
        places: Sequence[int] = range(ranks)
    else:
        actions = schedule_actions(schedule, ranks, len(seconds), micro_batches)
        places = rank_of_stage(schedule, ranks, len(seconds))
    return simulate(actions, places, seconds, sent.forward, sent.backward)


def _h2(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-H2 (Qi et al. 2024, section 2.2): twice as many forward passes ahead as in ZB-H1, and gradients of weights
    twice as late, so that each rank works without a pause; at most 2 * ranks - 1 micro-batches are in flight."""
    ahead, late = min(2 * (ranks - 1 - rank), micro_batches), 2 * rank
    order = [Action("F", rank, each) for each in range(ahead)]
    for turn in range(micro_batches + late):
        if turn + ahead < micro_batches:
            order.append(Action("F", rank, turn + ahead))
        if turn < micro_batches:
            order.append(Action("I", rank, turn))
        if 0 <= turn - late < micro_batches:
            order.append(Action("W", rank, turn - late))
    return order


def step_of(timeline: Timeline, *, apart: bool) -> float:
    """Seconds of a step of a schedule. Where ranks step `apart`, each begins the next one when it is done with its own,
    so that the step is that of the rank which takes longest."""
    if not apart:
        return timeline.step_s
    return max(ends[-1] - starts[0] for starts, ends in zip(timeline.starts, timeline.ends, strict=True))
