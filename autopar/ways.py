"""All ways to run a program on the meshes that are tried: how many micro-batches there are, what is computed again, and
when parameters travel.

Each of these ways to run has a solver of its own with a bound on what it takes. The one with the lowest bound is
always gone on with, so that little work goes into what cannot be better than the best so far. The step without any
memory limit bounds all ways to run as many micro-batches on a mesh, and more micro-batches never take less time than
fewer do.
"""

import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from autopar.clock import Clock
from autopar.pieces import Part, Pieces
from autopar.regimes import free_regime, limited_regimes, micro_batch_counts
from autopar.request import Request
from passes.constrain import constrain
from passes.cost.memory import memory_use
from passes.ir.choices import Problem, Solution
from passes.ir.demands import Demands
from passes.ir.errors import InfeasibleError
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.rules.strategies import Offer, method_token
from passes.solve import PROVEN, Solver
from passes.solving.limits import Limits
from passes.solving.prices import Prices
from passes.strategies import candidates

# Units of effort for closing gaps (`passes/solving/effort`): in all, and for each at least.
ALLOWANCE = 4000.0
_LEAST = 2500.0
# What every node may do on an axis: nothing is split.
_WHOLE = frozenset({"I", "R"})


@dataclass(frozen=True)
class Tried:
    """A mesh and a part of the batch, with a solver for what is left to choose."""

    mesh: Mesh
    part: Part
    demands: Demands
    solver: Solver

    @property
    def bound(self) -> float:
        """Nothing here takes less time (seconds)."""
        return self.solver.bound

    @property
    def problem(self) -> Problem:
        """What is left to choose."""
        return self.solver.instance.problem


# Looks at more and more of what there is, and gives a bound on what it has not seen yet.
Looking = Iterator[float]


