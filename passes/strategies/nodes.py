"""The nodes of the planning problem: inputs, buffers, carries, ops, parameters and outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from passes.ir.choices import Node
from passes.ir.constraints import Constraint, PlacedConstraints
from passes.ir.errors import ConstraintError
from passes.ir.layout import I, Layout, Placement, R, is_dtensor
from passes.ir.program import references
from passes.rules.rule import replicated
from passes.rules.strategies import combine, op_strategies
from passes.strategies.analysis import Analysis, Placed
from passes.strategies.constrained import meeting, refuse_unfollowed
from passes.strategies.operations import OpCosts, is_negligible, op_costs, op_node
from passes.strategies.setting import Setting
from passes.strategies.sizes import Sizes
from passes.strategies.splits import Splits
from passes.strategies.tensors import (
    blocks_of_parameters,
    buffer_node,
    carry_key,
    carry_node,
    input_node,
    output_node,
    parameter_node,
    storage,
)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a program's problem, by kind, each with its strategies.

    `analysis` is that of the program, `splits` has the splits of its ops and tensors, `sizes` their bytes.
    """

    analysis: Analysis
    demands: PlacedConstraints
    setting: Setting
    splits: Splits
    sizes: Sizes

    def all(self) -> Iterator[Node]:
        """Every node of the problem.

        Raises ConstraintError for a node that has none of its allowed methods.
        """
        kinds = (self.inputs(), self.buffers(), self.carries(), self.ops(), self.parameters(), self.outputs())
        for node in chain.from_iterable(kinds):
            if not node.strategies and node.key in self.setting.allowed:
                raise ConstraintError(f"{node.key} has no strategy with the methods that it is allowed")
            if not node.strategies:
                raise AssertionError(f"{node.key} has no strategy")
            yield node

    def inputs(self) -> Iterator[Node]:
        """Inputs can have any layout that DTensor can express; each rank must be given the part that it needs."""
        for item in self.analysis.folded.program.inputs:
            layouts = self._expressible(item.name, item.name)
            yield input_node(item.name, layouts, self._whole(item.name), self.sizes, self.setting.cluster.host)

    def buffers(self) -> Iterator[Node]:
        """Buffers and constants are replicated."""
        return (buffer_node(name, self.sizes) for name in sorted(self.analysis.constant))

    def carries(self) -> Iterator[Node]:
        """Tensors that copies of regions hand on can have any layout, with or without pending sums in the gradient."""
        for number, region in enumerate(self.analysis.folded.regions):
            for carry in region.carries:
                placements = [I, R] if carry.argument in self.analysis.folded.flowing else [R]
                layouts = self._layouts(carry.argument, placements, carry_key(region, carry))
                yield carry_node(region, carry, 2 * number + 1, layouts, self.sizes)

    def ops(self) -> Iterator[Node]:
        """Ops have the strategies that their rules allow and that meet the constraints."""
        followed: dict[Constraint, set[str]] = {}
        first: dict[str, OpCosts] = {}
        for placed in self.analysis.placed:
            key = self.analysis.folded.alike.get(placed.op.key, placed.op.key)
            costs = self._costs(placed, first.get(key), followed)
            first.setdefault(key, costs)
            yield op_node(self.analysis, placed, costs)
        refuse_unfollowed(followed, self.setting.mesh)

    def _costs(self, placed: Placed, like: OpCosts | None, followed: dict[Constraint, set[str]]) -> OpCosts:
        """The strategies of one op with their costs: those of the op `like` it in an equal layer, where these hold for
        it."""
        analysis, mesh, setting, key = self.analysis, self.setting.mesh, self.setting, placed.op.key
        context, allowed = analysis.contexts[key], setting.allowed.get(key)
        if is_negligible(context, analysis.depends, setting.cluster.device):
            whole = (replicated(len(context.operands), len(context.results), R),) * len(mesh.sizes)
            return op_costs(analysis, placed, {combine(context, whole): whole}, self.sizes, setting.cluster)
        if like is not None and not (
            like.are_of(analysis, placed) and setting.allowed.get(like.context.op.key) == allowed
        ):
            like = None
        found = like.strategies if like else op_strategies(context, self.splits.of_op(key), mesh, allowed)
        met = meeting(context, list(found), self.demands, analysis.names, mesh, followed)
        if like is not None and len(met) == len(found):
            return like
        return op_costs(analysis, placed, {strategy: found[strategy] for strategy in met}, self.sizes, setting.cluster)

    def parameters(self) -> Iterator[Node]:
        """Parameters can be stored in any layout that torch stores exactly, independent of the layouts in which ops use
        them."""
        analysis, setting = self.analysis, self.setting
        blocks = blocks_of_parameters(analysis)
        owned = {name for region in analysis.folded.regions for names in region.owned.values() for name in names}
        for name, training in analysis.parameters.items():
            if name in owned:
                continue
            demanded = self.demands.at("stored", analysis.names.get(name, name))
            layouts = storage(name, analysis.folded.types[name].shape, training.trainable, demanded, setting.mesh)
            yield parameter_node(analysis, name, layouts, blocks.get(name), setting)

    def outputs(self) -> Iterator[Node]:
        """The outputs of the program, and the new values of buffers, which are replicated."""
        program, last = self.analysis.folded.program, len(self.analysis.blocks) - 1
        wanted: dict[str, list[str]] = {}
        for label, value in zip(program.output_names, program.outputs, strict=True):
            for name in references(value):
                wanted.setdefault(self.analysis.inside(name), []).append(label)
        for name, labels in wanted.items():
            key = f"output {labels[0]}"
            layouts = [self._same(name)] if self.setting.full_outputs else self._expressible(name, key)
            yield output_node(key, name, layouts, len(labels), last, self.sizes)
        for update in program.updates:
            name = self.analysis.inside(update.value)
            yield output_node(f"update {update.buffer}", name, [self._same(name)], 1, last, self.sizes)

    def _same(self, name: str) -> Layout:
        """The layout of a tensor that all ranks have whole, and use the same way."""
        return (self._whole(name),) * len(self.setting.mesh.sizes)

    def _whole(self, name: str) -> Placement:
        """The placement of an axis that does not split a tensor, over which it is replicated."""
        return I if name in self.analysis.folded.flowing else R

    def _layouts(self, name: str, others: Sequence[Placement], key: str) -> list[Layout]:
        """The layouts of a tensor from `others` and its splits, restricted to the allowed methods of the node `key`."""
        return self.splits.layouts(name, self.analysis.folded.types[name].shape, others, self.setting.allowed.get(key))

    def _expressible(self, name: str, key: str) -> list[Layout]:
        """The layouts of a tensor, replicated or split, that DTensor can express."""
        layouts = self._layouts(name, [self._whole(name)], key)
        return [layout for layout in layouts if is_dtensor(layout, self.setting.mesh)]
