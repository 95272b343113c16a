"""The collectives of `fully_shard`, whose failures name what happened also in a plain `loss.backward()`."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.failures import naming_collectives


class NamedAllGather:
    """Gathers the parameters of an FSDP unit; raises RankFailedError where that fails."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks of `group` into `output_tensor`."""
        with naming_collectives("gathering the parameters of an FSDP unit"):
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class NamedReduceScatter:
    """Reduces the gradients of an FSDP unit; raises RankFailedError where that fails."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients of all ranks."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` over `group`; each rank gets its part in `output_tensor`."""
        with naming_collectives("reducing the gradients of an FSDP unit"):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# torch 2.13 renamed them, and warns at each call of the old names.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
