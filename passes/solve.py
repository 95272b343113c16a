"""solve: the planning problem in, the best strategy for every node out.

The problem is made smaller without losing the optimum (`network`), labels that cannot be in it are found by lower
bounds (`bounds`), and what is left is an integer program (`integer`). Where memory is short, bytes get a price until
the plan fits, and the integer program over what can then still be best closes the gap.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.cluster import GIB, Cluster
from passes.cost.memory import MemoryUse, Moment, largest_terms, memory_use, moments
from passes.ir.choices import Problem, Solution
from passes.ir.errors import InfeasibleError
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.solving.arrays import Arrays, arrays
from passes.solving.bounds import Bounds
from passes.solving.integer import SCALE, InfeasibleProgramError, OutOfTimeError, Program
from passes.solving.memory import limit_memory, made_again, node_bytes, priced
from passes.solving.network import Network, Sharing, drop_dominated, eliminate, restore
from passes.solving.prices import Flags, Prices

logger = logging.getLogger("autopar")

# A choice is proven when it costs at most this much more than the bound, relative to it.
GAP = 1e-9
# What is unusual about a choice costs this much of the least step time, to choose among equals.
TIE = 1e-9
SWEEPS = 12
# An integer program with at most this many flows is solved as it is.
SMALL = 20_000
# The integer program with the memory as rows gets so many seconds; the gap of the plan says what is not proven then.
PATIENCE = 30.0


@dataclass(frozen=True)
class Limits:
    """Bytes that a device has for the plan, and how many tensors the optimizer keeps per parameter."""

    memory: float
    optimizer_states: int


def solve(problem: Problem, cluster: Cluster, mesh: Mesh, limits: Limits) -> Solution:
    """The choice of least step time that fits the memory.

    Raises InfeasibleError where none fits.
    """
    found = arrays(problem, Prices(cluster, mesh))
    solver = _Solver(problem, found, mesh, limits)
    solution = solver.unlimited()
    if solver.use(solution).peak <= limits.memory:
        return solution
    return solver.limited(solution)


def optimum(found: Arrays) -> tuple[list[int], float]:
    """The best strategy of every node, and what no choice can be below."""
    network = network_of(found)
    eliminate(network)
    drop_dominated(network)
    labels, bound = optimal_labels(network)
    strategies = restore(network, labels)
    return [strategies[node] for node in range(len(found.costs))], bound


def network_of(found: Arrays) -> Network:
    """The arrays as a network, with a small price on what is unusual."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    costs = {node: own + unit * found.oddness[node] for node, own in enumerate(found.costs)}
    network = Network(costs, {node: np.arange(len(own)) for node, own in costs.items()})
    for group in found.groups:
        consumers = [(edge.consumer, edge.wanted) for edge in group.edges]
        network.add_sharing(Sharing(group.producer, group.made, consumers, group.seconds + unit * group.changes))
    return network


def optimal_labels(network: Network) -> tuple[dict[int, int], float]:
    """The best label of every node that is left in `network`, which shrinks meanwhile, and a bound on its cost.

    After `PATIENCE` seconds it is the best that was found.
    """
    best, chosen = np.inf, dict[int, int]()
    bound = -np.inf
    width = 16
    deadline = time.monotonic() + PATIENCE

    def consider(picks: dict[int, int]) -> None:
        nonlocal best, chosen
        cost = network.value(picks)
        if cost < best:
            best, chosen = cost, {node: int(network.labels[node][label]) for node, label in picks.items()}

    def labels() -> dict[int, int]:
        return {node: int(np.searchsorted(network.labels[node], chosen[node])) for node in network.costs}

    def exactly(alive: dict[int, Flags]) -> float:
        """Consider the best choice among the labels that are alive; a bound on all of these."""
        try:
            picks, _, reached = Program(network, alive, SCALE / best).solve(GAP, max(1.0, deadline - time.monotonic()))
        except OutOfTimeError:
            return bound
        consider(picks)
        return max(bound, reached)

    while True:
        bounds = Bounds(network)
        consider(bounds.decode())
        for _ in range(SWEEPS):
            if time.monotonic() > deadline:
                return labels(), min(bound, best)
            bounds.sweep(_a_little_more(best))
            consider(bounds.decode())
            bound = max(bound, bounds.bound)
            if bound >= best - GAP * abs(best):
                return labels(), min(bound, best)
        before = network.size()
        for node, alive in bounds.alive.items():
            alive[np.searchsorted(network.labels[node], chosen[node])] = True
        scores = bounds.scores()
        small = {node: scores[node][alive] for node, alive in bounds.alive.items()}
        for node, alive in bounds.alive.items():
            network.keep(node, np.flatnonzero(alive))
        whole = {node: np.ones(len(costs), dtype=bool) for node, costs in network.costs.items()}
        if network.size() <= SMALL:
            bound = exactly(whole)
            return labels(), min(bound, best)
        if network.size() > 0.7 * before:
            kept = {}
            for node, score in small.items():
                kept[node] = np.zeros(len(score), dtype=bool)
                kept[node][np.argsort(score, kind="stable")[:width]] = True
                kept[node][labels()[node]] = True
            reached = exactly(kept)
            if all(flags.all() for flags in kept.values()):
                return labels(), min(reached, best)
            width *= 2


