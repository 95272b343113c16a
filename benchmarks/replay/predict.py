"""One record at a time: the published figures against the predicted ones.

Runs are predicted by the product (`benchmarks.replay.product`), and by what their software does otherwise. Formulas on
the product's prices (`benchmarks.replay.compose`) are what devices are calibrated by.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.models import find_family
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.compose import besides, exchange_s, step_time, summing_s, update_bytes
from benchmarks.replay.flops import check, measured_seconds, utilization
from benchmarks.replay.graphs import Forced, Multiplications, Split, force, multiplications, trace
from benchmarks.replay.memory import outside, peak_memory
from benchmarks.replay.parts import Parts, parts_of
from benchmarks.replay.product import Inputs, Made, inputs_of, planned
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import Run, read_run
from benchmarks.replay.software import PRODUCT, Knowledge
from benchmarks.replay.stages import (
    SPLIT,
    Sent,
    elements_of,
    exchanging,
    layers_of,
    planned_schedule,
    schedule_of,
    simulated,
    step_of,
)
from passes.cost.cluster import Cluster
from passes.cost.schedules import StageSeconds
from passes.ir.plan import ProgramPlan

# Facts of the software that the product is given.
GIVEN = ("flash", "dropout", "sequence_parallel", "recompute", "fills")
# A plan that was made, with what it was made of.
Known = tuple[Inputs, Made]


@dataclass(frozen=True)
class Replayed:
    """A record and what is predicted for it: seconds of a step, bytes. Errors are predicted over published, less one.
    Where the product predicts, `inputs` are what it was given, and `plan` is what it planned."""

    run: Run
    cluster: str
    seconds: float | None
    source: str
    predicted: float
    flops_apart: float
    utilization: float | None
    predicted_utilization: float
    predicted_memory: float | None
    inputs: Inputs | None = None
    plan: ProgramPlan | None = None

    @property
    def error(self) -> float | None:
        """Of the step time."""
        return self.predicted / self.seconds - 1 if self.seconds else None

    @property
    def memory_error(self) -> float | None:
        """Of the memory."""
        published = self.run.measured.memory
        if published is None or self.predicted_memory is None:
            return None
        return self.predicted_memory / published - 1


def split_of(run: Run) -> Split:
    """The axes of a run's plan that split its graph."""
    parallel = run.parallel
    return Split(parallel.context, parallel.tensor, parallel.sequence_parallel, parallel.context_method)


def forced_of(run: Run, cluster: str) -> tuple[Forced, Multiplications, float]:
    """The graph of a run with its splits, the forward FLOPs of one sample, and how far they are from the record's."""
    family = find_family(run.dimensions)
    if family is None:
        raise SkippedError(Reason.MODEL)
    graph = trace(family, run.dimensions, run.micro_batch, run.software.flash, run.software.dropout, run.frozen)
    whole = multiplications(graph)
    counted = Multiplications(*(value / run.micro_batch for value in (whole.products, whole.attention, whole.head)))
    apart = check(run, family, counted)
    return force(graph, split_of(run), cluster), counted, apart


def is_alone(run: Run) -> bool:
    """Whether a record is about layers alone."""
    return "one layer" in run.dimensions.name


def waiting(run: Run, cluster: Cluster) -> Cluster:
    """`cluster` with devices that wait for the host before each kernel, where the software of `run` has it so."""
    return replace(cluster, device=replace(cluster.device, launch=cluster.device.launch + run.software.host))


def predict(record: Mapping[str, object], name: str, known: list[Known] | None = None) -> Mapping[Knowledge, Replayed]:
    """Predict one record by the product, told more or less of its software. Plans that are `known` are not made again;
    new ones are added.

    Raises SkippedError where it cannot be, and a subclass of AutoparError where its plan cannot be made.
    """
    run = read_run(record, name)
    if run.software.offloads:
        raise SkippedError(Reason.OFFLOADED)
    if run.parallel.shards > 1 and run.dimensions.hidden % run.parallel.shards:
        raise SkippedError(Reason.UNEVEN, f"{run.dimensions.hidden} over {run.parallel.shards}")
    known = [] if known is None else known
    found = {}
    for knowledge in Knowledge:
        run = read_run(record, name, knowledge)
        key, cluster = cluster_of(run)
        forced, counted, apart = forced_of(run, key)
        inputs = inputs_of(run, forced.graph.family, cluster)
        made = next((made for other, made in known if other == inputs), None)
        if made is None:
            made = planned(inputs)
            known.append((inputs, made))
        told = knowledge is not Knowledge.NOTHING
        seconds = _seconds(run, made, forced, inputs.cluster)
        memory = _bytes(run, made.plan, forced, cluster.device.reserve, told=told)
        item = _against(run, key, cluster, counted, apart, seconds, None if is_alone(run) else memory)
        found[knowledge] = replace(item, inputs=inputs, plan=made.plan)
    return found


