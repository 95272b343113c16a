"""Nodes of parameters: the cost and memory of each stored layout."""

from collections.abc import Sequence
from math import prod

from passes.cost.price import update_seconds
from passes.ir.choices import Node, StrategyBytes
from passes.ir.figures import as_float
from passes.ir.layout import Layout, local_shape
from passes.strategies.analysis import Analysis
from passes.strategies.setting import Setting
from passes.strategies.tensors import source


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
