"""What limits one instance, as rows: bytes at some moments, and traffic that computation hides; and what is left to
choose from when a choice must be better than some aim."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from passes.ir.choices import Solution
from passes.solving.dual import interior
from passes.solving.instance import Alive, Instance
from passes.solving.memory import ROUNDING, Repeats, Weights, decide_repeats
from passes.solving.network import Network, eliminate
from passes.solving.optimum import network_of, ties


@dataclass(frozen=True)
class Rows:
    """What is limited: the moments (`points`) at which at most `limit` bytes may be there, of which
    overlaps the traffic counts where it is not hidden, and the nodes that are `fixed` because these depend on them."""

    limit: float
    points: tuple[int, ...]
    hinges: tuple[int, ...]
    fixed: frozenset[int]


def first_rows(instance: Instance, weights: Weights, known: Rows | None = None) -> Rows:
    """Rows for all that has a price, and those that are `known` to break otherwise."""
    rows = known or Rows(instance.limits.memory, (), (), frozenset())
    dear = (point for point, price in zip(instance.points, weights.bytes, strict=False) if price > 0)
    points = (*rows.points, *(point for point in dear if point not in rows.points))
    return _with_fixed(instance, replace(rows, points=points, hinges=_sorted(rows.hinges, interior(weights.excess))))


def broken_rows(instance: Instance, rows: Rows, solution: Solution, weights: Weights) -> Rows:
    """The rows with those that a choice breaks."""
    over = instance.peak(solution) - instance.limits.memory
    if over <= 0:
        waiting = _unhidden(instance, rows, solution, weights)
        return _with_fixed(instance, replace(rows, hinges=_sorted(rows.hinges, waiting)))
    missing = [point for point in instance.breaking(solution) if point not in rows.points]
    if missing:
        return _with_fixed(instance, replace(rows, points=(*rows.points, *missing)))
    # Where no row is missing it is rounding, which is cut off with what it let pass.
    return replace(rows, limit=rows.limit - max(over, 2 * ROUNDING * rows.limit))


def _with_fixed(instance: Instance, rows: Rows) -> Rows:
    return replace(rows, fixed=rows.fixed | _fixed(instance, rows))


def _sorted(known: Iterable[int], more: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*known, *more}))


@dataclass(frozen=True)
class Rest:
    """What an aim leaves to choose from: a `network` of the seconds that no row counts, at the weights `plain`, with
    `base` in its costs besides (seconds); and which redistributions are made again."""

    network: Network
    plain: Weights
    repeats: Sequence[Repeats]
    base: float


def rest_of(instance: Instance, rows: Rows, weights: Weights, alive: Alive, aim: float) -> Rest:
    """What may be in a choice that takes less than `aim` seconds.

    Overlaps that have no row count with the part that `weights` has for them, nothing or all. Raises
    InfeasibleProgramError where there is no such choice.
    """
    parts = [0.0 if index in rows.hinges else round(part) for index, part in enumerate(weights.excess)]
    plain = Weights(1.0, [], parts)
    priced = instance.priced(plain)
    slack = instance.slack(weights, alive, rows.fixed, aim)
    network = network_of(priced, alive)
    eliminate(network, rows.fixed)
    network.narrow({node: slack.nodes[node][labels] >= 0 for node, labels in network.labels.items()})
    repeats = decide_repeats(instance.arrays, instance.bytes, instance.points, weights, slack)
    return Rest(network, plain, repeats, ties(priced) + instance.hidden(parts))


def _unhidden(instance: Instance, rows: Rows, solution: Solution, weights: Weights) -> list[int]:
    """Overlaps that the program counts as hidden, or as not hidden, of which the opposite is true."""
    found = []
    for index, (overlap, part) in enumerate(zip(instance.arrays.overlaps, weights.excess, strict=True)):
        excess = instance.arrays.excess(overlap, solution.picks, solution.again)
        if index not in rows.hinges and overlap.weight * (max(0.0, excess) - round(part) * excess) > (
            1e-9 * solution.seconds
        ):
            found.append(index)
    return found


def _fixed(instance: Instance, rows: Rows) -> frozenset[int]:
    """Nodes whose strategy counts in one of the rows."""
    parts = [instance.bytes.at(point) for point in rows.points]
    fixed = {node for node, size in enumerate(instance.bytes.nodes) if any(size.at(there).any() for there in parts)}
    overlaps = [instance.arrays.overlaps[hinge] for hinge in rows.hinges]
    for group, size in zip(instance.arrays.groups, instance.bytes.groups, strict=True):
        kept = any(size.saves(there) for there in parts)
        edges = [edge for edge in group.edges if edge.saved and kept]
        used = any(size.used(there) is not None for there in parts)
        if used or any(overlap.traffic(group) is not None for overlap in overlaps):
            edges = list(group.edges)
        if edges:
            fixed.add(group.producer)
            fixed.update(edge.consumer for edge in edges)
    return frozenset(fixed)
