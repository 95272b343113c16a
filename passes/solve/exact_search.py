"""Closing the gap exactly: by Pareto frontiers in increasing intervals above the bound, then by branch and bound."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from passes.ir.choices import Solution
from passes.solve.active_constraints import (
    ActiveConstraints,
    Remaining,
    first_constraints,
    limited_network,
    remaining_choices,
    solution_of,
    with_violated,
)
from passes.solve.branch_and_bound import Branch, split
from passes.solve.effort import OutOfEffortError
from passes.solve.instance import Instance
from passes.solve.lagrangian.dual_ascent import DualAscent
from passes.solve.lagrangian.relaxation import ROUNDING, Multipliers
from passes.solve.limits import InfeasibleProgramError
from passes.solve.optimum import a_little_more
from passes.solve.pareto.frontiers import ParetoFrontiers, Surrogate, TooManyError

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
SURROGATES = 20


class ExactSearch:
    """The exact search of one instance, with the multipliers that `dual` found. `active` are the constraints that were
    violated so far."""

    def __init__(self, dual: DualAscent) -> None:
        self.dual, self.gap, self.instance = dual, dual.gap, dual.gap.instance
        self.active: ActiveConstraints | None = None
        self.allowed = np.inf

    def close(self, root: Branch, allowed: float) -> None:
        """Close the gap among the choices of the branch `root`.

        Raises OutOfEffortError when so much effort is spent as `allowed`, in all.
        """
        self.allowed = allowed
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
                self._exactly(root, aim)
            except TooManyError:
                most = step
            else:
                done = step
                self.gap.bound = max(self.gap.bound, min(aim, self.gap.least))
        waiting = [root]
        while waiting and self.gap.is_open(self.gap.bound):
            branch = min(waiting, key=lambda item: item.bound)
            waiting.remove(branch)
            waiting += self._grow(branch)
            least = min((item.bound for item in waiting), default=np.inf)
            self.gap.bound = max(self.gap.bound, min(least, self.gap.least))

    def _grow(self, branch: Branch) -> list[Branch]:
        """The parts of a branch that may have a better choice; none if it was searched exactly.

        Raises OutOfEffortError where the effort is spent, or where frontiers are too large and nothing to branch on.
        """
        if not self.gap.is_open(branch.bound):
            return []
        try:
            branch.alive = self.instance.restricted(branch.multipliers, branch.alive, self.gap.least)
        except InfeasibleProgramError:
            return []
        with suppress(TooManyError):
            self._exactly(branch, self.gap.least)
            return []
        parts = split(self.instance, branch)
        if parts is None:
            raise OutOfEffortError
        found = []
        for alive in parts:
            if self.instance.arrays.effort.spent >= self.allowed:
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

    def _exactly(self, branch: Branch, aim: float) -> None:
        """Consider the best choice of a branch, if it takes less than `aim` seconds, by Pareto frontiers.

        Only active constraints are imposed; those that the result violates come in, and it is solved again. Raises
        TooManyError.
        """
        active = first_constraints(self.instance, branch.multipliers, self.active)
        while True:
            if self.instance.arrays.effort.spent >= self.allowed:
                raise OutOfEffortError
            try:
                choices = remaining_choices(self.instance, active, branch.multipliers, branch.alive, aim)
                solution = _best_by_frontiers(self.instance, active, choices, self.dual.tried[-SURROGATES:], aim)
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
