"""The seconds of a step from those of its blocks: recompute, parameter gathers, gradient reductions, pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay.parts import Part, Parts
from benchmarks.replay.records import Parallel, Run
from passes.cost.cluster import Cluster
from passes.cost.communication import step_seconds
from passes.ir.layout import I, P, R, S
from passes.ir.mesh import Mesh
from passes.ir.redistribution import Step

# Bytes that Adam reads and writes per element: states and a master copy in float32 both ways, a gradient, and the
# parameter in the precision that it is computed in.
UPDATE_BYTES = 2 * 12 + 4 + 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; `bubble` is what a pipeline waits."""

    compute: float
    sends: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.sends + self.data + self.bubble + self.optimizer


@dataclass(frozen=True)
class Axis:
    """The devices that hold copies of the same parameters: how many, and how far apart."""

    mesh: Mesh
    position: int
    cluster: Cluster

    def seconds(self, collective: str, elements: float, itemsize: int) -> float:
        """Seconds of a collective over a whole tensor of `elements`."""
        ways = self.mesh.sizes[self.position]
        if ways == 1 or not elements:
            return 0.0
        whole, part = (int(elements),), (int(elements / ways),)
        step = {
            "all_gather": Step(self.position, S(0), R, part, whole),
            "reduce_scatter": Step(self.position, P, S(0), whole, part),
            "all_reduce": Step(self.position, P, I, whole, whole),
        }[collective]
        return step_seconds(step, itemsize, self.cluster, self.mesh)


