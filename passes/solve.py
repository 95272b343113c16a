"""solve: the planning problem in, the best strategy for every node out.

The best choice without limits (`solving/optimum`) is the answer where it fits the memory and all traffic of parameters
is hidden. Otherwise bytes and traffic get prices (`solving/dual`) until a choice fits, and all that can then still be
best is looked at (`solving/by_frontiers`): step by step above the bound, and in branches where it is too much.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.memory import memory_model
from passes.ir.choices import Problem, Solution
from passes.ir.mesh import Mesh
from passes.ir.regime import PLAIN, Regime
from passes.solving.arrays import Uses, arrays, find_uses
from passes.solving.by_frontiers import best_by_frontiers
from passes.solving.by_program import best_by_program
from passes.solving.dual import Dual, Found
from passes.solving.effort import Effort, OutOfEffortError
from passes.solving.frontiers import TooManyError
from passes.solving.instance import Instance
from passes.solving.least import refuse_if_hopeless, refuse_if_impossible, smallest
from passes.solving.limits import InfeasibleProgramError, Limits, infeasible, out_of_effort
from passes.solving.memory import Weights
from passes.solving.prices import Prices
from passes.solving.rows import Rows, broken_rows, first_rows, rest_of
from passes.solving.tree import NOTHING, Branch, split

# Units of effort for closing a gap (`solving/effort`: 30 s or so); the gap of the plan says what is not proven then.
ALLOWANCE = 10_000.0
# A choice is proven when it costs at most this much more than the bound, relative to it.
PROVEN = 1e-6
# So often prices are tried before branching, and before it is asked whether any choice fits.
ROUNDS = 30
TRIES = 6
# Prices rise until the bytes of the limit are so many times as dear as the step.
DEAREST = 1e4
# What is at most so much above the bound, relative to it, is looked at first, then this many times as much, and from so
# much on anything. So little is not worth further prices.
FIRST = 5e-3
FURTHER = 2
FURTHEST = 1.0
# All is looked at at once where no more than this part of the bound is open, as long as that is not too much.
NEAR = 0.05
# What can be looked at is found to such a part of itself.
CLOSE = 0.2
# Bounds of branches are raised until less than this part of their gap is to be gained.
ENOUGH = 0.05
# So many of the last prices tell what frontiers may leave out.
OFFERS = 20
# A branch with so few strategies is not cut further.
SMALL = 300


def solve(problem: Problem, cluster: Cluster, mesh: Mesh, limits: Limits, regime: Regime = PLAIN) -> Solution:
    """The choice of least step time that fits the memory, in one regime.

    Raises InfeasibleError where none fits.
    """
    solver = Solver(problem, cluster, mesh, limits, regime)
    solver.begin()
    while solver.climb():
        pass
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
        uses: Sequence[Uses] | None = None,
    ) -> None:
        """`prices` are those of the mesh, and `uses` those of the problem, where they have been found already."""
        self.cluster = cluster
        self.uses = uses or find_uses(problem, prices or Prices(cluster, mesh))
        found = arrays(problem, self.uses, regime)
        sizes = memory_model(problem, regime, mesh, [each.tensor for each in self.uses])
        self.instance = Instance(problem, mesh, regime, found, sizes, limits)
        self.limits = limits
        self.cutoff = np.inf
        self.best: Solution | None = None
        self.bound = -np.inf
        self.dual = Dual(len(found.overlaps), 0.0)
        self.root: Branch | None = None
        self.climbing: Iterator[Found] | None = None
        self.rows: Rows | None = None
        self.tried: list[Weights] = []

    def other(self, limits: Limits, regime: Regime) -> "Solver":
        """A solver for the same problem within other limits, in another regime."""
        own = self.instance
        return Solver(own.problem, self.cluster, own.mesh, limits, regime, uses=self.uses)

    @property
    def has_begun(self) -> bool:
        """Whether there is a bound to raise."""
        return self.root is not None

    @property
    def effort(self) -> Effort:
        """The effort that was spent so far."""
        return self.instance.arrays.effort

    @property
    def regime(self) -> Regime:
        """What is chosen for."""
        return self.instance.regime

    @property
    def mixed(self) -> list[tuple[int, ...]]:
        """The strategies of the choices that the bound mixes."""
        return [] if self.root is None else [found.picks for found, part in self.root.mixture if part > NOTHING]

    @property
    def known(self) -> float:
        """Seconds of the best choice so far, or the cutoff."""
        return min(self.cutoff, np.inf if self.best is None else self.best.seconds)

    @property
    def is_open(self) -> bool:
        """Whether there may be a better choice than the best one, and than the cutoff."""
        return self._may_be_better(self.bound)

    def begin(self, cutoff: float = np.inf) -> None:
        """Find the best choice where bytes cost nothing, and the bound that it gives.

        Raises InfeasibleError where it is plain that none fits.
        """
        self.cutoff = cutoff
        refuse_if_hopeless(self.instance)
        start = self.dual.start()
        self.root = Branch(self.instance.all_alive, [], -np.inf, start, [])
        first = self._at(self.root, start)
        self.dual.unit = first.seconds / self.limits.memory
        self.bound = max(self.bound, self.root.bound)

    def climb(self, cutoff: float = np.inf) -> bool:
        """Raise the bound by other prices on bytes and on traffic, and look at the choice that is best at these.
        Whether more prices are worth a try.

        Raises InfeasibleError where it turns out that none fits.
        """
        assert self.root is not None
        if cutoff > self.cutoff:
            # More is of interest than was.
            self.root.alive, self.climbing = self.instance.all_alive, None
        self.cutoff = cutoff
        if self.bound * (1 + FIRST) >= self.known:
            # So little is left to an integer program.
            return False
        if self.climbing is None:
            self.climbing = self._climb(self.root, 1e-8 * abs(self.root.bound))
        goes_on = next(self.climbing, None) is not None
        self.bound = max(self.bound, self.root.bound)
        return goes_on

    def close(self, cutoff: float = np.inf, allowance: float = ALLOWANCE) -> None:
        """Close the gap with about `allowance` units of effort: by an integer program over what is little above the
        bound, then by branch and bound.

        Raises InfeasibleError where none fits, or none was found with that effort.
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
            raise infeasible(self.limits, smallest(self.instance, self.root.weights))

    def solution(self) -> Solution:
        """The best choice with the bound that was found."""
        assert self.best is not None
        return replace(self.best, bound=min(self.best.seconds, self.bound), by_clock=self.effort.by_clock)

    def _may_be_better(self, bound: float) -> bool:
        return bound < self.known * (1 - PROVEN)

    def _consider(self, solution: Solution) -> None:
        """Take a choice for the best one if it is, and fits."""
        is_better = self.best is None or solution.seconds < self.best.seconds
        if is_better and self.instance.peak(solution) <= self.limits.memory:
            self.best = solution

    # --- prices ---

    def _at(self, branch: Branch, weights: Weights) -> Found:
        """The best choice of a branch at these prices."""
        found, solution, alive = self.instance.at(weights, branch.alive, self.known)
        self._consider(solution)
        self.tried.append(weights)
        if not branch.found or found.bound >= branch.bound:
            branch.weights = weights
        branch.bound = max(branch.bound, found.bound)
        branch.alive = alive
        branch.found = [item for item in branch.found if branch.holds(item)] + [found]
        points = self.instance.points
        points += [point for point in self.instance.breaking(solution) if point not in points]
        return found

    def _climb(self, branch: Branch, enough: float) -> Iterator[Found]:
        """Raise the bound of a branch by better prices as long as there is more to gain than `enough` seconds; gives
        the best choice at each."""
        for number in range(ROUNDS):
            for item in branch.found:
                self.instance.complete(item)
            weights, most, parts = self.dual.next(branch.found)
            branch.mixture = list(zip(branch.found, parts, strict=True))
            if not self._may_be_better(branch.bound):
                return
            if self.known == np.inf and number == TRIES:
                solution = self.instance.solution(branch.found[-1].picks, branch.found[-1].again)
                refuse_if_impossible(self.instance, self.instance.worst(solution))
            at_the_end = self.dual.at_the_end(weights) and self.best is None and self.dual.highest < DEAREST
            if at_the_end:
                self.dual.highest *= 4
            elif most <= branch.bound + enough:
                return
            known = {(item.picks, item.again) for item in branch.found}
            points = len(self.instance.points)
            item = self._at(branch, weights)
            yield item
            is_new = (item.picks, item.again) not in known or len(self.instance.points) > points
            if not is_new and not at_the_end:
                return

    # --- branches ---

    def _close(self, root: Branch, allowed: float) -> None:
        # Of the bound: nothing is left to find so much above it, and there is too much to look at.
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
        """The parts of a branch in which something better may be; none after it was looked through wholly."""
        if not self._may_be_better(branch.bound):
            return []
        try:
            branch.alive = self.instance.restricted(branch.weights, branch.alive, self.known)
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
            part = Branch(alive, [], branch.bound, branch.weights, [])
            if all(len(labels) for labels in alive.values()):
                part.found = [item for item in branch.found if part.holds(item)]
                if not part.found:
                    self._at(part, branch.weights)
                for _ in self._climb(part, ENOUGH * (self.known - part.bound)):
                    pass
                if self._may_be_better(part.bound):
                    found.append(part)
        return found

    def _exactly(self, branch: Branch, aim: float, allowed: float, at_any_rate: bool) -> None:
        """Consider the best choice of a branch, if it takes less than `aim`: by frontiers, and where these get too
        large, `at_any_rate` by an integer program.

        Rows for moments and overlaps that do not bind, and for nodes that only need room while they run, are left out
        at first; those that break come in, and it is solved again. Raises TooManyError.
        """
        rows = first_rows(self.instance, branch.weights, self.rows)
        while True:
            left = allowed - self.effort.spent
            if left <= 0:
                raise OutOfEffortError
            try:
                rest = rest_of(self.instance, rows, branch.weights, branch.alive, aim)
                try:
                    solution, bound = best_by_frontiers(self.instance, rows, rest, self.tried[-OFFERS:], aim)
                except TooManyError:
                    if not at_any_rate:
                        raise
                    solution, bound = best_by_program(self.instance, rows, rest, aim, PROVEN, left)
            except InfeasibleProgramError:
                return
            self._consider(solution)
            more = self.rows = broken_rows(self.instance, rows, solution, branch.weights)
            if more == rows:
                # Programs are solved up to PROVEN, and rounding and ties take a little of a bound.
                if bound < min(aim, self.known) * (1 - 3 * PROVEN):
                    raise OutOfEffortError
                return
            rows = more
