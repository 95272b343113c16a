"""Lagrangian relaxation: limits on bytes and overlap terms become costs, and the rest is a problem without limits.

At given multipliers each tensor is saved after its redistribution, or its source is saved and backward reruns the
redistribution, whichever is cheaper. `pareto` imposes the limits as constraints.

Multipliers are found by cutting planes (Kelley 1960). With one per byte at each program point, and one between 0 and 1
per overlap term, the optimum of the relaxation is a lower bound on every choice that fits. Each such optimum is a cut:
it bounds the lower bounds at all other multipliers. The next multipliers are those at which the bound of all cuts is
highest."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from ortools.math_opt.python import mathopt

from passes.cost.memory import GroupBytes, MemoryModel
from passes.ir.arrays import Flags, Floats
from passes.ir.layout import Layout
from passes.solve.arrays import Arrays, EdgeArrays, GroupArrays

# Relative error of sums of bytes.
ROUNDING = 1e-7


def keepers(group: GroupArrays) -> GroupArrays | None:
    """The uses of a group that save the tensor for the backward pass; None if none does."""
    edges = [edge for edge in group.edges if edge.saved]
    return replace(group, edges=edges) if edges else None


@dataclass(frozen=True)
class Multipliers:
    """Multipliers of the step's seconds, of the bytes at each program point, and of each overlap term (0: its traffic
    is hidden, 1: all of it is exposed)."""

    seconds: float
    bytes: Sequence[float]
    overlaps: Sequence[float]


def relaxed(arrays: Arrays, sizes: MemoryModel, points: Sequence[int], multipliers: Multipliers) -> Arrays:
    """The problem without limits whose costs are the weighted sum of the step time, the bytes at all points, and the
    traffic of overlap terms. The computation that hides traffic is a constant, which is left out."""
    everywhere = sizes.blend(points, multipliers.bytes)
    costs = [
        multipliers.seconds * own + size.at(everywhere) for own, size in zip(arrays.costs, sizes.nodes, strict=True)
    ]
    groups = []
    keeping_groups = []
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        seconds = multipliers.seconds * group.seconds
        used = size.used(everywhere)
        if used is not None:
            seconds = seconds + used
        for overlap, part in zip(arrays.overlaps, multipliers.overlaps, strict=True):
            traffic = overlap.traffic(group)
            if part and traffic is not None:
                seconds = seconds + part * overlap.weight * traffic
        groups.append(replace(group, seconds=seconds))
        keeping = keepers(group) if any(multipliers.bytes) else None
        if keeping is not None:
            rerun, target = _kept(size, everywhere, rerun_seconds(arrays, group, multipliers))
            source = size.saved(everywhere).source
            kept = np.where(group.same, source[:, None], np.minimum(rerun, target))
            keeping_groups.append(replace(keeping, seconds=kept))
    return replace(arrays, costs=costs, groups=[*groups, *keeping_groups], overlaps=())


def _kept(size: GroupBytes, fractions: Floats, rerun: Floats) -> tuple[Floats, Floats]:
    """The cost of every redistribution of a group if backward reruns it, in `rerun` seconds, and if its result is
    saved."""
    saved = size.saved(fractions)
    return rerun + saved.source[:, None] + saved.rerun, saved.target


def cheaper_reruns(
    arrays: Arrays,
    sizes: MemoryModel,
    picks: Sequence[int],
    points: Sequence[int],
    multipliers: Multipliers,
) -> frozenset[tuple[int, Layout]]:
    """The redistributions that are cheaper to rerun than to save at these multipliers: (group, target)."""
    everywhere = sizes.blend(points, multipliers.bytes)
    found: set[tuple[int, Layout]] = set()
    for number, (group, size) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        keeping = keepers(group)
        if keeping is None:
            continue
        made = group.made[picks[group.producer]]
        rerun, kept = _kept(size, everywhere, rerun_seconds(arrays, group, multipliers))
        for edge in keeping.edges:
            wanted = edge.wanted[picks[edge.consumer]]
            if not group.same[made, wanted] and rerun[made, wanted] < kept[wanted]:
                found.add((number, group.targets[wanted]))
    return frozenset(found)


def rerun_seconds(arrays: Arrays, group: GroupArrays, multipliers: Multipliers) -> Floats:
    """The cost of rerunning each redistribution of a group in backward, including exposed traffic."""
    rerun = multipliers.seconds * group.rerun
    for overlap, part in zip(arrays.overlaps, multipliers.overlaps, strict=True):
        twice = overlap.rerun_traffic(group)
        if part and twice is not None:
            rerun = rerun + part * overlap.weight * twice
    return rerun


@dataclass(frozen=True)
class Repeats:
    """Flags of a group's redistributions: `cheaper` to rerun than to save, and still `open` within some aim."""

    cheaper: Flags
    open: Flags


