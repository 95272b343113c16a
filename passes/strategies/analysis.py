"""Analysis of a folded program: properties that building its planning problem needs, computed once. They are the blocks
of its ops, the tensors that autograd saves, and those that recompute needs instead. A planning problem has a setting
besides, on whose mesh tensors take bytes."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod

import torch

from passes.cost.cluster import Cluster, Device
from passes.cost.fusion import Fused, joined
from passes.cost.price import OpPrices, OpSeconds
from passes.cost.workspace import workspace
from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.ir.figures import as_float
from passes.ir.folded import Folded, Region, dependents
from passes.ir.layout import Layout, Placement, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType
from passes.ir.rule import Rule, Saved
from passes.rules import find_rule
from passes.rules.cheap import Cheap, how_cheap, is_cheap, is_view, second_products, with_viewed
from passes.rules.memory_order import MemoryOrder, memory_order
from passes.rules.parts import signature
from passes.rules.strategies import AllowedMethods, Choices, Digit, OpContext, op_context


@dataclass(frozen=True)
class Setting:
    """The machine, and the storage of parameters, their gradients and outputs on it.

    `optimizer_states` is the number of tensors of its size that the optimizer keeps per parameter, `update_tensors`
    that of those that it makes while it updates all parameters at once; `master` is the dtype that parameters are
    stored in (None: as they are), `reduce` the one that their gradients are reduced in. `allowed` are the allowed
    methods of nodes on each axis, by key; nodes without an entry are unrestricted. With `full_outputs` outputs are
    replicated, and used the same way on every rank. With `in_stripes` methods are offered in stripes too, on each
    axis by itself; `together` are numbers of ranks of several axes that may be in stripes together.
    """

    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    update_tensors: int = 0
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    allowed: Mapping[str, AllowedMethods] = field(default_factory=dict)
    full_outputs: bool = False
    in_stripes: bool = False
    together: tuple[int, ...] = ()

    def stripes(self, size: int) -> tuple[int, ...]:
        """The numbers of ranks that axes of `size` may be in stripes over, by themselves or with others."""
        return (*((size,) if self.in_stripes else ()), *(ranks for ranks in self.together if ranks % size == 0))


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors, which have their `types` by name, on one device of `mesh`. Results are cached."""

    types: Mapping[str, TensorType]
    mesh: Mesh
    _known: dict[tuple[str, Layout], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bytes(self, name: str, layout: Layout) -> float:
        """The bytes of a tensor in this layout on a device."""
        if (name, layout) not in self._known:
            type = self.types[name]
            self._known[name, layout] = as_float(prod(local_shape(type.shape, layout, self.mesh)) * type.dtype.itemsize)
        return self._known[name, layout]

    def total(self, names: Sequence[str], layouts: Sequence[Layout], among: Iterable[int] | None = None) -> float:
        """The bytes of these tensors together, or of those at the positions `among`."""
        slots = range(len(names)) if among is None else among
        return sum(self.bytes(names[slot], layouts[slot]) for slot in slots)

    def whole(self, name: str) -> float:
        """The bytes of a replicated tensor."""
        return as_float(self.types[name].bytes)


@dataclass(frozen=True)
class Placed:
    """An op, its block (0, 1, …: before, inside and after each region), and its number of runs."""

    op: Op
    rule: Rule | None
    block: int
    region: Region | None

    @property
    def count(self) -> int:
        """The number of times that it runs in a micro-batch."""
        return self.region.count if self.region else 1


def place(folded: Folded) -> tuple[list[Placed], list[str]]:
    """All ops with their blocks, and the names of the blocks."""
    placed: list[Placed] = []
    rules = folded.program.rules
    blocks = ["before"]
    for item in folded.items:
        if isinstance(item, Region):
            blocks += [item.name, f"after {item.name}"]
            placed += [Placed(op, find_rule(op, folded.types, rules), len(blocks) - 2, item) for op in item.ops]
        else:
            placed.append(Placed(item, find_rule(item, folded.types, rules), len(blocks) - 1, None))
    return placed, blocks


def saved_tensors(context: OpContext) -> list[Saved]:
    """The saved tensors of an op; of one without a rule all operands and results, to be safe."""
    if not context.flows:
        return []
    if context.rule is None:
        return [*map(Saved, range(len(context.operands))), Saved(0, result=True)]
    return [
        item
        for item in context.rule.saved
        if not item.needed_by or any(context.flowing_operands[slot] for slot in item.needed_by)
    ]


def passed_on(folded: Folded, placed: Sequence[Placed], copied: Collection[str]) -> set[str]:
    """The results of copies of regions, and the tensors that they view: were these not saved, the last copy would be
    recomputed from the first. Reshapes with a result in `copied` are no views."""
    given = {name for region in folded.regions for name in region.results}
    views = (
        (item.op.results, item.op.operands)
        for item in reversed(placed)
        if item.region and is_view(item.rule, item.op.results[0] in copied)
    )
    return with_viewed(given, views)


def uses_viewed(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], copied: Collection[str]
) -> set[tuple[str, int]]:
    """Uses (op, operand) by views whose result is saved, which keep the viewed tensor alive. Reshapes with a result in
    `copied` are no views."""
    found: set[tuple[str, int]] = set()
    kept: set[str] = set()
    for item in reversed(placed):
        op = item.op
        kept.update(op.operands[each.index] for each in saved[op.key] if not each.result and not each.copy)
        if is_viewing(item, copied) and not kept.isdisjoint(op.results):
            kept.add(op.operands[0])
            found.add((op.key, 0))
    return found


