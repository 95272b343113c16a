"""Lower bounds on configurations that are not yet solved, from the time that recompute adds to a step at least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.cost.live_ranges import is_recomputed
from passes.ir.choices import Node, Problem
from passes.ir.configuration import RECOMPUTE, Configuration
from passes.solve.arrays import Overlap
from passes.solve.solver import Solver


@dataclass(frozen=True)
class RecomputeBounds:
    """Lower bounds on the step times of all configurations with as many micro-batches as one without recompute.

    `bound` is one on the latter, `added` what the levels of recompute add to it (seconds), by block and level.
    """

    bound: float
    added: Mapping[tuple[str, str], float]

    def of(self, configuration: Configuration) -> float:
        """A lower bound on the step time of a configuration (seconds)."""
        return self.bound + sum(self.added.get(level, 0.0) for level in configuration.recompute.items())


def recompute_bounds(relaxed: Solver) -> RecomputeBounds:
    """The bounds that follow from that of a solver without memory limit.

    Every op that is computed again takes its fastest strategy at least. The computation that hides traffic is longer by
    what is computed again; that counts as far as the bound has traffic exposed.
    """
    problem, root = relaxed.instance.problem, relaxed.root
    overlaps, exposed = relaxed.instance.arrays.overlaps, root.multipliers.overlaps
    times, given = relaxed.configuration.micro_batches, relaxed.configuration.recompute
    added: dict[tuple[str, str], float] = {}
    for block, name in enumerate(problem.blocks):
        ops = [node for node in problem.nodes if node.kind == "op" and node.block == block]
        for level in RECOMPUTE:
            if level != "none" and given.get(name) == "none":
                hidden = _hidden(problem, block, level, overlaps, exposed)
                added[name, level] = times * sum(_least_again(node, level) for node in ops) - hidden
    return RecomputeBounds(root.bound, added)


def _least_again(node: Node, level: str) -> float:
    """The fewest seconds that an op is computed again in one micro-batch."""
    if level == "full":
        return min(node.forward)
    if level == "selective" or not node.second:
        return min(own * node.light[pick] for pick, own in enumerate(node.forward)) if node.light else 0.0
    return min(own * is_recomputed(node, pick) for pick, own in enumerate(node.forward))


def _hidden(problem: Problem, block: int, level: str, overlaps: Sequence[Overlap], exposed: Sequence[float]) -> float:
    """The seconds of traffic in the backward pass that the bound counts as exposed and recompute may hide."""
    covers = problem.covers[block]
    longer = covers.again(level) - covers.again("none")
    parts = zip(overlaps, exposed, strict=True)
    return sum(part * each.weight * longer for each, part in parts if each.block == block and not each.gather)
