"""Peak bytes of a run on its fullest device: states, and what is kept of micro-batches in flight.

States per element (Rajbhandari et al. 2020; `theoretical_memory_usage.py` of Megatron-LM): a parameter as it is
computed in, a gradient, and a float32 master copy with two moments, the last three split by ZeRO's stage. FSDP holds
parameters in float32, split, and gathers a layer and the next one. Runs in pure bfloat16 have everything in two bytes.

What layers keep is what fused programs keep (`benchmarks.replay.kept`). A stage of a pipeline holds as many
micro-batches as its schedule has in flight (section 2 of Korthikanti et al. 2022; Qi et al. 2024 for ZB-2p).
"""

from dataclasses import dataclass, replace

from benchmarks.replay.graphs import Forced
from benchmarks.replay.kept import Kept, kept_bytes
from benchmarks.replay.parts import parameter_elements
from benchmarks.replay.records import Run
from benchmarks.replay.stages import stage_layers

# Bytes per element: float32 master copy and two moments; the same of a run in pure bfloat16 (no master copy).
_ADAM, _PURE_ADAM = 12.0, 4.0
_FLOAT, _HALF = 4.0, 2.0
# What torch's allocator holds of each byte that it has given out: the median of the 43 runs of Megatron of which
# MooreThreads/SimuMax published both (docs/b200/b200_release_v1.2_summary.json at 4dcaae51; 1.028 to 1.093).
_RESERVED = 1.04
# Layers whose gathered parameters are there at once: the one that runs and the next.
_GATHERED = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device."""

    states: float
    gathered: float
    kept: float
    working: float
    reserve: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gathered + self.kept + self.working + self.reserve


def outside(run: Run, reserve: float) -> float:
    """The `reserve` where what was measured has it: whatever the driver says is taken, rather than what torch has
    allocated."""
    return reserve if "smi" in run.measured.memory_kind or run.measured.memory_kind == "GB as printed" else 0.0


def peak_memory(run: Run, forced: Forced, reserve: float, *, cached: bool = True) -> Memory:
    """The peak of the fullest stage, with the `reserve` where it was measured, and where the source says so
    (nvidia-smi, or what torch has reserved) and they are to count, the allocator's cached blocks."""
    kept = kept_bytes(forced, run.software.compiled, run.software.wide_masks)
    layers = stage_layers(run.dimensions.layers, run.parallel.pipeline, run.software.fills)
    stages = [_stage(run, forced, kept, number, layers, outside(run, reserve)) for number in range(len(layers))]
    most = max(stages, key=lambda stage: stage.total)
    if not cached:
        return most
    if "smi" in run.measured.memory_kind or "reserved" in run.measured.memory_kind or run.software.reserves:
        held = (_RESERVED - 1) * (most.total - most.reserve)
        return replace(most, reserve=most.reserve + held)
    return most


def _stage(run: Run, forced: Forced, kept: Kept, number: int, layers: list[int], reserve: float) -> Memory:
    layer, rest = parameter_elements(forced)
    first, last = number == 0, number == len(layers) - 1
    ends = run.dimensions.vocab * run.dimensions.hidden / run.parallel.tensor
    outside = rest if first and last else ends if first or last else 0.0
    elements = layers[number] * layer + outside
    states, gradients, gathered = _states(run, elements, layer, outside)
    gathered += run.software.buckets
    if run.software.placeholders:
        gradients += _HALF * layer
    held, running, loss = _activations(run, kept, layers[number], in_flight(run, number), last)
    if first:
        normed = _HALF * _entering(run) if run.software.norms_embeddings else 0.0
        held += in_flight(run, number) * (kept.before + normed)
    if run.software.keeps_sent and run.parallel.chunks > 1:
        # `passes.cost.schedules.messages_held`; before the first stage there is no other one.
        held += (run.parallel.chunks - first) * min(run.parallel.pipeline, run.micro_batches) * kept.entry
    if run.software.casts and run.recompute != "full" and run.parallel.data * run.parallel.context == 1:
        # The first copy is counted with the states.
        held += (in_flight(run, number) - 1) * _HALF * elements
    updating = Memory(_updating(run, elements), 0.0, 0.0, 0.0, reserve)
    if not run.software.standing and run.micro_batches == 1:
        # Where gradients come and go, the peak is before there are any, or when all of them are there.
        begins = Memory(states, gathered, held, max(running, loss), reserve)
        finishes = Memory(states + gradients, gathered, held / layers[number], running, reserve)
        return max(begins, finishes, updating, key=lambda moment: moment.total)
    runs = Memory(states + gradients, gathered, held, max(running, loss), reserve)
    return max(runs, updating, key=lambda moment: moment.total)


