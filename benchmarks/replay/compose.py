"""Actions of software besides a plan, and the seconds of a step from those of its blocks, by which devices are
calibrated: recompute, parameter gathers, gradient reductions, pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.replay.clusters import devices_per_card
from benchmarks.replay.parts import LayerSeconds, Parts
from benchmarks.replay.records import Parallel, Run
from benchmarks.replay.stages import stage_layers
from passes.cost import step
from passes.cost.cluster import Cluster
from passes.cost.step import compose
from passes.cost.step_costs import StepCosts
from passes.ir.configuration import Configuration
from passes.ir.layout import I, P, R, S
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep

# Bytes that Adam reads and writes per element: states and a master copy in float32 both ways, a gradient, and the
# parameter in the precision that it is computed in. In pure bfloat16 states, parameter and gradient take two each.
UPDATE_BYTES, PURE_UPDATE_BYTES = 2 * 12 + 4 + 2, 2 * 6 + 2
# Bytes of a gradient as the backward pass makes it, and of one in float32.
HALF, FLOAT = 2, 4
# A weight in four bits with a scale of eight bits per block of 64, read; and the same in two bytes, written.
DEQUANTIZING_BYTES = 0.5 + 1 / 64 + 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on.

    `data` is what of parameter gathers and gradient reductions no computation hides, `bubble` what a pipeline waits and
    sends from stage to stage.
    """

    compute: float
    sends: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.sends + self.data + self.bubble + self.optimizer

    def __mul__(self, times: float) -> "StepTime":
        return StepTime(*(getattr(self, item.name) * times for item in fields(self)))


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
        change = {
            "all_gather": RedistributionStep(self.position, S(0), R, part, whole),
            "reduce_scatter": RedistributionStep(self.position, P, S(0), whole, part),
            "all_reduce": RedistributionStep(self.position, P, I, whole, whole),
        }[collective]
        return StepCosts(self.cluster, self.mesh).total([change], itemsize)


