"""What no single integer program decides: the shape of the mesh, how many micro-batches there are, what is computed
again, and when parameters travel.

Each of these ways to run has a solver of its own with a bound on what it takes. The one with the lowest bound is
always gone on with, so that little work goes into what cannot be better than the best so far. The step without any
memory limit bounds all ways to run as many micro-batches on a mesh, and more micro-batches never take less time than
fewer do.
"""

import heapq
import itertools
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from autopar.clock import Clock
from autopar.meshes import finer, shapes
from autopar.regimes import free_regime, limited_regimes, micro_batch_counts, regime_text
from autopar.request import Request
from passes.candidates import candidates
from passes.constrain import constrain
from passes.cost.memory import memory_use
from passes.ir.choices import Node, Problem, Solution, Strategy
from passes.ir.demands import Demands
from passes.ir.errors import ConstraintError, InfeasibleError, MicroBatchError
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Program
from passes.ir.regime import Regime
from passes.micro_batches import Batch, MicroBatches
from passes.recompute import check_patterns
from passes.regions import fold
from passes.rules.strategies import letter_token
from passes.solve import PROVEN, Solver
from passes.solving.limits import Limits
from passes.solving.prices import Prices

logger = logging.getLogger("autopar")

# A searched mesh has at most so many axes.
_AXES = 4
# How many times as many devices are tried when no plan fits.
_MORE = (2, 4, 8, 16, 32, 64)
# Gaps are closed for so many seconds in all, and each for at least so many.
PATIENCE = 12.0
_LEAST = 8.0


