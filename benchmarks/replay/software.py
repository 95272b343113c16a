"""What is known of the software that published runs ran on, from the text of their source."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Software:
    """Facts that change what a step computes or hides.

    `flash` says that the scores of attention are never written to memory; `sequence_parallel` that activations between
    the tensor-parallel products are split over the sequence; `overlaps` that gradients are reduced while the backward
    pass runs; `dropout` its rate in training; `gradient_bytes` what an element of an accumulated gradient takes, and
    `reduced_bytes` what one that is sent takes. `gathered_bytes` is the same for parameters.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlaps: bool = True
    dropout: float = 0.0
    compiled: bool = True
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    gathered_bytes: int = 2
    loss_bytes: int = 4


_UNFUSED = Software(flash=False, sequence_parallel=False, overlaps=False, dropout=0.1)

# Pattern in the source -> its software, where it is not of today. FlashAttention is of June 2022 (arXiv 2205.14135),
# sequence parallelism of May 2022 (arXiv 2205.05198, which has dropout in its formulas).
_KNOWN: tuple[tuple[str, Software], ...] = (
    (r"bigscience|BLOOM", replace(_UNFUSED, dropout=0.0, reduced_bytes=2, gradient_bytes=2)),
    (r"Korthikanti|2205\.05198", replace(_UNFUSED, sequence_parallel=True)),
    (r"\b20(19|20|21)\b", replace(_UNFUSED, reduced_bytes=2, gradient_bytes=2)),
    (r"Zero Bubble", Software(sequence_parallel=False, overlaps=False)),
    (r"InternEvo", Software(sequence_parallel=False, reduced_bytes=2, gradient_bytes=2)),
    (r"torchtune", Software(gradient_bytes=2, reduced_bytes=2)),
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
        found = replace(found, gradient_bytes=4)
    return found
