"""Lower bounds on configurations that are not yet solved, from the time that recompute adds to a step at least."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.cost.live_ranges import is_recomputed
from passes.ir.choices import Node, Problem
from passes.ir.configuration import RECOMPUTE, Configuration
from passes.ir.levels import Level, level_of
from passes.solve.arrays import Overlap
from passes.solve.solver import Solver


@dataclass(frozen=True)
class RecomputeBounds:
    """Lower bounds on the step times of all configurations with as many micro-batches as one without recompute.

    `bound` is one on the latter, `added` what the levels of recompute add to it (seconds), by block and level; `counts`
    are the copies of each block.
    """

    bound: float
    added: Mapping[tuple[str, str], float]
    counts: Mapping[str, int]

    def of(self, configuration: Configuration) -> float:
        """A lower bound on the step time of a configuration (seconds)."""
        return self.bound + sum(self._added(name, level_of(text)) for name, text in configuration.recompute.items())

    def _added(self, name: str, level: Level) -> float:
        """Seconds that the level of a block adds at least: they are linear in the number of copies."""
        rest = self.added.get((name, level.rest), 0.0)
        if not level.is_mixed:
            return rest
        share = level.full / self.counts[name]
        return share * self.added.get((name, "full"), 0.0) + (1 - share) * rest


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
    return RecomputeBounds(root.bound, added, dict(zip(problem.blocks, problem.counts, strict=True)))


def least_per_copy_s(solver: Solver) -> float:
    """The fewest seconds by which the bound of a solver is higher where one copy more is recomputed fully, in a
    configuration in which some are.

    The bound counts a part of the traffic that computation leaves exposed, which what is computed again may hide. Where
    that part is not the same in all copies, all that is computed again is taken to hide traffic.
    """
    problem, configuration = solver.instance.problem, solver.configuration
    pairs = zip(solver.instance.arrays.overlaps, solver.root.multipliers.overlaps, strict=True)
    backward = [(each, part) for each, part in pairs if not each.gather]
    found = 0.0
    for block, name in enumerate(problem.blocks):
        level = level_of(configuration.recompute.get(name, "none"))
        if level.is_mixed:
            ops = [node for node in problem.nodes if node.kind == "op" and node.block == block]
            parts = {part for each, part in backward if each.block == block}
            weight = sum(each.weight for each, _ in backward if each.block == block)
            longer = problem.covers[block].again("full") - problem.covers[block].again(level.rest)
            again = configuration.micro_batches * sum(_least_more(node, level.rest) for node in ops)
            part = parts.pop() if len(parts) == 1 else 1.0
            found += max(0.0, again - part * weight * longer) / problem.counts[block]
    return found


def _least_more(node: Node, rest: str) -> float:
    """The fewest seconds by which an op takes longer in one micro-batch at full recompute than at another level."""
    if rest == "none":
        return min(node.forward)
    kept = [not (node.light[pick] or (rest == "ops" and node.second)) for pick in range(len(node.forward))]
    return min(own * each for own, each in zip(node.forward, kept, strict=True))


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
