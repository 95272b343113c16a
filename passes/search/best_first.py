"""Best-first branch and bound over configurations.

A node of the search is a set of choices with a lower bound on their step time. The node with the lowest bound is
expanded: into nodes for parts of it, or into itself with a higher bound. Little work goes into sets that cannot hold
anything better than the incumbent, the best choice so far. Nodes and the progress of the search are immutable; only
the solvers behind subproblems have a state: how far their bounds were raised.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from passes.ir.configuration import Configuration
from passes.ir.errors import InfeasibleError
from passes.ir.mesh import Mesh
from passes.search.configurations import is_monotone_in_micro_batches, limited_configurations
from passes.search.recomputing import recompute_bounds
from passes.search.subproblems import Choice, Subproblem, Subproblems, levels_key
from passes.solve.gap import PROVEN

# Units of effort for closing gaps (`passes/solve/limits`): in all, and for each subproblem at least.
ALLOWANCE = 4000.0
LEAST_ALLOWANCE = 2500.0


@dataclass(frozen=True)
class Progress:
    """The state of a search between two expansions.

    `incumbent` is the best choice so far that fits; choices of `limit_s` seconds or more are of no interest. `open` are
    the subproblems whose bound is below that and whose gap is not closed; `closed_bound` is a lower bound (seconds) on
    all that were closed. `effort` was spent on closing gaps.
    `errors` say why subproblems have no choice that fits.
    """

    incumbent: Choice | None = None
    limit_s: float = float("inf")
    open: tuple[Subproblem, ...] = ()
    closed_bound: float = float("inf")
    effort: float = 0.0
    errors: tuple[InfeasibleError, ...] = ()

    @property
    def cutoff(self) -> float:
        """Step time of the incumbent, or the limit (seconds)."""
        return self.limit_s if self.incumbent is None else min(self.limit_s, self.incumbent.seconds)

    @property
    def best(self) -> Choice | None:
        """The incumbent, whose bound is that of all subproblems that were closed."""
        if self.incumbent is None:
            return None
        solution = self.incumbent.solution
        return replace(self.incumbent, solution=replace(solution, bound=min(self.closed_bound, solution.seconds)))

    def may_improve(self, bound: float) -> bool:
        """Whether a choice of at least `bound` seconds may be better than the incumbent."""
        return bound < self.cutoff * (1 - PROVEN)

    def considering(self, subproblem: Subproblem, subproblems: Subproblems) -> "Progress":
        """The progress with the best choice that the solver of a subproblem has found, if it is better and fits."""
        best = subproblem.solver.gap.best
        if best is None or best.seconds >= self.cutoff or not subproblems.fits(subproblem):
            return self
        return replace(self, incumbent=Choice(subproblem, best))

    def opening(self, subproblem: Subproblem, subproblems: Subproblems) -> "Progress":
        """The progress with a subproblem whose gap may hold something better."""
        if not self.may_improve(subproblem.bound):
            return self
        return replace(self, open=(*self.open, subproblem)).considering(subproblem, subproblems)

    def failing(self, errors: Iterable[InfeasibleError]) -> "Progress":
        """The progress with further errors, without tracebacks: their frames would keep the arrays of solvers."""
        return replace(self, errors=(*self.errors, *(error.with_traceback(None) for error in errors)))


@dataclass(frozen=True)
class SearchNode(ABC):
    """A set of choices, of which none takes less than `bound` seconds."""

    bound: float

    @abstractmethod
    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple["Sequence[SearchNode]", Progress]:
        """The nodes that take the place of this one, and the progress with what was found on the way."""


@dataclass(frozen=True)
class OnMesh(SearchNode):
    """All choices on `mesh` with one of the numbers of micro-batches in `counts`."""

    mesh: Mesh
    counts: tuple[int, ...]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Bound those of the first number without memory limit, and with it its multiples; others keep their bound.
        First by the computation alone, which may be enough."""
        if not self.counts:
            return (), progress
        first, *rest = self.counts
        multiples = tuple(each for each in rest if each % first == 0)
        others = OnMesh(self.bound, self.mesh, tuple(each for each in rest if each % first))
        least = subproblems.least_s(self.mesh, first) if is_monotone_in_micro_batches() else 0.0
        if least > self.bound:
            return (OnMesh(least, self.mesh, (first, *multiples)), others), progress
        relaxed = subproblems.relaxed(self.mesh, first)
        if relaxed is None:
            return (), progress
        progress = _begin(relaxed, subproblems, progress)
        return (Relaxation(max(self.bound, relaxed.bound), relaxed, multiples), others), progress


