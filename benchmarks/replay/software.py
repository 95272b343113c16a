"""The software of published runs, parsed from the text of their source."""

import re
from dataclasses import dataclass, replace
from enum import Enum


class Knowledge(Enum):
    """The part of the software of a run that a prediction is told.

    `NOTHING`: it runs as the product does. `SOURCED`: all facts that have a source of their own. `ALL`: those too that
    were chosen in a range that a source gives, or that have none (`UNSOURCED`).
    """

    NOTHING = "as_is"
    SOURCED = "sourced_only"
    ALL = "facts"


@dataclass(frozen=True)
class Software:
    """Facts that change what a step computes, hides and keeps.

    - `flash`: the scores of attention are never written to memory.
    - `sequence_parallel`: activations between the tensor-parallel products are split over the sequence.
    - `overlaps`: gradients are reduced while the backward pass runs.
    - `dropout`: its rate in training.
    - `norms_embeddings`: a norm stands between embeddings and layers, and keeps what it reads.
    - `compiled`: chains of cheap ops are fused, by hand or by a compiler.
    - `gradient_bytes`, `reduced_bytes`, `gathered_bytes`: what an element of an accumulated gradient, of one that is
      sent, and of a parameter that is gathered takes.
    - `updating`: bytes of each element of its states that the optimizer's step takes besides these.
    - `standing`: gradients have their memory from the first step on, rather than while there are any.
    - `loss_copies`: how many float32 copies of the logits the loss takes at its peak.
    - `placeholders`: products that add gradients up themselves give autograd an empty tensor of their weight's shape.
      It is kept and shared by all layers; the head's goes when its backward pass is over.
    - `keeps_exchanged`: attention that exchanges heads for parts of the sequence keeps its results as they were before
      the exchange too.
    - `waits`: a stage of a pipeline computes nothing while it exchanges with its neighbours.
    - `exchanges`: two stages of a pipeline send to each other at the same time, rather than one after the other.
    - `steps_apart`: ranks of a pipeline update their parameters, and begin the next step, without waiting for others.
    - `casts`: parameters are held in float32 alone; where no data axis gathers them, each micro-batch in flight has
      them in two bytes.
    - `wide_masks`: masks of dropout have the bytes of activations, rather than one.
    - `holds_outputs`: a pipeline stage keeps its part of what it has sent on until its backward pass.
    - `keeps_sent`: with several stages on a rank, gradients that they send are counted for as many micro-batches as may
      be under way, rather than for none.
    - `adds`: gradients of a micro-batch are added to those before by a kernel of their own, rather than by the product
      that makes them.
    - `all_reduces`: gradients of ZeRO-1 are summed whole on every device.
    - `prefetches`: parameters that are split (ZeRO-3) are gathered, and their gradients reduced, while others compute.
    - `coalesces`: those of a layer in one collective, rather than one for each tensor.
    - `buckets`: bytes of the buffers that gradients are reduced and parameters gathered in.
    - `fills`: stages of a pipeline have as many layers as the first, the last has what is left.
    - `host`: seconds that the device waits for the host before each kernel.
    - `slower`: how often longer everything takes than it would.
    - `sample`: tokens of a sample of the data, beyond which no attention reaches; 0 where samples are whole sequences.
    - `packed`: samples are packed to whole sequences, rather than padded to each other.
    - `block`: queries and keys that attention computes together, if any pair of them belongs to one packed sample.
    - `offloads`: what layers keep lies in the host's memory.
    - `optimizer_in_backward`: parameters are updated as soon as their gradients are there.
    - `rotation`: bytes read and written to rotate an element of queries and keys, beyond the stock class's.
    - `rotation_kernels`: kernels of a layer that do so, beyond the stock class's.
    - `logits`: bytes read and written for each logit, beyond those of a fused loss.
    - `chunks`: parts of the sequence that the head computes one by one, each with a gradient of its weight.
    - `scales`: gradients are divided by the number of tokens once they are there.
    - `adapter`: rank of adapters on the matrices of frozen layers, but for that of keys; 0 where there are none.
    - `recompute`: what is computed again where a record does not say.
    - `reserves`: the memory that it prints is what the allocator holds, rather than what it has given out.
    - `keeps_products`: recompute of "ops" keeps the result of the last product of a layer too, which nothing reads.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlaps: bool = True
    dropout: float = 0.0
    norms_embeddings: bool = False
    compiled: bool = True
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    gathered_bytes: int = 2
    updating: int = 0
    standing: bool = True
    loss_copies: float = 2.5
    placeholders: bool = True
    keeps_exchanged: bool = True
    waits: bool = True
    exchanges: bool = True
    steps_apart: bool = False
    casts: bool = False
    wide_masks: bool = False
    holds_outputs: bool = False
    keeps_sent: bool = False
    fills: bool = False
    host: float = 0.0
    slower: float = 1.0
    sample: int = 0
    packed: bool = True
    block: int = 0
    offloads: bool = False
    optimizer_in_backward: bool = False
    rotation: float = 0.0
    rotation_kernels: int = 0
    logits: float = 0.0
    chunks: int = 1
    scales: bool = False
    adapter: int = 0
    adds: bool = False
    all_reduces: bool = False
    prefetches: bool = True
    coalesces: bool = True
    buckets: float = 0.0
    recompute: str = "none"
    reserves: bool = False
    keeps_products: bool = False


# The software that the product runs as: eager torch with its own attention, gradients that come and go in float32, and
# a loss as torch's cross entropy makes it.
PRODUCT = Software(
    standing=False,
    loss_copies=3.5,
    placeholders=False,
    keeps_exchanged=False,
    compiled=False,
    waits=False,
    casts=True,
    wide_masks=True,
    keeps_sent=True,
)

# Facts without a source of their own: the middles of two ranges, and copies that were counted by hand.
UNSOURCED = ("slower", "host", "loss_copies")

# What a record's plan and model say rather than its software.
_PLANNED = ("sequence_parallel", "dropout", "recompute", "reduced_bytes", "fills")


def as_known(software: Software, knowledge: Knowledge, compiled: bool) -> Software:
    """The part of `software` that a prediction is told; `compiled` says that the run asked torch to compile."""
    if knowledge is Knowledge.ALL:
        return software
    if knowledge is Knowledge.SOURCED:
        return replace(software, **{name: getattr(PRODUCT, name) for name in UNSOURCED})
    kept = {name: getattr(software, name) for name in _PLANNED}
    return replace(PRODUCT, compiled=compiled, **kept)


_UNFUSED = Software(
    flash=False, sequence_parallel=False, overlaps=False, dropout=0.1, placeholders=False, keeps_exchanged=False
)
_TORCH = replace(PRODUCT, adds=True, casts=False, wide_masks=False)
_TITAN = replace(_TORCH, recompute="ops", reserves=True, keeps_products=True)

_BLOOM = replace(
    _UNFUSED,
    norms_embeddings=True,
    adds=True,
    reduced_bytes=2,
    gradient_bytes=2,
    exchanges=False,
    holds_outputs=True,
    fills=True,
    host=15e-6,
    buckets=2 * 5e8 * 2,
)

# Logits in eight chunks (torchtune's modules/loss/ce_chunked_output_loss.py): all are there in two bytes, and one chunk
# in float32, with its softmax and their gradient; compiled there is its gradient in two bytes only.
_CHUNKED, _CHUNKED_COMPILED = 0.5 + 3 / 8, 0.5 + 0.5 / 8
_TUNE = replace(_TORCH, gradient_bytes=2, reduced_bytes=2, loss_copies=_CHUNKED)

# Logits in two bytes, with their gradient written over them (`cross_entropy_forward` of Transformer Engine 2.11, in
# pytorch/triton/cross_entropy.py).
_WRITTEN_OVER = 0.5

# Pattern in the source -> its software, where it is not as Megatron-LM is today.
#
# Megatron computes layers with Transformer Engine, whose products give `get_dummy_wgrad` (pytorch/module/base.py) to
# autograd where gradients are added up by products: one tensor for each shape. Megatron's own head makes one each time
# (`LinearWithGradAccumulationAndAsyncCommunication.backward` in core/tensor_parallel/layers.py). With all-to-alls
# around attention Transformer Engine keeps q, k, v and the result as they are between them (`AttnFuncWithCPAndQKVOA2A`
# of 2.11); the product that follows keeps the result as it is after them. SimuMax ran Megatron at 23e00ed0 with 2.11
# and its fused loss (docs/b200/b200_real_repro_guide.md).
#
# FlashAttention is of June 2022 (arXiv 2205.14135), sequence parallelism of May 2022 (arXiv 2205.05198, which has
# dropout in its formulas). Of what a stage of a pipeline sends, each tensor-parallel rank sends its part: in Megatron
# (Narayanan et al. 2021, section 4.1) and in DeepSpeed (`PartitionedTensor` in runtime/pipe/engine.py, at 2151c787 of
# February 2022), whose stages receive and send one after the other (`TrainSchedule.steps` in runtime/pipe/schedule.py)
# and are filled in order (78 layers on 12 stages lie 7 on each but the last, says the chronicle of BLOOM). DeepSpeed
# reduces and gathers in buckets of 5e8 elements. Its ZeRO-3 gathered parameter by parameter until the summer of 2021,
# and synchronized with each (microsoft/DeepSpeed#1188 and #1069). Megatron has products add gradients since 2022.
# Stages of both wait until what they exchange is there (`_communicate` in megatron/p2p_communication.py waits for its
# requests and synchronizes the device). Zero-bubble pipelines update parameters before they know whether the gradients
# of all ranks are finite, and validate that later (Qi et al. 2024, section 4).
#
# BLOOM ran with CUDA_LAUNCH_BLOCKING=1 (its README and scripts): no kernel is started while another runs, so the device
# waits for Python and the dispatcher, 5 to 25 us an op, of which the middle is taken. (The chronicle has three pairs of
# runs with and without: 6.8% slower, and twice no difference.) It says of the machine that a fix of PCIe and NUMA on 25
# February 2022 made all 1 to 5% faster: the middle is taken for what was before. In bfloat16 it ran DeepSpeed's
# BF16_Optimizer.
#
# llm-foundry's layers are taken to run as they are written, on flash attention: no record of it speaks of compiling.
# Torchtitan compiles where a record says so, and its loss since 2025. The memory that it prints is what the allocator
# holds (`max_reserved_gib` in its metrics), and torch's selective checkpointing keeps what the policy says, needed or
# not (`_CachingTorchDispatchMode` in torch/utils/checkpoint.py). InternEvo's step casts gradients to float32
# (`FSDPadaptOptimizer.step`, `HybridZeroOptimizer._step`), and torch's AdamW, which it used unfused before torch 2.1,
# makes the root of the second moments and what it divides by.
_KNOWN: tuple[tuple[str, Software], ...] = (
    (r"chronicles-prequel.*2022-02-2[0-4]", replace(_BLOOM, slower=1.03)),
    (r"bigscience|BLOOM", _BLOOM),
    (r"Korthikanti|2205\.05198", replace(_UNFUSED, sequence_parallel=True)),
    (
        r"\b20(19|20|21)\b",
        replace(_UNFUSED, adds=True, reduced_bytes=2, gradient_bytes=2, prefetches=False, coalesces=False),
    ),
    (r"Zero Bubble", replace(_UNFUSED, steps_apart=True)),
    (
        r"InternEvo",
        Software(
            sequence_parallel=False,
            reduced_bytes=2,
            gradient_bytes=2,
            updating=4 + 2 * 4,
            placeholders=False,
            keeps_exchanged=False,
        ),
    ),
    (r"SimuMax", Software(loss_copies=_WRITTEN_OVER)),
    (r"llm-foundry", _TORCH),
    (r"torchtitan.*2024", _TITAN),
    (r"torchtitan", replace(_TITAN, loss_copies=1.0)),
    (r"torchtune", _TUNE),
)


def find_software(source: str, precision: str, notes: str) -> Software:
    """The software of a run. Sources that name none count as today's, those in fp16 as of before FlashAttention."""
    found = next((software for pattern, software in _KNOWN if re.search(pattern, source)), None)
    if found is None:
        found = _UNFUSED if precision.lower().startswith("fp16") else Software()
    if "overlap off" in notes:
        found = replace(found, overlaps=False)
    # What Composer calls PURE sends gradients in bfloat16, DEFAULT in float32 (its `get_mixed_precision`).
    if "PURE" in precision:
        found = replace(found, reduced_bytes=2)
    own = found.fills and precision.lower().startswith("bf16")
    if own or ("fp32 grad accumulation" in precision and "no fp32" not in precision):
        # Beside the gradients of a micro-batch in two bytes. DeepSpeed's pipeline sums those of its BF16_Optimizer up
        # everywhere (`_bf16_reduce_grads`).
        found = replace(found, gradient_bytes=6, reduced_bytes=4, all_reduces=True)
    return found


