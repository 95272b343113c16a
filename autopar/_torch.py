"""Private names of torch: the runtime uses them from here, and what the compiler needs too from `passes/_torch.py`.

Every function says what it is for and why no public name serves. All were run with torch 2.11, 2.13 and 2.15
(`tests/autopar/test_torch.py` holds each to what is expected of it). The internals of `fully_shard` have a door of
their own, `autopar/runtime/fsdp/_torch.py`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# It registers the operators `torch.ops._c10d_functional`.
import torch.distributed._functional_collectives
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.pipelining.schedules import _batch_p2p
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules import module as _modules

# REGISTRY_KEY, STATE_KEY: the attributes in which `fully_shard` and its like enter themselves before anything else; it
#   is the only place where they can be refused before they change the module.
# Store: the type of what `default_store` returns.
# DTensorSpec: shape, placements and mesh of a `DTensor` in one object, from which one can be made without checks.
# StridedShard: a part of a dim that another axis of the mesh splits first; `Shard` alone cannot say it.
# local_shape_and_offset: the shape and the offset of a rank's part, as `torch.distributed.checkpoint` computes them.
__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "EFFICIENT_ATTENTION_BACKWARD",
    "FLASH_ATTENTION_BACKWARD",
    "PRELOADED",
    "REGISTRY_KEY",
    "STATE_KEY",
    "DTensorSpec",
    "Store",
    "StridedShard",
    "as_distributed",
    "backend_name",
    "backward_hooks",
    "call_hooks",
    "collectives",
    "default_store",
    "global_backward_hooks",
    "group_timeout",
    "has_hooks",
    "is_computed_in_backward",
    "local_shape_and_offset",
    "local_tensor",
    "named_group",
    "parts_of",
    "parts_of_flat",
    "pickled_state",
    "post_accumulate_hooks",
    "reducing_over_parameters",
    "set_group_timeout",
    "share_tables",
    "spec_of",
    "start_messages",
    "state_asked",
    "tensor_hooks",
    "without_subclasses",
]

_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
# Frames between a function that takes parameters and a module's own: `parameters()`, and constructors of optimizers.
_FRAMES_TO_PARAMETERS = 4
# Functions that take the norm of all parameters, of torch and of libraries around it.
_NORMS = ("clip_grad_norm_", "clip_grad_norm", "_get_total_norm", "get_total_norm")

# The fused kernel of attention of a CPU, and the backward passes of those of both devices: attention that is computed
# in blocks needs the log-sum-exp of each row, which `scaled_dot_product_attention` does not return.
CPU_ATTENTION: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ATTENTION_BACKWARD: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION_BACKWARD: OpOverload = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

# Methods that torch calls by these names, which autopar overrides where they stand.
OVERRIDDEN = {
    "_apply": "converts a module, for `to`, `half`, `cuda` and all their kin",
    "_load_from_state_dict": "loads one module's own tensors, whichever module `load_state_dict` was called on",
    "_torchdynamo_orig_callable": "the first attribute that `torch.compile` asks a module for",
}

# Modules that take seconds to import, and that `torch.export` and `DTensor` import at their first use.
PRELOADED = ("torch._dynamo", "torch._functorch.aot_autograd", "torch.export._trace")

# The collectives of `torch.compile`, as operators: they take groups by name and return at once; `wait_tensor` waits.
# Those of `torch.distributed` change their arguments, which autograd does not see and a graph cannot reorder.
collectives = torch.ops._c10d_functional

# A context in which subclasses of Tensor are plain tensors; torch's documentation of subclasses uses it by this name.
without_subclasses = torch._C.DisableTorchFunctionSubclass


# --- DTensor ---------------------------------------------------------------------------------------------------------


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor that a `DTensor` holds on this rank: the same object each time, without a node of autograd.

    `to_local` returns a new view each time, in 10 us; `fully_shard` reads this attribute too.
    """
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def spec_of(tensor: Tensor) -> DTensorSpec:
    """The shape and layout of a `DTensor`. torch replaces specs and never changes them: `fully_shard` gives parameters
    and their gradients one object too."""
    assert isinstance(tensor, DTensor)
    return tensor._spec


