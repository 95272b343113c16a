"""The private parts of `fully_shard` that the FSDP manager needs: gradients of gathered parameters, and recovery.

Read in torch 2.11 to 2.13 and 2.15 (torch/distributed/fsdp/_fully_shard). No other module touches these names.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.failures import naming_collectives

# No backward pass runs in this thread.
NO_BACKWARD = -1


class _ShardedParameter(Protocol):
    """The part of torch's `FSDPParam` that is used here.

    `_unsharded_param` is there from the first gather on. It takes gradients from autograd; where they are reduced in
    another dtype, those that are not reduced yet lie in `unsharded_accumulated_grad`. From torch 2.15 on they are those
    of `_unsharded_param`, in the dtype that they are accumulated in, and the other name is a property without a setter.
    """

    _unsharded_param: nn.Parameter
    unsharded_accumulated_grad: Tensor | None
    sharded_param: nn.Parameter

    def reset_sharded_param(self) -> None:
        """Take over the memory of `sharded_param`."""

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add the gradient of `_unsharded_param` to `unsharded_accumulated_grad`, if that is there."""

    def to_accumulated_grad_if_needed(self) -> None:
        """Move it there, if gradients are reduced in another dtype."""


@dataclass(frozen=True)
class GatheredParameter:
    """A parameter of a unit as it is gathered."""

    _sharded: _ShardedParameter

    def take_gradient(self) -> Tensor | None:
        """Remove and return the gradient that is not reduced, if there is one."""
        unsharded = getattr(self._sharded, "_unsharded_param", None)
        if unsharded is None:
            return None
        gradient = self._sharded.unsharded_accumulated_grad
        if gradient is None:
            gradient = unsharded.grad
        unsharded.grad = None
        if self._lies_apart:
            self._sharded.unsharded_accumulated_grad = None
        return cast(Tensor | None, gradient)

    def give_gradient(self, gradient: Tensor) -> None:
        """Let the next backward pass add to a gradient that is not reduced."""
        unsharded = self._sharded._unsharded_param
        if gradient.dtype == unsharded.dtype or not self._lies_apart:
            unsharded.grad = gradient
        else:
            self._sharded.unsharded_accumulated_grad = gradient

    def settle(self) -> None:
        """Add a gradient that autograd has accumulated outside of a backward pass of the unit to those in the dtype of
        the reduction, as `fully_shard` does at the end of such a pass."""
        if self._lies_apart and getattr(self._sharded, "_unsharded_param", None) is not None:
            self._sharded.accumulate_unsharded_grad_if_needed()
            self._sharded.to_accumulated_grad_if_needed()

    @property
    def _lies_apart(self) -> bool:
        """Whether gradients of another dtype than the parameter's have a place of their own."""
        return not isinstance(getattr(type(self._sharded), "unsharded_accumulated_grad", None), property)

    def store_in(self, part: Tensor) -> None:
        """Store this rank's part in the memory of `part`, which must be contiguous. It must not be gathered."""
        cast(DTensor, self._sharded.sharded_param)._local_tensor = part
        self._sharded.reset_sharded_param()

    def note_change(self) -> None:
        """Bump the version counter: a regathered parameter has other values, which torch hides from autograd."""
        unsharded = getattr(self._sharded, "_unsharded_param", None)
        if unsharded is not None:
            increment_version(unsharded)


_GATHERING = "gathering the parameters of an FSDP unit"
_REDUCING = "reducing the gradients of an FSDP unit"


class NamedParamGroup(FSDPParamGroup):
    """torch's parameters of one FSDP unit; raises RankFailedError where it cannot gather or reduce them.

    A unit gets it in place of its own class (`name_failures`): `fully_shard` has no argument for that. Autograd calls
    the methods from hooks, and nothing of autopar is between these and a plain `loss.backward()`. Their names are those
    of torch 2.11 to 2.15.
    """

    @naming_collectives(_GATHERING)
    def unshard(self, async_op: bool = False) -> None:
        """Start gathering the parameters."""
        super().unshard(async_op)

    @naming_collectives(_GATHERING)
    def wait_for_unshard(self) -> None:
        """Wait until they are gathered."""
        super().wait_for_unshard()

    @naming_collectives(_REDUCING)
    def post_backward(self, *args: object) -> None:
        """Reduce the gradients: on the axes that split the parameters, then on those that repeat them."""
        super().post_backward(*args)

    @naming_collectives(_REDUCING)
    def finalize_backward(self) -> None:
        """Wait for reductions."""
        super().finalize_backward()  # type: ignore[no-untyped-call]


def parameters_of(unit: nn.Module) -> list[GatheredParameter]:
    """The parameters of a unit in the order in which its module registers them."""
    names = list(unit._parameters)
    found = {item._module_info.param_name: item for group in _groups(unit) for item in group.fsdp_params}
    return [GatheredParameter(found[name]) for name in names]


def name_failures(unit: nn.Module) -> None:
    """Let the collectives of a unit raise RankFailedError where another rank has failed."""
    for group in _groups(unit):
        group.__class__ = NamedParamGroup


def allow_views(unit: type[nn.Module]) -> None:
    """Let units of this class return views without the warning that torch 2.13 gives.

    It warns of changes in place, which lose the hook that gathers parameters in the backward pass. Generated code has
    none, and what users get of a distributed module is a `DTensor`, or refuses such changes.
    """
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \(FSDP{unit.__name__}\) returned a view", UserWarning)


def reset(root: FSDPModule, units: Sequence[nn.Module]) -> None:
    """Reset units to the state between two steps, after an exception in a forward or backward pass.

    Gathered parameters and unreduced gradients are dropped. `reset_iter_state`, which torch 2.11 and 2.12 do not have,
    leaves the gradients: the next backward pass would add to them.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_by_hand(root)
    for unit in units:
        for parameter in parameters_of(unit):
            parameter.take_gradient()


def _reset_by_hand(root: FSDPModule) -> None:
    """Do what `reset_iter_state` of torch 2.13 does."""
    if torch.accelerator.is_available():
        # Collectives in flight may still write to the buffers that are dropped here.
        torch.accelerator.synchronize()
    state = root._get_fsdp_state()
    context, communication = state._state_ctx, state._comm_ctx
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    # Newer versions keep several reductions in flight.
    vars(communication).update(reduce_scatter_state=None, reduce_scatter_states=[], _last_post_reduce_events={})
    for inner in context.all_states:
        inner._training_state = TrainingState.IDLE
        for group in _groups_of_state(inner):
            work = None if group._all_gather_result is None else group._all_gather_result.all_gather_work
            if isinstance(work, dist.Work):
                work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()  # type: ignore[no-untyped-call]
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that the units of `root` have, outside of a backward pass, and wait for them.

    At the end of a backward pass torch does so with units that the pass has not reached.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def is_in_backward(root: FSDPModule) -> bool:
    """Whether torch has begun a backward pass and not finished it: it runs, or an exception has ended it."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def current_backward() -> int:
    """The number of the backward pass that runs in this thread, or `NO_BACKWARD`."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback()` when the current backward pass ends without an exception."""
    # What torch's DDP and FSDP use; there is no public name.
    Variable._execution_engine.queue_callback(callback)


def _groups(unit: nn.Module) -> Iterator[FSDPParamGroup]:
    return _groups_of_state(cast(FSDPModule, unit)._get_fsdp_state())


def _groups_of_state(
    state: "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
) -> Iterator[FSDPParamGroup]:
    """The groups of a state: several since torch 2.12, before that one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:
        yield state._fsdp_param_group
