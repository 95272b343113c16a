"""What no single integer program decides: the shape of the mesh, how many micro-batches there are, what is computed
again, and when parameters travel.

Each of these is tried with an integer program of its own, those that promise most first. What cannot be better than
the best so far is given up as soon as a bound says so: the step without any memory limit bounds all that computes
something again, and more micro-batches never take less time than fewer do.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

import torch

from autopar.clock import Clock
from autopar.meshes import finer, shapes
from autopar.request import Request
from passes.candidates import candidates, letter_token
from passes.constrain import constrain
from passes.cost.memory import memory_use
from passes.ir.choices import Problem, Solution
from passes.ir.demands import Demands
from passes.ir.errors import ConstraintError, InfeasibleError, MicroBatchError
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Program
from passes.ir.regime import RECOMPUTE, Regime
from passes.micro_batches import Batch, MicroBatches, batch_size
from passes.recompute import check_patterns, levels
from passes.regions import fold
from passes.solve import PROVEN, Solver
from passes.solving.arrays import Uses, find_uses
from passes.solving.limits import Limits
from passes.solving.prices import Prices

logger = logging.getLogger("autopar")

# Regions whose levels of recompute are chosen one by one; of more, all get the same.
_APART = 2
# A searched mesh has at most so many axes.
_AXES = 4
# How many times as many devices are tried when no plan fits.
_MORE = (2, 4, 8, 16, 32, 64)
# Gaps are closed for so many seconds in all, and each for at least so many.
PATIENCE = 10.0
_LEAST = 5.0


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
    def key(self) -> tuple[object, ...]:
        """What tells it from others: the mesh, the regime, and whether memory is limited."""
        regime = self.solver.regime
        again = tuple(regime.recompute.items())
        is_limited = self.solver.limits.memory < float("inf")
        return self.mesh, regime.micro_batches, again, regime.gather_once, regime.reduce_once, is_limited

    @property
    def problem(self) -> Problem:
        """What is left to choose."""
        return self.solver.instance.problem


@dataclass
class Search:
    """The search for one program in training or inference; `refused` says why the batch stays in one piece.

    `tried` is all that may have the best choice in it, `found` the best one that fits so far, and `cutoff` its seconds.
    `memory` is what is left of the limit for what the search counts, where that is less. The rest is what was found out
    on the way: `problems` by mesh and number of micro-batches, and what no way to run can be below, `refined` for
    meshes with one more axis.
    """

    program: Program
    request: Request
    master: torch.dtype | None
    clock: Clock
    refused: str = ""
    memory: float | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    errors: list[InfeasibleError] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    found: tuple[Tried, Solution] | None = None
    prices: dict[Mesh, Prices] = field(default_factory=dict)
    uses: dict[int, tuple[Problem, Sequence[Uses]]] = field(default_factory=dict)
    problems: dict[tuple[Mesh, int], tuple[Problem, Demands]] = field(default_factory=dict)
    bounds: dict[tuple[object, ...], float] = field(default_factory=dict)
    refined: dict[Mesh, float] = field(default_factory=dict)

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

    # --- meshes ---

    def on_all(self) -> tuple[Tried, Solution] | None:
        """The best choice on the mesh that is given, or on any of as many devices where its shape is to be found."""
        request = self.request
        return self._on_any(request.mesh.size) if request.any_shape else self._on([request.mesh])

    def _on_any(self, devices: int) -> tuple[Tried, Solution] | None:
        """The best choice on any mesh of so many devices.

        Shapes of up to two axes are tried first. The axes of the best one are then cut in two as long as that helps, up
        to four; for that nodes may do anything on the new axes, and on the others what they did before.
        """
        self._try(shapes(devices, self.request.cluster.node_size))
        while self.found is not None:
            parent = self.found
            for mesh, origins in finer(parent[0].mesh, self.request.cluster.node_size, _AXES):
                if self.refined.get(mesh, 0.0) < self.cutoff:
                    self._try_finer(*parent, mesh, origins)
            if self.found is parent:
                break
        return self._closed()

    def _on(self, meshes: Sequence[Mesh]) -> tuple[Tried, Solution] | None:
        """The best choice on any of these meshes; None where none fits."""
        self._try(meshes)
        return self._closed()

    def _try(self, meshes: Iterable[Mesh]) -> None:
        """Estimate all ways to run on `meshes`, for more and more micro-batches, those that promise most without any
        limit first: more micro-batches take no less time, so that it ends where nothing beats what is known."""
        waiting: list[tuple[Tried, Iterator[int]]] = []

        def wait(mesh: Mesh, counts: Iterator[int]) -> None:
            count = next(counts, None)
            part = None if count is None else self.part(count)
            if count is not None and part is not None:
                if (mesh, count) not in self.problems:
                    self.problems[mesh, count] = self.problem(mesh, part)
                problem, demands = self.problems[mesh, count]
                free = Tried(mesh, part, demands, self._free(problem, mesh, count, part.folded))
                if self._may_be_better(free):
                    self.clock("solve", partial(free.solver.estimate, self.cutoff))
                    self.bounds[free.key] = free.bound
                    waiting.append((free, counts))

        for mesh in meshes:
            wait(mesh, self._counts())
        while waiting:
            free, counts = min(waiting, key=lambda item: item[0].bound)
            if free.bound >= self.cutoff * (1 - PROVEN):
                return
            waiting = [item for item in waiting if item[0] is not free]
            if self._fits(free):
                self.tried.append(free)
                self._consider(free)
            else:
                self._try_limited(free)
                wait(free.mesh, counts)

    def _try_limited(self, tried: Tried) -> None:
        for regime in self._regimes(tried.solver.regime.micro_batches, tried.part.folded):
            solver = self._solver(tried.problem, tried.mesh, self._limits, regime)
            limited = replace(tried, solver=solver)
            if self._may_be_better(limited):
                self._estimate(limited)
                self.bounds[limited.key] = limited.bound

    def _try_finer(self, parent: Tried, solution: Solution, mesh: Mesh, origins: Sequence[int | None]) -> None:
        offers = {}
        for index, node in enumerate(parent.problem.nodes):
            strategy = solution.strategy(parent.problem, index)
            tokens = [method.partition("@")[0] for method in strategy.methods]
            if node.kind != "op":
                tokens = [letter_token(letter) for letter in (*strategy.results, *strategy.operands)[0]]
            offers[node.key] = [None if origin is None else frozenset({tokens[origin]}) for origin in origins]
        problem, demands = self.problem(mesh, parent.part, offers)
        solver = self._solver(problem, mesh, self._limits, solution.regime)
        tried = Tried(mesh, parent.part, demands, solver)
        self._estimate(tried)
        self.refined[mesh] = tried.bound

    def _may_be_better(self, tried: Tried) -> bool:
        """Whether nothing that was found with as much memory or more tells that it is no better than what is known, and
        it is not being looked at already."""
        is_known = any(tried.key == other.key for other in self.tried)
        return not is_known and self.bounds.get(tried.key, 0.0) < self.cutoff * (1 - PROVEN)

    def _closed(self) -> tuple[Tried, Solution] | None:
        """The best of all that was tried: gaps are closed where something better may be in them."""
        rest = list(self.tried)
        self.tried.clear()
        spent = 0.0
        bound = float("inf")
        while rest:
            tried = min(rest, key=lambda item: item.bound)
            rest.remove(tried)
            if tried.solver.bound < self.cutoff * (1 - PROVEN) or self.found is None:
                start = time.monotonic()
                self._close(tried, max(_LEAST, PATIENCE - spent))
                spent += time.monotonic() - start
                if tried.solver.limits != self._limits and not self._fits(tried):
                    # The best of all does not fit, though another one did.
                    self._try_limited(tried)
                    rest += self.tried
                    self.tried.clear()
                    continue
            bound = min(bound, tried.bound)
        if self.found is None:
            return None
        tried, solution = self.found
        return tried, replace(solution, bound=min(bound, solution.seconds))

    def within(self, tried: Tried, memory: float) -> tuple[Tried, Solution]:
        """The best choice that fits `memory` bytes. What was the best one with more is looked at first, so that little
        else is left to look at.

        Raises InfeasibleError where none fits.
        """
        less = replace(self, memory=memory, errors=[], tried=[], found=None)
        regime = tried.solver.regime
        less._estimate(replace(tried, solver=less._solver(tried.problem, tried.mesh, less._limits, regime)))
        return less.best()

    # --- regimes ---

    @property
    def _limits(self) -> Limits:
        asked = self.request.memory_limit
        return Limits(asked if self.memory is None else self.memory, self.request.optimizer_states, asked)

    def _estimate(self, tried: Tried) -> None:
        """Let a solver estimate, and remember it if it may have something better than what is known."""
        try:
            self.clock("solve", partial(tried.solver.estimate, self.cutoff))
        except InfeasibleError as error:
            self.errors.append(error)
            tried.solver.bound = float("inf")
            return
        if tried.bound < self.cutoff * (1 - PROVEN):
            self.tried.append(tried)
            self._consider(tried)

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

    def _counts(self) -> Iterator[int]:
        if self.request.micro_batches is not None or self.request.objective != "train":
            yield self.request.micro_batches or 1
            return
        batch = batch_size(item.type.shape for item in self.program.inputs)
        yield from (count for count in range(1, batch + 1) if batch % count == 0)

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

    def _levels(self, folded: Folded) -> Iterator[Mapping[str, str]]:
        """What may be computed again of each region, what takes least memory first."""
        if self.request.recompute is not None or self.request.objective != "train":
            yield levels(folded.regions, self.request.recompute or {})
            return
        names = [region.name for region in folded.regions if region.count > 1]
        if len(names) <= _APART:
            yield from (dict(zip(names, each, strict=True)) for each in product(RECOMPUTE[::-1], repeat=len(names)))
        else:
            yield from (dict.fromkeys(names, level) for level in RECOMPUTE[::-1])

    def _regimes(self, count: int, folded: Folded) -> Iterator[Regime]:
        """All ways to run so many micro-batches: ZeRO-3, 2 and 1."""
        travel = [(False, False)] if count == 1 else [(False, False), (True, False), (True, True)]
        for again in self._levels(folded):
            yield from (Regime(count, again, *once) for once in travel)

    def _free(self, problem: Problem, mesh: Mesh, count: int, folded: Folded) -> Solver:
        """A solver without a memory limit: nothing that is not asked for is computed again, and parameters travel
        once."""
        again = list(self._levels(folded))[-1]
        regime = Regime(count, again, count > 1, count > 1)
        limits = Limits(float("inf"), self.request.optimizer_states)
        return self._solver(problem, mesh, limits, regime)

    def _solver(self, problem: Problem, mesh: Mesh, limits: Limits, regime: Regime) -> Solver:
        """A solver that shares its prices with all others for the same mesh, and all but the regime with others for the
        same problem."""
        cluster = self.request.cluster
        if mesh not in self.prices:
            self.prices[mesh] = Prices(cluster, mesh)
        if id(problem) not in self.uses:
            # The problem is kept with them, so that its id stays its own.
            self.uses[id(problem)] = problem, self.clock("solve", lambda: find_uses(problem, self.prices[mesh]))
        _, uses = self.uses[id(problem)]
        return self.clock("solve", lambda: Solver(problem, cluster, mesh, limits, regime, uses))

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
            return replace(self, request=request, errors=[], tried=[], found=None).on_all()
        except ConstraintError:
            # The user's constraints cannot be met there.
            return None


def regime_text(regime: Regime) -> str:
    """A regime for people: "4 micro-batches, full recompute of model.layers.*"; nothing for the plain one."""
    parts = [f"{regime.micro_batches} micro-batches"] if regime.micro_batches > 1 else []
    parts += [f"{level} recompute of {name}" for name, level in regime.recompute.items() if level != "none"]
    return ", ".join(parts)
