"""solve: the planning problem in, the best strategy for every node out.

The best choice without limits (`solving/optimum`) is the answer where it fits the memory and all traffic of parameters
is hidden. Otherwise bytes and traffic get prices (`solving/dual`) until a choice fits, and an integer program over what
can then still be best closes the gap.
"""

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
from passes.ir.regime import PLAIN, Regime
from passes.solving.arrays import arrays
from passes.solving.bounds import Bounds
from passes.solving.dual import Dual, Found, interior
from passes.solving.integer import SCALE, InfeasibleProgramError, OutOfTimeError, Program
from passes.solving.memory import Weights, again_seconds, find_bytes, limit_memory, made_again, priced
from passes.solving.network import eliminate, restore
from passes.solving.optimum import PATIENCE, SWEEPS, a_little_more, network_of, optimum, ties
from passes.solving.prices import Flags, Prices

# A choice is proven when it costs at most this much more than the bound, relative to it.
PROVEN = 1e-6
# So often prices are tried before the integer program, and before it is asked whether any choice fits.
ROUNDS = 30
TRIES = 6
# Seconds for the best choice at one price.
QUICK = 5.0


@dataclass(frozen=True)
class Limits:
    """Bytes that a device has for the plan, and how many tensors the optimizer keeps per parameter. What was `asked`
    for is more where a part of it is set aside."""

    memory: float
    optimizer_states: int
    asked: float | None = None

    def __str__(self) -> str:
        return _gib(self.memory if self.asked is None else self.asked)


def solve(problem: Problem, cluster: Cluster, mesh: Mesh, limits: Limits, regime: Regime = PLAIN) -> Solution:
    """The choice of least step time that fits the memory, in one regime.

    Raises InfeasibleError where none fits.
    """
    solver = Solver(problem, cluster, mesh, limits, regime)
    solver.estimate()
    solver.close()
    return solver.solution()


