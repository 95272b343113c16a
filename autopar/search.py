"""What no single integer program decides: the shape of the mesh, how many micro-batches there are, what is computed
again, and when parameters travel.

Each of these is tried with an integer program of its own, those that promise most first. What cannot be better than
the best so far is given up as soon as a bound says so: the step without any memory limit bounds all that computes
something again, and more micro-batches never take less time than fewer do.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from autopar.clock import Clock
from autopar.meshes import finer, shapes
from autopar.request import Request
from passes.candidates import Setting, candidates, letter_token
from passes.constrain import constrain
from passes.cost.memory import memory_use
from passes.ir.choices import Problem, Solution
from passes.ir.demands import Demands
from passes.ir.errors import ConstraintError, InfeasibleError, MicroBatchError
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Program
from passes.ir.regime import RECOMPUTE, Regime
from passes.micro_batches import MicroBatches, batch_size, micro_batches
from passes.recompute import check_patterns, levels
from passes.regions import fold
from passes.solve import PROVEN, Limits, Solver

logger = logging.getLogger("autopar")

# Regions whose levels of recompute are chosen one by one; of more, all get the same.
_APART = 2
# A searched mesh has at most so many axes.
_AXES = 4
# How many times as many devices are tried when no plan fits.
_MORE = (2, 4, 8, 16, 32, 64)
# Gaps are closed for so many seconds in all, and each for at least so many.
PATIENCE = 30.0
_LEAST = 2.0


@dataclass(frozen=True)
class Part:
    """The program of one micro-batch (`micro` is None for the whole batch), folded."""

    micro: MicroBatches | None
    program: Program
    folded: Folded


@dataclass(frozen=True)
class Found:
    """The best choice: on which mesh, for which part of the batch, of which problem."""

    mesh: Mesh
    part: Part
    demands: Demands
    problem: Problem
    solution: Solution


@dataclass
class Search:
    """The search for one program in training or inference; `refused` says why the batch stays in one piece."""

    program: Program
    request: Request
    master: torch.dtype | None
    clock: Clock
    refused: str = ""
    parts: dict[int, Part] = field(default_factory=dict)
    errors: list[InfeasibleError] = field(default_factory=list)
    patience: float = PATIENCE
    spent: float = 0.0

    def best(self) -> Found:
        """The best choice on the mesh that is given, or on any shape of it.

        Raises InfeasibleError where none fits, which says what would.
        """
        request = self.request
        if request.recompute is not None:
            part = self._part(1)
            assert part is not None
            check_patterns(part.folded.regions, request.recompute)
            if not part.folded.regions and set(request.recompute.values()) != {"none"}:
                logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")
        found = self.on_all()
        if found is None:
            raise self._with_hint(min(self.errors, key=lambda error: error.missing))
        gap = 1 - found.solution.bound / found.solution.seconds if found.solution.seconds else 0.0
        if gap > PROVEN:
            logger.warning("the plan may be up to %.2g%% slower than the best: its proof was given up", 100 * gap)
        return found

    # --- meshes ---

    def on_all(self) -> Found | None:
        """The best choice on the mesh that is given, or on any of as many devices where its shape is to be found."""
        request = self.request
        return self.on_any(request.mesh.size) if request.any_shape else self.on(request.mesh, float("inf"))

    def on_any(self, devices: int) -> Found | None:
        """The best choice on any mesh of so many devices.

        All shapes of up to two axes are tried. The axes of the best one are then cut in two as long as that helps, up
        to four; for that nodes may do anything on the new axes, and on the others what they did before.
        """
        best: Found | None = None
        for mesh in shapes(devices, self.request.cluster.node_size):
            found = self.on(mesh, float("inf") if best is None else best.solution.seconds)
            best = found or best
        while best is not None:
            parent = best
            for mesh, origins in finer(parent.mesh, self.request.cluster.node_size, _AXES):
                found = self._refined(parent, mesh, origins, best.solution.seconds)
                best = found or best
            if best is parent:
                break
        return best

    def _refined(self, parent: Found, mesh: Mesh, origins: Sequence[int | None], cutoff: float) -> Found | None:
        offers = {}
        for index, node in enumerate(parent.problem.nodes):
            methods = parent.solution.strategy(parent.problem, index).methods
            tokens = [method.partition("@")[0] for method in methods]
            if node.kind != "op":
                layout = (*parent.solution.strategy(parent.problem, index).results,)
                layout = layout or parent.solution.strategy(parent.problem, index).operands
                tokens = [letter_token(letter) for letter in layout[0]]
            offers[node.key] = [None if origin is None else frozenset({tokens[origin]}) for origin in origins]
        regime = parent.solution.regime
        problem, demands = self._problem(mesh, parent.part, offers)
        limits = Limits(self.request.memory_limit, self.request.optimizer_states)
        solver = Solver(problem, self.request.cluster, mesh, limits, regime)
        if not self._estimate(solver, cutoff):
            return None
        return self._closed(None, [(parent.part, demands, solver)], mesh, cutoff)

    # --- regimes ---

    def on(self, mesh: Mesh, cutoff: float) -> Found | None:
        """The best choice on `mesh`; None where none fits or takes less than `cutoff` seconds."""
        best: Found | None = None
        rest: list[tuple[Part, Demands, Solver]] = []
        for count in self._counts():
            part = self._part(count)
            if part is None:
                break
            problem, demands = self._problem(mesh, part)
            free = self._free(problem, mesh, count, part.folded)
            self._estimate(free, cutoff)
            if free.bound >= cutoff * (1 - PROVEN):
                # More micro-batches take no less time.
                break
            fits = self._fits(free, mesh)
            if fits:
                self._close(free, cutoff)
                fits = self._fits(free, mesh)
            limits = Limits(self.request.memory_limit, self.request.optimizer_states)
            for regime in [] if fits else self._regimes(count, part.folded):
                solver = Solver(problem, self.request.cluster, mesh, limits, regime)
                if self._estimate(solver, cutoff):
                    rest.append((part, demands, solver))
                    if solver.best is not None and solver.best.seconds < cutoff:
                        cutoff = solver.best.seconds
                        best = Found(mesh, part, demands, problem, solver.solution())
            if fits:
                rest.append((part, demands, free))
                break
        return self._closed(best, rest, mesh, cutoff)

    def _closed(
        self, best: Found | None, rest: Sequence[tuple[Part, Demands, Solver]], mesh: Mesh, cutoff: float
    ) -> Found | None:
        """The best of what the solvers have, which close their gaps where something better may be in them."""
        for part, demands, solver in sorted(rest, key=lambda item: item[2].bound):
            self._close(solver, cutoff)
            found = solver.best
            if found is not None and (found.seconds < cutoff or (best is None and found.seconds <= cutoff)):
                cutoff = found.seconds
                best = Found(mesh, part, demands, solver.problem, found)
        if best is None:
            return None
        bound = min([cutoff, *(solver.bound for _, _, solver in rest)])
        return replace(best, solution=replace(best.solution, bound=bound))

    def _estimate(self, solver: Solver, cutoff: float) -> bool:
        """Whether a solver has, or may have, something below the cutoff."""
        try:
            self.clock("solve", lambda: solver.estimate(cutoff))
        except InfeasibleError as error:
            self.errors.append(error)
            return False
        return solver.bound < cutoff * (1 - PROVEN)

    def _close(self, solver: Solver, cutoff: float) -> None:
        left = max(_LEAST, self.patience - self.spent)
        start = time.monotonic()
        try:
            self.clock("solve", lambda: solver.close(cutoff, left))
        except InfeasibleError as error:
            self.errors.append(error)
        self.spent += time.monotonic() - start

    def _counts(self) -> Iterator[int]:
        if self.request.micro_batches is not None or self.request.objective != "train":
            yield self.request.micro_batches or 1
            return
        batch = batch_size(self.program) if any(item.type.shape for item in self.program.inputs) else 1
        yield from (count for count in range(1, batch + 1) if batch % count == 0)

    def _part(self, count: int) -> Part | None:
        """The program of one of `count` micro-batches; None where the graph does not show that it may be cut."""
        if self.refused and count > 1 and self.request.micro_batches is None:
            return None
        if count not in self.parts:
            micro = None
            if count > 1:
                try:
                    micro = self.clock("micro-batches", lambda: micro_batches(self.program, count))
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
        return Solver(problem, self.request.cluster, mesh, limits, regime)

    def _fits(self, solver: Solver, mesh: Mesh) -> bool:
        if solver.best is None:
            return False
        use = memory_use(solver.problem, solver.best, self.request.optimizer_states, mesh)
        return use.peak <= self.request.memory_limit

    def _problem(
        self, mesh: Mesh, part: Part, offers: Mapping[str, Sequence[frozenset[str] | None]] | None = None
    ) -> tuple[Problem, Demands]:
        request = self.request
        demands = constrain(part.program, request.constraints, mesh)
        states, reduce = request.optimizer_states, request.precision.reduce
        setting = Setting(mesh, request.cluster, states, self.master, reduce, offers or {})
        return self.clock("candidates", lambda: candidates(part.folded, demands, setting)), demands

    # --- what would fit ---

    def _with_hint(self, error: InfeasibleError) -> InfeasibleError:
        """The error with the nearest thing that fits, found by solving."""
        request = self.request
        freed = replace(request, micro_batches=None, recompute=None)
        if (request.micro_batches, request.recompute) != (None, None) and request.objective == "train":
            found = self._would_fit(freed)
            if found is not None:
                how = regime_text(found.solution.regime) or "nothing computed again, and one micro-batch"
                return InfeasibleError(f"{error}; it would fit with {how}", error.missing)
        sizes = request.mesh.sizes
        for factor in _MORE:
            wider = replace(freed, mesh=Mesh(request.mesh.names, (sizes[0] * factor, *sizes[1:])))
            found = self._would_fit(wider)
            if found is not None:
                how = regime_text(found.solution.regime)
                return InfeasibleError(
                    f"{error}; it would fit on {found.mesh.size} devices ({found.mesh})"
                    + (f" with {how}" if how else ""),
                    error.missing,
                )
        return InfeasibleError(
            f"{error}; nor does any fit with up to {request.mesh.size * _MORE[-1]} devices: take a smaller batch, "
            "shorter sequences, or a smaller model",
            error.missing,
        )

    def _would_fit(self, request: Request) -> Found | None:
        """What fits where something else is asked for; parts of the batch are the same for all meshes of these axes."""
        try:
            return replace(self, request=request, errors=[]).on_all()
        except ConstraintError:
            # The user's constraints cannot be met there.
            return None


def regime_text(regime: Regime) -> str:
    """A regime for people: "4 micro-batches, full recompute of model.layers.*"; nothing for the plain one."""
    parts = [f"{regime.micro_batches} micro-batches"] if regime.micro_batches > 1 else []
    parts += [f"{level} recompute of {name}" for name, level in regime.recompute.items() if level != "none"]
    return ", ".join(parts)