# The most seconds by which a choice is better than some aim, for each strategy of a node; below zero where none is.
Slack = Mapping[int, Floats]


def decide_repeats(
    arrays: Arrays, sizes: MemoryModel, points: Sequence[int], multipliers: Multipliers, slack: Slack
) -> list[Repeats]:
    """The redistributions to rerun at these multipliers; decided where the alternative exceeds the slack."""
    everywhere = sizes.blend(points, multipliers.bytes)
    found = []
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        rerun, kept = _kept(size, everywhere, rerun_seconds(arrays, group, multipliers))
        dearer = rerun - kept
        left = np.full(dearer.shape, -np.inf)
        for edge in (edge for edge in group.edges if edge.saved):
            np.maximum.at(left, (group.made[:, None], edge.wanted), _left(slack, group, edge))
        found.append(Repeats((dearer < 0) & ~group.same, (abs(dearer) <= left) & ~group.same))
    return found


def decided_reruns(
    arrays: Arrays,
    repeats: Sequence[Repeats],
    picks: Sequence[int],
    groups: Iterable[int],
    second: Set[tuple[int, int]],
) -> frozenset[tuple[int, Layout]]:
    """The redistributions of `groups` that a choice reruns: (group, target). Where `repeats` leave this open, those in
    `second`, whose targets are columns."""
    found: set[tuple[int, Layout]] = set()
    for number in groups:
        group, known = arrays.groups[number], repeats[number]
        made = int(group.made[picks[group.producer]])
        for target in {int(edge.wanted[picks[edge.consumer]]) for edge in group.edges if edge.saved}:
            if (number, target) in second if known.open[made, target] else known.cheaper[made, target]:
                found.add((number, group.targets[target]))
    return frozenset(found)


def _left(slack: Slack, group: GroupArrays, edge: EdgeArrays) -> Floats:
    """The slack of each pair of strategies at both ends of a use."""
    here = slack.get(group.producer, np.full(len(group.made), np.inf))
    return np.minimum(here[:, None], slack.get(edge.consumer, np.full(len(edge.wanted), np.inf)))


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
        result = _solved(model)
        if result is None:
            # The bound stays what it is.
            highest = max(found, key=lambda item: item.bound)
            return highest.multipliers, highest.bound, [float(item is highest) for item in found]
        values = result.variable_values()
        per_byte = [values[variables[index]] * self.unit if index in variables else 0.0 for index in range(points)]
        multipliers = Multipliers(1.0, per_byte, [values[part] for part in parts])
        duals = result.dual_values()
        return multipliers, result.objective_value() * scale, [duals[cut] for cut in cuts]

    def at_the_end(self, multipliers: Multipliers) -> bool:
        """Whether a multiplier is at the upper end of its range."""
        return max(multipliers.bytes, default=0.0) >= 0.999 * self.highest * self.unit


def _solved(model: mathopt.Model) -> mathopt.SolveResult | None:
    """The solution of a linear program with its duals; None where there is none. GLOP calls some programs too imprecise
    that HiGHS solves."""
    for solver in (mathopt.SolverType.GLOP, mathopt.SolverType.HIGHS):
        result = mathopt.solve(model, solver)
        if result.has_primal_feasible_solution() and result.has_dual_feasible_solution():
            return result
    return None


def interior(numbers: Sequence[float]) -> Iterator[int]:
    """Positions of numbers that are neither 0 nor 1."""
    return (index for index, number in enumerate(numbers) if 1e-9 < number < 1 - 1e-9)
