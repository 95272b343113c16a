"""solve: the planning problem in, the best strategy for every node out.

The best choice without limits (`solve/optimum`) is the answer where it fits the memory and all traffic of parameters
is hidden. Otherwise a Lagrangian relaxation (`solve/lagrangian`) gives a lower bound and choices that fit, and the
gap is closed exactly: by Pareto frontiers over increasing intervals above the bound (`solve/pareto`), by branch and
bound where that is too much, and by integer programs (`solve/integer_program`) on small branches.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.memory import memory_model
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.solve.active_constraints import ActiveConstraints, first_constraints, remaining_choices, with_violated
from passes.solve.arrays import Uses, arrays, find_uses
from passes.solve.branch_and_bound import NOTHING, Branch, split
from passes.solve.effort import Effort, OutOfEffortError
from passes.solve.feasibility import refuse_if_hopeless, refuse_if_impossible, smallest
from passes.solve.instance import Instance
from passes.solve.integer_program.limited import best_by_program
from passes.solve.lagrangian.cutting_planes import Cut, CuttingPlanes
from passes.solve.lagrangian.relaxation import Multipliers
from passes.solve.limits import InfeasibleProgramError, Limits, infeasible, out_of_effort
from passes.solve.pareto.frontiers import TooManyError
from passes.solve.pareto.limited import best_by_frontiers
from passes.solve.prices import Prices

# Units of effort for closing a gap (`solve/effort`: about 30 s); what is not proven then is the gap of the plan.
ALLOWANCE = 10_000.0
# A choice is proven when it costs at most this much more than the bound, relative to it.
PROVEN = 1e-6
# Maximum number of dual iterations before branching, and of those before feasibility is checked.
ROUNDS = 30
TRIES = 6
# Multipliers rise until the bytes of the limit cost so many times as much as the step.
DEAREST = 1e4
# The exact search covers this interval above the bound (relative to it) first, then so many times as much, and from
# FURTHEST on everything. A gap below FIRST is not worth further dual iterations.
FIRST = 5e-3
FURTHER = 2
FURTHEST = 1.0
# The exact search covers everything at once where the gap is at most this part of the bound.
NEAR = 0.05
# Relative tolerance of the largest interval that the exact search can cover.
CLOSE = 0.2
# Bounds of branches are raised until the gain is below this part of their gap.
ENOUGH = 0.05
# Number of the last multipliers that prune frontiers.
OFFERS = 20
# A branch with fewer strategies is not split further.
SMALL = 300


def solve(problem: Problem, cluster: Cluster, limits: Limits, configuration: Configuration) -> Solution:
    """The choice of least step time that fits the memory, in one configuration.

    Raises InfeasibleError where none fits.
    """
    solver = Solver(problem, cluster, limits, configuration)
    solver.begin()
    while solver.climb():
        pass
    solver.close()
    return solver.solution()


class Solver:
    """A resumable search for the best choice in one configuration.

    `begin` and `climb` raise the bound by dual iterations and mostly find a choice near it; `close` closes the gap.
    `best` is the incumbent, `bound` a lower bound on every choice; choices of `cutoff` seconds or more are of no
    interest.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        limits: Limits,
        configuration: Configuration,
        prices: Prices | None = None,
        uses: Sequence[Uses] | None = None,
    ) -> None:
        """Build the arrays of a problem; `prices` of the mesh and `uses` of the problem are reused if given."""
        self.cluster = cluster
        self.uses = uses or find_uses(problem, prices or Prices(cluster, configuration.mesh))
        found = arrays(problem, self.uses, configuration)
        sizes = memory_model(problem, configuration, [each.tensor for each in self.uses])
        self.instance = Instance(problem, configuration, found, sizes, limits)
        self.limits = limits
        self.cutoff = np.inf
        self.best: Solution | None = None
        self.bound = -np.inf
        self.cutting_planes = CuttingPlanes(len(found.overlaps), 0.0)
        self.root: Branch | None = None
        self.climbing: Iterator[Cut] | None = None
        self.active: ActiveConstraints | None = None
        self.tried: list[Multipliers] = []

    def other(self, limits: Limits, configuration: Configuration) -> "Solver":
        """A solver for the same problem within other limits, in another configuration."""
        own = self.instance
        return Solver(own.problem, self.cluster, limits, configuration, uses=self.uses)

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self.root is not None

    @property
    def effort(self) -> Effort:
        """The effort spent so far."""
        return self.instance.arrays.effort

    @property
    def configuration(self) -> Configuration:
        """The configuration of the problem."""
        return self.instance.configuration

    @property
    def mixed(self) -> list[tuple[int, ...]]:
        """The strategies of the choices that the bound is a mixture of."""
        return [] if self.root is None else [found.picks for found, part in self.root.mixture if part > NOTHING]

    @property
    def known(self) -> float:
        """Seconds of the incumbent, or the cutoff."""
        return min(self.cutoff, np.inf if self.best is None else self.best.seconds)

    @property
    def is_open(self) -> bool:
        """Whether there may be a choice better than the incumbent and the cutoff."""
        return self._may_be_better(self.bound)

    def begin(self, cutoff: float = np.inf) -> None:
        """Solve the problem without limits, which gives the first bound.

        Raises InfeasibleError where the least bytes of each node by itself do not fit.
        """
        self.cutoff = cutoff
        refuse_if_hopeless(self.instance)
        start = self.cutting_planes.start()
        self.root = Branch(self.instance.all_alive, [], -np.inf, start, [])
        first = self._at(self.root, start)
        self.cutting_planes.unit = first.seconds / self.limits.memory
        self.bound = max(self.bound, self.root.bound)

    def climb(self, cutoff: float = np.inf) -> bool:
        """Raise the bound by one dual iteration. Returns whether further iterations are worthwhile.

        Raises InfeasibleError where no choice fits.
        """
        assert self.root is not None
        if cutoff > self.cutoff:
            # Choices that were pruned may be better than the new cutoff.
            self.root.alive, self.climbing = self.instance.all_alive, None
        self.cutoff = cutoff
        if self.bound * (1 + FIRST) >= self.known:
            # The exact search closes a gap this small.
            return False
        if self.climbing is None:
            self.climbing = self._climb(self.root, 1e-8 * abs(self.root.bound))
        goes_on = next(self.climbing, None) is not None
        self.bound = max(self.bound, self.root.bound)
        return goes_on

    def close(self, cutoff: float = np.inf, allowance: float = ALLOWANCE) -> None:
        """Close the gap with about `allowance` units of effort: exactly, in increasing intervals above the bound, then
        by branch and bound.

        Raises InfeasibleError where no choice fits, or none was found with that effort.
        """
        assert self.root is not None
        self.cutoff = min(self.cutoff, cutoff)
        most = self.effort.spent + allowance
        try:
            self._close(self.root, most)
        except OutOfEffortError:
            if self.known < np.inf:
                return
            raise out_of_effort(self.limits) from None
        if self.known == np.inf:
            raise infeasible(self.limits, smallest(self.instance, self.root.multipliers))

    def solution(self) -> Solution:
        """The incumbent with the bound that was found."""
        assert self.best is not None
        return replace(self.best, bound=min(self.best.seconds, self.bound), by_clock=self.effort.by_clock)

    def _may_be_better(self, bound: float) -> bool:
        return bound < self.known * (1 - PROVEN)

    def _consider(self, solution: Solution) -> None:
        """Make a choice the incumbent if it is better and fits."""
        is_better = self.best is None or solution.seconds < self.best.seconds
        if is_better and self.instance.peak(solution) <= self.limits.memory:
            self.best = solution

    # --- dual iterations ---

    def _at(self, branch: Branch, multipliers: Multipliers) -> Cut:
        """Solve the relaxation of a branch at these multipliers."""
        found, solution, alive = self.instance.at(multipliers, branch.alive, self.known)
        self._consider(solution)
        self.tried.append(multipliers)
        if not branch.found or found.bound >= branch.bound:
            branch.multipliers = multipliers
        branch.bound = max(branch.bound, found.bound)
        branch.alive = alive
        branch.found = [item for item in branch.found if branch.holds(item)] + [found]
        points = self.instance.points
        points += [point for point in self.instance.breaking(solution) if point not in points]
        return found

    def _climb(self, branch: Branch, enough: float) -> Iterator[Cut]:
        """Dual iterations of a branch, as long as there is more to gain than `enough` seconds; yields their cuts."""
        for number in range(ROUNDS):
            for item in branch.found:
                self.instance.complete(item)
            multipliers, most, parts = self.cutting_planes.next(branch.found)
            branch.mixture = list(zip(branch.found, parts, strict=True))
            if not self._may_be_better(branch.bound):
                return
            if self.known == np.inf and number == TRIES:
                solution = self.instance.solution(branch.found[-1].picks, branch.found[-1].again)
                refuse_if_impossible(self.instance, self.instance.worst(solution))
            at_the_end = (
                self.cutting_planes.at_the_end(multipliers)
                and self.best is None
                and self.cutting_planes.highest < DEAREST
            )
            if at_the_end:
                self.cutting_planes.highest *= 4
            elif most <= branch.bound + enough:
                return
            known = {(item.picks, item.again) for item in branch.found}
            points = len(self.instance.points)
            item = self._at(branch, multipliers)
            yield item
            is_new = (item.picks, item.again) not in known or len(self.instance.points) > points
            if not is_new and not at_the_end:
                return

    # --- branches ---

    def _close(self, root: Branch, allowed: float) -> None:
        # Relative to the bound: the interval that has been covered, and the least one that is too much.
        done, most = 0.0, np.inf
        unit = abs(root.bound) or 1.0
        while self.is_open and (most == np.inf or most - done > max(FIRST, CLOSE * most)):
            open_part = (self.known - root.bound) / unit
            step = max(FIRST, FURTHER * done)
            if most < np.inf:
                step = min(step, (done + most) / 2, open_part)
            elif step > FURTHEST or open_part < max(FURTHER * step, NEAR):
                step = open_part
            aim = min(self.known, root.bound + step * unit)
            try:
                self._exactly(root, aim, allowed, at_any_rate=self.known == np.inf)
            except TooManyError:
                most = step
            else:
                done = step
                self.bound = max(self.bound, min(aim, self.known))
        waiting = [root]
        while waiting and self.is_open:
            branch = min(waiting, key=lambda item: item.bound)
            waiting.remove(branch)
            waiting += self._grow(branch, allowed)
            least = min((item.bound for item in waiting), default=np.inf)
            self.bound = max(self.bound, min(least, self.known))

    def _grow(self, branch: Branch, allowed: float) -> list[Branch]:
        """The parts of a branch that may have a better choice; none if it was searched exactly."""
        if not self._may_be_better(branch.bound):
            return []
        try:
            branch.alive = self.instance.restricted(branch.multipliers, branch.alive, self.known)
        except InfeasibleProgramError:
            return []
        parts = split(self.instance, branch)
        is_small = parts is None or sum(len(labels) for labels in branch.alive.values()) < SMALL
        with suppress(TooManyError):
            self._exactly(branch, self.known, allowed, at_any_rate=is_small)
            return []
        assert parts is not None
        found = []
        for alive in parts:
            if self.effort.spent >= allowed:
                raise OutOfEffortError
            part = Branch(alive, [], branch.bound, branch.multipliers, [])
            if all(len(labels) for labels in alive.values()):
                part.found = [item for item in branch.found if part.holds(item)]
                if not part.found:
                    self._at(part, branch.multipliers)
                for _ in self._climb(part, ENOUGH * (self.known - part.bound)):
                    pass
                if self._may_be_better(part.bound):
                    found.append(part)
        return found

    def _exactly(self, branch: Branch, aim: float, allowed: float, at_any_rate: bool) -> None:
        """Consider the best choice of a branch, if it takes less than `aim` seconds: by Pareto frontiers, and where
        these get too large, `at_any_rate` by an integer program.

        Only active constraints are imposed; those that the result violates come in, and it is solved again. Raises
        TooManyError.
        """
        active = first_constraints(self.instance, branch.multipliers, self.active)
        while True:
            left = allowed - self.effort.spent
            if left <= 0:
                raise OutOfEffortError
            try:
                choices = remaining_choices(self.instance, active, branch.multipliers, branch.alive, aim)
                try:
                    solution, bound = best_by_frontiers(self.instance, active, choices, self.tried[-OFFERS:], aim)
                except TooManyError:
                    if not at_any_rate:
                        raise
                    solution, bound = best_by_program(self.instance, active, choices, aim, PROVEN, left)
            except InfeasibleProgramError:
                return
            self._consider(solution)
            more = self.active = with_violated(self.instance, active, solution, branch.multipliers)
            if more == active:
                # Programs are solved up to PROVEN, and rounding and tie_break_total take a little of a bound.
                if bound < min(aim, self.known) * (1 - 3 * PROVEN):
                    raise OutOfEffortError
                return
            active = more
