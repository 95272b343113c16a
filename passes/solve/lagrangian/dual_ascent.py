"""Dual iterations: multipliers by cutting planes, at which the relaxation raises the bound of a branch."""

from collections.abc import Iterator

import numpy as np

from passes.solve.branch_and_bound import Branch
from passes.solve.gap import Gap
from passes.solve.instance import refuse_if_impossible
from passes.solve.lagrangian.relaxation import Cut, CuttingPlanes, Multipliers

# Maximum number of dual iterations before branching, and of those before feasibility is checked.
ROUNDS = 30
TRIES = 6
# Multipliers rise until the bytes of the limit cost so many times as much as the step.
DEAREST = 1e4


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
