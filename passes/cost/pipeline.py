"""The step of a lowered program: that of its only stage, or of all stages in the order of their schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from passes.cost.cluster import Cluster
from passes.cost.communication import collective_lines
from passes.cost.schedules import Held, StageSeconds, Timeline, held_together, schedule_actions, simulate
from passes.cost.step import Phases, Seconds
from passes.cost.walk import Optimizer, Prices, stage_seconds
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.layout import local_shape
from passes.ir.lowered import Lowered, Stage
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class ScheduledStep:
    """A step of a program: its seconds on the ranks that are busy longest, and for each stage the seconds of its phases
    and the micro-batches that hold tensors at a time. `timeline` is that of its schedule; None where there is none."""

    seconds: Seconds
    phases: tuple[Phases, ...]
    held: tuple[tuple[Held, ...], ...]
    timeline: Timeline | None = None


def scheduled_step(
    lowered: Lowered, folded: Folded, cluster: Cluster, optimizer: Optimizer, configuration: Configuration
) -> ScheduledStep:
    """The step of `lowered`: that of its only stage, or of all stages in the order of their schedule."""
    prices = Prices(folded, cluster, configuration.mesh)
    each, parts = zip(
        *(stage_seconds(stage, prices, optimizer, configuration) for stage in lowered.stages), strict=True
    )
    pipeline, mesh = configuration.pipeline, configuration.mesh
    if pipeline.stages == 1:
        return ScheduledStep(each[0], parts, ((Held(1),),))
    if pipeline.is_sequential:
        sent = sum(transfer_s(size, cluster, mesh, pipeline.ranks) for size, _ in _sent(lowered.stages, mesh))
        return ScheduledStep(sum(each, Seconds(bubble=sent)), parts, ((Held(1),),) * pipeline.stages)
    timeline = timeline_of(lowered.stages, parts, cluster, configuration)
    places = pipeline.places
    step_s = step_seconds(parts, places, timeline)
    of_rank = [
        sum((own for own, place in zip(each, places, strict=True) if place == rank), Seconds())
        for rank in range(pipeline.ranks)
    ]
    busiest = max(of_rank, key=lambda own: own.total)
    seconds = busiest + Seconds(bubble=max(0.0, step_s - busiest.total))
    # What a micro-batch leaves in a stage grows with what the stage computes.
    held = held_together(timeline.actions, [part.forward for part in parts])
    return ScheduledStep(seconds, parts, held, timeline)


def step_seconds(parts: Sequence[Phases], places: Sequence[int], timeline: Timeline) -> float:
    """Seconds of a step whose stages, on the ranks `places`, take `parts`: those of the schedule, and of what the
    slowest ranks do before and after it."""
    ranks = range(max(places) + 1)
    sums = [sum((part for part, place in zip(parts, places, strict=True) if place == rank), Phases()) for rank in ranks]
    return max(own.before for own in sums) + timeline.step_s + max(own.after for own in sums)


def timeline_of(
    stages: Sequence[Stage], parts: Sequence[Phases], cluster: Cluster, configuration: Configuration
) -> Timeline:
    """The schedule of the micro-batches of a step."""
    pipeline, mesh = configuration.pipeline, configuration.mesh
    actions = schedule_actions(pipeline.schedule, pipeline.ranks, pipeline.stages, configuration.micro_batches)
    places = pipeline.places
    sends, back = transfers_s(stages, cluster, mesh, pipeline.ranks)
    seconds = [StageSeconds(part.forward, part.backward, part.weight) for part in parts]
    return simulate(actions, places, seconds, sends, back)


def transfers_s(
    stages: Sequence[Stage], cluster: Cluster, mesh: Mesh, ranks: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds in which each stage but the last sends a micro-batch on, and gets its gradient back; all stages are on
    `ranks` ranks of the pipeline's axis."""
    there, back = zip(*_sent(stages, mesh), strict=True)
    return tuple(transfer_s(size, cluster, mesh, ranks) for size in there), tuple(
        transfer_s(size, cluster, mesh, ranks) for size in back
    )


def _sent(stages: Sequence[Stage], mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Bytes that a rank of each stage but the last sends to the next stage for one micro-batch, and of the gradients
    that it gets back."""
    for stage in stages[1:]:
        sizes = {item.name: _bytes(stage, item.name, mesh) for item in stage.received}
        yield sum(sizes.values()), sum(sizes[item.name] for item in stage.received if item.trainable)


def transfer_s(size: float, cluster: Cluster, mesh: Mesh, ranks: int) -> float:
    """Seconds to send `size` bytes to the same rank of the next stage; `ranks` stages' ranks of `mesh` follow each
    other."""
    if not size:
        return 0.0
    whole = Mesh(("pipeline", *(f"inner_{name}" for name in mesh.names)), (ranks, *mesh.sizes))
    return min(start + each * size for start, each in collective_lines("shift", cluster.route(whole, 0)))


def _bytes(stage: Stage, name: str, mesh: Mesh) -> int:
    """Bytes of a rank's part of a value."""
    type = stage.body.types[name]
    return prod(local_shape(type.shape, stage.body.layouts[name], mesh)) * type.dtype.itemsize