def is_viewing(item: Placed, copied: Collection[str]) -> bool:
    """Whether an op returns a view of its only operand."""
    return len(item.op.operands) == 1 and is_view(item.rule, item.op.results[0] in copied)


def recompute_inputs(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], cheap: Mapping[str, Cheap]
) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Uses (op, operand) of tensors that the backward pass of a region, whose ops are `placed`, needs to recompute its
    cheap ops: those that it keeps, and those that it recomputes, too. For a view it is the viewed tensor.

    `saved` are the saved tensors of each op, `cheap` says whether it is recomputed.
    """
    kept: set[tuple[str, int]] = set()
    recomputed: set[tuple[str, int]] = set()
    views = {item.op.results[0] for item in placed if is_view(item.rule, False)}
    # Recomputed tensors, and views of them, are not needed before.
    passed = views | {item.op.results[0] for item in placed if cheap[item.op.key] is Cheap.ALWAYS}
    wanted: set[str] = set()
    for item in reversed(placed):
        op, own = item.op, saved[item.op.key]
        may_run = cheap[op.key] is not Cheap.NEVER
        recomputes = may_run and any(each.result or each.copy for each in own)
        if recomputes or ((may_run or op.results[0] in views) and not wanted.isdisjoint(op.results)):
            wanted.update(op.operands)
            for slot, name in enumerate(op.operands):
                (recomputed if name in passed else kept).add((op.key, slot))
        wanted.update(op.operands[each.index] for each in own if not each.result)
    return kept, recomputed


@dataclass(frozen=True)
class Training:
    """Whether a parameter trains, and the number of parameters that its name stands for: one in each copy of a
    region."""

    trainable: bool
    count: int


@dataclass(frozen=True)
class Analysis:
    """A folded program and its properties.

    `placed` are its ops in order, `blocks` the names of the blocks that contain them. `parameters` and `constant`
    (buffers and constants) are by the names that ops use, so those of regions are among them; `names` maps the names of
    a region's parameters and buffers to their names in the program (of the first copy), `exported` those of tensors
    that are used outside of a region to their names inside. `depends` are the names of tensors that `dependents` gives,
    `order` is that of tensors in memory. By keys of ops: their contexts (`contexts`), their saved
    tensors (`saved`), and whether they are `cheap` to recompute. `second` are the keys of the products that recompute
    of "ops" recomputes, `fused` ops that are compiled together with others, by their first result. `same` maps the key
    of each op to that of the first one that does the same to tensors of the same types, in the same context.
    `propagated` caches the digits of ops and the splits of tensors, which are equal on all meshes with axes of a size.
    """

    folded: Folded
    placed: Sequence[Placed]
    blocks: Sequence[str]
    parameters: Mapping[str, Training]
    constant: Set[str]
    names: Mapping[str, str]
    exported: Mapping[str, str]
    depends: Set[str]
    order: MemoryOrder
    contexts: Mapping[str, OpContext]
    saved: Mapping[str, Sequence[Saved]]
    cheap: Mapping[str, Cheap]
    second: Set[str]
    fused: Mapping[str, Fused]
    same: Mapping[str, str]
    propagated: dict[Hashable, tuple[Mapping[str, Sequence[Digit]], Mapping[str, Set[Placement]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def inside(self, name: str) -> str:
        """The name of a tensor in the region or program that computes it."""
        return self.exported.get(name, name)


def analyze(folded: Folded) -> Analysis:
    """The analysis of `folded`."""
    placed, blocks = place(folded)
    parameters, constant = _owned(folded)
    order = memory_order(folded)
    contexts = {
        item.op.key: op_context(item.op, item.rule, folded.types, folded.flowing, parameters.keys(), order.copied)
        for item in placed
    }
    given = passed_on(folded, placed, order.copied)
    saved = {key: saved_tensors(context) for key, context in contexts.items()}
    fused = joined(folded)
    return Analysis(
        folded=folded,
        placed=placed,
        blocks=blocks,
        parameters=parameters,
        constant=constant,
        # A name that occurs in two regions belongs to the first.
        names={own: names[0] for region in reversed(folded.regions) for own, names in region.owned.items()},
        exported={
            name: export.value
            for region in folded.regions
            for export in region.exports
            for name in export.names
            if name
        },
        depends=dependents(folded),
        order=order,
        contexts=contexts,
        saved=saved,
        cheap={
            item.op.key: Cheap.NEVER
            if item.op.results[0] in given
            else how_cheap(item.op, item.rule, contexts[item.op.key].copies)
            for item in placed
        },
        second={
            key
            for region in folded.regions
            for key in second_products((item.op, item.rule) for item in placed if item.region is region)
            if contexts[key].op.results[0] not in given
        },
        fused=fused,
        same=_same_ops(folded, contexts, saved, fused),
    )


def _same_ops(
    folded: Folded,
    contexts: Mapping[str, OpContext],
    saved: Mapping[str, Sequence[Saved]],
    fused: Mapping[str, Fused],
) -> dict[str, str]:
    """For each op the key of the first one with the same arguments, types and rule, of whose tensors the same ones have
    gradients, are parameters, are saved and are fused."""
    first: dict[Hashable, list[str]] = {}
    found = {}
    for key, context in contexts.items():
        op = context.op
        types = context.operands, context.results, context.flowing_operands, context.flowing_results
        kept = context.parameters, context.copies, tuple(saved[key]), fused.get(op.results[0])
        alike = first.setdefault((signature(op, folded.types), *types, *kept), [])
        same = next((other for other in alike if contexts[other].rule == context.rule), key)
        if same == key:
            alike.append(key)
        found[key] = same
    return found


def _owned(folded: Folded) -> tuple[dict[str, Training], set[str]]:
    """The parameters, and the names of buffers and constants, of the program and of its regions."""
    program = folded.program
    parameters = {item.name: Training(item.trainable, 1) for item in program.parameters}
    constant = {item.name for item in program.buffers} | set(program.constants)
    for region in folded.regions:
        for own, names in region.owned.items():
            if names[0] in parameters:
                parameters[own] = Training(parameters[names[0]].trainable, region.count)
            else:
                constant.add(own)
    return parameters, constant


def is_negligible(context: OpContext, depends: Set[str], device: Device) -> bool:
    """Whether an op on positions or masks takes no longer than a kernel launch when it is not split, so that splitting
    gains nothing. `depends` are the tensors that depend on the batch or on a parameter."""
    if context.flows or any(name in depends for name in context.op.operands):
        return False
    touched = sum(type.bytes for type in (*context.operands, *context.results))
    return touched / device.bandwidth <= device.launch


@dataclass(frozen=True)
class OpCosts:
    """Costs of one run of an op under each of its `strategies`: `seconds`, bytes of `results`, of the `copies` that
    autograd saves, and of the workspace of the backward pass (`transient`); `saved` are the saved tensors. Ops that do
    the same (`Analysis.same`) and have the same strategies have the same costs."""

    saved: Sequence[Saved]
    strategies: Mapping[Strategy, Choices]
    seconds: Sequence[OpSeconds]
    results: Sequence[float]
    copies: Sequence[float]
    transient: Sequence[float]

    @cached_property
    def listed(self) -> tuple[Strategy, ...]:
        """The strategies in order."""
        return tuple(self.strategies)


def op_costs(
    analysis: Analysis, placed: Placed, strategies: Mapping[Strategy, Choices], sizes: Sizes, cluster: Cluster
) -> OpCosts:
    """The costs of an op with the given `strategies` and their choices on every axis."""
    op = placed.op
    context, saved = analysis.contexts[op.key], analysis.saved[op.key]
    prices = OpPrices(context, cluster, sizes.mesh, analysis.fused.get(op.results[0]))
    # Work and workspace depend on the splits of tensors alone: not on which whole ones have pending sums, say.
    splits = [tuple(choice.name if choice.factors else "" for choice in choices) for choices in strategies.values()]
    first = dict(zip(splits, strategies.items(), strict=True))
    seconds = {key: prices.seconds(choices, strategy) for key, (strategy, choices) in first.items()}
    needs = {
        key: workspace(context, choices, strategy, sizes.mesh, cluster.device.type)
        for key, (strategy, choices) in first.items()
    }
    copied = [item.index for item in saved if item.copy]
    copies = [sizes.total(op.operands, strategy.operands, copied) for strategy in strategies]
    return OpCosts(
        saved,
        strategies,
        [seconds[key] for key in splits],
        [sizes.total(op.results, strategy.results) for strategy in strategies],
        [size + needs[key][0] for size, key in zip(copies, splits, strict=True)],
        [needs[key][1] for key in splits],
    )


def op_node(analysis: Analysis, placed: Placed, costs: OpCosts) -> Node:
    """The node of an op with these costs."""
    op, count = placed.op, placed.count
    memory = {backward: StrategyBytes(transient=backward) for backward in costs.transient}
    forms = [tuple(choice.form for choice in choices) for choices in costs.strategies.values()]
    return Node(
        op.key,
        "op",
        op.results[0],
        count,
        placed.block,
        costs.listed,
        tuple(count * sum(each) for each in costs.seconds),
        tuple(memory[backward] for backward in costs.transient),
        any(item.result for item in costs.saved),
        tuple(count * size for size in costs.results),
        tuple(count * size for size in costs.copies),
        tuple(count * (each.forward + each.forward_communication) for each in costs.seconds),
        _light(analysis, placed, forms),
        analysis.cheap[op.key] is not Cheap.NEVER,
        op.key in analysis.second,
        is_viewing(placed, analysis.order.copied),
    )


def _light(analysis: Analysis, placed: Placed, forms: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
    """Whether selective recompute recomputes an op, for each of its strategies, by the local forms that it runs."""
    op = placed.op
    if analysis.cheap[op.key] is Cheap.NEVER:
        return (False,) * len(forms)
    is_light = cache(partial(is_cheap, op, placed.rule, analysis.contexts[op.key].copies))
    return tuple(is_light(each) for each in forms)