def _seconds(run: Run, made: Made, forced: Forced, cluster: Cluster) -> float:
    """Seconds of a step: those of the plan, or of one of its layers, and of what the software does besides."""
    software, plan = run.software, made.plan
    if is_alone(run):
        (layers,) = (block for block in plan.stages[0].blocks if block.count > 1)
        return layers.seconds / layers.count
    elements = 0.0 if run.frozen else max(elements_of(run, forced))
    plain = replace(run, software=replace(software, adds=False, scales=False))
    kernels = (update_bytes(run, elements) - update_bytes(plain, elements)) / cluster.device.stream
    parts = parts_of(forced, cluster, software.compiled)
    more = besides(run, parts, cluster) + kernels + summing_s(run, elements, cluster)
    if run.parallel.pipeline > 1:
        more += _rescheduled_s(run, made, parts, cluster)
    return (plan.step_s + more) * software.slower * run.repeats


def _rescheduled_s(run: Run, made: Made, parts: Parts, cluster: Cluster) -> float:
    """Seconds that the stages of a plan take longer in the order in which the software runs them, and where it waits
    for what they exchange."""
    plan, software = made.plan, run.software
    schedule, is_split = schedule_of(run), schedule_of(run) in SPLIT
    own = [StageSeconds(stage.forward_s, stage.backward_s) for stage in plan.stages]
    ours = simulated(plan.schedule, plan.ranks, plan.micro_batches, own, made.sent)
    theirs = [
        _split(stage, weights) if is_split else stage
        for stage, weights in zip(own, stage_weights(run, parts), strict=True)
    ]
    sent = made.sent
    if software.waits:
        theirs, sent = exchanging(theirs, exchange_s(run, cluster)), Sent(*([0.0] * (len(own) - 1),) * 2)
    timeline = simulated(schedule, plan.ranks, plan.micro_batches, theirs, sent)
    return step_of(timeline, apart=software.steps_apart and is_split) - ours.step_s


def stage_weights(run: Run, parts: Parts) -> list[float]:
    """Seconds of one micro-batch for the gradients of the parameters of products, by stage."""
    found = [count * parts.layer.weights for count in layers_of(run)]
    found[0] += parts.before.weights
    found[-1] += parts.after.weights
    return found


def _split(seconds: StageSeconds, weights: float) -> StageSeconds:
    """A stage whose backward pass computes the gradients of `weights` seconds apart."""
    return replace(seconds, backward=seconds.backward - weights, weight=weights)


def _bytes(run: Run, plan: ProgramPlan, forced: Forced, reserve: float, *, told: bool) -> float:
    """Bytes on the fullest device: the peak of the plan without its outputs, as training keeps no logits, and what the
    driver has besides where that was measured. If facts are `told`, also what the software takes more or less than the
    product, both by `benchmarks.replay.memory`; where it runs another schedule than the plan, that in any case."""
    peak = sum(plan.memory.values()) - plan.memory.get("outputs", 0.0) + outside(run, reserve)
    in_order = replace(run, parallel=replace(run.parallel, schedule=planned_schedule(run)))
    if not told:
        return peak + _peak(run, forced, reserve) - _peak(in_order, forced, reserve)
    # What the product was given is in its peak already; it counts memory as if nothing were compiled.
    given = {name: getattr(run.software, name) for name in GIVEN}
    plain = replace(in_order, software=replace(PRODUCT, gradient_bytes=_gradient_bytes(run), **given))
    return peak + peak_memory(run, forced, reserve).total - _peak(plain, forced, reserve)


def _gradient_bytes(run: Run) -> int:
    """Bytes of an element of a gradient that the product holds: as it is reduced where those of several micro-batches
    are added up first, and else as parameters are stored."""
    if "pure" in run.precision:
        return 2
    is_summed = run.micro_batches > 1 and run.parallel.data * run.parallel.context > 1
    return run.software.reduced_bytes if is_summed else 4


def _peak(run: Run, forced: Forced, reserve: float) -> float:
    return peak_memory(run, forced, reserve, cached=False).total


def replayed(run: Run, key: str, cluster: Cluster, forced: Forced, counted: Multiplications, apart: float) -> Replayed:
    """Predict a run by formulas on the product's prices, as devices are calibrated."""
    cluster = waiting(run, cluster)
    seconds = step_time(run, parts_of(forced, cluster, run.software.compiled), cluster, is_alone(run)).total
    memory = peak_memory(run, forced, cluster.device.reserve).total
    return _against(run, key, cluster, counted, apart, seconds, memory)


def _against(
    run: Run,
    key: str,
    cluster: Cluster,
    counted: Multiplications,
    apart: float,
    predicted: float,
    memory: float | None,
) -> Replayed:
    """Predicted seconds and bytes beside those that were measured."""
    peak = cluster.device.flops["bfloat16"]
    found = measured_seconds(run, counted)
    return Replayed(
        run,
        key,
        found[0] if found else None,
        found[1] if found else "",
        predicted,
        apart,
        utilization(run, counted, found[0], peak) if found else None,
        utilization(run, counted, predicted, peak),
        memory,
    )