class _Solver:
    def __init__(self, problem: Problem, found: Arrays, mesh: Mesh, limits: Limits) -> None:
        self.problem = problem
        self.arrays = found
        self.mesh = mesh
        self.limits = limits
        self.moments = moments(problem.blocks, problem.counts)
        self.targets = [list(group.targets) for group in found.groups]
        self._bound = -np.inf

    def use(self, solution: Solution) -> MemoryUse:
        """The memory that a choice takes at its peak."""
        return memory_use(self.problem, solution, self.limits.optimizer_states, self.mesh)

    def unlimited(self) -> Solution:
        """The best choice whatever memory it takes."""
        picks, bound = optimum(self.arrays)
        seconds = self.arrays.value(picks)
        return Solution(tuple(picks), frozenset(), seconds, min(seconds, bound - self._ties()))

    def limited(self, unlimited: Solution) -> Solution:
        """The best choice that fits."""
        moment = self._moment(self.use(unlimited).moment)
        self._refuse_if_impossible(moment)
        best: Solution | None = None
        bound, low, high = unlimited.bound, 0.0, unlimited.seconds / self.limits.memory
        found_price = high
        for _ in range(40):
            candidate, least = self._at_price(moment, high)
            if least > bound:
                bound, found_price = least, high
            if self.use(candidate).peak <= self.limits.memory:
                best = candidate
                break
            low, high = high, high * 4
        for _ in range(8):
            if best is None or best.seconds - bound <= 1e-6 * best.seconds:
                break
            middle = (low * high) ** 0.5 if low else high / 16
            candidate, least = self._at_price(moment, middle)
            if least > bound:
                bound, found_price = least, middle
            if self.use(candidate).peak <= self.limits.memory:
                high = middle
                best = min(best, candidate, key=lambda item: item.seconds)
            else:
                low = middle
        self._bound = bound
        if best is not None and best.seconds - bound <= 1e-6 * best.seconds:
            return replace(best, bound=bound)
        return self._exactly(moment, found_price, best)

    def _told(self, best: Solution) -> Solution:
        """`best` with the bound that was found, and a word where the two are apart."""
        bound = min(best.seconds, self._bound)
        if best.seconds - bound > 1e-6 * best.seconds:
            gap = (best.seconds - bound) / best.seconds
            logger.warning("the plan fits the memory limit, but may be up to %.2g%% slower than the best", 100 * gap)
        return replace(best, bound=bound)

    def _ties(self) -> float:
        """At most this much of a bound is the price of what is unusual."""
        unit = TIE * sum(float(costs.min()) for costs in self.arrays.costs)
        odd = sum(int(odd.max()) for odd in self.arrays.oddness)
        return unit * (odd + sum(int(group.changes.max()) * len(group.edges) for group in self.arrays.groups))

    def _moment(self, name: str) -> Moment:
        return next(moment for moment in self.moments if moment.name == name)

    def _at_price(self, moment: Moment, price: float) -> tuple[Solution, float]:
        """The best choice when a byte at `moment` costs `price` seconds, and the bound on any that fits."""
        picks, bound = optimum(priced(self.arrays, self.problem, moment, price))
        again = made_again(self.arrays, self.targets, picks, moment, price)
        seconds = self._seconds(picks, again)
        return Solution(tuple(picks), again, seconds, 0.0), bound - self._ties() - price * self.limits.memory

    def _seconds(self, picks: Sequence[int], again: frozenset[tuple[int, Layout]]) -> float:
        total = self.arrays.value(picks)
        for number, target in again:
            group = self.arrays.groups[number]
            made = group.made[picks[group.producer]]
            total += float(group.again[made, self.targets[number].index(target)])
        return total

    def _refuse_if_impossible(self, moment: Moment) -> None:
        """Raise if even the choice of least memory does not fit."""
        scale = self.arrays.value([0] * len(self.arrays.costs)) / self.limits.memory
        picks, least = optimum(priced(self.arrays, self.problem, moment, scale, 1e-9))
        if least / scale <= self.limits.memory:
            return
        again = made_again(self.arrays, self.targets, picks, moment, scale * 1e9)
        use = self.use(Solution(tuple(picks), again, 0.0, 0.0))
        raise self._infeasible(use)

    def _infeasible(self, use: MemoryUse) -> InfeasibleError:
        terms = ", ".join(f"{name} {_gib(size)}" for name, size in largest_terms(use))
        missing = use.peak - self.limits.memory
        return InfeasibleError(
            f"no plan fits the memory limit of {_gib(self.limits.memory)} per device: {_gib(missing)} are "
            f"missing ({use.moment}: {terms}); more devices, a smaller batch or shorter sequences would help"
        )

    def _exactly(self, moment: Moment, price: float, best: Solution | None) -> Solution:
        """The integer program with the memory as rows, over labels that may be in a choice better than `best`.

        Nodes that only need room while they run are left out of the program at first; those that break the limit
        come in, and it is solved again.
        """
        fixed = self._fixed()
        limit = self.limits.memory
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if time.monotonic() > deadline:
                    raise OutOfTimeError
                solution = self._within(limit, fixed, self._alive(fixed, moment, price, best), best, deadline)
            except InfeasibleProgramError:
                if best is not None:
                    return self._told(best)
                raise self._infeasible(self.use(self._at_price(moment, price * 1e6)[0])) from None
            except OutOfTimeError:
                if best is not None:
                    return self._told(best)
                raise InfeasibleError(
                    f"in {PATIENCE:.0f} s no plan was found that fits the memory limit of "
                    f"{_gib(self.limits.memory)} per device, though one may exist: raise the limit, take more "
                    "devices, or a smaller batch"
                ) from None
            if limit == self.limits.memory:
                self._bound = max(self._bound, solution.bound)
            use = self.use(solution)
            over = use.peak - self.limits.memory
            if over <= 0:
                return self._told(solution if best is None or solution.seconds <= best.seconds else best)
            breaking = self._needing(self._moment(use.moment), solution, use.transient - over) - fixed
            # Where no node breaks the limit, it is the solver, which meets rows within a millionth.
            fixed, limit = (fixed | breaking, limit) if breaking else (fixed, limit - over)

    def _alive(self, fixed: frozenset[int], moment: Moment, price: float, best: Solution | None) -> dict[int, Flags]:
        """The labels of the nodes that are left next to `fixed` which may be in a choice better than `best`."""
        if best is None:
            network = network_of(self.arrays)
            eliminate(network, fixed)
            return {node: np.ones(len(costs), dtype=bool) for node, costs in network.costs.items()}
        relaxed = network_of(priced(self.arrays, self.problem, moment, price))
        eliminate(relaxed, fixed)
        bounds = Bounds(relaxed)
        threshold = best.seconds + price * self.limits.memory + self._ties()
        for _ in range(2 * SWEEPS):
            bounds.sweep(_a_little_more(threshold))
        for node, flags in bounds.alive.items():
            flags[int(np.searchsorted(relaxed.labels[node], best.picks[node]))] = True
        return bounds.alive

    def _within(
        self, limit: float, fixed: frozenset[int], alive: dict[int, Flags], best: Solution | None, deadline: float
    ) -> Solution:
        """The best choice whose `fixed` nodes fit `limit` bytes; raises what `Program.solve` does."""
        network = network_of(self.arrays)
        eliminate(network, fixed)
        seconds = best.seconds if best is not None else self.arrays.value([0] * len(self.arrays.costs))
        program = Program(network, alive, SCALE / seconds)
        columns = limit_memory(program, self.arrays, self.problem, self.moments, limit)
        picks, values, bound = program.solve(1e-6, max(1.0, deadline - time.monotonic()))
        strategies = restore(network, picks)
        chosen = [strategies[node] for node in range(len(self.arrays.costs))]
        again = set()
        for item in columns:
            group = self.arrays.groups[item.group]
            row = int(np.flatnonzero(item.sources == group.made[chosen[group.producer]])[0])
            for column, target in enumerate(item.targets):
                if values[item.columns[row, column]] > 0.5:
                    again.add((item.group, self.targets[item.group][target]))
        made = frozenset(again)
        return Solution(tuple(chosen), made, self._seconds(chosen, made), bound - self._ties())

    def _needing(self, moment: Moment, solution: Solution, size: float) -> frozenset[int]:
        """The nodes that need more than `size` bytes while they run at `moment`."""
        return frozenset(
            index
            for index, node in enumerate(self.problem.nodes)
            if node.block == moment.running and node.memory[solution.picks[index]].transient > size
        )

    def _fixed(self) -> frozenset[int]:
        """Nodes whose strategy decides about what stays in memory."""
        fixed = {
            node
            for node, size in enumerate(node_bytes(self.problem))
            if size.held.any() or size.gradient.any() or size.kept.any()
        }
        for group in self.arrays.groups:
            if any(edge.saved for edge in group.edges):
                fixed.add(group.producer)
                fixed.update(edge.consumer for edge in group.edges if edge.saved)
        return frozenset(fixed)


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def _a_little_more(cost: float) -> float:
    return cost + 1e-11 * abs(cost)
