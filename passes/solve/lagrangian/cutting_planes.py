"""Lagrange multipliers of bytes and of overlap terms, found by cutting planes (Kelley 1960).

With a multiplier per byte at each program point, and one between 0 and 1 per overlap term, the rest is a problem
without limits, whose optimum is a lower bound on every choice that fits. Each such optimum is a cut: it bounds the
lower bounds at all other multipliers. The next multipliers are those at which the bound of all cuts is highest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from passes.ir.layout import Layout
from passes.solve.lagrangian.relaxation import Multipliers


@dataclass(frozen=True)
class Cut:
    """The best choice at some multipliers: its seconds without exposed traffic, its bytes over the limit at each point,
    the weighted seconds by which traffic exceeds computation in each overlap term, and the lower bound on every choice
    that fits."""

    picks: tuple[int, ...]
    rerun: frozenset[tuple[int, Layout]]
    seconds: float
    over: list[float]
    excess: Sequence[float]
    bound: float
    multipliers: Multipliers


@dataclass
class CuttingPlanes:
    """The choice of the next multipliers; per byte they are at most `highest` times `unit`."""

    overlaps: int
    unit: float
    highest: float = 1 / 16

    def start(self) -> Multipliers:
        """Multipliers at which bytes cost nothing and all traffic is hidden."""
        return Multipliers(1.0, [], [0.0] * self.overlaps)

    def next(self, found: Sequence[Cut]) -> tuple[Multipliers, float, list[float]]:
        """The multipliers at which the cuts in `found` allow the highest bound, that bound (seconds), and the mixture
        of their choices that costs as much: the part of each."""
        model = mathopt.Model()
        best = model.add_variable()
        points = len(found[0].over)
        breaking = [index for index in range(points) if any(item.over[index] > 0 for item in found)]
        variables = {index: model.add_variable(lb=0.0, ub=self.highest) for index in breaking}
        parts = [model.add_variable(lb=0.0, ub=1.0) for _ in range(self.overlaps)]
        scale = max(abs(item.seconds) for item in found)
        cuts = []
        for item in found:
            # Multipliers are relative to one at which the bytes of the limit cost as much as the whole step.
            bytes_part = mathopt.LinearSum(
                variables[index] * (item.over[index] * self.unit / scale) for index in breaking
            )
            excess_part = mathopt.LinearSum(
                part * (size / scale) for part, size in zip(parts, item.excess, strict=True)
            )
            cuts.append(model.add_linear_constraint(best <= item.seconds / scale + bytes_part + excess_part))
        model.maximize(best)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        values = result.variable_values()
        per_byte = [values[variables[index]] * self.unit if index in variables else 0.0 for index in range(points)]
        multipliers = Multipliers(1.0, per_byte, [values[part] for part in parts])
        duals = result.dual_values()
        return multipliers, result.objective_value() * scale, [duals[cut] for cut in cuts]

    def at_the_end(self, multipliers: Multipliers) -> bool:
        """Whether a multiplier is at the upper end of its range."""
        return max(multipliers.bytes, default=0.0) >= 0.999 * self.highest * self.unit


def interior(numbers: Sequence[float]) -> Iterator[int]:
    """Positions of numbers that are neither 0 nor 1."""
    return (index for index, number in enumerate(numbers) if 1e-9 < number < 1 - 1e-9)
