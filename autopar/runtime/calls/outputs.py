"""Outputs of a program as the model returns them.

In the plan's layout they are `DTensor`s, which say in one sentence why they mix with no plain tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import without_subclasses
from autopar.runtime.generated.bases import GeneratedProgram, PlannedOutput
from autopar.runtime.state import from_local, mesh_of
from passes._torch import pytree
from passes.ir.errors import InputError
from passes.ir.mesh import Mesh

# Part of the message of torch's RuntimeError, in all versions from 2.11 to 2.13.
_MIXED = "mixed torch.Tensor and DTensor"


class PlannedTensor(DTensor):
    """An output of a distributed module, or a result computed from one: a `DTensor` with a clearer error message where
    it is mixed with a plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an op as on a `DTensor`."""
        try:
            with without_subclasses():
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise InputError(
                "an output of the distributed module is a DTensor in the plan's layout, and meets a plain tensor: plan "
                "the loss with it (loss=), ask for whole outputs (outputs='full'), or call .full_tensor() on it"
            ) from None
        for item in result if isinstance(result, tuple | list) else (result,):
            # In-place ops return their argument, whose class stays.
            if type(item) is DTensor and not any(item is given for given in args):
                item.__class__ = PlannedTensor
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        """A copy as a `DTensor`."""
        copied: DTensor = _as_dtensor(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Pickled as a `DTensor`, which `torch.load` knows."""
        reduced: str | tuple[object, ...] = _as_dtensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return reduced


def _as_dtensor(tensor: Tensor) -> DTensor:
    """The same values, on the same graph, as a plain `DTensor`."""
    with without_subclasses():
        plain = tensor.detach() if not tensor.requires_grad or tensor.is_leaf else tensor.view_as(tensor)
        if plain.is_leaf:
            plain.requires_grad_(tensor.requires_grad)
    assert isinstance(plain, DTensor)
    return plain


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
    if whole:
        return distributed.full_tensor()
    distributed.__class__ = PlannedTensor
    return distributed


def loss_of(output: object) -> Tensor | None:
    """The loss in an output: the entry of that name, or the only scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None