@dataclass(frozen=True)
class Relaxation(SearchNode):
    """All choices of a number of micro-batches, or of one in `further`, its multiples, bounded without memory limit.

    `relaxed` bounds all configurations of its number of micro-batches (`relaxed_configuration`): where its best choice
    fits, none of them is better.
    """

    relaxed: Subproblem
    further: tuple[int, ...]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Raise the bound; at its end go on with the configurations within the limit, if the best choice breaks it."""
        goes_on, progress = _raise_bound(self.relaxed, subproblems, progress)
        bound = max(self.bound, self.relaxed.bound)
        if goes_on:
            return (replace(self, bound=bound),), progress
        # A bound on some micro-batches is one on multiples of them only where these never take less time.
        is_monotone = is_monotone_in_micro_batches()
        further = OnMesh(bound if is_monotone else 0.0, self.relaxed.mesh, self.further)
        if subproblems.fits(self.relaxed):
            return () if is_monotone else (further,), progress.opening(self.relaxed, subproblems)
        return (*within_limit(self.relaxed, bound, subproblems, progress), further), progress


@dataclass(frozen=True)
class Unbounded(SearchNode):
    """All choices of the subproblem that `make` gives, whose solver has not begun."""

    make: Callable[[], Subproblem]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Begin to bound them."""
        subproblem = self.make()
        progress = _begin(subproblem, subproblems, progress)
        subproblem.solver.gap.bound = max(self.bound, subproblem.bound)
        node = Bounding(subproblem.bound, subproblem)
        node.remember(subproblems)
        return (node,), progress


@dataclass(frozen=True)
class Bounding(SearchNode):
    """All choices of a subproblem within the memory limit, whose bound is being raised."""

    subproblem: Subproblem

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Raise the bound; at its end the subproblem is open, until its gap is closed."""
        goes_on, progress = _raise_bound(self.subproblem, subproblems, progress)
        self.remember(subproblems)
        if goes_on:
            return (replace(self, bound=self.subproblem.bound),), progress
        return (), progress.opening(self.subproblem, subproblems)

    def remember(self, subproblems: Subproblems) -> None:
        """Keep the bound for searches of other spaces: infinite where nothing fits."""
        if self.subproblem.has_all_strategies:
            subproblems.memo.bounds[self.subproblem.configuration.key] = self.subproblem.bound


@dataclass(frozen=True)
class ByStage(SearchNode):
    """All choices of `relaxed` under configurations that differ in their ZeRO stages alone, the one that takes least
    memory first."""

    relaxed: Subproblem
    configurations: tuple[Configuration, ...]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Begin with the first: where no choice fits under it, none does under the others."""
        first, *others = (
            Unbounded(self.bound, partial(subproblems.limited, self.relaxed, each)) for each in self.configurations
        )
        following, progress = first.expand(subproblems, progress)
        if all(node.bound == float("inf") for node in following):
            if self.relaxed.has_all_strategies:
                bounds = subproblems.memo.bounds
                bounds.update((each.key, float("inf")) for each in self.configurations)
            return (), progress
        return (*following, *others), progress


