"""Outputs in the plan's layout: `DTensor`s that say in one sentence why they mix with no plain tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import without_subclasses
from passes.ir.errors import InputError

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


def planned_tensor(tensor: DTensor) -> DTensor:
    """`tensor` itself, as a `PlannedTensor`."""
    tensor.__class__ = PlannedTensor
    return tensor


def _as_dtensor(tensor: Tensor) -> DTensor:
    """The same values, on the same graph, as a plain `DTensor`."""
    with without_subclasses():
        plain = tensor.detach() if not tensor.requires_grad or tensor.is_leaf else tensor.view_as(tensor)
        if plain.is_leaf:
            plain.requires_grad_(tensor.requires_grad)
    assert isinstance(plain, DTensor)
    return plain
