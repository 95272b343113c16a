"""One problem in one configuration: costs, bytes, program points and limits, the relaxations that the solver bounds it
by, and the least memory that any choice takes, to report infeasible limits early.

Many ways to store a parameter cost the same, split over one dim or another. A strategy of a source is dropped where
another one is at least as good in all seconds, bytes and traffic, so that neither multipliers nor branches have to tell
equal choices apart.

A branch holds the choices in which every node takes one of some strategies. The relaxation leaves a gap where its bound
mixes choices of which none is as good: one that takes too many bytes or too much traffic, and one that takes less of
them and more time. The decision that sets these apart most is branched on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from passes.cost.memory import GroupBytes, MemoryModel, MemoryUse, memory_by_kind
from passes.cost.program_points import Phase
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.layout import Layout
from passes.solve.arrays import Arrays, GroupArrays, Overlap, SharedDecisions
from passes.solve.elimination.network import eliminate
from passes.solve.lagrangian.relaxation import ROUNDING, Cut, Multipliers, Slack, cheaper_reruns, relaxed
from passes.solve.limits import InfeasibleProgramError, Limits, infeasible
from passes.solve.optimum import a_little_more, least_with, network_of, optimum, tie_break_total

# Figures that differ by less than this, relative to the largest of their kind, are equal.
_EQUAL = 1e-12


def undominated(arrays: Arrays, sizes: MemoryModel, alive: Mapping[int, Integers]) -> dict[int, Integers]:
    """The strategies of each node that are alive and not dominated; all of nodes that consume anything."""
    consumers = {edge.consumer for group in arrays.groups for edge in group.edges}
    made: dict[int, list[tuple[GroupArrays, GroupBytes]]] = {}
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        made.setdefault(group.producer, []).append((group, size))
    left = dict(alive)
    for node, labels in alive.items():
        if node not in consumers and len(labels) > 1:
            own = [arrays.costs[node], *sizes.nodes[node].sizes]
            figures = [column[:, None] for column in own]
            figures += [item for uses in made.get(node, []) for item in _figures(*uses, arrays.overlaps, alive)]
            left[node] = labels[_least_rows(np.concatenate(figures, axis=1)[labels], arrays.tie_break[node][labels])]
    return left


def _figures(
    group: GroupArrays, size: GroupBytes, overlaps: Sequence[Overlap], alive: Mapping[int, Integers]
) -> list[Floats]:
    """All costs of the uses of each strategy of the producer, in any of the layouts that may be wanted."""
    wanted = np.unique(np.concatenate([edge.wanted[alive[edge.consumer]] for edge in group.edges]))
    matrices = [group.seconds, group.rerun, *size.sizes]
    traffics = [each(group) for overlap in overlaps for each in (overlap.traffic, overlap.rerun_traffic)]
    matrices += [traffic for traffic in traffics if traffic is not None]
    # The saved tensor is the source where both are one tensor, or where the redistribution is rerun.
    kept = np.where(size.same, size.source_bytes[:, None], size.target_bytes)
    matrices += [kept, np.broadcast_to(size.source_bytes[:, None], kept.shape)]
    return [matrix[np.ix_(group.made, wanted)] for matrix in matrices]


def _least_rows(figures: Floats, tie_break: Integers) -> Integers:
    """Rows that no other row dominates; of equal rows the one with the lowest tie-break, then the first."""
    scale = np.abs(figures).max(axis=0, initial=0.0)
    figures = figures / np.where(scale > 0, scale, 1.0)
    kept: list[int] = []
    better = np.empty_like(figures)
    for row in np.lexsort((np.arange(len(figures)), tie_break, figures.sum(axis=1).round(9))).tolist():
        if not (better[: len(kept)] <= figures[row] + _EQUAL).all(axis=1).any():
            better[len(kept)] = figures[row]
            kept.append(row)
    return np.sort(np.array(kept))


# Of every node the strategies that may be chosen, in order.
Alive = Mapping[int, Integers]
Regathered = frozenset[tuple[int, Layout]]


@dataclass(frozen=True)
class Instance:
    """A problem whose choices must keep within the limits at all program points.

    `arrays` and `bytes` are those of its decisions (`shared`), which nodes with equal layers share; `every` has the
    bytes of all nodes. `points` are those (by number) at which some choice did not fit; `counted` caches the bytes of
    choices.
    """

    problem: Problem
    configuration: Configuration
    arrays: Arrays
    bytes: MemoryModel
    every: MemoryModel
    shared: SharedDecisions
    limits: Limits
    points: list[int] = field(default_factory=list)
    counted: dict[tuple[tuple[int, ...], Regathered], Floats] = field(default_factory=dict)

    @cached_property
    def all_alive(self) -> Alive:
        """All strategies of all nodes that may be in a best choice."""
        return self._undominated({node: np.arange(len(costs)) for node, costs in enumerate(self.arrays.costs)})

    def _undominated(self, alive: Alive) -> Alive:
        return undominated(self.arrays, self.bytes, alive)

    def solution(self, picks: Sequence[int], rerun: Regathered) -> Solution:
        """A choice of all nodes, from that of decisions, with its seconds."""
        seconds = self.arrays.value(picks, rerun)
        return Solution(*self.shared.expanded(picks, rerun), seconds, seconds, self.configuration)

    def excess(self, overlap: Overlap, solution: Solution) -> float:
        """Seconds by which the traffic of `overlap` exceeds the computation in a choice."""
        return self.arrays.excess(overlap, *self.shared.reduced(solution.picks, solution.regathered))

    def totals(self, picks: tuple[int, ...], rerun: Regathered) -> Floats:
        """The bytes of a choice at every program point."""
        key = picks, rerun
        if key not in self.counted:
            self.counted[key] = self.every.totals(self.every.allocations(picks, rerun))
        return self.counted[key]

    def peak(self, solution: Solution) -> float:
        """The peak bytes of a choice, equal to those of `use` to the last digit near the limit."""
        most = float(self.totals(solution.picks, solution.regathered).max())
        is_near = abs(most - self.limits.memory) <= 1e-9 * most
        return self.use(solution).peak if is_near else most

    def use(self, solution: Solution) -> MemoryUse:
        """The memory that a choice takes at its peak."""
        allocations = self.every.allocations(solution.picks, solution.regathered)
        return self.every.use(allocations, self.limits.optimizer_states)

    def relaxed(self, multipliers: Multipliers) -> Arrays:
        """The problem without limits at these multipliers."""
        return relaxed(self.arrays, self.bytes, self.points, multipliers)

    def constant(self, multipliers: Multipliers) -> float:
        """The constant of the relaxation, which its optimum exceeds the lower bound by: the multipliers times the bytes
        of the limit and the computation that hides traffic (seconds)."""
        bytes = sum(multipliers.bytes) * self.limits.memory if any(multipliers.bytes) else 0.0
        return bytes + self.hidden(multipliers.overlaps)

    def hidden(self, parts: Sequence[float]) -> float:
        """The computation of all overlap terms, each times its part."""
        pairs = zip(parts, self.arrays.overlaps, strict=True)
        return sum(part * overlap.weight * overlap.cover for part, overlap in pairs)

    def cheapest(self, picks: Mapping[int, int], multipliers: Multipliers) -> Solution:
        """The choice of these strategies that reruns the redistributions for which this is cheaper at these
        multipliers."""
        chosen = [picks[node] for node in range(len(self.arrays.costs))]
        return self.solution(chosen, cheaper_reruns(self.arrays, self.bytes, chosen, self.points, multipliers))

    def at(self, multipliers: Multipliers, alive: Alive, cutoff: float) -> tuple[Cut, Solution, Alive]:
        """Solve the relaxation at these multipliers over the strategies that are alive.

        Returns its cut, the choice, and the strategies that may be in a choice that takes less than `cutoff` seconds.
        Where none does, the choice need not be the best one.
        """
        found = self.relaxed(multipliers)
        beyond = self.constant(multipliers) + tie_break_total(found)
        best = optimum(found, cutoff + beyond, alive)
        solution = self.cheapest(best.picks, multipliers)
        excess = [overlap.weight * self.excess(overlap, solution) for overlap in self.arrays.overlaps]
        seconds = solution.seconds - sum(max(0.0, size) for size in excess)
        picks, rerun = self.shared.reduced(solution.picks, solution.regathered)
        choice = Cut(picks, rerun, seconds, [], excess, best.bound - beyond, multipliers)
        return choice, solution, best.remaining

    def complete(self, found: Cut) -> None:
        """Add to a cut the bytes over the limit at points that were found after it."""
        most = self.totals(*self.shared.expanded(found.picks, found.rerun))
        over = [float(most[point]) - self.limits.memory for point in self.points[len(found.over) :]]
        # Differences that are rounding alone would trouble the linear program.
        found.over.extend(size if abs(size) > 1e-12 * self.limits.memory else 0.0 for size in over)

    def worst(self, solution: Solution) -> int:
        """The point at which a choice takes most bytes."""
        return int(self.totals(solution.picks, solution.regathered).argmax())

    def breaking(self, solution: Solution) -> list[int]:
        """The worst point of each block, and of the copies of it that differ, if a choice does not fit there."""
        most = self.totals(solution.picks, solution.regathered)
        found: dict[tuple[int | None, float], int] = {}
        for number, point in enumerate(self.bytes.points):
            key = point.block, point.done
            if most[number] > self.limits.memory and (key not in found or most[number] > most[found[key]]):
                found[key] = number
        return list(found.values())

    def slack(self, multipliers: Multipliers, alive: Alive, fixed: frozenset[int], aim: float) -> Slack:
        """The slack that the strategies of `fixed` and other remaining nodes leave to `aim` seconds.

        Raises InfeasibleProgramError where no choice takes less than `aim`.
        """
        found = self.relaxed(multipliers)
        network = network_of(found, alive)
        eliminate(network, fixed)
        threshold = a_little_more(aim + self.constant(multipliers) + tie_break_total(found))
        least = least_with(network, threshold)
        if least is None:
            raise InfeasibleProgramError
        sizes = [len(costs) for costs in self.arrays.costs]
        slack = {node: np.full(sizes[node], -np.inf) for node in least}
        for node, own in least.items():
            slack[node][network.labels[node]] = threshold - own
        if not all((left >= 0).any() for left in slack.values()):
            raise InfeasibleProgramError
        return slack

    def restricted(self, multipliers: Multipliers, alive: Alive, aim: float) -> Alive:
        """The strategies that may be in a choice which takes less than `aim`; raises as `slack` does."""
        slack = self.slack(multipliers, alive, frozenset(alive), aim)
        return self._undominated({node: np.flatnonzero(left >= 0) for node, left in slack.items()})


def refuse_if_hopeless(instance: Instance) -> None:
    """Raise InfeasibleError if the sum of the least bytes of each node and each saved tensor does not fit."""
    least = _least(instance, int(instance.bytes.least_totals().argmax()))
    if least.peak > instance.limits.memory:
        raise infeasible(instance.limits, least, "at least ")


def refuse_if_impossible(instance: Instance, where: int) -> None:
    """Raise InfeasibleError if even the choice of least memory at a point does not fit."""
    limit = instance.limits.memory
    scale = instance.arrays.value([0] * len(instance.arrays.costs)) / limit
    bytes = [scale if point == where else 0.0 for point in instance.points]
    multipliers = Multipliers(1e-9, bytes, [0.0] * len(instance.arrays.overlaps))
    best = optimum(instance.relaxed(multipliers))
    # Seconds and tie_break_total weigh a little, too.
    if best.bound / scale > limit * (1 + ROUNDING):
        raise infeasible(instance.limits, instance.use(instance.cheapest(best.picks, multipliers)))


def smallest(instance: Instance, multipliers: Multipliers) -> MemoryUse:
    """The memory of a choice that minimizes bytes, at the multipliers of each point."""
    dear = replace(multipliers, bytes=[max(1e6 * price, 1e-30) for price in multipliers.bytes])
    return instance.use(instance.cheapest(optimum(instance.relaxed(dear)).picks, dear))


def _least(instance: Instance, point: int) -> MemoryUse:
    """The least bytes of nodes and saved tensors at a point, each by itself."""
    model = instance.bytes
    fractions = model.at(point)
    live: dict[str, float] = {}
    optimizer = 0.0
    for size in model.nodes:
        pick = int(size.at(fractions).argmin())
        for kind, number, sizes in zip(size.kinds, size.ranges.tolist(), size.sizes, strict=True):
            live[kind] = live.get(kind, 0.0) + float(fractions[number] * sizes[pick])
            is_gradient = model.ranges[number].phase is Phase.ACCUMULATED
            share = model.ranges[number].share
            optimizer += instance.limits.optimizer_states * share * float(sizes[pick]) * is_gradient
    for group, saving in zip(model.groups, model.saved, strict=True):
        if saving:
            saved = group.saved(fractions)
            live["saved"] = live.get("saved", 0.0) + float(min(saved.source.min(), saved.target.min()))
    return memory_by_kind(live, optimizer, model.points[point].name)


# Parts of a mixture below this are none.
NOTHING = 1e-6


@dataclass(eq=False)
class Branch:
    """The choices in which every node takes a strategy that is `alive`: the cuts `found` among them, a `bound` on all
    of them, the multipliers that gave it, and the mixture of choices (the part of each) that is as low."""

    alive: Alive
    found: list[Cut]
    bound: float
    multipliers: Multipliers
    mixture: Sequence[tuple[Cut, float]]

    def holds(self, choice: Cut) -> bool:
        """Whether a choice is in this branch."""
        return all(pick in self.alive[node] for node, pick in enumerate(choice.picks))


def split(instance: Instance, branch: Branch) -> tuple[Alive, Alive] | None:
    """The strategies of two child branches: a node uses on an axis the method of one choice in the mixture, or any
    other method. Where the choices do not differ in a relevant method, the node with most strategies has half of them
    in each. None where every node has one strategy."""
    parts = [(found, part) for found, part in branch.mixture if part > NOTHING]
    if len(parts) < 2:
        return _halves(branch.alive)
    most = (False, 0.0)
    best: tuple[int, int, str] | None = None
    shares = np.array([part for _, part in parts])
    needs = np.array([_needs(instance, branch.multipliers, found) for found, _ in parts])
    for node in np.flatnonzero((needs.max(axis=0) - needs.min(axis=0)) > 0).tolist():
        first = instance.problem.nodes[instance.shared.nodes[node][0]]
        strategies, is_op = first.strategies, first.kind == "op"
        mean = shares @ needs[:, node] / shares.sum()
        for axis in range(len(strategies[0].methods)):
            methods = [strategies[found.picks[node]].methods[axis] for found, _ in parts]
            for method in sorted(set(methods)):
                same = np.array([other == method for other in methods])
                if same.all():
                    continue
                score = shares[same].sum() * abs(shares[same] @ needs[same, node] / shares[same].sum() - mean)
                # How parameters are stored matters less than how ops run: many ways of storing cost the same.
                if score > 0 and (is_op, score) > most:
                    most, best = (is_op, score), (node, axis, method)
    if best is None:
        return _halves(branch.alive)
    node, axis, method = best
    strategies = instance.problem.nodes[instance.shared.nodes[node][0]].strategies
    does: Flags = np.array([strategies[label].methods[axis] == method for label in branch.alive[node]])
    return {**branch.alive, node: branch.alive[node][does]}, {**branch.alive, node: branch.alive[node][~does]}


def _halves(alive: Alive) -> tuple[Alive, Alive] | None:
    node = max(alive, key=lambda each: len(alive[each]))
    middle = len(alive[node]) // 2
    return ({**alive, node: alive[node][:middle]}, {**alive, node: alive[node][middle:]}) if middle else None


def _needs(instance: Instance, multipliers: Multipliers, found: Cut) -> list[float]:
    """The cost in a choice of each node's bytes and parameter traffic at the multipliers (seconds)."""
    needs = []
    everywhere = instance.bytes.blend(instance.points, multipliers.bytes)
    for size, pick in zip(instance.bytes.nodes, found.picks, strict=True):
        needs.append(float(size.at(everywhere)[pick]))
    for group, (made, wanted) in zip(instance.arrays.groups, instance.arrays.changes(found.picks), strict=True):
        for overlap, part in zip(instance.arrays.overlaps, multipliers.overlaps, strict=True):
            traffic = overlap.traffic(group)
            if traffic is None:
                continue
            seconds = part * overlap.weight * sum(float(traffic[made, target]) for target in wanted)
            for number in {group.producer, *(edge.consumer for edge in group.edges)}:
                needs[number] += seconds
    return needs
