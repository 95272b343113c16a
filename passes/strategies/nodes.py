"""The nodes of the planning problem: inputs, buffers, carries, ops, parameters and outputs.

Their strategies come from splits that are propagated through the program, and meet the constraints; errors say which
constraint no strategy meets. Every layout of a tensor has its cost and memory."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from passes.cost.price import update_seconds
from passes.ir.arguments import references
from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.ir.constraints import Constraint, PlacedConstraints
from passes.ir.errors import ConstraintError
from passes.ir.figures import as_float
from passes.ir.folded import Carry, Region
from passes.ir.grouping import grouped
from passes.ir.layout import I, Layout, Placement, R, S, Shape, digits, fits, is_dtensor, is_storable, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.rules.following import following, ranks_by_start
from passes.rules.propagation import propagate
from passes.rules.strategies import (
    AllowedMethods,
    Digit,
    OpContext,
    axes_for_stripes,
    combine,
    op_strategies,
    parse_choice,
    placement_token,
    replicated,
)
from passes.strategies.analysis import Analysis, OpCosts, Placed, Setting, Sizes, is_negligible, op_costs, op_node
from passes.strategies.reasons import indivisible, missing, withheld


def _demanded_methods(context: OpContext, demanded: Mapping[int, Constraint], mesh: Mesh) -> dict[int, str]:
    """The methods that constraints require by axis, in which axes that split a factor at one place take the digits that
    follow each other there."""
    return following(context.rule, {axis: demand.method for axis, demand in demanded.items()}, mesh.sizes)


def demanded_splits(
    placed: Sequence[Placed], demands: PlacedConstraints, names: Mapping[str, str], mesh: Mesh, size: int
) -> dict[str, list[Placement]]:
    """The splits of the tensors of ops that constraints require, by name, on axes of `size`, those of a method
    included. `names` maps names in a region to names in the program."""
    wanted: list[tuple[str, Mapping[int, Constraint]]] = []
    chosen: list[tuple[str, Placement]] = []
    for op, rule in ((item.op, item.rule) for item in placed):
        first = op.results[0]
        for axis, demand in demands.at("method", first).items():
            choice = parse_choice(demand.method, rule, len(op.operands), len(op.results), size)
            if choice is not None and mesh.sizes[axis] == size:
                chosen += zip((*op.operands, *op.results), (*choice.operands, *choice.results), strict=True)
        for slot, name in enumerate(op.operands):
            wanted += [(name, demands.at("in", first, str(slot))), (name, demands.at("used", names.get(name, name)))]
        wanted += [(name, demands.at("out", first, str(number))) for number, name in enumerate(op.results)]
    chosen += (
        (name, demand.placement)
        for name, by_axis in wanted
        for axis, demand in by_axis.items()
        if demand.placement is not None and mesh.sizes[axis] == size
    )
    return grouped((name, placement) for name, placement in chosen if placement.kind == "S")


def meeting(
    context: OpContext,
    strategies: list[Strategy],
    demands: PlacedConstraints,
    names: Mapping[str, str],
    mesh: Mesh,
    followed: dict[Constraint, dict[str, str]],
) -> list[Strategy]:
    """The strategies that meet the constraints on an op and on the parameters it uses.

    `names` maps names in a region to names in the program. A method that is required of a whole module applies to the
    ops that have it; `followed` records the methods that ops of the module have, with "", and the reason why one cannot
    use the method.
    Raises ConstraintError if no strategy is left.
    """
    op, first = context.op, context.op.results[0]

    def keep(demand: Constraint, met: Iterable[bool], reason: str) -> list[Strategy]:
        kept = [strategy for strategy, good in zip(strategies, met, strict=True) if good]
        if not kept:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, {demand.what} {demand.method} on axis {mesh.names[demand.axis]!r} "
                f"cannot be met at {op.key}: "
                f"{reason or 'no strategy has it together with the other constraints'}"
            )
        return kept

    def at(demand: Constraint, type: TensorType, name: str) -> str:
        reason = indivisible(demand.placement, type.shape, mesh, demand.axis)
        return reason and f"{name} of shape {list(type.shape)} cannot be split so, because {reason}"

    available = [{strategy.methods[axis] for strategy in strategies} for axis in mesh.dimensions]
    methods = _demanded_methods(context, demands.at("method", first), mesh)
    for axis, demand in demands.at("method", first).items():
        met = [strategy.methods[axis] == methods[axis] for strategy in strategies]
        strategies = keep(demand, met, missing(context, demand, available[axis], mesh))
    methods = _demanded_methods(context, demands.at("method within", first), mesh)
    for axis, demand in demands.at("method within", first).items():
        found = {strategy.methods[axis] for strategy in strategies}
        has = followed.setdefault(demand, {})
        has.update(dict.fromkeys(found, ""))
        if methods[axis] in found:
            has[demand.method] = ""
        elif reason := withheld(context, demand, mesh):
            has.setdefault(demand.method, f"{op.key} cannot use it, because {reason}")
        strategies = [strategy for strategy in strategies if strategy.methods[axis] == methods[axis]] or strategies
    for slot, name in enumerate(op.operands):
        wanted = {**demands.at("used", names.get(name, name)), **demands.at("in", first, str(slot))}
        for axis, demand in wanted.items():
            flows = context.flowing_operands[slot]
            met = [demand.is_met(strategy.operands[slot][axis], flows) for strategy in strategies]
            strategies = keep(demand, met, at(demand, context.operands[slot], names.get(name, name)))
    for number in range(len(op.results)):
        for axis, demand in demands.at("out", first, str(number)).items():
            flows = context.flowing_results[number]
            met = [demand.is_met(strategy.results[number][axis], flows) for strategy in strategies]
            strategies = keep(demand, met, at(demand, context.results[number], "its result"))
    return strategies


def refuse_unfollowed(followed: Mapping[Constraint, Mapping[str, str]], mesh: Mesh) -> None:
    """Raise ConstraintError if no op of a module has the method that a constraint requires of it."""
    for demand, methods in followed.items():
        known = ", ".join(sorted(name for name, reason in methods.items() if not reason))
        reason = methods.get(demand.method, f"no op of the module has that method; they have {known}")
        if reason:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, method {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
                f"met: {reason}"
            )


@dataclass(frozen=True)
class Splits:
    """The splits that axes of `mesh` can make: for every size of axis except 1 the `digits` of each op by its key, and
    the `placements` of each tensor by its name."""

    mesh: Mesh
    digits: Mapping[int, Mapping[str, Sequence[Digit]]]
    placements: Mapping[int, Mapping[str, Set[Placement]]]

    def layouts(
        self, name: str, shape: Shape, others: Sequence[Placement], allowed: AllowedMethods | None
    ) -> list[Layout]:
        """The layouts of a tensor of `shape` from `others` and its propagated splits, of those that divide and are
        among the `allowed` (None: all). Axes with the same split take its digits in mesh order, as those of ops do. An
        axis of size 1 has the first of `others`."""
        sizes = self.mesh.sizes
        options = [
            [*others, *sorted(self.placements[size].get(name, ()))] if size != 1 else list(others[:1]) for size in sizes
        ]
        options = [
            [placement for placement in placements if names is None or placement_token(placement) in names]
            for placements, names in zip(options, allowed or (None,) * len(sizes), strict=True)
        ]
        layouts = dict.fromkeys(_in_mesh_order(layout, self.mesh) for layout in product(*options))
        return [layout for layout in layouts if fits(shape, layout, self.mesh)]


def _in_mesh_order(layout: Layout, mesh: Mesh) -> Layout:
    """`layout` with the digits that follow each other in place of a split that several axes make."""
    taken: dict[Placement, int] = {}
    found = []
    for placement, size in zip(layout, mesh.sizes, strict=True):
        before = taken.get(placement, 1)
        found.append(S(placement.dim, placement.major * before) if placement.kind == "S" else placement)
        taken[placement] = before * size
    return tuple(found)


def find_splits(analysis: Analysis, demands: PlacedConstraints, setting: Setting) -> Splits:
    """All splits that ops have or constraints require, propagated. Tensors that a region carries or exports have the
    same splits inside and outside, and those of equal layers have the same."""
    mesh = setting.mesh
    same: list[tuple[str, ...]] = []
    for region in analysis.folded.regions:
        same += [(carry.argument, carry.initial, carry.next) for carry in region.carries]
        same += [(export.value, *(name for name in export.names if name)) for export in region.exports]
    alike = analysis.folded.alike
    first = {placed.op.key: placed for placed in analysis.placed if placed.op.key not in alike}
    ops = [placed.op for placed in analysis.placed]
    for op in (op for op in ops if op.key in alike):
        other = first[alike[op.key]].op
        same += zip((*other.operands, *other.results), (*op.operands, *op.results), strict=True)
    digits: dict[int, Mapping[str, Sequence[Digit]]] = {}
    placements: dict[int, Mapping[str, Set[Placement]]] = {}
    for size in set(mesh.sizes) - {1}:
        required = demanded_splits(analysis.placed, demands, analysis.names, mesh, size)
        stripes = setting.stripes(size)
        known = (size, stripes, tuple((name, tuple(some)) for name, some in required.items()))
        if known not in analysis.propagated:
            found, spread = propagate(
                [(item.op, item.rule) for item in first.values()], same, required, size, stripes_over=stripes
            )
            own = dict(zip(first, found, strict=True))
            analysis.propagated[known] = {op.key: own[alike.get(op.key, op.key)] for op in ops}, spread
        digits[size], placements[size] = analysis.propagated[known]
    return Splits(mesh, digits, placements)


def source(
    name: str,
    kind: str,
    layouts: Sequence[Layout],
    seconds: tuple[float, ...],
    memory: tuple[StrategyBytes, ...],
    block: int = 0,
    count: int = 1,
) -> Node:
    """The node of a tensor that exists from the start, with its cost in each of `layouts`."""
    strategies = tuple(Strategy(_methods(layout), (), (layout,)) for layout in layouts)
    return Node(name, kind, name, count, block, strategies, seconds, memory)


def input_node(name: str, layouts: Sequence[Layout], whole: Placement, sizes: Sizes, host: float) -> Node:
    """The node of an input, of which each device loads its part at `host` bytes per second. An axis that does not split
    it has the placement `whole`."""
    seconds = tuple(sizes.bytes(name, layout) / host for layout in layouts)
    # The caller holds the whole batch, in addition to this rank's part of it.
    batch, split = sizes.whole(name), [set(layout) - {whole} for layout in layouts]
    memory = tuple(
        StrategyBytes(held=batch + (sizes.bytes(name, layout) if parts else 0.0))
        for layout, parts in zip(layouts, split, strict=True)
    )
    return source(name, "input", layouts, seconds, memory)


def buffer_node(name: str, sizes: Sizes) -> Node:
    """The node of a buffer or constant, which is replicated."""
    layout = (R,) * len(sizes.mesh.sizes)
    return source(name, "buffer", [layout], (0.0,), (StrategyBytes(held=sizes.whole(name)),))


def carry_key(region: Region, carry: Carry) -> str:
    """The key in plans of a tensor that copies of a region hand on."""
    return f"{region.name}/carry" + (f".{carry.argument[7:]}" if len(region.carries) > 1 else "")


def carry_node(region: Region, carry: Carry, block: int, layouts: Sequence[Layout], sizes: Sizes) -> Node:
    """The node of a tensor that copies of a region hand on, which has the same layout between all of them."""
    return Node(
        carry_key(region, carry),
        "carry",
        carry.argument,
        region.count,
        block,
        tuple(Strategy(_methods(layout), (layout,), (layout,)) for layout in layouts),
        (0.0,) * len(layouts),
        (StrategyBytes(),) * len(layouts),
        results=tuple(region.count * sizes.bytes(carry.argument, layout) for layout in layouts),
    )


def output_node(key: str, name: str, layouts: Sequence[Layout], count: int, block: int, sizes: Sizes) -> Node:
    """The node of a tensor that leaves the program `count` times."""
    strategies = tuple(Strategy(_methods(layout), (layout,), ()) for layout in layouts)
    memory = tuple(StrategyBytes(held=count * sizes.bytes(name, layout)) for layout in layouts)
    return Node(key, "output", name, count, block, strategies, (0.0,) * len(layouts), memory)


def _methods(layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, layout))


def storage(name: str, shape: Shape, trainable: bool, demanded: Mapping[int, Constraint], mesh: Mesh) -> list[Layout]:
    """The layouts in which the parameter `name` can be stored: all that torch stores exactly and that meet the
    constraints `demanded` on axes.

    Ops can use it in other layouts, for example a part of each of several fused projections (`S(0, 3)`), after a
    redistribution.

    Raises ConstraintError if no layout is left.
    """
    whole = I if trainable else R
    wanted = {axis: _wanted(demand, whole) for axis, demand in demanded.items()}
    # An axis of one rank splits only what constraints require.
    base = tuple(wanted.get(axis, whole) if size == 1 else whole for axis, size in enumerate(mesh.sizes))
    found: dict[Layout, None] = {}
    if fits(shape, base, mesh):
        _split_further(base, shape, mesh, found)
    layouts = [
        layout
        for layout in found
        if is_storable(layout, mesh) and all(layout[axis] == placement for axis, placement in wanted.items())
    ]
    if not layouts:
        raise _unmet(name, shape, demanded, base, mesh)
    return layouts


def _wanted(demand: Constraint, whole: Placement) -> Placement:
    """The stored placement that a constraint requires: R and I both mean replicated."""
    assert demand.placement is not None, "only demands of a method have no placement"
    return demand.placement if demand.placement.kind == "S" else whole


def _split_further(base: Layout, shape: Shape, mesh: Mesh, found: dict[Layout, None]) -> None:
    """Add to `found` the layout `base`, and its refinements in which further axes split the least significant part of
    some dim."""
    if base in found:
        return
    found[base] = None
    for axis, placement in enumerate(base):
        if placement.kind == "S" or mesh.sizes[axis] == 1:
            continue
        for dim in range(len(shape)):
            taken = digits(base, dim, mesh)
            major = taken[-1][0] * taken[-1][1] if taken else 1
            layout = (*base[:axis], S(dim, major), *base[axis + 1 :])
            if fits(shape, layout, mesh):
                _split_further(layout, shape, mesh, found)


def _unmet(name: str, shape: Shape, demanded: Mapping[int, Constraint], base: Layout, mesh: Mesh) -> ConstraintError:
    """The error for constraints that no storable layout of the parameter meets."""
    reasons = {demand: indivisible(demand.placement, shape, mesh, demand.axis) for demand in demanded.values()}
    for demand in demanded.values():
        placement, axis = demand.placement, demand.axis
        if placement is not None and placement.kind == "S" and placement.major > 1 and not reasons[demand]:
            reasons[demand] = (
                _strided(placement) if fits(shape, (*base[:axis], placement, *base[axis + 1 :]), mesh) else ""
            )
    demand = next((item for item, reason in reasons.items() if reason), next(iter(reasons)))
    return ConstraintError(
        f"constraint {demand.pattern!r}, stored {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
        f"met for {name} of shape {list(shape)}: {reasons[demand] or 'the split collides with another'}"
    )


def _strided(placement: Placement) -> str:
    """The reason why a parameter is not stored in a split that begins in the middle of a dim."""
    return (
        f"a rank's part would be {placement.major} blocks of the whole, and torch.distributed.checkpoint saves and "
        f"loads one; demand 'used' {placement} instead, or let other axes split dim {placement.dim} into "
        f"{placement.major} parts first"
    )


def blocks_of_parameters(analysis: Analysis) -> dict[str, int]:
    """The block of the first op that reads each parameter; unused parameters are absent."""
    reads = ((name, placed.block) for placed in reversed(analysis.placed) for name in placed.op.operands)
    return {name: block for name, block in reads if name in analysis.parameters}


def parameter_node(
    analysis: Analysis, name: str, layouts: Sequence[Layout], block: int | None, setting: Setting
) -> Node:
    """The node of a parameter with the stored `layouts`, first read in `block` (None: never); the optimizer updates
    parameters that train and are read."""
    type, training = analysis.folded.types[name], analysis.parameters[name]
    count, states = training.count, setting.optimizer_states
    itemsize = (setting.master or type.dtype).itemsize
    sizes = [prod(local_shape(type.shape, layout, setting.mesh)) * itemsize for layout in layouts]
    if not training.trainable or block is None:
        seconds = (0.0,) * len(sizes)
        memory = tuple(StrategyBytes(held=as_float(count * size)) for size in sizes)
    else:
        seconds = tuple(count * update_seconds(size, states, setting.cluster) for size in sizes)
        memory = tuple(
            StrategyBytes(
                held=as_float(count * size * (1 + states)),
                gradient=as_float(count * size),
                update=as_float(count * size * setting.update_tensors),
            )
            for size in sizes
        )
    return source(name, "parameter", layouts, seconds, memory, block or 0, count)


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
        followed: dict[Constraint, dict[str, str]] = {}
        known: dict[Hashable, OpCosts] = {}
        for placed in self.analysis.placed:
            yield op_node(self.analysis, placed, self._costs(placed, known, followed))
        refuse_unfollowed(followed, self.setting.mesh)

    def _costs(
        self, placed: Placed, known: dict[Hashable, OpCosts], followed: dict[Constraint, dict[str, str]]
    ) -> OpCosts:
        """The strategies of one op with their costs; those of ops that do the same are `known`."""
        analysis, mesh, setting, key = self.analysis, self.setting.mesh, self.setting, placed.op.key
        context, allowed = analysis.contexts[key], setting.allowed.get(key)
        if is_negligible(context, analysis.depends, setting.cluster.device):
            whole = (replicated(len(context.operands), len(context.results), R),) * len(mesh.sizes)
            return op_costs(analysis, placed, {combine(context, whole): whole}, self.sizes, setting.cluster)
        digits = {size: splits[key] for size, splits in self.splits.digits.items()}
        basis = (
            analysis.same[key],
            tuple(tuple(own) for own in digits.values()),
            None if allowed is None else tuple(None if names is None else frozenset(names) for names in allowed),
        )
        like = known.get(basis)
        found = op_strategies(context, digits, mesh, allowed) if like is None else like.strategies
        met = meeting(context, list(found), self.demands, analysis.names, mesh, followed)
        if setting.together:
            met = [each for each in met if self._has_whole_stripes(context, each)] or met
        if like is not None and len(met) == len(found):
            return like
        costs = op_costs(analysis, placed, {strategy: found[strategy] for strategy in met}, self.sizes, setting.cluster)
        if len(met) == len(found):
            known[basis] = costs
        return costs

    def _has_whole_stripes(self, context: OpContext, strategy: Strategy) -> bool:
        """Whether what an op has in stripes is so over all ranks that these are offered for together."""
        rule, sizes = context.rule, self.setting.mesh.sizes
        own = [] if rule is None else [each for each in rule.joint.values() if each.in_stripes]
        if rule is None or not own:
            return True
        size = rule.factors[own[0].factors[0]].size
        starts = ranks_by_start(strategy.methods, sizes, axes_for_stripes(rule, strategy.methods))
        return all(
            size // start not in self.setting.together or start * ranks == size for start, ranks in starts.items()
        )

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
        leaves = zip(program.output_names, program.outputs, strict=True)
        wanted = grouped((self.analysis.inside(name), label) for label, value in leaves for name in references(value))
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
