"""FLOPs by the conventions of those who publish, and the step time that follows from what they publish.

A convention says how often the forward pass counts, and whether causal attention counts whole or half:

- model_noncausal: three times, attention whole (Korthikanti et al. 2022, arXiv 2205.05198, appendix A);
- model_causal: three times, attention half (`num_floating_point_operations` of Megatron-LM);
- hardware_full_recompute: the layers four times, the head three (Narayanan et al. 2021, arXiv 2104.04473, section 3).
"""

from dataclasses import dataclass

from benchmarks.models import Dimensions, Family
from benchmarks.replay.graphs import Multiplications
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import Run

# How far FLOPs may be apart.
TOLERANCE = 0.01
# FLOP/s are published in whole TFLOP/s.
ROUNDING = 0.5e12


@dataclass(frozen=True)
class Convention:
    """The number of forward passes of layers and head that count, and the fraction of attention that counts."""

    layers: float
    head: float
    attention: float

    def flops(self, counted: Multiplications) -> float:
        """FLOPs of a step with the forward FLOPs `counted`."""
        return self.layers * (counted.products + self.attention * counted.attention) + self.head * counted.head


CONVENTIONS = {
    "model_noncausal": Convention(3, 3, 1.0),
    "model_causal": Convention(3, 3, 0.5),
    "hardware_full_recompute": Convention(4, 3, 1.0),
}
MODEL = CONVENTIONS["model_noncausal"]


def convention_of(run: Run) -> Convention:
    """The convention of a record's FLOP/s, the plain one where it has none."""
    return CONVENTIONS.get(run.measured.convention or "", MODEL)


def formula(family: Family, sizes: Dimensions) -> Multiplications:
    """Forward FLOPs of one sample from the dimensions alone (section 2.1 of Megatron's counting, closed form)."""
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    mlp = sizes.hidden * sizes.ffn * (3 if family.gated else 2)
    products = 2.0 * sizes.sequence * sizes.layers * (sizes.hidden * (2 * queries + 2 * keys) + mlp)
    attention = 4.0 * sizes.sequence**2 * sizes.layers * queries
    return Multiplications(products, attention, 2.0 * sizes.sequence * sizes.hidden * sizes.vocab)


def check(run: Run, family: Family, counted: Multiplications) -> float:
    """The relative difference of the traced graph's FLOPs from the record's: from those that its FLOP/s and its step
    time make, where both are published, or from the formula of its convention; whichever is nearer, since some sources'
    own two figures do not agree.

    `counted` are the forward FLOPs of one sample. Raises SkippedError where they are more than 1% apart, and more than
    the rounding of what is published.
    """
    convention, measured = convention_of(run), run.measured
    ours = convention.flops(counted)
    apart = ours / convention.flops(formula(family, run.dimensions)) - 1
    seconds = _published_seconds(run)
    if measured.convention in CONVENTIONS and measured.flops_per_second is not None and seconds is not None:
        theirs = measured.flops_per_second * run.devices * seconds / run.global_batch
        rounding = ROUNDING / measured.flops_per_second
        published = (ours + _added(run, counted)) / theirs - 1
        if abs(published) <= TOLERANCE + rounding:
            return published
    if abs(apart) > TOLERANCE:
        raise SkippedError(Reason.FLOPS, f"{100 * apart:+.1f}%")
    return apart


def _added(run: Run, counted: Multiplications) -> float:
    """The FLOPs that counting 6 per parameter and token adds, where the number of parameters is published: learned
    positions multiply nothing."""
    if run.parameters is None:
        return 0.0
    sizes = run.dimensions
    multiplied = (counted.products + counted.head) / (2 * sizes.sequence)
    return 6.0 * sizes.sequence * max(0.0, run.parameters - multiplied)


def _published_seconds(run: Run) -> float | None:
    """The step time that is published, or follows from tokens/s."""
    measured = run.measured
    if measured.step_time is not None:
        return measured.step_time
    if measured.tokens_per_second is not None:
        return run.tokens / (measured.tokens_per_second * run.devices)
    return None


def measured_seconds(run: Run, counted: Multiplications) -> tuple[float, str] | None:
    """The step time of a record, and how it was had: published; from tokens/s (tokens of a step over tokens/s of all
    devices); or from FLOP/s (the traced graph's FLOPs in the record's convention over FLOP/s of all devices). None
    where none of them is published."""
    seconds = _published_seconds(run)
    if seconds is not None:
        return seconds, "published" if run.measured.step_time is not None else "from tokens/s"
    if run.measured.flops_per_second is None:
        return None
    if run.measured.convention not in CONVENTIONS:
        return None
    flops = convention_of(run).flops(counted) * run.global_batch * run.repeats
    return flops / (run.measured.flops_per_second * run.devices), f"from FLOP/s, {run.measured.convention}"


def utilization(run: Run, counted: Multiplications, seconds: float, peak: float) -> float:
    """Model FLOPs in the record's convention (without what is computed again) over those that the devices could do."""
    attention = 0.5 if run.measured.convention == "model_causal" else 1.0
    flops = Convention(3, 3, attention).flops(counted) * run.global_batch * run.repeats
    return flops / (seconds * run.devices * peak)