def _updating(run: Run, elements: float) -> float:
    """Bytes while the optimizer updates: parameters in two bytes, states and what the step makes; where parameters are
    split their gradients in two bytes are there too. 0 where a step makes nothing."""
    if not run.software.updating:
        return 0.0
    own = elements / max(1, run.parallel.shards)
    halves = 2 * _HALF * own if run.parallel.zero == 3 else _HALF * elements
    return halves + own * (_ADAM + run.software.updating)


def _states(run: Run, elements: float, layer: float, outside: float) -> tuple[float, float, float]:
    """Bytes of parameters with the optimizer, of gradients, and of gathered parameters with one layer's gradients."""
    shards, zero = max(1, run.parallel.shards), run.parallel.zero
    if run.quantized:
        # Frozen weights in four bits, with a scale in eight bits per block of 64; embeddings are not quantized.
        return (elements - outside) * (0.5 + 1 / 64) + outside * _HALF, 0.0, _HALF * layer
    adam = _PURE_ADAM if "pure" in run.precision else _ADAM
    if run.software.optimizer_in_backward:
        # Gradients go as soon as they are used; the head's waits for the embedding's where they are one.
        largest = max(layer, outside if run.dimensions.tied else outside / 2)
        return elements * (_HALF + adam), 0.0, _HALF * largest
    if zero == 3:
        gathered = _HALF * (_GATHERED * layer + outside) + (_HALF + _FLOAT) * max(layer, outside / 2)
        return elements * adam / shards, elements * _FLOAT / shards, gathered
    gradient = run.software.gradient_bytes / (shards if zero == 2 else 1)
    return elements * (_HALF + adam / shards), elements * gradient, 0.0


def in_flight(run: Run, stage: int) -> float:
    """The number of micro-batches whose activations a stage holds at once."""
    stages, chunks = run.parallel.pipeline, run.parallel.chunks
    if stages == 1:
        return 1.0
    least = float(run.micro_batches)
    if "gpipe" in run.parallel.schedule.lower():
        return least
    if chunks > 1:
        return min(least, stages + (stages - 1) / chunks - 2 * stage / chunks)
    return min(least, (2 * stages - 1 if "2p" in run.parallel.schedule else stages) - stage)


def _activations(run: Run, kept: Kept, layers: int, flying: float, last: bool) -> tuple[float, float, float]:
    """Bytes that are kept, those of a layer whose backward pass runs, and those of the loss."""
    loss = _loss(run, kept) if last else 0.0
    whole = kept.layer + (_exchanged(run) if run.software.keeps_exchanged else 0.0)
    if run.recompute == "full":
        entry = 0.0 if run.software.offloads else kept.entry
        sent = run.software.holds_outputs and run.parallel.pipeline > 1
        outputs = flying * kept.entry / run.parallel.tensor if sent else 0.0
        return flying * layers * entry + outputs, whole + kept.working, loss
    if run.recompute == "ops":
        selected = kept.selected - (0.0 if run.software.keeps_products else kept.entry)
        return flying * layers * selected, whole - selected + kept.working, loss
    per_layer = whole - (kept.scores if run.recompute == "selective" else 0.0)
    return flying * layers * per_layer, kept.working, loss


def _loss(run: Run, kept: Kept) -> float:
    """Bytes of what stands after the layers: while the loss is computed, or while the head's backward pass has the
    gradient of the logits, makes that of what it read, and gives autograd a tensor for its weight's.

    A split sequence is whole there, as the operand and as its gradient.
    """
    sizes, parallel = run.dimensions, run.parallel
    read = _HALF * _entering(run)
    whole = 2 * read if parallel.sequence_parallel else read
    weight = _HALF * sizes.vocab * sizes.hidden / parallel.tensor if run.software.placeholders else 0.0
    headed = kept.loss * _HALF / _FLOAT + whole + weight
    return max(0.0, kept.after - kept.loss) + max(kept.loss * run.software.loss_copies, headed)


def _entering(run: Run) -> float:
    """Elements that enter the first layer and leave the last one, of the part of the sequence that a device has."""
    return run.micro_batch * run.dimensions.sequence * run.dimensions.hidden / run.parallel.context


def _exchanged(run: Run) -> float:
    """Bytes of what a layer's attention gives on one device, where heads are exchanged for parts of the sequence."""
    sizes, parallel = run.dimensions, run.parallel
    if parallel.context == 1 or parallel.context_method != "a2a":
        return 0.0
    elements = run.micro_batch * sizes.sequence * sizes.heads * sizes.head_size
    return _HALF * elements / (parallel.context * parallel.tensor)
