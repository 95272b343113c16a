"""One problem in one regime, in all that solving it needs: costs, bytes, the points of the step, and the limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from passes.cost.memory import MemoryModel, MemoryUse
from passes.ir.choices import Problem, Solution
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.solving.arrays import Arrays
from passes.solving.dominance import undominated
from passes.solving.dual import Found
from passes.solving.limits import InfeasibleProgramError, Limits
from passes.solving.memory import Slack, Weights, made_again, priced
from passes.solving.network import eliminate
from passes.solving.optimum import a_little_more, least_with, network_of, optimum, ties
from passes.solving.prices import Floats, Integers

# Of every node the strategies that may be chosen, in order.
Alive = Mapping[int, Integers]
Again = frozenset[tuple[int, Layout]]


@dataclass(frozen=True)
class Instance:
    """A problem whose choices must keep within the limits at all moments. The `points` are those of them (by number) at
    which some choice did not. `counted` remembers the bytes of choices at all moments."""

    problem: Problem
    mesh: Mesh
    regime: Regime
    arrays: Arrays
    bytes: MemoryModel
    limits: Limits
    points: list[int] = field(default_factory=list)
    counted: dict[tuple[tuple[int, ...], Again], Floats] = field(default_factory=dict)

    @cached_property
    def all_alive(self) -> Alive:
        """All strategies of all nodes that may be in a best choice."""
        return self._undominated({node: np.arange(len(costs)) for node, costs in enumerate(self.arrays.costs)})

    def _undominated(self, alive: Alive) -> Alive:
        return undominated(self.arrays, self.bytes, alive)

    def solution(self, picks: Sequence[int], again: Again) -> Solution:
        """A choice with its seconds."""
        seconds = self.arrays.value(picks, again)
        return Solution(tuple(picks), again, seconds, seconds, self.regime)

    def totals(self, picks: tuple[int, ...], again: Again) -> Floats:
        """The bytes of a choice at every moment."""
        key = picks, again
        if key not in self.counted:
            self.counted[key] = self.bytes.totals(self.bytes.allocations(picks, again))
        return self.counted[key]

    def peak(self, solution: Solution) -> float:
        """The most bytes that a choice takes, near the limit to the last digit as `use` has it."""
        most = float(self.totals(solution.picks, solution.again).max())
        is_near = abs(most - self.limits.memory) <= 1e-9 * most
        return self.use(solution).peak if is_near else most

    def use(self, solution: Solution) -> MemoryUse:
        """The memory that a choice takes at its peak."""
        allocations = self.bytes.allocations(solution.picks, solution.again)
        return self.bytes.use(allocations, self.limits.optimizer_states)

    def priced(self, weights: Weights) -> Arrays:
        """The problem at these prices, without limits."""
        return priced(self.arrays, self.bytes, self.points, weights)

    def constant(self, weights: Weights) -> float:
        """What the bytes of the limit and the traffic that computation hides are worth at these prices: the best choice
        at them costs that much more than a bound on every choice that fits (seconds)."""
        bytes = sum(weights.bytes) * self.limits.memory if any(weights.bytes) else 0.0
        return bytes + self.hidden(weights.excess)

    def hidden(self, parts: Sequence[float]) -> float:
        """What computation takes off the traffic of which `parts` count."""
        pairs = zip(parts, self.arrays.overlaps, strict=True)
        return sum(part * overlap.weight * overlap.cover for part, overlap in pairs)

    def cheapest(self, picks: Mapping[int, int], weights: Weights) -> Solution:
        """The choice of these strategies that makes again what is cheaper made again at these prices."""
        chosen = [picks[node] for node in range(len(self.arrays.costs))]
        return self.solution(chosen, made_again(self.arrays, self.bytes, chosen, self.points, weights))

    def at(self, weights: Weights, alive: Alive, cutoff: float) -> tuple[Found, Solution, Alive]:
        """The best choice at these prices among the strategies that are alive, with the bound on any of these that
        fits; and the strategies that may be in one that takes less than `cutoff` seconds. Where none does, it need not
        be the best one."""
        found = self.priced(weights)
        beyond = self.constant(weights) + ties(found)
        best = optimum(found, cutoff + beyond, alive)
        solution = self.cheapest(best.picks, weights)
        over = [self.arrays.excess(overlap, solution.picks, solution.again) for overlap in self.arrays.overlaps]
        excess = [overlap.weight * size for overlap, size in zip(self.arrays.overlaps, over, strict=True)]
        seconds = solution.seconds - sum(max(0.0, size) for size in excess)
        choice = Found(solution.picks, solution.again, seconds, [], excess, best.bound - beyond, weights)
        return choice, solution, best.hopeful

    def complete(self, found: Found) -> None:
        """Find the bytes over the limit of a choice at the points that came later."""
        most = self.totals(found.picks, found.again)
        over = [float(most[point]) - self.limits.memory for point in self.points[len(found.over) :]]
        # What is left of equal sums by rounding would trouble the linear program.
        found.over.extend(size if abs(size) > 1e-12 * self.limits.memory else 0.0 for size in over)

    def worst(self, solution: Solution) -> int:
        """The moment at which a choice takes most."""
        return int(self.totals(solution.picks, solution.again).argmax())

    def breaking(self, solution: Solution) -> list[int]:
        """Of each block, and of the copies of it that differ, the worst moment, where a choice does not fit then."""
        most = self.totals(solution.picks, solution.again)
        found: dict[tuple[int | None, float], int] = {}
        for number, moment in enumerate(self.bytes.points):
            key = moment.block, moment.done
            if most[number] > self.limits.memory and (key not in found or most[number] > most[found[key]]):
                found[key] = number
        return list(found.values())

    def slack(self, weights: Weights, alive: Alive, fixed: frozenset[int], aim: float) -> Slack:
        """What the nodes that are left next to `fixed` leave to `aim`.

        Raises InfeasibleProgramError where no choice takes less than `aim`.
        """
        found = self.priced(weights)
        network = network_of(found, alive)
        eliminate(network, fixed)
        threshold = a_little_more(aim + self.constant(weights) + ties(found))
        least = least_with(network, threshold)
        if least is None:
            raise InfeasibleProgramError
        sizes = [len(costs) for costs in self.arrays.costs]
        slack = Slack({}, {})
        for node, own in least[0].items():
            slack.nodes[node] = np.full(sizes[node], -np.inf)
            slack.nodes[node][network.labels[node]] = threshold - own
        if not all((left >= 0).any() for left in slack.nodes.values()):
            raise InfeasibleProgramError
        for (first, second), pair in least[1].items():
            slack.pairs[first, second] = np.full((sizes[first], sizes[second]), -np.inf)
            slack.pairs[first, second][np.ix_(network.labels[first], network.labels[second])] = threshold - pair
        return slack

    def restricted(self, weights: Weights, alive: Alive, aim: float) -> Alive:
        """The strategies that may be in a choice which takes less than `aim`; raises as `slack` does."""
        slack = self.slack(weights, alive, frozenset(alive), aim)
        return self._undominated({node: np.flatnonzero(left >= 0) for node, left in slack.nodes.items()})
