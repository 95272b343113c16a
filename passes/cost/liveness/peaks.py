"""The memory peaks of a step, for all numbers of micro-batches that hold tensors at a time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from passes.cost.liveness.graph import ACTIVATIONS, LiveBytes, MemoryPeak
from passes.cost.schedules import Held
from passes.ir.lowered import BEFORE


@dataclass(frozen=True)
class PartPeak:
    """The memory peak of a part of a step while one micro-batch holds tensors. Each further one with tensors saved adds
    the bytes `saved`, and each whose gradients of weights are left to compute adds `left`."""

    alone: MemoryPeak
    saved: LiveBytes
    left: int

    def bytes_with(self, held: Held) -> float:
        """The bytes of the peak if so many micro-batches hold tensors."""
        return self.alone.peak + (held.saved - 1) * sum(self.saved.values()) + held.left * self.left

    def with_held(self, held: Held) -> MemoryPeak:
        """The peak if so many micro-batches hold tensors."""
        others = Counter({place: size * (held.saved - 1) for place, size in self.saved.items()})
        others[ACTIVATIONS, BEFORE] += self.left * held.left
        return self.alone.beside(others)


@dataclass(frozen=True)
class StepPeaks:
    """The memory peaks of the parts of a step: what is live beside a micro-batch is the same throughout each part, so
    one simulation tells the peak for all numbers of micro-batches that hold tensors at a time."""

    parts: tuple[PartPeak, ...]

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes of the step, in which these micro-batches hold tensors at one time or another."""
        return max(part.bytes_with(each) for part in self.parts for each in held)

    def with_held(self, held: Sequence[Held]) -> MemoryPeak:
        """The peak of the step, in which these micro-batches hold tensors at one time or another."""
        pairs = ((part, each) for part in self.parts for each in held)
        part, most = max(pairs, key=lambda pair: pair[0].bytes_with(pair[1]))
        return part.with_held(most)
