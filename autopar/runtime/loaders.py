"""Batches of which each rank has a part, as data loaders give them."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.runtime.generated import CompiledProgram
from autopar.runtime.inputs import check_names, check_tensor, is_like
from autopar.runtime.state import from_local, mesh_of
from passes.ir.layout import fits, local_shape, whole_shape
from passes.ir.leaves import input_leaves
from passes.ir.program import TensorType


def planned_parts(
    batch: Mapping[str, object], compiled: CompiledProgram, mesh: DeviceMesh, device: torch.device
) -> dict[str, object]:
    """`batch`, which holds this rank's parts in the planned layout, as `DTensor`s of the whole batch.

    Raises InputError for a part of another dtype or number of dims than planned, and for one that the layout cannot
    have.
    """
    shape_of_mesh = mesh_of(mesh)
    planned = {item.name: item for item in compiled.inputs}
    leaves = input_leaves(batch)
    check_names([name for name, _ in leaves], planned, compiled.constants)
    whole = []
    for name, leaf in leaves:
        item = planned.get(name)
        if item is None:
            whole.append(leaf)
            continue
        assert isinstance(leaf, Tensor)
        shape = whole_shape(tuple(leaf.shape), item.layout, shape_of_mesh)
        if not is_like(leaf, item.type) or not fits(shape, item.layout, shape_of_mesh):
            part = local_shape(item.type.shape, item.layout, shape_of_mesh)
            check_tensor(name, leaf, TensorType(part, item.type.dtype), "this rank's part of ")
        whole.append(from_local(leaf.to(device), item.layout, shape, mesh, shape_of_mesh))
    filled: dict[str, object] = pytree.tree_unflatten(whole, pytree.tree_structure(dict(batch)))
    return filled
