"""Best-first branch and bound over configurations.

A node of the search is a set of choices with a lower bound on their step time. The node with the lowest bound is
expanded: into nodes for parts of it, or into itself with a higher bound. Little work goes into sets that cannot hold
anything better than the incumbent, the best choice so far. Nodes and the progress of the search are immutable; only
the solvers behind subproblems have a state: how far their bounds were raised.
"""

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from passes.ir.configuration import Configuration
from passes.ir.errors import InfeasibleError
from passes.ir.mesh import Mesh
from passes.search.configurations import (
    between,
    is_monotone_in_micro_batches,
    is_undecided,
    limited_configurations,
    numbers,
)
from passes.search.progress import Progress
from passes.search.recomputing import RecomputeBounds, least_per_copy_s, recompute_bounds
from passes.search.subproblems import Subproblem, Subproblems, levels_key

# Units of effort for closing gaps (`passes/solve/limits`): in all, for one subproblem at least, and for each of many.
ALLOWANCE = 4000.0
LEAST_ALLOWANCE = 2500.0
BRIEFLY = 700.0


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
class SomeCopies(SearchNode):
    """All choices of layouts of the subproblem that `make` gives, under configurations that leave open how many copies
    are recomputed fully, and differ in their ZeRO stages alone, the one that takes least memory first.

    They are bounded by the seconds of the least number and the last stage, and the bytes of the largest number and the
    first stage. `least_s` gives a lower bound on the seconds of each number, which grows with it: the numbers end where
    it exceeds the incumbent's.
    """

    make: Callable[[], Subproblem]
    configurations: tuple[Configuration, ...]
    least_s: Callable[[int], float]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Begin to bound them."""
        made = self.make()
        least, most = numbers(self.configurations[0])
        last = most
        most = (
            bisect_left(range(least + 1, most + 1), True, key=lambda n: not progress.may_improve(self.least_s(n)))
            + least
        )
        if most < last:
            progress = progress.leaving_out(self.least_s(most + 1))
        configurations = tuple(between(each, least, most) for each in self.configurations)
        if least == most and len(configurations) == 1:
            return Unbounded(self.bound, partial(subproblems.limited, made, *configurations)).expand(
                subproblems, progress
            )
        subproblem = subproblems.limited(made, configurations[-1], configurations[0])
        node = BoundingCopies(self.bound, subproblem, made, configurations, self.least_s)
        if _has_begun(subproblem, subproblems, progress):
            subproblem.solver.gap.bound = max(self.bound, subproblem.bound)
            return (replace(node, bound=subproblem.bound),), progress
        return (), progress


@dataclass(frozen=True)
class BoundingCopies(SearchNode):
    """All choices under `configurations`, as in `SomeCopies`, while `subproblem`, a relaxation of all of them, is being
    bounded; `made` has the same choices of layouts."""

    subproblem: Subproblem
    made: Subproblem
    configurations: tuple[Configuration, ...]
    least_s: Callable[[int], float]

    def expand(self, subproblems: Subproblems, progress: Progress) -> tuple[Sequence[SearchNode], Progress]:
        """Raise the bound. At its end go on with each stage; of one stage begin with the number of copies that the best
        choice needs, and divide the others: those below it and above it, or where it needs more than there are, in
        halves."""
        solver = self.subproblem.solver
        try:
            with subproblems.clock("solve"):
                goes_on = solver.climb(progress.goal)
        except InfeasibleError:
            return (), progress
        if goes_on:
            return (replace(self, bound=self.subproblem.bound),), progress
        least, most = numbers(self.configurations[0])
        if len(self.configurations) > 1:
            return [self._part(each, least, most) for each in self.configurations], progress
        (configuration,) = self.configurations
        best = solver.gap.best
        needed = None if best is None else subproblems.least_copies(self.subproblem, best)
        if needed is None:
            middle = (least + most) // 2
            return [self._part(configuration, *ends) for ends in ((least, middle), (middle + 1, most))], progress
        found, progress = self._part(configuration, needed, needed).expand(subproblems, progress)
        others = [(first, last) for first, last in ((least, needed - 1), (needed + 1, most)) if first <= last]
        return [*found, *(self._part(configuration, *ends) for ends in others)], progress

    def _part(self, configuration: Configuration, least: int, most: int) -> SomeCopies:
        """Those of one stage with some of the numbers of copies."""
        first, _ = numbers(configuration)
        bound, each_s = self.subproblem.bound, least_per_copy_s(self.subproblem.solver)

        def least_s(number: int) -> float:
            return max(self.least_s(number), bound + (number - first) * each_s)

        return SomeCopies(least_s(least), lambda: self.made, (between(configuration, least, most),), least_s)


def _has_begun(subproblem: Subproblem, subproblems: Subproblems, progress: Progress) -> bool:
    """Let the solver of a relaxation find its first bound. False where nothing fits."""
    try:
        with subproblems.clock("solve"):
            subproblem.solver.begin(progress.goal)
    except InfeasibleError:
        # What a relaxation lacks is not what any of its configurations lacks.
        return False
    return True


def under(
    bound: float, make: Callable[[], Subproblem], configuration: Configuration, subproblems: Subproblems
) -> SearchNode:
    """All choices of layouts of the subproblem that `make` gives, under a configuration."""
    if is_undecided(configuration):
        return SomeCopies(bound, make, (configuration,), lambda _: bound)

    def limited() -> Subproblem:
        made = make()
        is_same = made.configuration == configuration and made.solver.limits == subproblems.limits(configuration)
        return made if is_same else subproblems.limited(made, configuration)

    return Unbounded(bound, limited)


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


def by_stage(
    relaxed: Subproblem, configurations: tuple[Configuration, ...], bound: float, least: RecomputeBounds
) -> SearchNode:
    """All choices of `relaxed` under configurations that differ in their ZeRO stages alone, the one that takes least
    memory first, with lower bounds on all of them and on each."""
    bound = max(bound, least.of(configurations[0]))
    if is_undecided(configurations[0]):
        own = configurations[-1]
        return SomeCopies(bound, lambda: relaxed, configurations, lambda n: max(bound, least.of(between(own, n, n))))
    return ByStage(bound, relaxed, configurations)


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
        return [by_stage(relaxed, tuple(some), bound, least) for some in alike.values()], progress


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
            found.append(under(own, lambda: relaxed, each, subproblems))
        elif each.key not in seen:
            unknown.setdefault((each.pipeline, levels_key(each)), []).append(each)
        seen.add(each.key)
    found += [by_stage(relaxed, tuple(each), bound, least) for each in unknown.values()]
    return tuple(found)


def explore(nodes: Iterable[SearchNode], subproblems: Subproblems, progress: Progress) -> Progress:
    """Expand `nodes`, and what becomes of them, until no bound is below the incumbent's step time. What may still hold
    something better is open afterwards. Where some choice is known and the effort is spent, nodes with a bound are left
    out, and the others end when they have one."""
    numbers = count()
    queue = [(node.bound, next(numbers), node) for node in nodes]
    heapq.heapify(queue)
    while queue:
        bound, _, node = heapq.heappop(queue)
        if not progress.may_improve(bound):
            progress = progress.leaving_out(bound)
            break
        if bound > 0 and subproblems.is_spent and progress.cutoff < float("inf"):
            progress = progress.leaving_out(bound)
            continue
        following, progress = node.expand(subproblems, progress)
        for each in following:
            # Nodes with nothing better would keep the arrays of their solvers.
            if progress.may_improve(each.bound):
                heapq.heappush(queue, (each.bound, next(numbers), each))
            else:
                progress = progress.leaving_out(each.bound)
    return progress.leaving_out_others()


def close(
    subproblems: Subproblems, progress: Progress, at_least: float = LEAST_ALLOWANCE, allowance: float = ALLOWANCE
) -> Progress:
    """Close the gaps of all open subproblems that may hold something better, lowest bound first: with `allowance` units
    of effort in all, and `at_least` so many for the first, and half as many for each of the next, down to `BRIEFLY`."""
    while progress.open:
        subproblem = min(progress.open, key=lambda item: item.bound)
        progress = replace(progress, open=tuple(item for item in progress.open if item is not subproblem))
        if progress.may_improve(subproblem.bound) or progress.cutoff == float("inf"):
            progress = _close(subproblem, subproblems, progress, max(at_least, allowance - progress.effort))
            at_least = max(at_least / 2, min(at_least, BRIEFLY))
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
            solver.close(progress.goal, allowance)
    except InfeasibleError as error:
        progress = progress.failing([error])
    progress = progress.considering(subproblem, subproblems)
    return replace(progress, effort=progress.effort + solver.effort.spent - before)


def _begin(subproblem: Subproblem, subproblems: Subproblems, progress: Progress) -> Progress:
    """Let the solver of a subproblem find its first bound and choice, if it has not."""
    try:
        if not subproblem.solver.has_begun:
            subproblems.begin(subproblem, progress.goal)
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
            goes_on = subproblem.solver.climb(progress.goal)
    except InfeasibleError as error:
        subproblem.solver.gap.bound = float("inf")
        return False, progress.failing([error])
    subproblems.remember(subproblem)
    return goes_on, progress.considering(subproblem, subproblems) if goes_on else progress
