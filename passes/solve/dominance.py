"""Dominated strategies of sources: layouts of parameters and inputs that are never better than another one.

Many ways to store a parameter cost the same, split over one dim or another. A strategy is dropped where another one is
at least as good in all seconds, bytes and traffic, so that neither multipliers nor branches have to tell equal choices
apart.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from passes.cost.memory import GroupBytes, MemoryModel
from passes.ir.arrays import Floats, Integers
from passes.solve.arrays import Arrays, GroupArrays, Overlap

# Figures that differ by less than this, relative to the largest of their kind, are equal.
ROUNDING = 1e-12


def undominated(arrays: Arrays, sizes: MemoryModel, alive: Mapping[int, Integers]) -> dict[int, Integers]:
    """The strategies of each node that are alive and not dominated; all of nodes that consume anything."""
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
    """All costs of the uses of each strategy of the producer, in any of the layouts that may be wanted."""
    wanted = np.unique(np.concatenate([edge.wanted[alive[edge.consumer]] for edge in group.edges]))
    matrices = [group.seconds, group.rerun, *size.sizes]
    for overlap in overlaps:
        matrices += [
            traffic for traffic in (overlap.traffic(group), overlap.rerun_traffic(group)) if traffic is not None
        ]
    # The saved tensor is the source where both are one tensor, or where the redistribution is rerun.
    kept = np.where(size.same, size.source_bytes[:, None], size.target_bytes)
    matrices += [kept, np.broadcast_to(size.source_bytes[:, None], kept.shape)]
    return [matrix[np.ix_(group.made, wanted)] for matrix in matrices]


def _least(figures: Floats, tie_break: Integers) -> Integers:
    """Rows that no other row dominates; of equal rows the one with the lowest tie-break, then the first."""
    scale = np.abs(figures).max(axis=0, initial=0.0)
    figures = figures / np.where(scale > 0, scale, 1.0)
    kept: list[int] = []
    better = np.empty_like(figures)
    for row in np.lexsort((np.arange(len(figures)), tie_break, figures.sum(axis=1).round(9))).tolist():
        if not (better[: len(kept)] <= figures[row] + ROUNDING).all(axis=1).any():
            better[len(kept)] = figures[row]
            kept.append(row)
    return np.sort(np.array(kept))
