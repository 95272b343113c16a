"""The gap between the best choice that was found and a lower bound on every choice."""

from dataclasses import dataclass

import numpy as np

from passes.ir.choices import Solution
from passes.solve.instance import Instance

# A choice is proven when it costs at most this much more than the bound, relative to it.
PROVEN = 1e-6


@dataclass
class Gap:
    """The incumbent `best` and the lower bound `bound`; choices of `cutoff` seconds or more are of no interest."""

    instance: Instance
    best: Solution | None = None
    bound: float = -np.inf
    cutoff: float = np.inf

    @property
    def least(self) -> float:
        """Seconds of the incumbent, or the cutoff."""
        return min(self.cutoff, np.inf if self.best is None else self.best.seconds)

    def is_open(self, bound: float) -> bool:
        """Whether choices with this lower bound may be better than the incumbent and the cutoff."""
        return bound < self.least * (1 - PROVEN)

    def consider(self, solution: Solution) -> None:
        """Make a choice the incumbent if it is better and fits."""
        is_better = self.best is None or solution.seconds < self.best.seconds
        if is_better and self.instance.peak(solution) <= self.instance.limits.memory:
            self.best = solution
