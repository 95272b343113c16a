"""What is known of the software that published runs ran on, from the text of their source."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Software:
    """Facts that change what a step computes, hides and keeps.

    - `flash`: the scores of attention are never written to memory.
    - `sequence_parallel`: activations between the tensor-parallel products are split over the sequence.
    - `overlaps`: gradients are reduced while the backward pass runs.
    - `dropout`: its rate in training.
    - `compiled`: chains of cheap ops are fused, by hand or by a compiler.
    - `gradient_bytes`, `reduced_bytes`, `gathered_bytes`: what an element of an accumulated gradient, of one that is
      sent, and of a parameter that is gathered takes.
    - `updating`: bytes of each element of its states that the optimizer's step takes besides these.
    - `standing`: gradients have their memory from the first step on, rather than while there are any.
    - `loss_copies`: how many float32 copies of the logits the loss takes at its peak.
    - `scatters`: tensor-parallel ranks each send a part of what goes to the next stage of a pipeline, gathered there.
    - `holds_outputs`: a pipeline stage keeps what it has sent on until its backward pass.
    - `adds`: gradients of a micro-batch are added to those before by a kernel of their own, rather than by the product
      that makes them.
    - `all_reduces`: gradients of ZeRO-1 are summed whole on every device.
    - `prefetches`: parameters that are split (ZeRO-3) are gathered, and their gradients reduced, while others compute.
    - `coalesces`: those of a layer in one collective, rather than one for each tensor.
    - `buckets`: bytes of the buffers that gradients are reduced and parameters gathered in.
    - `recompute`: what is computed again where a record does not say.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlaps: bool = True
    dropout: float = 0.0
    compiled: bool = True
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    gathered_bytes: int = 2
    updating: int = 0
    standing: bool = True
    loss_copies: float = 2.5
    scatters: bool = True
    holds_outputs: bool = False
    adds: bool = False
    all_reduces: bool = False
    prefetches: bool = True
    coalesces: bool = True
    buckets: float = 0.0
    recompute: str = "none"


_UNFUSED = Software(flash=False, sequence_parallel=False, overlaps=False, dropout=0.1)
_TORCH = Software(standing=False, loss_copies=3.5, adds=True)

_BLOOM = replace(
    _UNFUSED,
    dropout=0.0,
    adds=True,
    reduced_bytes=2,
    gradient_bytes=2,
    scatters=False,
    holds_outputs=True,
    buckets=2 * 5e8 * 2,
)

# Pattern in the source -> its software, where it is not as Megatron-LM is today. FlashAttention is of June 2022 (arXiv
# 2205.14135), sequence parallelism of May 2022 (arXiv 2205.05198, which has dropout in its formulas). Megatron scatters
# what stages send (Narayanan et al. 2021, section 4.1), DeepSpeed does not; it reduces and gathers in buckets of 5e8
# elements. Its ZeRO-3 gathered parameter by parameter until the summer of 2021, and synchronized with each (microsoft/
# DeepSpeed#1188 and #1069). Megatron has products add gradients since 2022. Torchtitan compiles its loss since
# 2025; torchtune makes logits in eight chunks. InternEvo's step casts gradients to float32 (`FSDPadaptOptimizer.step`,
# `HybridZeroOptimizer._step`), and torch's AdamW, which it used unfused before torch 2.1, makes the root of the second
# moments and what it divides by.
_KNOWN: tuple[tuple[str, Software], ...] = (
    (r"bigscience|BLOOM", _BLOOM),
    (r"Korthikanti|2205\.05198", replace(_UNFUSED, sequence_parallel=True)),
    (
        r"\b20(19|20|21)\b",
        replace(_UNFUSED, adds=True, reduced_bytes=2, gradient_bytes=2, prefetches=False, coalesces=False),
    ),
    (r"Zero Bubble", _UNFUSED),
    (r"InternEvo", Software(sequence_parallel=False, reduced_bytes=2, gradient_bytes=2, updating=4 + 2 * 4)),
    (r"llm-foundry", _TORCH),
    (r"torchtitan.*2024", replace(_TORCH, recompute="ops")),
    (r"torchtitan", replace(_TORCH, recompute="ops", loss_copies=1.0)),
    (r"torchtune", replace(_TORCH, gradient_bytes=2, reduced_bytes=2, loss_copies=1.3)),
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
    if "fp32 grad accumulation" in precision and "no fp32" not in precision:
        # Beside the gradients of a micro-batch in two bytes. DeepSpeed's pipeline sums those of its BF16_Optimizer up
        # everywhere (`_bf16_reduce_grads`).
        found = replace(found, gradient_bytes=6, reduced_bytes=4, all_reduces=True)
    return found
