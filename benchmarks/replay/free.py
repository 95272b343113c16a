"""The planner's own plan for a run's model and devices, by the same prices: mesh, layouts, ZeRO stage and recompute are
chosen freely."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.models import find_family
from benchmarks.replay.compose import step_time
from benchmarks.replay.graphs import Forced, Split, force, trace
from benchmarks.replay.memory import peak_memory
from benchmarks.replay.parts import parts_of
from benchmarks.replay.predict import Replayed, is_alone
from benchmarks.replay.reasons import SkippedError
from benchmarks.replay.records import Run
from passes.cost.cluster import GIB, Cluster

# Plans that are faster by more than this are explained.
NOTABLE = 0.10


@dataclass(frozen=True)
class Planned:
    """The fastest plan for a run's model and devices: its seconds, its bytes, and what it does otherwise; `chosen` is
    the run as it would be, None where nothing is better."""

    run: Run
    published: float
    seconds: float
    memory: float
    changes: tuple[str, ...]
    memory_error: float | None = None
    chosen: Run | None = None

    @property
    def gain(self) -> float:
        """The time saved relative to the predicted time of the published plan."""
        return 1 - self.seconds / self.published

    def sentence(self) -> str:
        """Why it is faster, and whether that is to be believed, in words."""
        return f"{100 * self.gain:.0f}% faster with {' and '.join(self.changes)}: {self._verdict()}."

    def _verdict(self) -> str:
        if self.memory_error is not None and self.memory_error < -NOTABLE:
            short = -100 * self.memory_error
            return f"a hole in the memory model, which has {short:.0f}% too little for the published plan"
        if not self.run.software.flash:
            return (
                "a find of later years (selective recompute, sequence parallelism and ZeRO were not in that software)"
            )
        needs = f"as long as the {self.memory / GIB:.0f} GiB that it takes are there"
        chosen = self.chosen or self.run
        if chosen.recompute != self.run.recompute:
            return f"a find, {needs}"
        if chosen.parallel.tensor < self.run.parallel.tensor:
            return f"a find, {needs}: what a tensor axis sends is waited for, what a data axis sends is hidden"
        if chosen.parallel.tensor > self.run.parallel.tensor:
            return (
                "a find: parameters and gradients of the data axis travel longer than there is computation to hide them"
            )
        return f"a find, {needs}: less is sent"


def is_plain(run: Run) -> bool:
    """Whether a run can be planned freely: neither pipeline nor context axes, nor parameters that do not train."""
    return run.parallel.pipeline == run.parallel.context == 1 and not run.frozen and not is_alone(run)


def plan_freely(item: Replayed, forced: Forced, cluster: Cluster) -> Planned:
    """The fastest of all choices that fit the device, the published plan among them (it ran, so it fits)."""
    published = item.predicted.total
    best = Planned(item.run, published, published, item.predicted_memory or 0.0, (), item.memory_error)
    for run, reshaped in _meshes(item.run, cluster):
        for name, graph in _graphs(run, None if reshaped else forced, item.cluster):
            parts = parts_of(graph, cluster, run.software.compiled)
            for tried, changes in _configurations(run):
                seconds = step_time(tried, parts, cluster, False).total
                if seconds >= best.seconds:
                    continue
                # What the driver has besides is in the limit already.
                memory = peak_memory(tried, graph, 0.0, False).total
                if memory <= cluster.usable_memory:
                    best = replace(
                        best, seconds=seconds, memory=memory, changes=(*reshaped, *changes, *name), chosen=tried
                    )
    return best


def _meshes(run: Run, cluster: Cluster) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """The run on its own mesh, and on all others of a data and a tensor axis in which micro-batches are as large."""
    yield run, ()
    parallel = run.parallel
    for tensor in range(1, min(cluster.node_size, run.devices) + 1):
        data, over = divmod(run.devices, tensor)
        if over or tensor == parallel.tensor or run.dimensions.heads % tensor or cluster.node_size % tensor:
            continue
        micro_batches, rest = divmod(run.global_batch, run.micro_batch * data)
        if rest or not micro_batches:
            continue
        shards = data if parallel.zero else 1
        other = replace(parallel, tensor=tensor, data=data, shards=shards, sequence_parallel=tensor > 1)
        change = f"a mesh of {data} x {tensor} (data x tensor) instead of {parallel.data} x {parallel.tensor}"
        yield replace(run, parallel=other, micro_batches=micro_batches), (change,)


def _graphs(run: Run, forced: Forced | None, cluster: str) -> Iterator[tuple[tuple[str, ...], Forced]]:
    """The graph with the run's layouts, where these are given, and with those that the solver chooses by itself."""
    if forced is not None:
        yield (), forced
    family = find_family(run.dimensions)
    if family is None or (forced is not None and run.parallel.tensor == 1):
        return
    software = run.software
    graph = trace(family, run.dimensions, run.micro_batch, software.flash, software.dropout, run.frozen)
    try:
        free = force(graph, Split(1, run.parallel.tensor, False, "", forced=False), cluster)
    except SkippedError:
        # Nothing divides.
        return
    yield ("layouts of its own on the tensor axis",) if forced is not None else (), free


def _configurations(run: Run) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """The run with other ZeRO stages and recompute, and what is changed."""
    stages = (0, 1, 2, 3) if run.parallel.data > 1 else (run.parallel.zero,)
    kinds = ("none", "full") if run.software.flash else ("none", "selective", "full")
    for zero in stages:
        shards = run.parallel.shards if zero == run.parallel.zero else run.parallel.data if zero else 1
        parallel = replace(run.parallel, zero=zero, shards=shards)
        for recompute in sorted({*kinds, run.recompute}):
            changes: tuple[str, ...] = ()
            if recompute != run.recompute:
                changes = (f"recompute {recompute!r} instead of {run.recompute!r}",)
            if zero != run.parallel.zero:
                changes += (f"ZeRO stage {zero} instead of {run.parallel.zero}",)
            yield replace(run, parallel=parallel, recompute=recompute), changes