@dataclass
class Ways:
    """The best of many ways to run.

    `waiting` is what may have something better in it, by its bound and its number; `tried` all that may have the best
    choice in it, `found` the best one that fits so far, and `cutoff` its seconds. Closing gaps has `spent` so many
    units of effort, and none of what was closed takes less than `least`. `memory` is what is left of the limit for what
    is counted here, where that is less. The rest is what was found out on the way: what is `free` of limits by mesh and
    number of micro-batches, and what no way to run can be below.
    """

    pieces: Pieces
    request: Request
    master: torch.dtype | None
    clock: Clock
    memory: float | None = None
    errors: list[InfeasibleError] = field(default_factory=list)
    waiting: list[tuple[float, int, Looking]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    tried: list[Tried] = field(default_factory=list)
    found: tuple[Tried, Solution] | None = None
    spent: float = 0.0
    least: float = float("inf")
    prices: dict[Mesh, Prices] = field(default_factory=dict)
    free: dict[tuple[Mesh, int], Tried] = field(default_factory=dict)
    bounds: dict[tuple[Mesh, Hashable], float] = field(default_factory=dict)

    @property
    def cutoff(self) -> float:
        """Seconds of the best choice so far."""
        return float("inf") if self.found is None else self.found[1].seconds

    def anew(self, request: Request) -> "Ways":
        """Ways to run where something else is asked for, of which nothing is known yet."""
        return replace(
            self, request=request, errors=[], waiting=[], tried=[], found=None, spent=0.0, least=float("inf")
        )

    def within(self, tried: Tried, memory: float) -> "Ways":
        """Ways to run that take at most `memory` bytes, of which that is known which was the best one with more."""
        less = replace(self.anew(self.request), memory=memory)
        less._wait(0.0, less._limited(tried, tried.solver.regime))
        less.go_on()
        return less

    def on(self, meshes: Iterable[Mesh]) -> None:
        """Try all ways to run on these meshes."""
        for mesh in meshes:
            self._wait(0.0, self._on(mesh))
        self.go_on()

    def offered(self, parent: Tried, solution: Solution, mesh: Mesh, origins: Sequence[int | None]) -> None:
        """Have what is done in a choice on another mesh, or in those that its bound mixes, wait to be tried on `mesh`:
        on each axis what is done on the axis of `origins`, and anything where that is None."""
        self._wait(0.0, self._offered(parent, solution, mesh, origins))

    def go_on(self) -> None:
        """Go on where the bound is lowest, until nothing that waits can be better than what is known."""
        while self.waiting:
            bound, _, looking = heapq.heappop(self.waiting)
            if bound >= self.cutoff * (1 - PROVEN):
                self.waiting.clear()
                return
            following = next(looking, None)
            if following is not None:
                self._wait(following, looking)

    def closed(self, at_least: float = _LEAST) -> tuple[Tried, Solution] | None:
        """The best of all that was tried: gaps are closed where something better may be in them, each with at least
        so many units of effort if that takes so much."""
        while self.tried:
            tried = min(self.tried, key=lambda item: item.bound)
            self.tried.remove(tried)
            if tried.solver.bound < self.cutoff * (1 - PROVEN) or self.found is None:
                before = tried.solver.effort.spent
                self._close(tried, max(at_least, ALLOWANCE - self.spent))
                self.spent += tried.solver.effort.spent - before
                if tried.solver.limits != self._limits and not self._fits(tried):
                    # The best of all does not fit, though another one did.
                    self._wait_for_limited(tried, tried.bound)
                    self.go_on()
                    continue
            self.least = min(self.least, tried.bound)
        if self.found is None:
            return None
        tried, solution = self.found
        return tried, replace(solution, bound=min(self.least, solution.seconds))

    def problem(self, mesh: Mesh, part: Part, offers: Mapping[str, Offer] | None = None) -> tuple[Problem, Demands]:
        """What may be chosen on a mesh, of what nodes have `offers` for no more than these; and what is demanded
        there."""
        request = self.request
        demands = constrain(part.program, request.constraints, mesh)
        setting = replace(request, mesh=mesh).setting(self.master, offers)
        return self.clock("candidates", lambda: candidates(part.folded, demands, setting)), demands

    def _wait(self, bound: float, looking: Looking) -> None:
        heapq.heappush(self.waiting, (bound, next(self.numbers), looking))

    def _on(self, mesh: Mesh) -> Looking:
        """All ways to run on a mesh."""
        bound = 0.0
        for count in micro_batch_counts(self.request, self.pieces.program):
            yield bound
            part = self.pieces.of(count, self.request.micro_batches is not None)
            if part is None:
                return
            tried = self._free(mesh, part, count)
            for least in self._estimate(tried):
                bound = max(bound, least)
                yield bound
            bound = max(bound, tried.bound)
            if self._fits(tried):
                self._remember(tried)
                return
            self._wait_for_limited(tried, bound)

    def _wait_for_limited(self, tried: Tried, bound: float) -> None:
        """All ways to run as many micro-batches within the memory wait."""
        for regime in limited_regimes(self.request, tried.solver.regime.micro_batches, tried.part.folded):
            key = tried.mesh, regime.key
            if all(key != (other.mesh, other.solver.regime.key) for other in self.tried):
                self._wait(max(bound, self.bounds.get(key, 0.0)), self._limited(tried, regime))

    def _limited(self, same: Tried, regime: Regime) -> Looking:
        """One way to run within the memory; what is found out about it holds with less memory, too."""
        tried = replace(same, solver=same.solver.other(self._limits, regime))
        for bound in self._estimate(tried):
            self.bounds[tried.mesh, regime.key] = bound
            yield bound
        self._remember(tried)

    def _offered(self, parent: Tried, solution: Solution, mesh: Mesh, origins: Sequence[int | None]) -> Looking:
        """What is offered by a choice, in its regime."""
        demands = constrain(parent.part.program, self.request.constraints, mesh)
        ops = {op.key: op for op in parent.part.folded.ops}
        choices = [solution.picks, *parent.solver.mixed]
        offers = {}
        for index, node in enumerate(parent.problem.nodes):
            is_op = node.key in ops
            done = [node.strategies[pick].methods for pick in {picks[index] for picks in choices}]
            demanded = demands.axes(*(demands.places(ops[node.key]) if is_op else [("stored", node.name)]))
            # What is demanded on one axis may leave nothing of what was done on another.
            others = _WHOLE if demanded else frozenset()
            offers[node.key] = [
                None
                if origin is None or axis in demanded
                else others.union(method_token(methods[origin], is_op) for methods in done)
                for axis, origin in enumerate(origins)
            ]
        problem, demands = self.problem(mesh, parent.part, offers)
        tried = Tried(mesh, parent.part, demands, self._solver(problem, mesh, self._limits, solution.regime))
        yield from self._estimate(tried)
        self._remember(tried)

    def _estimate(self, tried: Tried) -> Looking:
        """Let a solver raise its bound."""
        solver = tried.solver
        try:
            if not solver.has_begun:
                self.clock("solve", partial(solver.begin, self.cutoff))
            goes_on = True
            while goes_on:
                self._consider(tried)
                yield tried.bound
                goes_on = self.clock("solve", partial(solver.climb, self.cutoff))
        except InfeasibleError as error:
            self.errors.append(error)
            solver.bound = float("inf")

    def _remember(self, tried: Tried) -> None:
        """Remember what may have something better than what is known."""
        if tried.bound < self.cutoff * (1 - PROVEN):
            self.tried.append(tried)
            self._consider(tried)

    @property
    def _limits(self) -> Limits:
        asked = self.request.memory_limit
        return Limits(asked if self.memory is None else self.memory, self.request.optimizer_states, asked)

    def _close(self, tried: Tried, allowance: float) -> None:
        try:
            self.clock("solve", partial(tried.solver.close, self.cutoff, allowance))
        except InfeasibleError as error:
            self.errors.append(error)
        self._consider(tried)

    def _consider(self, tried: Tried) -> None:
        """Take what a solver has for the best choice if it is, and fits."""
        best = tried.solver.best
        if best is not None and best.seconds < self.cutoff and self._fits(tried):
            self.found = tried, best

    def _free(self, mesh: Mesh, part: Part, count: int) -> Tried:
        """What takes as much memory as it likes."""
        regime = free_regime(self.request, count, part.folded)
        limits = Limits(float("inf"), self.request.optimizer_states)
        if (mesh, count) not in self.free:
            problem, demands = self.problem(mesh, part)
            self.free[mesh, count] = Tried(mesh, part, demands, self._solver(problem, mesh, limits, regime))
        tried = self.free[mesh, count]
        if tried.solver.regime != regime:
            tried = replace(tried, solver=tried.solver.other(limits, regime))
        return tried

    def _solver(self, problem: Problem, mesh: Mesh, limits: Limits, regime: Regime) -> Solver:
        """A solver that shares its prices with all others for the same mesh."""
        cluster = self.request.cluster
        if mesh not in self.prices:
            self.prices[mesh] = Prices(cluster, mesh)
        return self.clock("solve", lambda: Solver(problem, cluster, mesh, limits, regime, self.prices[mesh]))

    def _fits(self, tried: Tried) -> bool:
        best = tried.solver.best
        if best is None:
            return False
        use = memory_use(tried.problem, best, self.request.optimizer_states, tried.mesh)
        return use.peak <= self._limits.memory
