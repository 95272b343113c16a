"""Outputs of a program as the model returns them."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.calls.planned_tensor import planned_tensor
from autopar.runtime.generated.bases import GeneratedProgram, PlannedOutput
from autopar.runtime.state import from_local, mesh_of
from passes._torch import pytree
from passes.ir.mesh import Mesh


def output_of(program: GeneratedProgram, leaves: Sequence[object], mesh: DeviceMesh, *, whole: bool) -> object:
    """The model's output, from this rank's parts of its leaves: scalars as plain tensors, others as `DTensor`, or, with
    `whole`, as plain tensors too."""
    shape = mesh_of(mesh)
    outputs = [_at_surface(leaf, item, mesh, shape, whole) for leaf, item in zip(leaves, program.outputs, strict=True)]
    return pytree.tree_unflatten(outputs, program.output_tree)


def _at_surface(leaf: object, item: PlannedOutput, mesh: DeviceMesh, shape: Mesh, whole: bool) -> object:
    if not isinstance(leaf, Tensor) or item.layout is None or not item.shape:
        return leaf
    if whole and not any(placement.kind == "S" for placement in item.layout):
        return leaf
    distributed = from_local(leaf, item.layout, item.shape, mesh, shape)
    return distributed.full_tensor() if whole else planned_tensor(distributed)


def loss_of(output: object) -> Tensor | None:
    """The loss in an output: the entry of that name, or the only scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None
