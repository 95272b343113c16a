"""The solver of one problem in one configuration, step by step.

Dual iterations find multipliers by cutting planes, at which the relaxation raises the bound of a branch. The gap is
closed exactly: by Pareto frontiers in increasing intervals above the bound, then by branch and bound, and on small
branches by integer programs."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.memory import memory_model
from passes.cost.redistributions import RedistributionCosts
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.solve.active_constraints import (
    ActiveConstraints,
    Remaining,
    first_constraints,
    limited_network,
    remaining_choices,
    solution_of,
    with_violated,
)
from passes.solve.arrays import Overlap, Uses, arrays, find_uses, shared_decisions
from passes.solve.gap import PROVEN, Gap
from passes.solve.instance import NOTHING, Branch, Instance, refuse_if_hopeless, refuse_if_impossible, smallest, split
from passes.solve.integer_program import best_by_program
from passes.solve.lagrangian.relaxation import ROUNDING, Cut, CuttingPlanes, Multipliers
from passes.solve.limits import Effort, InfeasibleProgramError, Limits, OutOfEffortError, infeasible, out_of_effort
from passes.solve.optimum import a_little_more
from passes.solve.pareto.frontiers import ParetoFrontiers, Surrogate, TooManyError

# Maximum number of dual iterations before branching, and of those before feasibility is checked.
ROUNDS = 30
TRIES = 6
# Multipliers rise until the bytes of the limit cost so many times as much as the step.
DEAREST = 1e4


@dataclass(frozen=True)
class Guess:
    """Multipliers at which the bound of a problem was highest, `bound` seconds: of bytes by the name of the program
    point, and of overlap terms by their block and the traffic that counts in them. They may exclude another problem."""

    bytes: Mapping[str, float]
    overlaps: Mapping[Hashable, float]
    bound: float


def _traffic_of(overlap: Overlap) -> Hashable:
    return overlap.block, overlap.gather, overlap.rerun, overlap.reduce, overlap.forced


class DualAscent:
    """Dual iterations of the branches of one instance. `tried` are the multipliers of all of them."""

    def __init__(self, gap: Gap) -> None:
        self.gap = gap
        self.instance = gap.instance
        self.cutting_planes = CuttingPlanes(len(self.instance.arrays.overlaps), 0.0)
        self.tried: list[Multipliers] = []

    def at(self, branch: Branch, multipliers: Multipliers) -> Cut:
        """Solve the relaxation of a branch at these multipliers."""
        found, solution, alive = self.instance.at(multipliers, branch.alive, self.gap.least)
        self.gap.consider(solution)
        self.tried.append(multipliers)
        if not branch.found or found.bound >= branch.bound:
            branch.multipliers = multipliers
        branch.bound = max(branch.bound, found.bound)
        branch.alive = alive
        branch.found = [item for item in branch.found if branch.holds(item)] + [found]
        points = self.instance.points
        points += [point for point in self.instance.breaking(solution) if point not in points]
        return found

    def climb(self, branch: Branch, enough: float) -> Iterator[Cut]:
        """Dual iterations of a branch, as long as there is more to gain than `enough` seconds; yields their cuts."""
        for number in range(ROUNDS):
            for item in branch.found:
                self.instance.complete(item)
            multipliers, most, parts = self.cutting_planes.next(branch.found)
            branch.mixture = list(zip(branch.found, parts, strict=True))
            if not self.gap.is_open(branch.bound):
                return
            if self.gap.least == np.inf and number == TRIES:
                solution = self.instance.solution(branch.found[-1].picks, branch.found[-1].rerun)
                refuse_if_impossible(self.instance, self.instance.worst(solution))
            at_the_end = (
                self.cutting_planes.at_the_end(multipliers)
                and self.gap.best is None
                and self.cutting_planes.highest < DEAREST
            )
            if at_the_end:
                self.cutting_planes.highest *= 4
            elif most <= branch.bound + enough:
                return
            known = {(item.picks, item.rerun) for item in branch.found}
            points = len(self.instance.points)
            item = self.at(branch, multipliers)
            yield item
            is_new = (item.picks, item.rerun) not in known or len(self.instance.points) > points
            if not is_new and not at_the_end:
                return


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
# Part of the effort for closing a gap that mixing choices may take.
MIXING = 0.2
# Number of the last multipliers that prune frontiers.
SURROGATES = 20
# A branch with fewer strategies is not split further.
SMALL = 300


# Units of effort for closing a gap (`solve/limits`: about 30 s); what is not proven then is the gap of the plan.
ALLOWANCE = 10_000.0


class Solver:
    """A resumable search for the best choice in one configuration.

    `begin` and `climb` raise the bound by dual iterations and mostly find a choice near it; `close` closes the `gap`.
    `active` are the constraints that were violated so far, `allowed` is the effort that may be spent in all.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        limits: Limits,
        configuration: Configuration,
        costs: RedistributionCosts | None = None,
        uses: Sequence[Uses] | None = None,
        held: Configuration | None = None,
        effort: Effort | None = None,
    ) -> None:
        """Build the arrays of a problem; `costs` on the mesh and `uses` of the problem are reused if given. The bytes
        are those of the configuration `held`, if it is given: for bounds on several configurations at once. What is
        spent is a part of `effort`."""
        self.cluster = cluster
        self.limits = limits
        self.uses = uses or find_uses(problem, costs or RedistributionCosts(cluster, configuration.mesh))
        sizes = memory_model(problem, held or configuration, [each.tensor for each in self.uses])
        self.search_effort = Effort() if effort is None else effort
        found = replace(arrays(problem, self.uses, configuration), effort=self.search_effort.part())
        found.effort.add(0, sum(len(node.strategies) for node in problem.nodes))
        shared = shared_decisions(problem, found, sizes)
        own = shared.arrays(found), shared.bytes(sizes)
        self.instance = Instance(problem, configuration, *own, sizes, shared, limits)
        self.gap = Gap(self.instance)
        self.dual = DualAscent(self.gap)
        self.root = Branch({}, [], -np.inf, self.dual.cutting_planes.start(), [])
        self.climbing: Iterator[Cut] | None = None
        self.active: ActiveConstraints | None = None
        self.allowed = np.inf

    def other(self, limits: Limits, configuration: Configuration, held: Configuration | None = None) -> "Solver":
        """A solver for the same problem within other limits, in another configuration."""
        problem, effort = self.instance.problem, self.search_effort
        return Solver(problem, self.cluster, limits, configuration, uses=self.uses, held=held, effort=effort)

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return bool(self.root.found)

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
        mixture = [found for found, part in self.root.mixture if part > NOTHING]
        return [self.instance.shared.expanded(found.picks, ())[0] for found in mixture]

    @property
    def guess(self) -> Guess:
        """The multipliers at which the bound is highest so far."""
        found, instance = self.root.multipliers, self.instance
        points = [instance.bytes.points[point].name for point in instance.points]
        names = map(_traffic_of, instance.arrays.overlaps)
        # Points that were found later have no multiplier.
        bytes, overlaps = zip(points, found.bytes, strict=False), zip(names, found.overlaps, strict=True)
        return Guess(dict(bytes), dict(overlaps), self.gap.bound)

    def begin(self, cutoff: float = np.inf, guess: Guess | None = None) -> None:
        """Solve the problem without limits, which gives the first bound. Where a guess has excluded all choices of
        another problem, it is tried before.

        Raises InfeasibleError where the least bytes of each node by itself do not fit.
        """
        self.gap.cutoff = cutoff
        refuse_if_hopeless(self.instance)
        self.root.alive = self.instance.all_alive
        if guess is not None and guess.bound >= cutoff * (1 - PROVEN) and self._is_excluded(guess):
            return
        first = self.dual.at(self.root, self.root.multipliers)
        self.dual.cutting_planes.unit = first.seconds / self.limits.memory
        self.gap.bound = max(self.gap.bound, self.root.bound)

    def _is_excluded(self, guess: Guess) -> bool:
        """Whether no choice takes less than the cutoff, by the bound at the multipliers of a guess. Then nothing is
        begun: with a higher cutoff it is later."""
        instance = self.instance
        dear = {name: price for name, price in guess.bytes.items() if price > 0 and self.limits.memory < np.inf}
        points = [number for number, point in enumerate(instance.bytes.points) if point.name in dear]
        bytes = [dear[instance.bytes.points[point].name] for point in points]
        overlaps = [guess.overlaps.get(_traffic_of(overlap), 0.0) for overlap in instance.arrays.overlaps]
        if not any(bytes) and not any(overlaps):
            return False
        multipliers = Multipliers(1.0, bytes, overlaps)
        # What is found otherwise must not depend on the guess, so that it changes no plan.
        found, _, _ = replace(instance, points=points).at(multipliers, self.root.alive, self.gap.cutoff)
        if self.gap.is_open(found.bound):
            return False
        self.gap.bound = max(self.gap.bound, found.bound)
        return True

    def climb(self, cutoff: float = np.inf) -> bool:
        """Raise the bound by one dual iteration. Returns whether further iterations are worthwhile.

        Raises InfeasibleError where no choice fits.
        """
        if cutoff > self.gap.cutoff:
            # Choices that were pruned may be better than the new cutoff.
            self.root.alive, self.climbing = self.instance.all_alive, None
        self.gap.cutoff = cutoff
        if self.gap.bound * (1 + FIRST) >= self.gap.least:
            # The exact search closes a gap this small.
            return False
        if self.climbing is None:
            self.climbing = self.dual.climb(self.root, 1e-8 * abs(self.root.bound))
        goes_on = next(self.climbing, None) is not None
        self.gap.bound = max(self.gap.bound, self.root.bound)
        return goes_on

    def close(self, cutoff: float = np.inf, allowance: float = ALLOWANCE) -> None:
        """Close the gap with about `allowance` units of effort: exactly, in increasing intervals above the bound, then
        by branch and bound.

        Raises InfeasibleError where no choice fits, or none was found with that effort.
        """
        self.gap.cutoff = min(self.gap.cutoff, cutoff)
        self.allowed = self.effort.spent + allowance
        try:
            self._close()
        except OutOfEffortError:
            if self.gap.least < np.inf:
                return
            raise out_of_effort(self.limits) from None
        if self.gap.least == np.inf:
            raise infeasible(self.limits, smallest(self.instance, self.root.multipliers))

    def solution(self) -> Solution:
        """The incumbent with the bound that was found."""
        best = self.gap.best
        assert best is not None
        return replace(best, bound=min(best.seconds, self.gap.bound))

    def _close(self) -> None:
        """Close the gap by Pareto frontiers in increasing intervals above the bound, then by branch and bound, from the
        best mixture of the choices that were found.

        Raises OutOfEffortError when so much effort is spent as is `allowed`.
        """
        root = self.root
        # Relative to the bound: the interval that has been covered, and the least one that is too much.
        done, most = 0.0, np.inf
        unit = abs(root.bound) or 1.0
        while self.gap.is_open(self.gap.bound) and (most == np.inf or most - done > max(FIRST, CLOSE * most)):
            open_part = (self.gap.least - root.bound) / unit
            step = max(FIRST, FURTHER * done)
            if most < np.inf:
                step = min(step, (done + most) / 2, open_part)
            elif step > FURTHEST or open_part < max(FURTHER * step, NEAR):
                step = open_part
            aim = min(self.gap.least, root.bound + step * unit)
            try:
                self._exactly(root, aim, at_any_rate=False)
            except TooManyError:
                most = step
            else:
                done = step
                self.gap.bound = max(self.gap.bound, min(aim, self.gap.least))
        if self.gap.is_open(self.gap.bound):
            self._among_found()
        waiting = [root]
        while waiting and self.gap.is_open(self.gap.bound):
            branch = min(waiting, key=lambda item: item.bound)
            waiting.remove(branch)
            waiting += self._grow(branch)
            least = min((item.bound for item in waiting), default=np.inf)
            self.gap.bound = max(self.gap.bound, min(least, self.gap.least))

    def _among_found(self) -> None:
        """Consider the best choice that takes each strategy from a choice that was found while the bound was raised."""
        root, allowed = self.root, self.allowed
        mixed = {node: np.unique([found.picks[node] for found in root.found]) for node in root.alive}
        self.allowed = self.effort.spent + MIXING * (allowed - self.effort.spent)
        with suppress(TooManyError, OutOfEffortError):
            self._exactly(Branch(mixed, [], root.bound, root.multipliers, []), self.gap.least, at_any_rate=True)
        self.allowed = allowed

    def _grow(self, branch: Branch) -> list[Branch]:
        """The parts of a branch that may have a better choice; none if it was searched exactly.

        Raises OutOfEffortError where the effort is spent.
        """
        if not self.gap.is_open(branch.bound):
            return []
        try:
            branch.alive = self.instance.restricted(branch.multipliers, branch.alive, self.gap.least)
        except InfeasibleProgramError:
            return []
        parts = split(self.instance, branch)
        is_small = sum(len(labels) for labels in branch.alive.values()) < SMALL
        with suppress(TooManyError):
            self._exactly(branch, self.gap.least, at_any_rate=is_small or parts is None)
            return []
        assert parts is not None
        found = []
        for alive in parts:
            if self.effort.spent >= self.allowed:
                raise OutOfEffortError
            part = Branch(alive, [], branch.bound, branch.multipliers, [])
            if all(len(labels) for labels in alive.values()):
                part.found = [item for item in branch.found if part.holds(item)]
                if not part.found:
                    self.dual.at(part, branch.multipliers)
                for _ in self.dual.climb(part, ENOUGH * (self.gap.least - part.bound)):
                    pass
                if self.gap.is_open(part.bound):
                    found.append(part)
        return found

    def _exactly(self, branch: Branch, aim: float, at_any_rate: bool) -> None:
        """Consider the best choice of a branch, if it takes less than `aim` seconds: by Pareto frontiers, and where
        these get too large, `at_any_rate` by an integer program.

        Only active constraints are imposed; those that the result violates come in, and it is solved again. Raises
        TooManyError.
        """
        active = first_constraints(self.instance, branch.multipliers, self.active)
        while True:
            if self.effort.spent >= self.allowed:
                raise OutOfEffortError
            try:
                choices = remaining_choices(self.instance, active, branch.multipliers, branch.alive, aim)
                try:
                    solution = _best_by_frontiers(self.instance, active, choices, self.dual.tried[-SURROGATES:], aim)
                except TooManyError:
                    if not at_any_rate:
                        raise
                    solution = best_by_program(self.instance, active, choices, abs(self.root.bound) or 1.0)
            except InfeasibleProgramError:
                return
            self.gap.consider(solution)
            more = self.active = with_violated(self.instance, active, solution, branch.multipliers)
            if more == active:
                return
            active = more


