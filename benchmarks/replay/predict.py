"""One record at a time: the published figures against the predicted ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.models import find_family
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.compose import StepTime, step_time
from benchmarks.replay.flops import check, measured_seconds, utilization
from benchmarks.replay.graphs import Forced, Multiplications, Split, force, multiplications, trace
from benchmarks.replay.memory import peak_memory
from benchmarks.replay.parts import parts_of
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import Run, read_run
from passes.cost.cluster import Cluster


@dataclass(frozen=True)
class Replayed:
    """A record and what is predicted for it. Errors are predicted over published, less one."""

    run: Run
    cluster: str
    seconds: float | None
    source: str
    predicted: StepTime
    flops_apart: float
    utilization: float | None
    predicted_utilization: float
    predicted_memory: float | None

    @property
    def error(self) -> float | None:
        """Of the step time."""
        return self.predicted.total / self.seconds - 1 if self.seconds else None

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


def replay(record: Mapping[str, object], name: str) -> Replayed:
    """Predict one record. Raises SkippedError where it cannot be."""
    run = read_run(record, name)
    key, cluster = cluster_of(run)
    forced, counted, apart = forced_of(run, key)
    return replayed(run, key, cluster, forced, counted, apart)


def replayed(run: Run, key: str, cluster: Cluster, forced: Forced, counted: Multiplications, apart: float) -> Replayed:
    """Price a run whose graph is there."""
    cluster = waiting(run, cluster)
    predicted = step_time(run, parts_of(forced, cluster, run.software.compiled), cluster, is_alone(run))
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
        utilization(run, counted, predicted.total, peak),
        peak_memory(run, forced, cluster.device.reserve, is_alone(run)).total,
    )
