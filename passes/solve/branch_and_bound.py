"""Branch and bound over the method of a node on one axis.

The Lagrangian relaxation leaves a gap where its bound mixes choices of which none is as good: one that takes too many
bytes or too much traffic, and one that takes less of them and more time. The decision that sets these apart most is
branched on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir.arrays import Flags
from passes.solve.instance import Alive, Instance
from passes.solve.lagrangian.relaxation import Cut, Multipliers

# Parts of a mixture below this are none.
NOTHING = 1e-6


@dataclass(eq=False)
class Branch:
    """The choices in which every node takes a strategy that is `alive`: the cuts `found` among them, a `bound` on all
    of them, the multipliers that gave it, and the mixture of choices (the part of each) that is as low."""

    alive: Alive
    found: list[Cut]
    bound: float
    multipliers: Multipliers
    mixture: Sequence[tuple[Cut, float]]

    def holds(self, choice: Cut) -> bool:
        """Whether a choice is in this branch."""
        return all(pick in self.alive[node] for node, pick in enumerate(choice.picks))


def split(instance: Instance, branch: Branch) -> tuple[Alive, Alive] | None:
    """The strategies of two child branches: a node uses on an axis the method of one choice in the mixture, or any
    other method. None where the choices do not differ in a relevant method."""
    parts = [(found, part) for found, part in branch.mixture if part > NOTHING]
    if len(parts) < 2:
        return None
    most = (False, 0.0)
    best: tuple[int, int, str] | None = None
    shares = np.array([part for _, part in parts])
    needs = np.array([_needs(instance, branch.multipliers, found) for found, _ in parts])
    for node in np.flatnonzero((needs.max(axis=0) - needs.min(axis=0)) > 0).tolist():
        first = instance.problem.nodes[instance.shared.nodes[node][0]]
        strategies, is_op = first.strategies, first.kind == "op"
        mean = shares @ needs[:, node] / shares.sum()
        for axis in range(len(strategies[0].methods)):
            methods = [strategies[found.picks[node]].methods[axis] for found, _ in parts]
            for method in sorted(set(methods)):
                same = np.array([other == method for other in methods])
                if same.all():
                    continue
                score = shares[same].sum() * abs(shares[same] @ needs[same, node] / shares[same].sum() - mean)
                # How parameters are stored matters less than how ops run: many ways of storing cost the same.
                if score > 0 and (is_op, score) > most:
                    most, best = (is_op, score), (node, axis, method)
    if best is None:
        return None
    node, axis, method = best
    strategies = instance.problem.nodes[instance.shared.nodes[node][0]].strategies
    does: Flags = np.array([strategies[label].methods[axis] == method for label in branch.alive[node]])
    return {**branch.alive, node: branch.alive[node][does]}, {**branch.alive, node: branch.alive[node][~does]}


def _needs(instance: Instance, multipliers: Multipliers, found: Cut) -> list[float]:
    """The cost in a choice of each node's bytes and parameter traffic at the multipliers (seconds)."""
    needs = []
    everywhere = instance.bytes.blend(instance.points, multipliers.bytes)
    for size, pick in zip(instance.bytes.nodes, found.picks, strict=True):
        needs.append(float(size.at(everywhere)[pick]))
    for group, (made, wanted) in zip(instance.arrays.groups, instance.arrays.changes(found.picks), strict=True):
        for overlap, part in zip(instance.arrays.overlaps, multipliers.overlaps, strict=True):
            traffic = overlap.traffic(group)
            if traffic is None:
                continue
            seconds = part * overlap.weight * sum(float(traffic[made, target]) for target in wanted)
            for number in {group.producer, *(edge.consumer for edge in group.edges)}:
                needs[number] += seconds
    return needs
