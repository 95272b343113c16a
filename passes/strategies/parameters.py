"""Nodes of parameters: the cost and memory of each stored layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.price import update_seconds
from passes.ir.choices import Node, StrategyBytes
from passes.ir.figures import as_float
from passes.ir.layout import Layout, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.strategies.analysis import Analysis
from passes.strategies.tensors import source


@dataclass(frozen=True)
class Upkeep:
    """Storage of a parameter: the optimizer keeps `states` tensors of its size. It is stored in the dtype `master`
    (None: its own)."""

    states: int
    master: torch.dtype | None

    def stored_bytes(self, type: TensorType, layout: Layout, mesh: Mesh) -> float:
        """The bytes of a parameter of this type on a device, without the optimizer's states."""
        return prod(local_shape(type.shape, layout, mesh)) * (self.master or type.dtype).itemsize


def blocks_of_parameters(known: Analysis) -> dict[str, int]:
    """The block of the first op that reads each parameter; unused parameters are absent."""
    found: dict[str, int] = {}
    for placed in known.placed:
        for name in placed.op.operands:
            if name in known.parameters:
                found.setdefault(name, placed.block)
    return found


def parameter_node(
    known: Analysis,
    name: str,
    layouts: Sequence[Layout],
    block: int | None,
    upkeep: Upkeep,
    cluster: Cluster,
    mesh: Mesh,
) -> Node:
    """The node of a parameter with the stored `layouts`, first read in `block` (None: never); the optimizer updates
    parameters that train and are read."""
    type, training = known.folded.types[name], known.parameters[name]
    sizes = [upkeep.stored_bytes(type, layout, mesh) for layout in layouts]
    count, updated = training.count, training.trainable and block is not None
    seconds = tuple(count * update_seconds(size, upkeep.states, cluster) if updated else 0.0 for size in sizes)
    memory = tuple(_memory(count * size, upkeep.states if updated else None) for size in sizes)
    return source(name, "parameter", layouts, seconds, memory, block or 0, count)


def _memory(size: float, states: int | None) -> StrategyBytes:
    """The memory of `size` bytes of a parameter with this many `states` and a gradient; None: with neither."""
    if states is None:
        return StrategyBytes(held=as_float(size))
    return StrategyBytes(held=as_float(size * (1 + states)), gradient=as_float(size))
