"""Nodes of inputs, buffers, carried tensors and outputs: the cost and memory of each of their layouts."""

from collections.abc import Sequence

from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.ir.layout import Layout, Placement, R
from passes.ir.program import Carry, Region
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
