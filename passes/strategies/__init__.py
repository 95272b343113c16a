"""strategies: builds the planning problem of a folded program on a mesh and a cluster.

For every op the strategies that its rule allows and whose splits divide, with their costs; for parameters, inputs and
outputs their possible layouts; and the edges between producers and consumers.
"""

from passes.cost.price import cover
from passes.ir.choices import Cover, Problem
from passes.ir.constraints import PlacedConstraints
from passes.ir.folded import Folded
from passes.strategies.analysis import Analysis, Setting, Sizes, analyze
from passes.strategies.connections import connect
from passes.strategies.nodes import Nodes, find_splits

__all__ = ["Analysis", "Setting", "analyze", "planning_problem"]


def planning_problem(
    folded: Folded, demands: PlacedConstraints, setting: Setting, analysis: Analysis | None = None
) -> Problem:
    """The planning problem of `folded`, whose `analysis` is made if it is not given.

    Every node has a strategy; every strategy of an op computes the same as on one device. The arguments are not
    modified. Raises ConstraintError if a constraint leaves an op or parameter without any strategy, or if a node has
    none of its allowed methods.
    """
    analysis = analysis or analyze(folded)
    splits = find_splits(analysis, demands, setting)
    nodes = list(Nodes(analysis, demands, setting, splits, Sizes(folded.types, setting.mesh)).all())
    index = {node.key: number for number, node in enumerate(nodes)}
    edges, groups = connect(analysis, nodes, index, setting.reduce, setting.cluster.device.overlaps)
    counts, covers = _blocks(analysis, setting)
    return Problem(nodes, edges, groups, analysis.blocks, counts, index, covers, folded.alike)


def _blocks(analysis: Analysis, setting: Setting) -> tuple[list[int], list[Cover]]:
    """The number of times that each block runs, and its overlap budget."""
    counts = [1] * len(analysis.blocks)
    covers = [Cover()] * len(analysis.blocks)
    folded, devices, cluster = analysis.folded, setting.mesh.size, setting.cluster
    rules = folded.program.rules
    for number, region in enumerate(folded.regions):
        counts[2 * number + 1] = region.count
        covers[2 * number + 1] = cover(
            region.ops, folded.types, folded.flowing, rules, cluster, devices, region.count, analysis.fused
        )
    return counts, covers
