"""Layouts as types of `spmd_types`, and back."""

import spmd_types as spmd
from torch import Tensor

from passes.ir.layout import I, Layout, Placement, R, digits, parse_placement
from passes.ir.mesh import Mesh

SpmdTypeError = spmd.SpmdTypeError
KINDS = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": spmd.V}
LETTERS = {spmd.R: R, spmd.I: I, spmd.P: parse_placement("P")}


def partition_spec(layout: Layout, dims: int, mesh: Mesh) -> tuple[spmd.PartitionSpec | None, dict[int, Placement]]:
    """The splits of a tensor with `dims` dims as a PartitionSpec, and by axis those that it cannot say."""
    entries: list[object] = []
    middle = {axis: placement for axis, placement in enumerate(layout) if placement.kind == "S"}
    for dim in range(dims):
        found: list[str] = []
        taken = 1
        for major, size, axis in digits(layout, dim, mesh):
            if major != taken:
                break
            taken *= size
            found.append(mesh.names[axis])
            del middle[axis]
        entries.append(None if not found else found[0] if len(found) == 1 else tuple(found))
    return (spmd.PartitionSpec(*entries) if any(entries) else None), middle


def annotate(tensor: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Give `tensor` the type of `layout`, or refine the type that it has."""
    spec, middle = partition_spec(layout, tensor.dim(), mesh)
    types = {name: KINDS[placement.kind] for name, placement in zip(mesh.names, layout, strict=True)}
    spmd.assert_type(tensor, types, spec)
    tensor.noted = middle  # type: ignore[attr-defined]
    return tensor


def layout_of(tensor: Tensor, mesh: Mesh) -> Layout:
    """The layout that the type of `tensor` says, and what is noted beside it.

    Raises SpmdTypeError where it is split and not known how.
    """
    spec = spmd.get_partition_spec(tensor)
    where: dict[int, Placement] = dict(getattr(tensor, "noted", {}))
    for dim, entry in enumerate(spec or ()):
        taken = 1
        for item in entry if isinstance(entry, tuple) else (entry,) if entry is not None else ():
            axis = _number(item, mesh)
            where[axis] = Placement("S", dim, taken)
            taken *= mesh.sizes[axis]
    placements = []
    for axis, name in enumerate(mesh.names):
        kind = spmd.maybe_get_axis_local_type(tensor, name)
        if kind is None:
            raise SpmdTypeError(f"a tensor of shape {tuple(tensor.shape)} has no type on {name}")
        if kind is spmd.V and axis not in where:
            raise SpmdTypeError(f"a tensor of shape {tuple(tensor.shape)} is split on {name}, but not known where")
        placements.append(where[axis] if kind is spmd.V else LETTERS[kind])
    return tuple(placements)


def _number(axis: object, mesh: Mesh) -> int:
    """The number of an axis of the current mesh."""
    names = spmd.current_mesh_all_names() or {}
    return next(number for number, name in enumerate(mesh.names) if names[name] == axis)


def is_located(tensor: Tensor) -> bool:
    """Whether for every axis that splits `tensor` its type says which dim."""
    spec = spmd.get_partition_spec(tensor)
    known = set() if spec is None else spec.axes_with_partition_spec()
    return all(kind is not spmd.V or axis in known for axis, kind in spmd.get_local_type(tensor).items())
