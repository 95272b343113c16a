"""Branch and bound over what a node does on one axis.

Prices leave a gap where a bound mixes choices of which none is as good: one that takes too many bytes or too much
traffic, and one that takes less and longer. What sets these apart most is tried both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.solving.dual import Found
from passes.solving.instance import Alive, Instance
from passes.solving.memory import Weights
from passes.solving.prices import Flags

# A smaller part of a mixture is none.
NOTHING = 1e-6


@dataclass(eq=False)
class Branch:
    """The choices in which every node takes a strategy that is `alive`: what was `found` among them, a `bound` on all
    of them, the prices that gave it, and the mixture of choices (the part of each) that is as low."""

    alive: Alive
    found: list[Found]
    bound: float
    weights: Weights
    mixture: Sequence[tuple[Found, float]]

    def holds(self, choice: Found) -> bool:
        """Whether a choice is one of these."""
        return all(pick in self.alive[node] for node, pick in enumerate(choice.picks))


def split(instance: Instance, branch: Branch) -> tuple[Alive, Alive] | None:
    """The strategies of two parts of a branch: a node does on an axis what one choice in the mixture does, or anything
    else. None where the choices differ in nothing that counts."""
    parts = [(found, part) for found, part in branch.mixture if part > NOTHING]
    if len(parts) < 2:
        return None
    most = (False, 0.0)
    best: tuple[int, int, str] | None = None
    shares = np.array([part for _, part in parts])
    needs = np.array([_needs(instance, branch.weights, found) for found, _ in parts])
    for node in np.flatnonzero((needs.max(axis=0) - needs.min(axis=0)) > 0).tolist():
        strategies, is_op = instance.problem.nodes[node].strategies, instance.problem.nodes[node].kind == "op"
        mean = shares @ needs[:, node] / shares.sum()
        for axis in range(len(strategies[0].methods)):
            methods = [strategies[found.picks[node]].methods[axis] for found, _ in parts]
            for method in sorted(set(methods)):
                same = np.array([other == method for other in methods])
                if same.all():
                    continue
                score = shares[same].sum() * abs(shares[same] @ needs[same, node] / shares[same].sum() - mean)
                # Where parameters are stored matters less than what is done with them: there are many ways to the same.
                if score > 0 and (is_op, score) > most:
                    most, best = (is_op, score), (node, axis, method)
    if best is None:
        return None
    node, axis, method = best
    strategies = instance.problem.nodes[node].strategies
    does: Flags = np.array([strategies[label].methods[axis] == method for label in branch.alive[node]])
    return {**branch.alive, node: branch.alive[node][does]}, {**branch.alive, node: branch.alive[node][~does]}


def _needs(instance: Instance, weights: Weights, found: Found) -> list[float]:
    """What each node's bytes, and the traffic of parameters that it makes or wants, are worth in a choice (seconds)."""
    needs = []
    everywhere = instance.bytes.blend(instance.points, weights.bytes)
    for size, pick in zip(instance.bytes.nodes, found.picks, strict=True):
        needs.append(float(size.at(everywhere)[pick]))
    for group, (made, wanted) in zip(instance.arrays.groups, instance.arrays.changes(found.picks), strict=True):
        for overlap, part in zip(instance.arrays.overlaps, weights.excess, strict=True):
            traffic = overlap.traffic(group)
            if traffic is None:
                continue
            seconds = part * overlap.weight * sum(float(traffic[made, target]) for target in wanted)
            for number in {group.producer, *(edge.consumer for edge in group.edges)}:
                needs[number] += seconds
    return needs