def axes_of(parallel: Parallel, cluster: Cluster) -> tuple[Axis, Axis]:
    """The axis that states are split over, and the one that is left of the copies. Tensor-parallel devices are next to
    each other, then those of the context, of the data, of the pipeline."""
    copies = parallel.data * parallel.context
    shards = max(1, parallel.shards)
    mesh = Mesh(("outer", "inner", "tensor"), (max(1, copies // shards), shards, parallel.tensor))
    return Axis(mesh, 1, cluster), Axis(mesh, 0, cluster)


@dataclass(frozen=True)
class _Work:
    """Seconds of one copy of a block in one micro-batch."""

    forward: float
    backward: float
    again: float
    send_forward: float
    send_backward: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.again + self.send_forward + self.send_backward


def _work(part: LayerSeconds, recompute: str) -> _Work:
    again, send_again = 0.0, 0.0
    if recompute == "full":
        again, send_again = part.forward, part.send_forward
    elif recompute == "selective":
        again = part.core
    elif recompute == "ops":
        again, send_again = part.products / 2 + part.rest, part.send_forward / 2
    return _Work(part.forward, part.backward, again, part.send_forward, part.send_backward + send_again)


@dataclass(frozen=True)
class Stage:
    """The contents of one pipeline stage: blocks and the count of each. A single stage holds everything.
    `exchange` is the seconds of a micro-batch that it sends and receives."""

    blocks: tuple[tuple[LayerSeconds, str, int], ...]
    exchange: float = 0.0

    def seconds(self) -> float:
        """Seconds of one micro-batch."""
        return self.exchange + sum(count * _work(part, recompute).total for part, recompute, count in self.blocks)

    def parameters(self) -> float:
        """Elements of the parameters on one rank."""
        return sum(count * part.parameters for part, _, count in self.blocks)


def stages_of(run: Run, parts: Parts, cluster: Cluster, alone: bool) -> list[Stage]:
    """The stages of a run. With `alone` there are layers only, no embedding and no head."""
    layers = stage_layers(run.dimensions.layers, run.parallel.pipeline, run.software.fills)
    exchange, last = exchange_s(run, cluster), len(layers) - 1
    found = []
    for number, count in enumerate(layers):
        blocks = [(parts.layer, run.recompute, count)]
        if number == 0 and not alone:
            blocks.insert(0, (parts.before, "none", 1))
        if number == last and not alone:
            blocks.append((parts.after, "none", 1))
        # With several chunks a device the first stage and the last have a neighbour on either side too.
        sides = 2 if run.parallel.chunks > 1 or 0 < number < last else min(1, last)
        found.append(Stage(tuple(blocks), sides * run.parallel.chunks * exchange))
    return found


def step_time(run: Run, parts: Parts, cluster: Cluster, alone: bool) -> StepTime:
    """The seconds of a step of `run`: those of its slowest stage by `passes.cost.step`, and what a pipeline adds."""
    stages = stages_of(run, parts, cluster, alone)
    longest = max(stages, key=Stage.seconds)
    traffic = not alone and not run.frozen
    hidden = run.software.prefetches if run.parallel.zero == 3 else run.software.overlaps
    blocks = [_block(run, *block, cluster, traffic) for block in longest.blocks]
    update = 0.0
    if not alone and not run.frozen:
        update = update_bytes(run, max(stage.parameters() for stage in stages)) / cluster.device.stream
    axis = axes_of(run.parallel, cluster)[0 if run.parallel.shards > 1 else 1]
    zero = run.parallel.zero
    configuration = Configuration(axis.mesh, run.micro_batches, gather_once=zero < 3, reduce_once=zero < 2)
    share = cluster.device.share(cluster.link(axis.mesh, axis.position))
    seconds = compose(blocks if hidden else [_uncovered(block) for block in blocks], configuration, 0.0, update, share)
    found = StepTime(
        seconds.forward_compute + seconds.backward_compute + seconds.recompute + besides(run, parts, cluster),
        seconds.forward_communication + seconds.backward_communication,
        seconds.exposed_gathers + seconds.exposed_reductions,
        run.micro_batches * longest.exchange + _bubble(run, stages, longest),
        seconds.optimizer,
    )
    return found * (run.software.slower * run.repeats)


def update_bytes(run: Run, parameters: float) -> float:
    """Bytes that adding up gradients and the optimizer read and write; `parameters` are a rank's, gathered.

    Gradients in float32 are added to from the first micro-batch on, others stay where the first has put them.
    """
    parallel, software = run.parallel, run.software
    adam = PURE_UPDATE_BYTES if "pure" in run.precision else UPDATE_BYTES
    update = parameters * adam / max(1, parallel.shards)
    if software.scales:
        update += parameters * 2 * HALF
    if not software.adds:
        return update
    kept = parameters / (max(1, parallel.shards) if parallel.zero >= 2 else 1)
    width = HALF if software.gradient_bytes == HALF else FLOAT
    times = run.micro_batches - (width == HALF)
    return update + times * kept * (HALF + 2 * width)


def summing_s(run: Run, elements: float, cluster: Cluster) -> float:
    """Seconds that a step takes longer where gradients of `elements` parameters are summed whole on every device, and
    not in the parts that are stored."""
    if not run.software.all_reduces or run.parallel.shards == 1:
        return 0.0
    inner, _ = axes_of(run.parallel, cluster)
    itemsize = run.software.reduced_bytes
    whole, part = (inner.seconds(name, elements, itemsize) for name in ("all_reduce", "reduce_scatter"))
    return whole - part


def besides(run: Run, parts: Parts, cluster: Cluster) -> float:
    """Seconds of a step that software computes beside the ops of the stock class."""
    each = _rotating(run, cluster) + _adapting(run, cluster) + _masking(run, cluster)
    return run.micro_batches * (run.dimensions.layers * each + _ending(run, cluster)) + _dequantizing(
        run, parts, cluster
    )


def _ending(run: Run, cluster: Cluster) -> float:
    """Seconds of the loss beyond a fused one, and of adding up the gradients of the head's weight, chunk by chunk."""
    sizes, parallel = run.dimensions, run.parallel
    logits = run.micro_batch * sizes.sequence / parallel.context * sizes.vocab * run.software.logits
    added = 0.0 if run.frozen else (run.software.chunks - 1) * 3 * HALF * sizes.vocab * sizes.hidden
    return (logits + added) / parallel.tensor / cluster.device.stream


def _rotating(run: Run, cluster: Cluster) -> float:
    """Seconds that rotating queries and keys of a layer takes beyond the stock class's."""
    sizes = run.dimensions
    elements = run.micro_batch * sizes.sequence * (sizes.heads + sizes.kv_heads) * sizes.head_size
    kernels = run.software.rotation_kernels * cluster.device.launch
    return elements * run.software.rotation / run.parallel.tensor / cluster.device.stream + kernels


def _masking(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer's attention on whole blocks, beyond those of samples that begin where blocks do.

    A query's block is computed with its own and with those before it that its first sample begins in: that sample has
    begun anywhere in its length before the block does.
    """
    block, length = run.software.block, run.software.sample
    if not block or not run.software.packed:
        return 0.0
    sizes, device = run.dimensions, cluster.device
    before = sum(-(-begun // block) for begun in range(length)) / length
    keys = block * (1 + before) - sizes.sequence / 2
    flops = 4 * run.micro_batch * sizes.sequence * keys * sizes.heads * sizes.head_size
    forward = flops * (1 + device.softmax / sizes.head_size) / (device.attention * device.flops["bfloat16"])
    return ((2 if run.recompute == "full" else 1) + 2.5) * forward


def _adapting(run: Run, cluster: Cluster) -> float:
    """Seconds of the adapters of a layer: x A B beside each product x W, added to it; backward the gradients of A, B
    and x. All wait for memory, as the rank is small."""
    if not run.software.adapter:
        return 0.0
    sizes, rank = run.dimensions, run.software.adapter
    heads, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    attention = [(sizes.hidden, heads), (sizes.hidden, keys), (heads, sizes.hidden)]
    mlp = [(sizes.hidden, sizes.ffn), (sizes.hidden, sizes.ffn), (sizes.ffn, sizes.hidden)]
    tokens = run.micro_batch * sizes.sequence
    forward = backward = 0.0
    for first, last in (*attention, *mlp):
        # Forward x is read, and the result written and added; backward its gradient and x are read twice, x's added.
        forward += tokens * (first + 4 * last + 2 * rank) * HALF
        backward += tokens * (2 * last + 5 * first + 4 * rank) * HALF
    return ((2 if run.recompute == "full" else 1) * forward + backward) / cluster.device.stream


def _dequantizing(run: Run, parts: Parts, cluster: Cluster) -> float:
    """Seconds to make weights of four bits again for each pass over them: forward, backward, and again between."""
    if not run.quantized:
        return 0.0
    passes = 3 if run.recompute == "full" else 2
    elements = parts.layer.parameters * run.dimensions.layers
    return run.micro_batches * passes * elements * DEQUANTIZING_BYTES / cluster.device.stream


def _uncovered(block: step.BlockSeconds) -> step.BlockSeconds:
    return replace(block, cover=0.0, cover_backward=0.0)


def _block(
    run: Run, part: LayerSeconds, recompute: str, count: int, cluster: Cluster, traffic: bool
) -> step.BlockSeconds:
    """A block as `passes.cost.step` composes it, with the traffic of its parameters."""
    work = _work(part, recompute)
    gather, reduce = _traffic(run, part, cluster) if traffic else (0.0, 0.0)
    once = step.BlockSeconds(
        count=count,
        forward_compute=work.forward,
        backward_compute=work.backward,
        forward_communication=work.send_forward,
        backward_communication=work.send_backward,
        recompute=work.again,
        gather=gather,
        regather=gather,
        reduce=reduce,
        cover=work.forward,
        cover_backward=work.backward + work.again,
    )
    return once * count


def _traffic(run: Run, part: LayerSeconds, cluster: Cluster) -> tuple[float, float]:
    """Seconds to gather the parameters of a block, and to reduce their gradients."""
    parallel, software = run.parallel, run.software
    inner, outer = axes_of(parallel, cluster)
    if parallel.zero == 0:
        return 0.0, outer.seconds("all_reduce", part.parameters, software.reduced_bytes)
    tensors = 1 if software.coalesces else part.tensors
    gather = tensors * inner.seconds("all_gather", part.parameters / tensors, software.gathered_bytes)
    summing = "all_reduce" if software.all_reduces else "reduce_scatter"
    reduce = tensors * inner.seconds(summing, part.parameters / tensors, software.reduced_bytes)
    return gather, reduce + outer.seconds("all_reduce", part.parameters / parallel.shards, software.reduced_bytes)


def _bubble(run: Run, stages: Sequence[Stage], longest: Stage) -> float:
    """The bubble of 1F1B, interleaved where ranks have several stages (Narayanan et al. 2021, section 2.2): seconds
    besides the work of the slowest stage."""
    return (sum(stage.seconds() for stage in stages) - longest.seconds()) / run.parallel.chunks


def exchange_s(run: Run, cluster: Cluster) -> float:
    """Seconds in which two stages exchange the activations of one micro-batch and the gradients of another.

    Both ways at once, or one after the other. Where tensor-parallel ranks send a part each, who receives gathers it
    (Narayanan et al. 2021, section 4.1); DeepSpeed gathers what a stage has sent once more, for its backward pass.
    """
    parallel, sizes = run.parallel, run.dimensions
    if parallel.pipeline == 1:
        return 0.0
    elements = run.micro_batch * sizes.sequence * sizes.hidden / parallel.context
    mesh = Mesh(("pipeline", "inner"), (parallel.pipeline, parallel.data * parallel.context * parallel.tensor))
    link = cluster.link(mesh, 0)
    ways = 1 if run.software.exchanges else 2
    # The tensor-parallel ranks of a stage send at once; a card that they share with another replica's is theirs then.
    own = max(1.0, min(devices_per_card(run.interconnect, cluster.node_size), cluster.node_size / parallel.tensor))
    rate = own * link.bandwidth * link.efficiency
    seconds = ways * (link.latency + elements * HALF / parallel.tensor / rate)
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        tensor = Axis(Mesh(("outer", "tensor"), (parallel.pipeline * parallel.data, parallel.tensor)), 1, cluster)
        seconds += (1.5 if run.software.holds_outputs else 1) * tensor.seconds("all_gather", elements, HALF)
    return seconds
