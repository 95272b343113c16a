"""Active constraints of one instance, as in an active-set method: bytes at some program points, and some overlap terms.

An exact search starts with the constraints that have a multiplier. Those that its optimum violates are added, and it is
repeated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from passes.ir.choices import Solution
from passes.solve.elimination.network import Network
from passes.solve.elimination.variables import eliminate
from passes.solve.instance import Alive, Instance
from passes.solve.lagrangian.cutting_planes import interior
from passes.solve.lagrangian.relaxation import ROUNDING, Multipliers, Repeats, decide_repeats
from passes.solve.optimum import network_of, tie_break_total


@dataclass(frozen=True)
class ActiveConstraints:
    """At most `limit` bytes at the program points `points`, and the overlap terms `overlaps`, whose cost is the traffic
    in excess of computation. The nodes `fixed` are not eliminated, as constraints depend on them."""

    limit: float
    points: tuple[int, ...]
    overlaps: tuple[int, ...]
    fixed: frozenset[int]


def first_constraints(
    instance: Instance, multipliers: Multipliers, known: ActiveConstraints | None = None
) -> ActiveConstraints:
    """The constraints that have a multiplier, and those `known` to be violated otherwise."""
    own = known or ActiveConstraints(instance.limits.memory, (), (), frozenset())
    dear = (point for point, price in zip(instance.points, multipliers.bytes, strict=False) if price > 0)
    points = (*own.points, *(point for point in dear if point not in own.points))
    overlaps = _sorted(own.overlaps, interior(multipliers.overlaps))
    return _with_fixed(instance, replace(own, points=points, overlaps=overlaps))


def with_violated(
    instance: Instance, own: ActiveConstraints, solution: Solution, multipliers: Multipliers
) -> ActiveConstraints:
    """The constraints with those that a solution violates."""
    over = instance.peak(solution) - instance.limits.memory
    if over <= 0:
        overlaps = _misjudged_overlaps(instance, own, solution, multipliers)
        return _with_fixed(instance, replace(own, overlaps=_sorted(own.overlaps, overlaps)))
    missing = [point for point in instance.breaking(solution) if point not in own.points]
    if missing:
        return _with_fixed(instance, replace(own, points=(*own.points, *missing)))
    # No constraint is missing: rounding let the solution pass, and a lower limit cuts it off.
    return replace(own, limit=own.limit - max(over, 2 * ROUNDING * own.limit))


def _with_fixed(instance: Instance, own: ActiveConstraints) -> ActiveConstraints:
    return replace(own, fixed=own.fixed | _fixed(instance, own))


def _sorted(known: Iterable[int], more: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*known, *more}))


@dataclass(frozen=True)
class Remaining:
    """The choices below an aim: a `network` of the seconds that no active constraint counts, at the multipliers
    `plain`, whose costs contain `base` seconds more; and the redistributions that backward reruns, by group."""

    network: Network
    plain: Multipliers
    repeats: Sequence[Repeats]
    base: float


def remaining_choices(
    instance: Instance, own: ActiveConstraints, multipliers: Multipliers, alive: Alive, aim: float
) -> Remaining:
    """The choices that may take less than `aim` seconds.

    Overlap terms that are not active count nothing or all of their traffic, whichever is nearer to their multiplier.
    Raises InfeasibleProgramError where there is no such choice.
    """
    parts = [0.0 if index in own.overlaps else round(part) for index, part in enumerate(multipliers.overlaps)]
    plain = Multipliers(1.0, [], parts)
    relaxed = instance.relaxed(plain)
    slack = instance.slack(multipliers, alive, own.fixed, aim)
    network = network_of(relaxed, alive)
    eliminate(network, own.fixed)
    network.narrow({node: slack[node][labels] >= 0 for node, labels in network.labels.items()})
    repeats = decide_repeats(instance.arrays, instance.bytes, instance.points, multipliers, slack)
    return Remaining(network, plain, repeats, tie_break_total(relaxed) + instance.hidden(parts))


def _misjudged_overlaps(
    instance: Instance, own: ActiveConstraints, solution: Solution, multipliers: Multipliers
) -> list[int]:
    """Inactive overlap terms that are assumed to be hidden but are exposed in a solution, or the other way round."""
    found = []
    for index, (overlap, part) in enumerate(zip(instance.arrays.overlaps, multipliers.overlaps, strict=True)):
        excess = instance.excess(overlap, solution)
        error = overlap.weight * (max(0.0, excess) - round(part) * excess)
        if index not in own.overlaps and error > 1e-9 * solution.seconds:
            found.append(index)
    return found


def _fixed(instance: Instance, own: ActiveConstraints) -> frozenset[int]:
    """Nodes whose strategy counts in one of the constraints."""
    fractions = [instance.bytes.at(point) for point in own.points]
    fixed = {node for node, size in enumerate(instance.bytes.nodes) if any(size.at(there).any() for there in fractions)}
    overlaps = [instance.arrays.overlaps[index] for index in own.overlaps]
    for group, size in zip(instance.arrays.groups, instance.bytes.groups, strict=True):
        is_saved = any(size.saves(there) for there in fractions)
        edges = [edge for edge in group.edges if edge.saved and is_saved]
        used = any(size.used(there) is not None for there in fractions)
        if used or any(overlap.traffic(group) is not None for overlap in overlaps):
            edges = list(group.edges)
        if edges:
            fixed.add(group.producer)
            fixed.update(edge.consumer for edge in edges)
    return frozenset(fixed)