# What the rows of torchtune's table of techniques add (its README at bd2a0fc7), each to those before it; LoRA and QLoRA
# leave out the optimizer's.
_ROWS = ("baseline", "packed", "compile", "chunked", "act ckpt", "opt in bwd", "act offload", "8-bit", "lora", "qlora")
# Tokens of a sample of Alpaca: 918 bytes a row of the data set, of which the prompt with its answer is 540 (the columns
# and once more all of them in a template of 165), at 3.94 characters a token of Llama 3 (Llama team 2024, section 3.2).
_ALPACA = 137


# Rotations of torchtune (modules/position_embeddings.py) run in float32, even elements apart from odd ones. Op by op
# they read and write 56 bytes an element forward and 116 backward, where each of four slices makes a tensor of zeros;
# the stock class's have 20 and 26 in two bytes. These are 9 and 18 kernels for queries, and as many for keys: a cast,
# four products, a difference and a sum, a stack and a cast; backward two casts, four products, a sign, four zeros and
# copies, and three sums. Of the stock class 5 are counted, and 7 backward.
_ROTATION, _ROTATION_KERNELS = 56 + 116 - 20 - 26.0, 2 * (9 + 18 - 5 - 7)
# What a fused loss does not: layers and the loss are compiled, but not what casts logits between them, and a softmax in
# one kernel reads rows for their maximum and for their sum. The cast writes 4 bytes, the loss reads 2 x 4 in place of
# 2, and backward reads and writes 4 in place of 2, which the cast's gradient reads again and writes in 2 (22 in all).
# Chunks are cast within (torchtune's modules/transformer.py and training/_compile.py at 1814feb1, which added the
# table).
_CAST_LOGITS, _CHUNKED_LOGITS = (4 + 4 + 4) + (4 + 4 + 4 - 2.0), 2.0
_CHUNKS = 8
# Flex attention skips whole blocks of a mask (`_DEFAULT_SPARSE_BLOCK_SIZE` in torch/nn/attention/flex_attention.py).
_BLOCK = 128
# recipes/configs/llama3_2/3B_qlora_single_device.yaml, on queries, values, outputs and the MLP.
_RANK = 64