def _best_by_frontiers(
    instance: Instance, active: ActiveConstraints, choices: Remaining, multipliers: Sequence[Multipliers], aim: float
) -> Solution:
    """The best choice that meets the active constraints, among those that take less than `aim` seconds. Each of the
    `multipliers` prunes more of the frontiers.

    Raises InfeasibleProgramError where there is no such choice, TooManyError where the frontiers get too large.
    """
    arrays = instance.arrays
    problem, names = limited_network(instance, active, choices)
    surrogates = _surrogates(instance, active, [choices.plain, *multipliers], aim + choices.base)
    frontiers = ParetoFrontiers(problem, surrogates)
    amounts = frontiers.rows.amounts
    if not len(amounts):
        raise InfeasibleProgramError
    seconds = amounts[:, 0] - choices.base
    for column, index in enumerate(active.overlaps, 1 + len(active.points)):
        overlap = arrays.overlaps[index]
        seconds = seconds + overlap.weight * np.maximum(0.0, amounts[:, column] - overlap.cover)
    return solution_of(instance, choices, names, frontiers.choice(int(seconds.argmin())))


def _surrogates(
    instance: Instance, active: ActiveConstraints, multipliers: Sequence[Multipliers], aim: float
) -> list[Surrogate]:
    """Constraints that every feasible choice of less than `aim` seconds satisfies: one for each of some multipliers,
    and the limit at each point by itself."""
    count = 1 + len(active.points) + len(active.overlaps)
    overlaps = [instance.arrays.overlaps[index] for index in active.overlaps]
    found = []
    for item in multipliers:
        dear = dict(zip(instance.points, item.bytes, strict=False))
        bytes = [dear.get(point, 0.0) for point in active.points]
        parts = [
            item.overlaps[index] * overlap.weight for index, overlap in zip(active.overlaps, overlaps, strict=True)
        ]
        most = aim + sum(price * active.limit for price in bytes)
        most += sum(part * overlap.cover for part, overlap in zip(parts, overlaps, strict=True))
        found.append(Surrogate(np.array([1.0, *bytes, *parts]), a_little_more(most)))
    for index in range(len(active.points)):
        alone = np.zeros(count)
        alone[1 + index] = 1.0
        found.append(Surrogate(alone, active.limit * (1 + ROUNDING)))
    return found
