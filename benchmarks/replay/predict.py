"""One record at a time: the published figures against the predicted ones.

Runs without a pipeline are predicted by the product (`benchmarks.replay.product`), all others by
formulas on the product's prices (`benchmarks.replay.compose`, `benchmarks.replay.memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.models import find_family
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.compose import besides, step_time, update_bytes
from benchmarks.replay.flops import check, measured_seconds, utilization
from benchmarks.replay.graphs import Forced, Multiplications, Split, force, multiplications, trace
from benchmarks.replay.memory import outside, peak_memory
from benchmarks.replay.parts import parameter_elements, parts_of
from benchmarks.replay.product import Inputs, inputs_of, planned
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import Run, read_run
from benchmarks.replay.software import PRODUCT, Knowledge
from passes.cost.cluster import Cluster
from passes.ir.plan import ProgramPlan


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


def is_planned(run: Run) -> bool:
    """Whether the product has the axes of a run: all but a pipeline."""
    return run.parallel.pipeline == 1


def waiting(run: Run, cluster: Cluster) -> Cluster:
    """`cluster` with devices that wait for the host before each kernel, where the software of `run` has it so."""
    return replace(cluster, device=replace(cluster.device, launch=cluster.device.launch + run.software.host))


def predict(record: Mapping[str, object], name: str) -> Mapping[Knowledge, Replayed]:
    """Predict one record by the product, told more or less of its software.

    Raises SkippedError where it cannot be, and a subclass of AutoparError where its plan cannot be made.
    """
    run = read_run(record, name)
    if run.software.offloads:
        raise SkippedError(Reason.OFFLOADED)
    if run.parallel.shards > 1 and run.dimensions.hidden % run.parallel.shards:
        raise SkippedError(Reason.UNEVEN, f"{run.dimensions.hidden} over {run.parallel.shards}")
    made: list[tuple[Inputs, ProgramPlan]] = []
    found = {}
    for knowledge in Knowledge:
        run = read_run(record, name, knowledge)
        key, cluster = cluster_of(run)
        forced, counted, apart = forced_of(run, key)
        inputs = inputs_of(run, forced.graph.family, cluster)
        plan = next((plan for other, plan in made if other == inputs), None) or planned(inputs)
        made.append((inputs, plan))
        seconds = _seconds(run, plan, forced, inputs.cluster)
        memory = _bytes(run, plan, forced, cluster.device.reserve, told=knowledge is not Knowledge.NOTHING)
        item = _against(run, key, cluster, counted, apart, seconds, None if is_alone(run) else memory)
        found[knowledge] = replace(item, inputs=inputs, plan=plan)
    return found


def _seconds(run: Run, plan: ProgramPlan, forced: Forced, cluster: Cluster) -> float:
    """Seconds of a step: those of the plan, or of one of its layers, and of what the software does besides."""
    software = run.software
    if is_alone(run):
        (layers,) = (block for block in plan.stages[0].blocks if block.count > 1)
        return layers.seconds / layers.count
    layer, rest = parameter_elements(forced)
    elements = 0.0 if run.frozen else run.dimensions.layers * layer + rest
    plain = replace(run, software=replace(software, adds=False, scales=False))
    kernels = (update_bytes(run, elements) - update_bytes(plain, elements)) / cluster.device.stream
    more = besides(run, parts_of(forced, cluster, software.compiled), cluster)
    return (plan.step_s + kernels + more) * software.slower * run.repeats


def _bytes(run: Run, plan: ProgramPlan, forced: Forced, reserve: float, *, told: bool) -> float:
    """Bytes on the fullest device: the peak of the plan without its outputs, as training keeps no logits, and what the
    driver has besides where that was measured. If facts are `told`, also what the software takes more or less than the
    product, both by `benchmarks.replay.memory`."""
    peak = sum(plan.memory.values()) - plan.memory.get("outputs", 0.0) + outside(run, reserve)
    if not told:
        return peak
    # What the product was given is in its peak already; it counts memory as if nothing were compiled.
    given = {name: getattr(run.software, name) for name in ("flash", "dropout", "sequence_parallel", "recompute")}
    gradients = 2 if "pure" in run.precision else 4
    plain = replace(run, software=replace(PRODUCT, gradient_bytes=gradients, **given))
    return peak + peak_memory(run, forced, reserve).total - peak_memory(plain, forced, reserve, cached=False).total


def replay(record: Mapping[str, object], name: str) -> Replayed:
    """Predict one record by formulas on the product's prices. Raises SkippedError where it cannot be."""
    run = read_run(record, name)
    key, cluster = cluster_of(run)
    forced, counted, apart = forced_of(run, key)
    return replayed(run, key, cluster, forced, counted, apart)


def replayed(run: Run, key: str, cluster: Cluster, forced: Forced, counted: Multiplications, apart: float) -> Replayed:
    """Price a run whose graph is there."""
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
