"""Prices for bytes and for hidden traffic, found by cutting planes (Kelley 1960).

A choice costs its seconds, what the traffic of parameters exceeds the computation by, and nothing if its bytes are
within the limit at all points of the step. With a price per byte at each point, and a part between 0 and 1 of each
excess, the rest is a problem without limits, whose optimum is a lower bound on every choice that fits. Each such
optimum is a choice too, and bounds the lower bounds of all other prices: where that bound is highest the next prices
are tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from passes.ir.layout import Layout
from passes.solving.memory import Weights


@dataclass(frozen=True)
class Found:
    """The best choice at some prices: its seconds without what is hidden, bytes over the limit at each point, seconds
    that each overlap's excess counts, and what no choice that fits can be below."""

    picks: tuple[int, ...]
    again: frozenset[tuple[int, Layout]]
    seconds: float
    over: list[float]
    excess: Sequence[float]
    bound: float
    weights: Weights


@dataclass
class Dual:
    """Which prices come next; per byte they are at most `highest` times `unit`."""

    overlaps: int
    unit: float
    highest: float = 1 / 16

    def start(self) -> Weights:
        """Bytes cost nothing, all traffic is hidden."""
        return Weights(1.0, [], [0.0] * self.overlaps)

    def next(self, found: Sequence[Found]) -> tuple[Weights, float, list[float]]:
        """The prices at which the choices in `found` leave the highest bound, that bound (seconds), and the mixture of
        these choices that costs as much: the part of each."""
        model = mathopt.Model()
        best = model.add_variable()
        points = len(found[0].over)
        breaking = [index for index in range(points) if any(item.over[index] > 0 for item in found)]
        prices = {index: model.add_variable(lb=0.0, ub=self.highest) for index in breaking}
        parts = [model.add_variable(lb=0.0, ub=1.0) for _ in range(self.overlaps)]
        scale = max(abs(item.seconds) for item in found)
        cuts = []
        for item in found:
            # Prices are in parts of what would make the bytes of the limit as dear as the whole step.
            bytes_part = mathopt.LinearSum(prices[index] * (item.over[index] * self.unit / scale) for index in breaking)
            excess_part = mathopt.LinearSum(
                part * (size / scale) for part, size in zip(parts, item.excess, strict=True)
            )
            cuts.append(model.add_linear_constraint(best <= item.seconds / scale + bytes_part + excess_part))
        model.maximize(best)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        values = result.variable_values()
        found_prices = [values[prices[index]] * self.unit if index in prices else 0.0 for index in range(points)]
        weights = Weights(1.0, found_prices, [values[part] for part in parts])
        duals = result.dual_values()
        return weights, result.objective_value() * scale, [duals[cut] for cut in cuts]

    def at_the_end(self, weights: Weights) -> bool:
        """Whether a price is as high as was looked."""
        return max(weights.bytes, default=0.0) >= 0.999 * self.highest * self.unit


def interior(numbers: Sequence[float]) -> Iterator[int]:
    """Positions of numbers that are neither 0 nor 1."""
    return (index for index, number in enumerate(numbers) if 1e-9 < number < 1 - 1e-9)