def find_row(software: Software, row: str) -> Software:
    """`software` with the techniques of a row of torchtune's table, and all before it."""
    name = row.strip("+ ").lower()
    place = next((place for place, title in enumerate(_ROWS) if name.startswith(title)), None)
    if place is None:
        return software
    compiled = place >= _ROWS.index("compile")
    chunked = place >= _ROWS.index("chunked")
    early = _ROWS.index("opt in bwd") <= place < _ROWS.index("lora")
    return replace(
        software,
        sample=_ALPACA,
        packed=place >= _ROWS.index("packed"),
        block=_BLOCK,
        compiled=compiled,
        rotation=0.0 if compiled else _ROTATION,
        rotation_kernels=0 if compiled else _ROTATION_KERNELS,
        logits=_CHUNKED_LOGITS if chunked else _CAST_LOGITS if compiled else 0.0,
        chunks=_CHUNKS if chunked else 1,
        # The recipe's step (`scale_grads`), where there are gradients left by then.
        scales=not early,
        adapter=_RANK if place >= _ROWS.index("lora") else 0,
        # The logits in float32, their softmax, and the gradients of both.
        loss_copies=_CHUNKED_COMPILED if chunked else 3.0,
        optimizer_in_backward=early,
        offloads=place >= _ROWS.index("act offload"),
    )
