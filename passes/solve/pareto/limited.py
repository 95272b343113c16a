"""The best choice within limits by Pareto frontiers over seconds, bytes at some points, and traffic of overlap
terms."""

from collections.abc import Sequence

import numpy as np

from passes.ir.choices import Solution
from passes.solve.active_constraints import ActiveConstraints, Remaining
from passes.solve.instance import Instance
from passes.solve.lagrangian.relaxation import ROUNDING, Multipliers
from passes.solve.limited_network import limited_network, solution_of
from passes.solve.limits import InfeasibleProgramError
from passes.solve.optimum import a_little_more
from passes.solve.pareto.frontiers import ParetoFrontiers, Surrogate


def best_by_frontiers(
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