class Solver:
    """The search for the best choice in one regime, in two steps: the first gives a bound and, mostly, a choice that
    is not far from it, the second closes the gap. `best` is the best choice so far, `bound` what none can be below;
    what takes `cutoff` seconds or more is of no interest.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        mesh: Mesh,
        limits: Limits,
        regime: Regime = PLAIN,
        prices: Prices | None = None,
    ) -> None:
        """`prices` are those of the cluster and the mesh, where another solver has found some already."""
        self.problem = problem
        self.arrays = arrays(problem, prices or Prices(cluster, mesh), regime)
        self.mesh = mesh
        self.limits = limits
        self.regime = regime
        self.cutoff = np.inf
        self.moments = moments(problem.blocks, problem.counts, regime)
        self.bytes = find_bytes(problem, self.arrays, regime)
        self.best: Solution | None = None
        self.bound = -np.inf
        self.leader: Found | None = None

    @property
    def is_open(self) -> bool:
        """Whether there may be a better choice than the best one, and than the cutoff."""
        best = np.inf if self.best is None else self.best.seconds
        return self.bound < min(best, self.cutoff) * (1 - PROVEN)

    def estimate(self, cutoff: float = np.inf) -> None:
        """Raise the bound by prices on bytes and on traffic, and look at the choices that are best at these.

        Raises InfeasibleError where it turns out that none fits.
        """
        self.cutoff = cutoff
        self._refuse_if_hopeless()
        dual = Dual(len(self.moments), len(self.arrays.overlaps), 0.0)
        found = [self._at(dual.start())]
        dual.unit = found[0].seconds / self.limits.memory
        for number in range(ROUNDS):
            if not self.is_open:
                return
            assert self.leader is not None
            if self.best is None and number == TRIES:
                self._refuse_if_impossible(self._use(self.leader).moment)
            weights, most = dual.next(found)
            if dual.at_the_end(weights) and self.best is None:
                dual.highest *= 4
            elif most <= self.bound + 1e-8 * abs(self.bound):
                return
            item = self._at(weights)
            if any(item.picks == other.picks and item.again == other.again for other in found):
                return
            found.append(item)

    def close(self, cutoff: float = np.inf, patience: float = PATIENCE) -> None:
        """Close the gap by an integer program, in about `patience` seconds.

        Raises InfeasibleError where none fits, or none was found in the time.
        """
        self.cutoff = min(self.cutoff, cutoff)
        if self.is_open:
            assert self.leader is not None
            self._exactly(self.leader.weights, time.monotonic() + patience)

    def solution(self) -> Solution:
        """The best choice with the bound that was found."""
        assert self.best is not None
        return replace(self.best, bound=min(self.best.seconds, self.bound))

    def _use(self, choice: Found) -> MemoryUse:
        return self.use(Solution(choice.picks, choice.again, 0.0, 0.0, self.regime))

    def use(self, solution: Solution) -> MemoryUse:
        """The memory that a choice takes at its peak."""
        return memory_use(self.problem, solution, self.limits.optimizer_states, self.mesh)

    def _consider(self, picks: Sequence[int], again: frozenset[tuple[int, Layout]]) -> Solution:
        """Take a choice for the best one if it is, and fits."""
        seconds = self.arrays.value(picks, again)
        solution = Solution(tuple(picks), again, seconds, seconds, self.regime)
        if (self.best is None or seconds < self.best.seconds) and self.use(solution).peak <= self.limits.memory:
            self.best = solution
        return solution

    def _at(self, weights: Weights) -> Found:
        """The best choice at these prices, and the bound on any that fits."""
        found = priced(self.arrays, self.problem, self.bytes, self.moments, weights)
        paid = self._paid(weights)
        hidden = self._hidden(weights.excess)
        enough = self.cutoff + paid + hidden + ties(found)
        picks, least = optimum(found, QUICK if any(weights.bytes) else PATIENCE, enough)
        bound = least - ties(found) - paid - hidden
        again = made_again(self.arrays, self.bytes, picks, self.moments, weights)
        self._consider(picks, again)
        self.bound = max(self.bound, bound)
        beyond = [self.arrays.excess(overlap, picks, again) for overlap in self.arrays.overlaps]
        excess = [overlap.weight * size for overlap, size in zip(self.arrays.overlaps, beyond, strict=True)]
        seconds = self.arrays.value(picks, again) - sum(max(0.0, size) for size in excess)
        found_here = Found(tuple(picks), again, seconds, self._over(picks, again), excess, bound, weights)
        if self.leader is None or bound >= self.leader.bound:
            self.leader = found_here
        return found_here

    def _paid(self, weights: Weights) -> float:
        """What all bytes of the limit cost."""
        return sum(weights.bytes) * self.limits.memory if any(weights.bytes) else 0.0

    def _hidden(self, parts: Sequence[float]) -> float:
        """What computation takes off the traffic of which `parts` count."""
        pairs = zip(parts, self.arrays.overlaps, strict=True)
        return sum(part * overlap.weight * overlap.cover for part, overlap in pairs)

    def _over(self, picks: Sequence[int], again: frozenset[tuple[int, Layout]]) -> list[float]:
        """Bytes over the limit at every moment, transient ones left out."""
        solution = Solution(tuple(picks), again, 0.0, 0.0, self.regime)
        uses = (memory_use(self.problem, solution, self.limits.optimizer_states, self.mesh, [m]) for m in self.moments)
        return [use.peak - use.transient - self.limits.memory for use in uses]

    def _refuse_if_hopeless(self) -> None:
        """Raise if what nodes and kept tensors take at least, each by itself, does not fit."""
        least = max((self._least(moment) for moment in self.moments), key=lambda use: use.peak)
        if least.peak > self.limits.memory:
            raise self._infeasible(least, "at least ")

    def _least(self, moment: Moment) -> MemoryUse:
        """What nodes and kept tensors take at least at a moment, each by itself."""
        held: dict[str, float] = {}
        optimizer = gradients = kept = 0.0
        for node, size in zip(self.problem.nodes, self.bytes.nodes, strict=True):
            pick = int(size.there(moment, node.block).argmin())
            held[node.kind] = held.get(node.kind, 0.0) + float(size.held[pick])
            optimizer += self.limits.optimizer_states * float(size.gradient[pick])
            gradients += moment.gradients[node.block] * float(size.gradient[pick])
            kept += moment.kept[size.place] * float(size.kept[pick])
        for group, places in zip(self.arrays.groups, self.bytes.groups, strict=True):
            if any(edge.saved for edge in group.edges):
                source = moment.kept[places.source] * float(group.source_bytes.min())
                kept += min(source, moment.kept[places.target] * float(group.target_bytes.min()))
        parameters = held.get("parameter", 0.0) - optimizer
        buffers, inputs, outputs = (held.get(kind, 0.0) for kind in ("buffer", "input", "output"))
        return MemoryUse(parameters, optimizer, buffers, inputs, outputs, gradients, kept, 0.0, moment.name)

    def _refuse_if_impossible(self, name: str) -> None:
        """Raise if even the choice of least memory at a moment does not fit."""
        scale = self.arrays.value([0] * len(self.arrays.costs)) / self.limits.memory
        bytes = [scale if moment.name == name else 0.0 for moment in self.moments]
        weights = Weights(1e-9, bytes, [0.0] * len(self.arrays.overlaps))
        picks, least = optimum(priced(self.arrays, self.problem, self.bytes, self.moments, weights), QUICK)
        if least / scale <= self.limits.memory:
            return
        again = made_again(self.arrays, self.bytes, picks, self.moments, weights)
        raise self._infeasible(self.use(Solution(tuple(picks), again, 0.0, 0.0, self.regime)))

    def _infeasible(self, use: MemoryUse, at_least: str = "") -> InfeasibleError:
        terms = ", ".join(f"{name} {_gib(size)}" for name, size in largest_terms(use))
        missing = use.peak - self.limits.memory
        return InfeasibleError(
            f"no plan fits the memory limit of {self.limits} per device: {at_least}{_gib(missing)} are "
            f"missing ({use.moment}: {terms})",
            missing,
        )

    # --- the integer program ---

    def _exactly(self, weights: Weights, deadline: float) -> None:
        """The integer program with memory and hidden traffic as rows, over labels that may be in a better choice.

        Nodes that only need room while they run are left out of the program at first; those that break the limit
        come in, and it is solved again.
        """
        hinges = list(interior(weights.excess))
        fixed = self._fixed(hinges)
        limit = self.limits.memory
        while self.is_open:
            known = min(self.cutoff, np.inf if self.best is None else self.best.seconds)
            try:
                if time.monotonic() > deadline:
                    raise OutOfTimeError
                solution, bound = self._within(limit, fixed, hinges, weights, deadline)
            except InfeasibleProgramError:
                if known == np.inf:
                    self.bound = np.inf
                    raise self._infeasible(self._smallest(weights)) from None
                # Nothing is better than what is known.
                self.bound = max(self.bound, known)
                return
            except OutOfTimeError:
                if known < np.inf:
                    return
                raise InfeasibleError(
                    f"in the time given no plan was found that fits the memory limit of {self.limits} per device, "
                    "though one may exist: raise the limit"
                ) from None
            if limit == self.limits.memory:
                # What is left out of the program costs no less than what was known.
                self.bound = max(self.bound, min(bound, known))
            use = self.use(solution)
            over = use.peak - self.limits.memory
            if over <= 0:
                waiting = self._unhidden(solution, hinges, weights)
                if not waiting:
                    return
                hinges = sorted({*hinges, *waiting})
                fixed = fixed | self._fixed(hinges)
                continue
            breaking = self._needing(self._moment(use.moment), solution, use.transient - over) - fixed
            # Where no node breaks the limit, it is the solver, which meets rows within a millionth.
            fixed, limit = (fixed | breaking, limit) if breaking else (fixed, limit - over)

    def _smallest(self, weights: Weights) -> MemoryUse:
        """What a choice takes for which bytes are all that counts."""
        dear = replace(weights, bytes=[max(1e6 * price, 1e-30) for price in weights.bytes])
        picks, _ = optimum(priced(self.arrays, self.problem, self.bytes, self.moments, dear), QUICK)
        again = made_again(self.arrays, self.bytes, picks, self.moments, dear)
        return self.use(Solution(tuple(picks), again, 0.0, 0.0, self.regime))

    def _unhidden(self, solution: Solution, hinges: Sequence[int], weights: Weights) -> list[int]:
        """Overlaps that the program counts as hidden, or as not hidden, of which the opposite is true."""
        found = []
        for index, (overlap, part) in enumerate(zip(self.arrays.overlaps, weights.excess, strict=True)):
            excess = self.arrays.excess(overlap, solution.picks, solution.again)
            if index not in hinges and overlap.weight * (max(0.0, excess) - part * excess) > 1e-9 * solution.seconds:
                found.append(index)
        return found

    def _moment(self, name: str) -> Moment:
        return next(moment for moment in self.moments if moment.name == name)

    def _within(
        self, limit: float, fixed: frozenset[int], hinges: Sequence[int], weights: Weights, deadline: float
    ) -> tuple[Solution, float]:
        """The best choice whose `fixed` nodes fit `limit` bytes and a bound on all; raises what `Program.solve` does.

        Overlaps that are not among `hinges` count with the part that `weights` has for them.
        """
        parts = [0.0 if index in hinges else round(part) for index, part in enumerate(weights.excess)]
        rounded = Weights(1.0, [0.0] * len(self.moments), parts)
        plain = priced(self.arrays, self.problem, self.bytes, self.moments, rounded)
        network = network_of(plain)
        eliminate(network, fixed)
        seconds = self.best.seconds if self.best is not None else self.arrays.value([0] * len(self.arrays.costs))
        program = Program(network, self._alive(network.labels, fixed, hinges, weights), SCALE / seconds)
        groups = [replace(group, again=again_seconds(self.arrays, group, rounded)) for group in self.arrays.groups]
        with_parts = replace(self.arrays, groups=groups)
        columns = limit_memory(program, with_parts, self.problem, self.bytes, self.moments, limit, hinges)
        picks, values, bound = program.solve(PROVEN, max(1.0, deadline - time.monotonic()))
        strategies = restore(network, picks)
        chosen = [strategies[node] for node in range(len(self.arrays.costs))]
        again: set[tuple[int, Layout]] = set()
        for item in columns:
            group = self.arrays.groups[item.group]
            row = int(np.flatnonzero(item.sources == group.made[chosen[group.producer]])[0])
            for column, target in enumerate(item.targets):
                if values[item.columns[row, column]] > 0.5:
                    again.add((item.group, group.targets[target]))
        return self._consider(chosen, frozenset(again)), bound - ties(plain) - self._hidden(parts)

    def _alive(
        self, labels: dict[int, np.ndarray], fixed: frozenset[int], hinges: Sequence[int], weights: Weights
    ) -> dict[int, Flags]:
        """The labels of the nodes that are left next to `fixed` which may be in a choice better than the best."""
        known = min(self.cutoff, np.inf if self.best is None else self.best.seconds)
        if known == np.inf:
            return {node: np.ones(len(own), dtype=bool) for node, own in labels.items()}
        found = priced(self.arrays, self.problem, self.bytes, self.moments, weights)
        relaxed = network_of(found)
        eliminate(relaxed, fixed)
        bounds = Bounds(relaxed)
        threshold = known + self._paid(weights) + self._hidden(weights.excess) + ties(found)
        for _ in range(2 * SWEEPS):
            bounds.sweep(a_little_more(threshold))
        if self.best is not None:
            for node, flags in bounds.alive.items():
                flags[int(np.searchsorted(relaxed.labels[node], self.best.picks[node]))] = True
        elif not all(flags.any() for flags in bounds.alive.values()):
            raise InfeasibleProgramError
        return bounds.alive

    def _needing(self, moment: Moment, solution: Solution, size: float) -> frozenset[int]:
        """The nodes that need more than `size` bytes while they run at `moment`."""
        return frozenset(
            index
            for index, node in enumerate(self.problem.nodes)
            if node.block == moment.running and node.memory[solution.picks[index]].transient > size
        )

    def _fixed(self, hinges: Sequence[int]) -> frozenset[int]:
        """Nodes whose strategy decides about what stays in memory, or about what is hidden."""
        limited = self.limits.memory != float("inf")
        fixed = {
            node
            for node, size in enumerate(self.bytes.nodes)
            if limited and (size.held.any() or size.gradient.any() or size.kept.any())
        }
        overlaps = [self.arrays.overlaps[hinge] for hinge in hinges]
        for group in self.arrays.groups:
            edges = [edge for edge in group.edges if edge.saved and limited]
            if (limited and group.held.any()) or any(overlap.traffic(group) is not None for overlap in overlaps):
                edges = list(group.edges)
            if edges:
                fixed.add(group.producer)
                fixed.update(edge.consumer for edge in edges)
        return frozenset(fixed)


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