def axes_of(parallel: Parallel, cluster: Cluster) -> tuple[Axis, Axis]:
    """The axis that states are split over, and the one that is left of the copies. Tensor-parallel devices are next to
    each other, then those of the context, of the data, of the pipeline."""
    copies = parallel.data * parallel.context
    shards = max(1, parallel.shards)
    mesh = Mesh(("outer", "inner", "tensor"), (max(1, copies // shards), shards, parallel.tensor))
    return Axis(mesh, 1, cluster), Axis(mesh, 0, cluster)


@dataclass(frozen=True)
class _Passes:
    """Seconds of a block's passes, its copies together."""

    forward: float
    backward: float
    sends: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.sends


def _passes(part: Part, recompute: str) -> _Passes:
    again, send_again = 0.0, 0.0
    if recompute == "full":
        again, send_again = part.forward, part.send_forward
    elif recompute == "selective":
        again = part.core
    elif recompute == "ops":
        again = part.products / 2 + part.rest
        send_again = part.send_forward / 2
    return _Passes(part.forward, part.backward + again, part.send_forward + part.send_backward + send_again)


def stage_layers(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: the same, or one less in the first and last (beside the embedding and the head),
    or as equal as can be."""
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    each, more = divmod(layers, stages)
    return [each + (1 if 0 < stage <= more or (stage == 0 and more == stages) else 0) for stage in range(stages)]


def step_time(run: Run, parts: Parts, cluster: Cluster, alone: bool) -> StepTime:
    """The seconds of a step of `run`. With `alone` there are layers only, no embedding and no head."""
    parallel = run.parallel
    layers = stage_layers(run.dimensions.layers, parallel.pipeline)
    nothing = Part()
    before, after = (nothing, nothing) if alone else (parts.before, parts.after)
    layer, first, last = (
        _passes(parts.layer, run.recompute),
        _passes(before, "none"),
        _passes(after, "none"),
    )
    stages = [
        (count * layer.total)
        + (first.total if number == 0 else 0.0)
        + (last.total if number == len(layers) - 1 else 0.0)
        for number, count in enumerate(layers)
    ]
    longest = max(range(len(stages)), key=lambda number: stages[number])
    micro = run.micro_batches
    sends = (
        layers[longest] * layer.sends
        + (first.sends if longest == 0 else 0.0)
        + (last.sends if longest == len(layers) - 1 else 0.0)
    )
    bubble = _bubble(run, stages, longest, parts, layers) + _hops(run, cluster)
    data, optimizer = 0.0, 0.0
    if not alone:
        data = max(_data_seconds(run, parts, stage, count, cluster) for stage, count in _ends(layers))
        optimizer = max(_update_seconds(run, parts, stage, count, cluster) for stage, count in _ends(layers))
    return StepTime(micro * (stages[longest] - sends), micro * sends, data, bubble, optimizer)


def _ends(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first, a middle and the last stage, with their layers; a stage says where it is by -1, 0 or 1, 2 for all."""
    if len(layers) == 1:
        return [(2, layers[0])]
    return [(-1, layers[0]), (0, layers[len(layers) // 2]), (1, layers[-1])]


def _bubble(run: Run, stages: Sequence[float], longest: int, parts: Parts, layers: Sequence[int]) -> float:
    """What a pipeline waits besides the work of its longest stage, by its schedule."""
    if len(stages) == 1:
        return 0.0
    schedule = run.parallel.schedule
    others = sum(stages) - stages[longest]
    if schedule.startswith("ZB"):
        # Backward passes of weights fill the wait; half of a backward pass is theirs. ZB-2p leaves none.
        one = layers[longest] * (parts.layer.forward + parts.layer.send_forward)
        return 0.0 if "2p" in schedule else (len(stages) - 1) * one
    return others / run.parallel.chunks


def _hops(run: Run, cluster: Cluster) -> float:
    """Seconds that activations and their gradients travel between stages, for all micro-batches."""
    parallel, sizes = run.parallel, run.dimensions
    if parallel.pipeline == 1:
        return 0.0
    split = parallel.tensor * parallel.context if parallel.sequence_parallel else parallel.context
    size = run.micro_batch * sizes.sequence * sizes.hidden * 2 / split
    mesh = Mesh(("pipeline", "inner"), (parallel.pipeline, parallel.data * parallel.context * parallel.tensor))
    link = cluster.link(mesh, 0)
    return 2 * run.micro_batches * parallel.chunks * (link.latency + size / link.bandwidth)


def _stage_parameters(parts: Parts, stage: int, layers: int) -> float:
    ends = (parts.before.parameters if stage in (-1, 2) else 0.0) + (parts.after.parameters if stage in (1, 2) else 0.0)
    return layers * parts.layer.parameters + ends


def _data_seconds(run: Run, parts: Parts, stage: int, layers: int, cluster: Cluster) -> float:
    """Seconds of parameter gathers and gradient reductions that no computation hides."""
    parallel, software = run.parallel, run.software
    if parallel.data * parallel.context == 1 or run.frozen:
        return 0.0
    inner, outer = axes_of(parallel, cluster)
    blocks = [(parts.layer, layers)]
    blocks += [(parts.before, 1)] if stage in (-1, 2) else []
    blocks += [(parts.after, 1)] if stage in (1, 2) else []
    total = 0.0
    # Only the last micro-batch's backward pass can hide what is reduced once a step.
    per_micro_batch = run.micro_batches if parallel.zero >= 2 else 1
    for part, count in blocks:
        passes = _passes(part, run.recompute if part is parts.layer else "none")
        gather = inner.seconds("all_gather", part.parameters, software.gathered_bytes)
        if parallel.zero == 0:
            reduce = outer.seconds("all_reduce", part.parameters, software.reduced_bytes)
        else:
            reduce = inner.seconds("reduce_scatter", part.parameters, software.reduced_bytes)
            reduce += outer.seconds("all_reduce", part.parameters / inner.mesh.sizes[1], software.reduced_bytes)
        if parallel.zero == 3:
            forward = exposed(gather, passes.forward)
            backward = exposed(gather + reduce, passes.backward)
        elif software.overlaps:
            forward = exposed(gather, passes.forward) if parallel.zero else 0.0
            backward = exposed(reduce, passes.backward)
        else:
            forward, backward = gather if parallel.zero else 0.0, reduce
        total += count * per_micro_batch * (forward + backward)
    if parallel.zero == 3:
        total += run.micro_batches * inner.seconds("all_gather", parts.before.parameters, software.gathered_bytes)
    return total


def _update_seconds(run: Run, parts: Parts, stage: int, layers: int, cluster: Cluster) -> float:
    if run.frozen:
        return 0.0
    elements = _stage_parameters(parts, stage, layers) / max(1, run.parallel.shards)
    return elements * UPDATE_BYTES / cluster.device.bandwidth


CONTENTION = 0.0


def exposed(sent: float, computed: float) -> float:
    """Seconds that `sent` seconds of communication add to `computed` seconds of computation at the same time: what
    is longer, and what the two take from each other (multiprocessors and memory)."""
    return max(0.0, sent - computed) + CONTENTION * min(sent, computed)
