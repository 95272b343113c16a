"""One problem in one regime, in all that solving it needs: costs, bytes, the points of the step, and the limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from passes.cost.memory import MemoryUse, Moment, memory_use
from passes.ir.choices import Problem, Solution
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.solving.arrays import Arrays
from passes.solving.bounds import Bounds
from passes.solving.dominance import undominated
from passes.solving.dual import Found
from passes.solving.integer import InfeasibleProgramError
from passes.solving.limits import Limits
from passes.solving.memory import Bytes, Point, Slack, Weights, made_again, priced
from passes.solving.network import eliminate
from passes.solving.optimum import SWEEPS, a_little_more, network_of, optimum, ties
from passes.solving.prices import Integers

# Of every node the strategies that may be chosen, in order.
Alive = Mapping[int, Integers]
Again = frozenset[tuple[int, Layout]]


@dataclass(frozen=True)
class Instance:
    """A problem whose choices must keep within the limits at all of the `moments`. The `points` are those at which they
    were looked at so far: each moment, and with it nodes that turned out to need too much room then."""

    problem: Problem
    mesh: Mesh
    regime: Regime
    arrays: Arrays
    bytes: Bytes
    moments: Sequence[Moment]
    limits: Limits
    points: list[Point]

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

    def use(self, solution: Solution, among: Sequence[Moment] | None = None) -> MemoryUse:
        """The memory that a choice takes at its peak."""
        return memory_use(self.problem, solution, self.limits.optimizer_states, self.mesh, among)

    def priced(self, weights: Weights) -> Arrays:
        """The problem at these prices, without limits."""
        return priced(self.arrays, self.problem, self.bytes, self.points, weights)

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

    def at(
        self, weights: Weights, alive: Alive, patience: float, cutoff: float, gap: float
    ) -> tuple[Found, Solution, Alive]:
        """The best choice at these prices among the strategies that are alive, up to a part `gap` of its price, with
        the bound on any of these that fits; and the strategies that may be in one that takes less than `cutoff`
        seconds. Where none does, it need not be the best one."""
        found = self.priced(weights)
        beyond = self.constant(weights) + ties(found)
        best = optimum(found, patience, cutoff + beyond, alive, gap, rough=self.limits.memory < np.inf)
        solution = self.cheapest(best.picks, weights)
        over = [self.arrays.excess(overlap, solution.picks, solution.again) for overlap in self.arrays.overlaps]
        excess = [overlap.weight * size for overlap, size in zip(self.arrays.overlaps, over, strict=True)]
        seconds = solution.seconds - sum(max(0.0, size) for size in excess)
        choice = Found(solution.picks, solution.again, seconds, [], excess, best.bound - beyond, weights)
        return choice, solution, best.hopeful

    def complete(self, found: Found) -> None:
        """Find the bytes over the limit of a choice at the points that came later."""
        for point in self.points[len(found.over) :]:
            use = self.use(self.solution(found.picks, found.again), [point.moment])
            runs = 0.0 if point.node is None else self.bytes.nodes[point.node].transient[found.picks[point.node]]
            found.over.append(use.peak - use.transient + float(runs) - self.limits.memory)

    def peak(self, solution: Solution) -> Point:
        """The point at which a choice takes most."""
        name = self.use(solution).moment
        moment = next(moment for moment in self.moments if moment.name == name)
        needs = [
            float(size.transient[pick]) * (node.block == moment.running)
            for node, size, pick in zip(self.problem.nodes, self.bytes.nodes, solution.picks, strict=True)
        ]
        most = int(np.argmax(needs))
        return Point(moment, most if needs[most] else None)

    def slack(self, weights: Weights, alive: Alive, fixed: frozenset[int], aim: float) -> Slack:
        """What the nodes that are left next to `fixed` leave to `aim`.

        Raises InfeasibleProgramError where no choice takes less than `aim`.
        """
        found = self.priced(weights)
        network = network_of(found, alive)
        eliminate(network, fixed)
        bounds = Bounds(network)
        threshold = a_little_more(aim + self.constant(weights) + ties(found))
        for _ in range(SWEEPS):
            bounds.sweep(threshold)
        sizes = [len(costs) for costs in self.arrays.costs]
        slack = Slack({}, {})
        for node, least in bounds.with_label().items():
            slack.nodes[node] = np.full(sizes[node], -np.inf)
            slack.nodes[node][network.labels[node]] = threshold - least
        if not all((left >= 0).any() for left in slack.nodes.values()):
            raise InfeasibleProgramError
        for (first, second), least in bounds.with_pair().items():
            slack.pairs[first, second] = np.full((sizes[first], sizes[second]), -np.inf)
            slack.pairs[first, second][np.ix_(network.labels[first], network.labels[second])] = threshold - least
        return slack

    def restricted(self, weights: Weights, alive: Alive, aim: float) -> Alive:
        """The strategies that may be in a choice which takes less than `aim`; raises as `slack` does."""
        slack = self.slack(weights, alive, frozenset(alive), aim)
        return self._undominated({node: np.flatnonzero(left >= 0) for node, left in slack.nodes.items()})
