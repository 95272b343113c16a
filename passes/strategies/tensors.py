"""Nodes of inputs, buffers, carried tensors, outputs and parameters: their layouts, and the cost and memory of each."""

from collections.abc import Mapping, Sequence
from math import prod

from passes.cost.price import update_seconds
from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.ir.constraints import Constraint
from passes.ir.errors import ConstraintError
from passes.ir.figures import as_float
from passes.ir.layout import I, Layout, Placement, R, S, Shape, digits, fits, is_storable, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Carry, Region
from passes.strategies.analysis import Analysis
from passes.strategies.constrained import indivisible
from passes.strategies.setting import Setting
from passes.strategies.sizes import Sizes


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
    found: dict[str, int] = {}
    for placed in analysis.placed:
        for name in placed.op.operands:
            if name in analysis.parameters:
                found.setdefault(name, placed.block)
    return found


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
            StrategyBytes(held=as_float(count * size * (1 + states)), gradient=as_float(count * size)) for size in sizes
        )
    return source(name, "parameter", layouts, seconds, memory, block or 0, count)
