"""The kernels that run, counted by the ops of a trace."""

from math import prod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes._torch import TorchDispatchMode

# Ops that launch nothing worth a count: memory that is not written, views, and questions about dtypes.
_FREE = ("empty_like", "new_empty", "new_zeros", "_unsafe_view", "promote_types")


class Kernels(TorchDispatchMode):
    """Counts the kernels of attention, and the others with the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others, self.bytes, self.attention = 0, 0, 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        found = func(*args, **(kwargs or {}))  # type: ignore[arg-type]
        returns = func._schema.returns
        is_view = any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
        if "attention" in func._opname:
            self.attention += 1
        elif not is_view and func._opname not in _FREE:
            self.others += 1
            self.bytes += sum(map(_bytes, pytree.tree_leaves((args, kwargs, found))))
        return found


def _bytes(value: object) -> int:
    """The bytes of a tensor, of dims that are not expanded."""
    if not isinstance(value, Tensor):
        return 0
    kept = (size for size, step in zip(value.shape, value.stride(), strict=True) if step or size == 1)
    return prod(kept) * value.dtype.itemsize