@dataclass(frozen=True)
class Part:
    """The program of one micro-batch (`micro` is None for the whole batch), folded."""

    micro: MicroBatches | None
    program: Program
    folded: Folded


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
class Search:
    """The search for one program in training or inference; `refused` says why the batch stays in one piece.

    `waiting` is what may have something better in it, by its bound and its number; `tried` all that may have the best
    choice in it, `found` the best one that fits so far, and `cutoff` its seconds. `memory` is what is left of the limit
    for what the search counts, where that is less. The rest is what was found out on the way: what is `free` of limits
    by mesh and number of micro-batches, and what no way to run can be below.
    """

    program: Program
    request: Request
    master: torch.dtype | None
    clock: Clock
    refused: str = ""
    memory: float | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    errors: list[InfeasibleError] = field(default_factory=list)
    waiting: list[tuple[float, int, Looking]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    tried: list[Tried] = field(default_factory=list)
    found: tuple[Tried, Solution] | None = None
    prices: dict[Mesh, Prices] = field(default_factory=dict)
    free: dict[tuple[Mesh, int], Tried] = field(default_factory=dict)
    bounds: dict[tuple[Mesh, Hashable], float] = field(default_factory=dict)

    @property
    def cutoff(self) -> float:
        """Seconds of the best choice so far."""
        return float("inf") if self.found is None else self.found[1].seconds

    def best(self) -> tuple[Tried, Solution]:
        """The best choice on the mesh that is given, or on any shape of it.

        Raises InfeasibleError where none fits, which says what would.
        """
        request = self.request
        if request.recompute is not None:
            part = self.part(1)
            assert part is not None
            check_patterns(part.folded.regions, request.recompute)
            if not part.folded.regions and set(request.recompute.values()) != {"none"}:
                logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")
        found = self.on_all()
        if found is None:
            raise self._with_hint(min(self.errors, key=lambda error: error.missing))
        seconds, bound = found[1].seconds, found[1].bound
        if bound < seconds * (1 - PROVEN):
            logger.warning("the plan may be up to %.2g%% slower than the best", 100 * (1 - bound / seconds))
        return found

    def within(self, tried: Tried, memory: float) -> tuple[Tried, Solution]:
        """The best choice that fits `memory` bytes. What was the best one with more is looked at first, so that little
        else is left to look at.

        Raises InfeasibleError where none fits.
        """
        less = replace(self, memory=memory, errors=[], waiting=[], tried=[], found=None)
        less._wait(0.0, less._limited(tried, tried.solver.regime))
        less._go_on()
        return less.best()

    # --- meshes ---

    def on_all(self) -> tuple[Tried, Solution] | None:
        """The best choice on the mesh that is given, or on any of as many devices where its shape is to be found."""
        request = self.request
        if request.any_shape:
            return self._on_any(request.mesh.size)
        self._try([request.mesh])
        return self._closed()

    def _on_any(self, devices: int) -> tuple[Tried, Solution] | None:
        """The best choice on any mesh of so many devices.

        Shapes of up to two axes are tried first. The axes of the best one are then cut in two as long as that helps, up
        to four; for that nodes may do anything on the new axes, and on the others what they did before, in the best
        choice or in those that its bound mixes.
        """
        self._try(shapes(devices, self.request.cluster.node_size))
        while self.found is not None:
            parent = self.found
            for mesh, origins in finer(parent[0].mesh, self.request.cluster.node_size, _AXES):
                self._wait(0.0, self._finer(*parent, mesh, origins))
            self._go_on()
            if self.found is parent:
                break
        return self._closed()

    def _try(self, meshes: Iterable[Mesh]) -> None:
        for mesh in meshes:
            self._wait(0.0, self._on(mesh))
        self._go_on()

    def _wait(self, bound: float, looking: Looking) -> None:
        heapq.heappush(self.waiting, (bound, next(self.numbers), looking))

    def _go_on(self) -> None:
        """Go on where the bound is lowest, until nothing that waits can be better than what is known."""
        while self.waiting:
            bound, _, looking = heapq.heappop(self.waiting)
            if bound >= self.cutoff * (1 - PROVEN):
                self.waiting.clear()
                return
            following = next(looking, None)
            if following is not None:
                self._wait(following, looking)

    def _on(self, mesh: Mesh) -> Looking:
        """All ways to run on a mesh."""
        bound = 0.0
        for count in micro_batch_counts(self.request, self.program):
            yield bound
            part = self.part(count)
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

    def _finer(self, parent: Tried, solution: Solution, mesh: Mesh, origins: Sequence[int | None]) -> Looking:
        """What is done in a choice, or in those that its bound mixes, with one axis cut in two."""
        offers = {}
        choices = [solution.picks, *parent.solver.mixed]
        for index, node in enumerate(parent.problem.nodes):
            tokens = [_tokens(node, node.strategies[pick]) for pick in {picks[index] for picks in choices}]
            offers[node.key] = [
                None if origin is None else frozenset(own[origin] for own in tokens) for origin in origins
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

    def _closed(self) -> tuple[Tried, Solution] | None:
        """The best of all that was tried: gaps are closed where something better may be in them."""
        spent = 0.0
        bound = float("inf")
        while self.tried:
            tried = min(self.tried, key=lambda item: item.bound)
            self.tried.remove(tried)
            if tried.solver.bound < self.cutoff * (1 - PROVEN) or self.found is None:
                start = time.monotonic()
                self._close(tried, max(_LEAST, PATIENCE - spent))
                spent += time.monotonic() - start
                if tried.solver.limits != self._limits and not self._fits(tried):
                    # The best of all does not fit, though another one did.
                    self._wait_for_limited(tried, tried.bound)
                    self._go_on()
                    continue
            bound = min(bound, tried.bound)
        if self.found is None:
            return None
        tried, solution = self.found
        return tried, replace(solution, bound=min(bound, solution.seconds))

    # --- what they are tried on ---

    @property
    def _limits(self) -> Limits:
        asked = self.request.memory_limit
        return Limits(asked if self.memory is None else self.memory, self.request.optimizer_states, asked)

    def _close(self, tried: Tried, patience: float) -> None:
        try:
            self.clock("solve", partial(tried.solver.close, self.cutoff, patience))
        except InfeasibleError as error:
            self.errors.append(error)
        self._consider(tried)

    def _consider(self, tried: Tried) -> None:
        """Take what a solver has for the best choice if it is, and fits."""
        best = tried.solver.best
        if best is not None and best.seconds < self.cutoff and self._fits(tried):
            self.found = tried, best

    @cached_property
    def batch(self) -> Batch:
        """The batch, to be cut."""
        return Batch(self.program)

    def part(self, count: int) -> Part | None:
        """The program of one of `count` micro-batches; None where the graph does not show that it may be cut."""
        if self.refused and count > 1 and self.request.micro_batches is None:
            return None
        if count not in self.parts:
            micro = None
            if count > 1:
                try:
                    micro = self.clock("micro-batches", lambda: self.batch.cut(count))
                except MicroBatchError as error:
                    if self.request.micro_batches is not None:
                        raise
                    self.refused = str(error)
                    return None
            program = self.program if micro is None else micro.program
            demands = constrain(program, self.request.constraints, self.request.mesh)
            self.parts[count] = Part(micro, program, self.clock("regions", lambda: fold(program, demands.label)))
        return self.parts[count]

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

    def problem(
        self, mesh: Mesh, part: Part, offers: Mapping[str, Sequence[frozenset[str] | None]] | None = None
    ) -> tuple[Problem, Demands]:
        request = self.request
        demands = constrain(part.program, request.constraints, mesh)
        setting = replace(request, mesh=mesh).setting(self.master, offers)
        return self.clock("candidates", lambda: candidates(part.folded, demands, setting)), demands

    # --- what would fit ---

    def _with_hint(self, error: InfeasibleError) -> InfeasibleError:
        """The error with the nearest thing that fits, found by solving."""
        request = self.request
        freed = replace(request, micro_batches=None, recompute=None)
        if (request.micro_batches, request.recompute) != (None, None) and request.objective == "train":
            found = self._would_fit(freed)
            if found is not None:
                how = regime_text(found[1].regime) or "nothing computed again, and one micro-batch"
                return InfeasibleError(f"{error}; it would fit with {how}", error.missing)
        sizes = request.mesh.sizes
        for factor in _MORE:
            wider = replace(freed, mesh=Mesh(request.mesh.names, (sizes[0] * factor, *sizes[1:])))
            found = self._would_fit(wider)
            if found is not None:
                how = regime_text(found[1].regime)
                return InfeasibleError(
                    f"{error}; it would fit on {found[0].mesh.size} devices ({found[0].mesh})"
                    + (f" with {how}" if how else ""),
                    error.missing,
                )
        return InfeasibleError(
            f"{error}; nor does any fit with up to {request.mesh.size * _MORE[-1]} devices: take a smaller batch, "
            "shorter sequences, or a smaller model",
            error.missing,
        )

    def _would_fit(self, request: Request) -> tuple[Tried, Solution] | None:
        """What fits where something else is asked for; parts of the batch are the same for all meshes of these axes."""
        try:
            return replace(self, request=request, errors=[], waiting=[], tried=[], found=None).on_all()
        except ConstraintError:
            # The user's constraints cannot be met there.
            return None


def _tokens(node: Node, strategy: Strategy) -> list[str]:
    """What a strategy does on each axis, as it is offered to `candidates`."""
    if node.kind == "op":
        return [method.partition("@")[0] for method in strategy.methods]
    return [letter_token(letter) for letter in (*strategy.results, *strategy.operands)[0]]
