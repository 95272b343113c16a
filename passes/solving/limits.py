"""What a plan may take, and the errors that say that nothing does."""

from dataclasses import dataclass

from passes.cost.cluster import GIB
from passes.cost.memory import MemoryUse, largest_terms
from passes.ir.errors import InfeasibleError


class InfeasibleProgramError(Exception):
    """No choice keeps within the limits and takes less than was aimed at."""


@dataclass(frozen=True)
class Limits:
    """Bytes that a device has for the plan, and how many tensors the optimizer keeps per parameter. What was `asked`
    for is more where a part of it is set aside."""

    memory: float
    optimizer_states: int
    asked: float | None = None

    def __str__(self) -> str:
        return _gib(self.memory if self.asked is None else self.asked)


def infeasible(limits: Limits, use: MemoryUse, at_least: str = "") -> InfeasibleError:
    """The error that says what is missing where the least that a plan can take is `use`."""
    terms = ", ".join(f"{name} {_gib(size)}" for name, size in largest_terms(use))
    missing = use.peak - limits.memory
    return InfeasibleError(
        f"no plan fits the memory limit of {limits} per device: {at_least}{_gib(missing)} are missing "
        f"({use.moment}: {terms})",
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
