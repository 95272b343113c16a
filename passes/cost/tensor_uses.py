"""Uses of every tensor of a problem as arrays: its layouts under all strategies of its producer and consumers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.live_ranges import is_recomputed, layout_bytes
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Edge, EdgeGroup, Problem
from passes.ir.layout import I, Layout, Placement, R
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class TensorUses:
    """The uses of one tensor in one block.

    Strategy y of `producer` gives layout `sources[made[y]]`; strategy y of the consumer of `edges[i]` wants layout
    `targets[wanted[i][y]]`. Strategies that selective recompute recomputes have `sources` of their own (`rerun[a]`), as
    their results have other live ranges. For all pairs `[source, target]`, `same` says that source and target are the
    same tensor (R and I hold the same values), and `changes` counts the axes whose placement differs. `source_bytes`
    and `target_bytes` are those of all occurrences on one device; of symbolic sizes they are figures.
    """

    group: EdgeGroup
    producer: int
    edges: Sequence[Edge]
    sources: Sequence[Layout]
    rerun: Flags
    made: Integers
    targets: Sequence[Layout]
    wanted: Sequence[Integers]
    same: Flags
    changes: Integers
    source_bytes: Floats
    target_bytes: Floats


def find_tensor_uses(problem: Problem, mesh: Mesh) -> list[TensorUses]:
    """The uses of every tensor, in the order of the groups of `problem`."""
    by_group: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        by_group.setdefault(edge.group, []).append(edge)
    numbers: dict[Placement, int] = {R: 0, I: _WHOLE}
    return [_uses(problem, problem.groups[group], edges, mesh, numbers) for group, edges in sorted(by_group.items())]


# R and I have the lowest numbers, up to this one.
_WHOLE = 1


def _uses(
    problem: Problem, group: EdgeGroup, edges: Sequence[Edge], mesh: Mesh, numbers: dict[Placement, int]
) -> TensorUses:
    producer = edges[0].producer
    sources: dict[tuple[Layout, bool], int] = {}
    node = problem.nodes[producer]
    made = [(item.results[edges[0].result], is_recomputed(node, pick)) for pick, item in enumerate(node.strategies)]
    rows = np.array([sources.setdefault(each, len(sources)) for each in made])
    targets: dict[Layout, int] = {}
    wanted = [
        np.array(
            [
                targets.setdefault(item.operands[edge.operand], len(targets))
                for item in problem.nodes[edge.consumer].strategies
            ]
        )
        for edge in edges
    ]
    layouts = [layout for layout, _ in sources]
    # [source, axis, target]
    here = np.array([_numbered(layout, numbers) for layout in layouts])[:, :, None]
    there = np.array([_numbered(layout, numbers) for layout in targets]).T[None]
    return TensorUses(
        group,
        producer,
        edges,
        layouts,
        np.array([rerun for _, rerun in sources]),
        rows,
        tuple(targets),
        wanted,
        (np.maximum(here, _WHOLE) == np.maximum(there, _WHOLE)).all(axis=1),
        (here != there).sum(axis=1),
        np.array([layout_bytes(group, layout, mesh) for layout in layouts]),
        np.array([layout_bytes(group, layout, mesh) for layout in targets]),
    )


def _numbered(layout: Layout, numbers: dict[Placement, int]) -> list[int]:
    return [numbers.setdefault(placement, len(numbers)) for placement in layout]
