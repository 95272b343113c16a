"""Limits of a plan, the errors for limits that no plan satisfies, and the effort that a search may spend.

The solver is bounded by the numbers that it computes, not by a clock, so that a problem has the same solution on every
machine. A unit of effort is the work on a million array elements; calling NumPy counts as the work on some. Machines
differ in how long a unit takes, mostly about 3 ms, but not in how many units a problem takes.
"""

from dataclasses import dataclass

from passes.cost.cluster import GIB
from passes.cost.memory import MemoryUse, largest_terms
from passes.ir.errors import InfeasibleError

_UNIT = 1e6
# An operation on a small array takes as long as one on so many elements.
_CALL = 3000


class OutOfEffortError(Exception):
    """No solution was found with the effort that was allowed."""


@dataclass
class Effort:
    """Units of effort that were spent so far, on parts, too. What is added also counts in `whole`, of which this is a
    part."""

    spent: float = 0.0
    whole: "Effort | None" = None

    def add(self, elements: float, calls: int = 1) -> None:
        """Count operations on so many array elements in all, in so many `calls`."""
        units = (elements + calls * _CALL) / _UNIT
        counted: Effort | None = self
        while counted is not None:
            counted.spent += units
            counted = counted.whole

    def part(self) -> "Effort":
        """The effort of a part."""
        return Effort(whole=self)


class InfeasibleProgramError(Exception):
    """No choice satisfies the limits in less time than the aim."""


@dataclass(frozen=True)
class Limits:
    """Bytes of device memory for the plan, and the tensors that the optimizer keeps per parameter. The limit `asked`
    for is larger where a part of it is set aside."""

    memory: float
    optimizer_states: int
    asked: float | None = None

    def __str__(self) -> str:
        return _gib(self.memory if self.asked is None else self.asked)


def infeasible(limits: Limits, use: MemoryUse, at_least: str = "") -> InfeasibleError:
    """The error for a problem whose smallest plan takes `use`. Its terms add up to the limit and what is missing."""
    terms = largest_terms(use)
    if limits.asked is not None:
        terms.append(("set aside", limits.asked - limits.memory))
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in terms)
    missing = use.peak - limits.memory
    return InfeasibleError(
        f"no plan fits the memory limit of {limits} per device: {at_least}{_gib(missing)} are missing "
        f"({use.moment}: {listed})",
        missing,
    )


def out_of_effort(limits: Limits) -> InfeasibleError:
    """The error for a search that ended before it found a plan."""
    return InfeasibleError(
        f"with the effort allowed no plan was found that fits the memory limit of {limits} per device, though one may "
        "exist: raise the limit"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