@dataclass(frozen=True)
class Unlimited(SearchNode):
    """All choices of the subproblem that `make` gives under each of `configurations`, of as many micro-batches, those
    that take least memory first."""

    make: Callable[[], Subproblem]
    configurations: tuple[Configuration, ...]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Bound them without memory limit, and with it where that leaves anything."""
        relaxed = subproblems.unlimited(self.make())
        progress = _begin(relaxed, subproblems, progress)
        bound, least = max(self.bound, relaxed.bound), recompute_bounds(relaxed.solver)
        alike: dict[Hashable, list[Configuration]] = {}
        for each in self.configurations:
            alike.setdefault((each.pipeline, levels_key(each)), []).append(each)
        return [ByStage(max(bound, least.of(some[0])), relaxed, tuple(some)) for some in alike.values()], progress


def within_limit(
    relaxed: Subproblem, bound: float, subproblems: Subproblems, progress: Progress
) -> tuple[SearchNode, ...]:
    """Nodes for all configurations of as many micro-batches within the memory limit, but for those that are open."""
    folded, count = relaxed.program.folded, relaxed.configuration.micro_batches
    least, known = recompute_bounds(relaxed.solver), subproblems.memo.bounds
    seen = {item.configuration.key for item in progress.open}
    found: list[SearchNode] = []
    unknown: dict[Hashable, list[Configuration]] = {}
    for each in limited_configurations(subproblems.space, relaxed.mesh, count, folded):
        own = max(bound, least.of(each), known.get(each.key, 0.0))
        if each.key in known and each.key not in seen:
            found.append(Unbounded(own, partial(subproblems.limited, relaxed, each)))
        elif each.key not in seen:
            unknown.setdefault((each.pipeline, levels_key(each)), []).append(each)
        seen.add(each.key)
    found += [ByStage(max(bound, least.of(each[0])), relaxed, tuple(each)) for each in unknown.values()]
    return tuple(found)


def explore(nodes: Iterable[SearchNode], subproblems: Subproblems, progress: Progress) -> Progress:
    """Expand `nodes`, and what becomes of them, until no bound is below the incumbent's step time. What may still hold
    something better is open afterwards."""
    numbers = count()
    queue = [(node.bound, next(numbers), node) for node in nodes]
    heapq.heapify(queue)
    while queue:
        bound, _, node = heapq.heappop(queue)
        if not progress.may_improve(bound):
            break
        following, progress = node.expand(subproblems, progress)
        for each in following:
            # Nodes with nothing better would keep the arrays of their solvers.
            if progress.may_improve(each.bound):
                heapq.heappush(queue, (each.bound, next(numbers), each))
    return replace(progress, open=tuple(each for each in progress.open if progress.may_improve(each.bound)))


def close(subproblems: Subproblems, progress: Progress, at_least: float = LEAST_ALLOWANCE) -> Progress:
    """Close the gaps of all open subproblems that may hold something better, lowest bound first: with `ALLOWANCE` units
    of effort in all, and `at_least` so many for each."""
    while progress.open:
        subproblem = min(progress.open, key=lambda item: item.bound)
        progress = replace(progress, open=tuple(item for item in progress.open if item is not subproblem))
        if progress.may_improve(subproblem.bound) or progress.cutoff == float("inf"):
            progress = _close(subproblem, subproblems, progress, max(at_least, ALLOWANCE - progress.effort))
            has_limit = subproblem.solver.limits == subproblems.limits(subproblem.configuration)
            if not has_limit and not subproblems.fits(subproblem):
                # The best choice without limit breaks it, though another one did not.
                nodes = within_limit(subproblem, subproblem.bound, subproblems, progress)
                progress = explore(nodes, subproblems, progress)
                continue
        progress = replace(progress, closed_bound=min(progress.closed_bound, subproblem.bound))
    return progress


def _close(subproblem: Subproblem, subproblems: Subproblems, progress: Progress, allowance: float) -> Progress:
    solver = subproblem.solver
    before = solver.effort.spent
    try:
        with subproblems.clock("solve"):
            solver.close(progress.cutoff, allowance)
    except InfeasibleError as error:
        progress = progress.failing([error])
    progress = progress.considering(subproblem, subproblems)
    return replace(progress, effort=progress.effort + solver.effort.spent - before)


def _begin(subproblem: Subproblem, subproblems: Subproblems, progress: Progress) -> Progress:
    """Let the solver of a subproblem find its first bound and choice, if it has not."""
    try:
        if not subproblem.solver.has_begun:
            subproblems.begin(subproblem, progress.cutoff)
    except InfeasibleError as error:
        subproblem.solver.gap.bound = float("inf")
        return progress.failing([error])
    return progress.considering(subproblem, subproblems)


def _raise_bound(subproblem: Subproblem, subproblems: Subproblems, progress: Progress) -> tuple[bool, Progress]:
    """Let the solver of a subproblem raise its bound once. Whether it may be raised further."""
    if subproblem.bound == float("inf"):
        return False, progress
    try:
        with subproblems.clock("solve"):
            goes_on = subproblem.solver.climb(progress.cutoff)
    except InfeasibleError as error:
        subproblem.solver.gap.bound = float("inf")
        return False, progress.failing([error])
    subproblems.remember(subproblem)
    return goes_on, progress.considering(subproblem, subproblems) if goes_on else progress