def as_distributed(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A `DTensor` without autograd that holds `local`, which has the dtype and strides that `spec` implies.

    The class is public, its constructor is not; `fully_shard` calls it. `DTensor.from_local` goes through autograd,
    which takes ten times as long. `__init__` does nothing but step out of graphs that are being traced, in twice the
    time of `__new__`.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


# --- process groups --------------------------------------------------------------------------------------------------


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that runs the collectives of `group` on `device`; `get_backend` knows one per group."""
    return str(group._get_backend(device).name())


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of the collectives of `group`; None where its backend has none. No public function returns it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of a group that `init_device_mesh` has made, which takes none."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def named_group(name: str) -> Iterator[None]:
    """Let the group that `torch.distributed.new_group` makes of its members alone have this name.

    It takes no name. The one that it makes up depends on the number of groups that the rank has made before, and ranks
    under different names wait for each other until they time out.
    """
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name):
        yield


def default_store() -> Store:
    """The key-value store of the default process group, where `init_process_group` was not given one to keep."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


# --- tensors ---------------------------------------------------------------------------------------------------------


def parts_of_flat(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of parts of `flat`, of one dim, one after the other: of the shapes of the tensors `like`.

    `DistributedDataParallel` uses it; `split` and `view` take several times as long for many small tensors.
    """
    return tuple(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


# --- pipelines -------------------------------------------------------------------------------------------------------


def start_messages(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start messages from point to point as torch's schedules do: from 2.13 on not in one batch, where all are sent."""
    return _batch_p2p(operations)


# --- autograd --------------------------------------------------------------------------------------------------------


def tensor_hooks(parameter: nn.Parameter) -> Sequence[Callable[[Tensor], Tensor | None]]:
    """The hooks that were registered with `register_hook`, in their order; tensors have no public table of them."""
    return tuple((parameter._backward_hooks or {}).values())


def post_accumulate_hooks(parameter: nn.Parameter) -> Sequence[Callable[[Tensor], None]]:
    """The hooks that were registered with `register_post_accumulate_grad_hook`, in their order."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


@dataclass(frozen=True)
class StateAsked:
    """Options of `torch.distributed.checkpoint.state_dict`: whole tensors; states of optimizers, nested."""

    full: bool
    nested: bool


def state_asked() -> StateAsked | None:
    """The state that `get_state_dict` of `torch.distributed.checkpoint`, or one of its kind, is asked for, where it
    calls the caller's caller; None anywhere else. It asks a module for its parameters like anyone, and says nothing of
    its options.
    """
    frame: FrameType | None = sys._getframe(3)
    asked = None
    while frame is not None and frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
        if frame.f_code.co_name == "_verify_options":
            options = frame.f_locals.get("options")
            nested = bool(frame.f_locals.get("optims")) and not getattr(options, "flatten_optimizer_state_dict", True)
            asked = StateAsked(bool(getattr(options, "full_state_dict", False)), nested)
        if frame.f_code.co_name.startswith("get_"):
            return asked
        frame = frame.f_back
    return None


def reducing_over_parameters() -> str | None:
    """The name of the function that iterates the parameters of the caller's caller to reduce over all of them: a
    `clip_grad_norm_` or `get_total_norm` of torch or another library, or the constructor of `LBFGS`. None where none of
    these does, and where autopar does.

    Frames are told by their code alone: Python 3.11 keeps the locals of a frame that is asked for them until it ends,
    and with them a module that the caller deletes.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_FRAMES_TO_PARAMETERS):
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if frame is None or module.startswith("autopar."):
            return None
        name = frame.f_code.co_name
        if name in _NORMS:
            return f"{module}.{name}"
        if frame.f_code is torch.optim.LBFGS.__init__.__code__:
            return "torch.optim.LBFGS"
        frame = frame.f_back
    return None


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks that autograd would call with its gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_computed_in_backward(node: Node) -> bool:
    """Whether the backward pass that runs will come to `node`; the public passes tell of nodes that they came to.

    torch refuses to answer for a leaf that `torch.autograd.grad` was called for, whose gradient it does compute.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


# --- modules ---------------------------------------------------------------------------------------------------------


def parts_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's own parts, which can be written to: assignment is refused in distributed modules."""
    return module._modules


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the tables of another one: what is replaced in one is replaced in both."""
    module._modules = other._modules
    module._parameters = other._parameters
    module._buffers = other._buffers
    module._non_persistent_buffers_set = other._non_persistent_buffers_set


def call_hooks(module: nn.Module, backward: bool = True) -> Sequence[Callable[..., object]]:
    """The hooks that run when a module is called, and with `backward` those of its backward pass."""
    forward = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [*forward, *backward_hooks(module)] if backward else forward


def backward_hooks(module: nn.Module) -> Sequence[Callable[..., object]]:
    """The hooks that run in the backward pass of a module."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def global_backward_hooks() -> Sequence[Callable[..., object]]:
    """The hooks that run in the backward pass of every module, of which torch has no public list."""
    return [*_modules._global_backward_pre_hooks.values(), *_modules._global_backward_hooks.values()]


def state_dict_hooks(module: nn.Module) -> Sequence[Callable[..., object]]:
    """The hooks that run when the state dict of a module is made or loaded, except the methods by which modules take
    over checkpoints of earlier versions of their own class."""
    given = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    before = [hook for hook in given if getattr(hook, "__self__", None) is not module]
    after = [*module._state_dict_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return [*before, *module._state_dict_pre_hooks.values(), *after]


def pickled_state(module: nn.Module, parts: Mapping[str, nn.Module], more: Mapping[str, Tensor]) -> dict[str, Any]:
    """The attributes of a module with other parts and `more` parameters, without its hooks for loading old checkpoints.

    Those are local functions often, which cannot be pickled, and they have done what they were for.
    """
    return {
        **vars(module),
        "_modules": dict(parts),
        "_parameters": {**module._parameters, **more},
        "_load_state_dict_pre_hooks": {},
    }
