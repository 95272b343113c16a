"""Sources that are never better than another one, whatever they are used for.

A parameter can mostly be stored in many ways that cost the same: split over one dim or another. Where one way is at
least as good as another in all that counts, in seconds as in bytes and traffic, the other one is left out, so that
neither prices nor branches tell alike choices apart.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from passes.cost.memory import GroupBytes, MemoryModel
from passes.solving.arrays import Arrays, GroupArrays, Overlap
from passes.solving.prices import Floats, Integers

# Figures that differ by less than this, relative to the largest of their kind, are equal.
ROUNDING = 1e-12


def undominated(arrays: Arrays, sizes: MemoryModel, alive: Mapping[int, Integers]) -> dict[int, Integers]:
    """Of the strategies of each node that are alive those that are left; all of nodes that consume anything."""
    consumers = {edge.consumer for group in arrays.groups for edge in group.edges}
    made: dict[int, list[tuple[GroupArrays, GroupBytes]]] = {}
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        made.setdefault(group.producer, []).append((group, size))
    left = dict(alive)
    for node, labels in alive.items():
        if node not in consumers and len(labels) > 1:
            own = [arrays.costs[node], *sizes.nodes[node].sizes]
            figures = [column[:, None] for column in own]
            figures += [item for uses in made.get(node, []) for item in _figures(*uses, arrays.overlaps, alive)]
            left[node] = labels[_least(np.concatenate(figures, axis=1)[labels], arrays.tie_break[node][labels])]
    return left


def _figures(
    group: GroupArrays, size: GroupBytes, overlaps: Sequence[Overlap], alive: Mapping[int, Integers]
) -> list[Floats]:
    """For each strategy of the producer all that its uses cost, in any of the layouts that may be wanted."""
    wanted = np.unique(np.concatenate([edge.wanted[alive[edge.consumer]] for edge in group.edges]))
    matrices = [group.seconds, group.again, *size.sizes]
    for overlap in overlaps:
        matrices += [
            traffic for traffic in (overlap.traffic(group), overlap.traffic_again(group)) if traffic is not None
        ]
    # What is kept is the source where it is the very tensor that is wanted, or made again.
    kept = np.where(size.same, size.source_bytes[:, None], size.target_bytes)
    matrices += [kept, np.broadcast_to(size.source_bytes[:, None], kept.shape)]
    return [matrix[np.ix_(group.made, wanted)] for matrix in matrices]


def _least(figures: Floats, tie_break: Integers) -> Integers:
    """ActiveConstraints than which no other is as good in every column; of equal rows the one that is least odd, and
    first."""
    scale = np.abs(figures).max(axis=0, initial=0.0)
    figures = figures / np.where(scale > 0, scale, 1.0)
    kept: list[int] = []
    better = np.empty_like(figures)
    for row in np.lexsort((np.arange(len(figures)), tie_break, figures.sum(axis=1).round(9))).tolist():
        if not (better[: len(kept)] <= figures[row] + ROUNDING).all(axis=1).any():
            better[len(kept)] = figures[row]
            kept.append(row)
    return np.sort(np.array(kept))
