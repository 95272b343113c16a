"""Edges of the planning problem: the uses of each tensor, in groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from passes.ir.choices import Edge, EdgeGroup, Node
from passes.ir.exchanges import REDUCTION_BYTES, Sharing
from passes.rules.cheap import Cheap
from passes.strategies.analysis import Analysis, recompute_inputs, uses_viewed
from passes.strategies.nodes import carry_key


def connect(
    analysis: Analysis, nodes: Sequence[Node], index: dict[str, int], reduce: torch.dtype | None, overlaps: bool
) -> tuple[list[Edge], list[EdgeGroup]]:
    """The edges from the producer of each operand to every op, carry and output among `nodes`, and their groups.
    `index` finds nodes by their keys; gradients of parameters are reduced in the dtype `reduce` (None: as they are).
    Where collectives do not overlap computation, parameters that are read in one place are `joined`."""
    found = _Connections(analysis, nodes, index, reduce)
    found.ops()
    found.carries()
    found.outputs()
    return found.edges, found.groups if overlaps else share_collectives(found.groups)


def share_collectives(groups: Sequence[EdgeGroup]) -> list[EdgeGroup]:
    """`groups`, where the parameters of one block are gathered together, and the gradients of all parameters reduced in
    batches (`autopar.runtime.fsdp.reductions`), but for those of units that cast them."""
    parameters = [group for group in groups if group.parameter]
    in_block = Counter(group.block for group in parameters)
    reduced = [group for group in parameters if group.gradient and not _is_cast(group)]
    size = sum(group.count * prod(group.type.shape) * group.gradient_itemsize for group in reduced)
    in_batch = sum(group.count for group in reduced) // max(size // REDUCTION_BYTES, 1)

    def joined(group: EdgeGroup) -> Sharing:
        found = Sharing(max(in_batch, 1), in_block[group.block])
        return found.by_unit if _is_cast(group) else found

    return [replace(group, joined=joined(group)) if group.parameter else group for group in groups]


def _is_cast(group: EdgeGroup) -> bool:
    """Whether gradients of a parameter are reduced in another dtype than its own."""
    return group.gradient and group.gradient_itemsize != group.type.dtype.itemsize


@dataclass
class _Connections:
    analysis: Analysis
    nodes: Sequence[Node]
    index: dict[str, int]
    reduce: torch.dtype | None
    edges: list[Edge] = field(default_factory=list)
    groups: list[EdgeGroup] = field(default_factory=list)
    group_index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The node that makes a tensor, and which of its results it is.
        self.producers = {node.name: (number, 0) for number, node in enumerate(self.nodes) if node.kind != "output"}
        for placed in self.analysis.placed:
            number = self.index[placed.op.key]
            self.producers.update({name: (number, result) for result, name in enumerate(placed.op.results)})

    def ops(self) -> None:
        """Every operand of every op."""
        analysis = self.analysis
        inside = {
            name
            for region in analysis.folded.regions
            for name in (
                *(name for op in region.ops for name in op.results),
                *(carry.argument for carry in region.carries),
            )
        }
        again = {**analysis.cheap, **dict.fromkeys(analysis.second, Cheap.ALWAYS)}
        levels = (("selective", analysis.cheap), ("ops", again))
        regions = [
            [placed for placed in analysis.placed if placed.region is region] for region in analysis.folded.regions
        ]
        inputs = {
            level: [recompute_inputs(placed, analysis.saved, cheap) for placed in regions] for level, cheap in levels
        }
        kept, passed = (
            {level: set().union(*(uses[way] for uses in found)) for level, found in inputs.items()} for way in range(2)
        )
        viewed = uses_viewed(analysis.placed, analysis.saved, analysis.order.copied)
        for placed in analysis.placed:
            key, block = placed.op.key, placed.block
            consumer = self.index[key]
            own = {item.index for item in analysis.saved[key] if not item.result and not item.copy}
            for slot, name in enumerate(placed.op.operands):
                if name in analysis.parameters:
                    within = placed.region is not None
                    # A parameter that a copy reads several times stays gathered in between.
                    use = ("parameter", name, block) if within else ("use", consumer, slot)
                    group = self._group(use, name, placed.count, block, within)
                elif name in inside:
                    group = self._group(("inside", name), name, placed.count, block, True)
                else:
                    group = self._group(("outside", name), name, 1, block)
                stays = slot in own or (key, slot) in viewed
                needed = (
                    frozenset(level for level, uses in way.items() if (key, slot) in uses) for way in (kept, passed)
                )
                self._edge(name, consumer, slot, group, stays, *needed)

    def carries(self) -> None:
        """The edges to carried tensors: the initial value for the first copy of a region, and the result of the
        previous copy for the others."""
        for number, region in enumerate(self.analysis.folded.regions):
            block = 2 * number + 1
            for carry in region.carries:
                consumer = self.index[carry_key(region, carry)]
                if carry.initial in self.analysis.parameters:
                    group = self._group(("use", consumer, "initial"), carry.initial, 1, block - 1)
                else:
                    group = self._group(("outside", carry.initial), carry.initial, 1, block)
                self._edge(carry.initial, consumer, 0, group, False)
                group = self._group(("carry", carry.argument), carry.next, region.count - 1, block)
                self._edge(carry.next, consumer, 0, group, False)

    def outputs(self) -> None:
        """The edges to the outputs of the program."""
        for number, node in enumerate(self.nodes):
            if node.kind == "output":
                group = self._group(("output", node.name), node.name, node.count, node.block)
                self._edge(node.name, number, 0, group, False)

    def _group(self, key: tuple[object, ...], name: str, count: int, block: int, inside: bool = False) -> int:
        """The number of the group `key` of uses of the tensor `name`, which is created if it does not exist yet."""
        if key not in self.group_index:
            self.group_index[key] = len(self.groups)
            analysis = self.analysis
            type, parameter = analysis.folded.types[name], name in analysis.parameters
            itemsize = ((self.reduce if parameter else None) or type.dtype).itemsize
            flows, strided = name in analysis.folded.flowing, name in analysis.order.strided
            self.groups.append(EdgeGroup(name, type, count, block, flows, itemsize, parameter, strided, inside))
        return self.group_index[key]

    def _edge(
        self,
        name: str,
        consumer: int,
        slot: int,
        group: int,
        saved: bool,
        remade: frozenset[str] = frozenset(),
        passed: frozenset[str] = frozenset(),
    ) -> None:
        producer, result = self.producers[self.analysis.inside(name)]
        self.edges.append(Edge(producer, result, consumer, slot, group, saved, remade, passed))
