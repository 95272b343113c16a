"""Operations that torch applies to any module but that a distributed module refuses with a clear error.

A distributed module runs generated code, which reads its parameters where the plan put them. Its parts only hold these
parameters: they are never called, and nothing else can take their place. Things that rely on more would fail far from
their cause, or be ignored without a word, so they raise `UnsupportedError` when they are asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import (
    REGISTRY_KEY,
    STATE_KEY,
    call_hooks,
    global_backward_hooks,
    has_hooks,
    parts_of,
    reducing_over_parameters,
    state_asked,
)
from autopar.runtime.parameters import alike
from passes._torch import PARAMETERS, buffers_of, parameters_of
from passes.ir.errors import UnsupportedAttributeError, UnsupportedError

_BEFORE = "change the model, then call parallelize again"


def _refusal(what: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises UnsupportedError: `what` is not supported, use `instead`."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedError(f"{what}: {instead}")

    return refuse


class _NoFurtherApis(dict[Any, Any]):
    """The register of APIs that were applied to a module, in which `fully_shard` and its like enter themselves first.
    Functions for checkpoints read it."""

    def setdefault(self, api: object, default: object = None) -> NoReturn:
        """Refuse an API: a function or its name."""
        raise UnsupportedError(
            f"{getattr(api, '__name__', api)} cannot be applied to a distributed module, which is parallel already: "
            "constrain the plan instead, or apply it to the model without parallelize"
        )


class DistributedPart(nn.Module):
    """A distributed module or a submodule of it. Only parameters and buffers can be replaced, by compatible ones."""

    def __init__(self) -> None:
        super().__init__()
        # torch has no other place to ask at: it changes the class of the module in the end, with or without success.
        self.__dict__[STATE_KEY] = self.__dict__[REGISTRY_KEY] = _NoFurtherApis()

    # --- copies ---

    __deepcopy__ = __copy__ = __reduce_ex__ = _refusal(
        "a distributed module cannot be copied or pickled",
        "save dist_model.state_dict() with torch.distributed.checkpoint, or parallelize a second model; for an average "
        "of weights, keep [p.detach().clone() for p in dist_model.parameters()] and call lerp_ on these",
    )
    share_memory = _refusal("a distributed module cannot be shared between processes", "parallelize in each process")

    # --- other wrappers ---

    _replicate_for_data_parallel = _refusal(
        "DataParallel cannot wrap a distributed module, which is parallel already", "call it as it is"
    )
    __prepare_scriptable__ = _refusal(
        "a distributed module cannot be compiled by torch.jit", "script or trace the model without parallelize"
    )

    # The first attribute that torch.jit.trace asks for.
    __jit_ignored_attributes__ = property(__prepare_scriptable__)
    # The first attribute that DistributedDataParallel asks for.
    _ddp_params_and_buffers_to_ignore = property(
        _refusal(
            "DistributedDataParallel cannot wrap a distributed module, which reduces its gradients itself",
            "call it as it is",
        )
    )

    # --- conversions ---

    apply = _refusal(
        "apply() finds no layers in a distributed module, whose parts only hold parameters",
        "initialize the model before parallelize, or change dist_model.parameters() in place",
    )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DistributedPart":
        """Convert all parameters and buffers, as `to()` and its like do: allowed where it changes nothing."""
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            like = torch.empty((2,) * local.dim(), dtype=local.dtype, device=local.device)
            if fn(like) is not like:
                raise UnsupportedError(
                    f"a distributed module stays in the dtype ({local.dtype}) and on the device ({local.device}) that "
                    "it was planned for: convert the model before parallelize, or pass precision="
                )
        return self

    # --- other parameters and parts ---

    add_module = register_module = _refusal("no part can be added to a distributed module", _BEFORE)
    set_submodule = _refusal("no part of a distributed module can be replaced", _BEFORE)

    # The first attribute that torch.nn.utils.parametrize asks for.
    parametrizations = property(_refusal("the parameters of a distributed module cannot be parametrized", _BEFORE))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Replace a buffer by another one of the same shape and dtype.

        Raises UnsupportedError for any other buffer.
        """
        instead = "a tensor of the same shape and dtype: copy values into it instead"
        _check_replacement("buffer", name, buffers_of(self).get(name), tensor, instead)
        super().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replace a parameter by another one with the same shape, dtype and placements.

        Raises UnsupportedError for any other parameter.
        """
        instead = "a DTensor of the same shape, dtype and placements: copy values into it under torch.no_grad() instead"
        _check_replacement("parameter", name, parameters_of(self).get(name), param, instead)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Set an attribute; submodules cannot be added or replaced."""
        if isinstance(value, nn.Module):
            raise UnsupportedError(
                f"{name!r} cannot become a part of a distributed module, whose code does not call it: {_BEFORE}"
            )
        if value is None and self.__dict__.get(PARAMETERS, {}).get(name) is not None:
            raise UnsupportedError(f"the parameter {name!r} of a distributed module cannot be removed: {_BEFORE}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; parameters, buffers and submodules cannot be deleted."""
        if name in parameters_of(self) or name in buffers_of(self) or name in parts_of(self):
            raise UnsupportedError(f"{name!r} of a distributed module cannot be removed: {_BEFORE}")
        super().__delattr__(name)


_uncalled = _refusal(
    "a hook on a part of a distributed module would never be called, because generated code runs without its parts",
    "register hooks on the distributed module itself, or on its parameters",
)


class HoldingPart(DistributedPart):
    """A submodule of a distributed module that only holds parameters and is never called."""

    register_forward_pre_hook = register_forward_hook = _uncalled
    register_full_backward_pre_hook = register_full_backward_hook = register_backward_hook = _uncalled

    def train(self, mode: bool = True) -> "HoldingPart":
        """Stay in the mode that was planned; raises UnsupportedError for another one."""
        if mode is not self.training:
            raise UnsupportedError(
                "a part of a distributed module has no mode of its own: call train() or eval() on the whole module; "
                "parts of a model in training mode that are in evaluation mode before parallelize stay so"
            )
        return self

    forward = _refusal(
        "a part of a distributed module cannot be called on its own", "call the whole module, or parallelize the part"
    )


class CalledPart(DistributedPart):
    """A distributed module as a whole."""

    compile = _refusal(
        "torch.compile cannot take a distributed module, whose code is generated", "pass compiled=True to parallelize"
    )

    # The first attribute that torch.compile asks for.
    _torchdynamo_orig_callable = property(compile)
    # An attribute that transformers.Trainer and accelerate's prepare ask for, before they move or wrap a model.
    hf_device_map = property(
        _refusal(
            "transformers.Trainer and accelerate cannot take a distributed module, which has its own placement, "
            "gradients and checkpoints",
            "train it in a loop, as examples/finetune.py does",
        )
    )


# --- methods and attributes of the model -----------------------------------------------------------------------------

_EXPORT = (
    "collect the weights with state = dist_model.full_state_dict() on all ranks, and on rank 0 call the model's own "
)
_CHECKPOINTING = (
    "recompute is decided when the model is planned: pass recompute= ('none', 'selective', "
    "'full', or a level by region) to autopar.parallelize"
)
_INSTEAD: Mapping[str, str] = {
    "generate": "a plan has no steps of decoding: save the weights, and generate with the model itself, or with an "
    "engine for inference",
    "save_pretrained": f"{_EXPORT}save_pretrained(folder, state_dict=state)",
    "push_to_hub": f"{_EXPORT}save_pretrained(folder, state_dict=state), then upload the folder",
    "gradient_checkpointing_enable": _CHECKPOINTING,
    "gradient_checkpointing_disable": _CHECKPOINTING,
    "resize_token_embeddings": "shapes of parameters are part of the plan: resize the model before "
    "autopar.parallelize, and plan it anew",
}


def missing_method(model_class: type, name: str) -> UnsupportedAttributeError | None:
    """The error for an attribute that a distributed module has not, but the class of its model has; None if neither
    has it."""
    if name.startswith("_") or not hasattr(model_class, name):
        return None
    instead = _INSTEAD.get(name, "it has the model's forward, parameters and buffers alone; ask the model itself")
    return UnsupportedAttributeError(
        f"{model_class.__name__}.{name} is not available on the distributed module: {instead}"
    )


# --- calls and replacements ------------------------------------------------------------------------------------------


def refuse_export() -> None:
    """Raise UnsupportedError while torch.export traces a distributed module."""
    if torch.compiler.is_exporting():
        raise UnsupportedError("a distributed module cannot be exported: export the model without parallelize")


def refuse_global_hooks() -> None:
    """Raise UnsupportedError for backward hooks on all modules, unless gradients are disabled: they would see parts of
    generated code instead of the layers of the model."""
    if torch.is_grad_enabled() and global_backward_hooks():
        raise UnsupportedError(
            "a backward hook on all modules (register_module_full_backward_hook or its like) would not be called for "
            "the layers of a distributed module, whose generated code runs without them: remove it before the call, "
            "and read .grad of the parameters after the backward pass"
        )


def refuse_partial_state() -> None:
    """Raise UnsupportedError where torch asks a module in pipeline stages for a state dict that would be wrong, because
    it would have what one rank's stages hold alone."""
    asked = state_asked()
    if asked is not None and asked.full:
        raise UnsupportedError(
            "full_state_dict=True would collect the pipeline stages of one rank alone: call "
            "dist_model.full_state_dict() for the whole model, and save optimizers with torch.distributed.checkpoint"
        )
    if asked is not None and asked.nested:
        raise UnsupportedError(
            "a checkpoint would list the parameters of one rank's pipeline stages alone in the optimizer's groups: ask "
            "for options=StateDictOptions(flatten_optimizer_state_dict=True), here and where the checkpoint is loaded"
        )


def refuse_partial_reduction() -> None:
    """Raise UnsupportedError where a function asks a module in pipeline stages for its parameters to reduce over all of
    them: it would see those of one rank's stages alone."""
    function = reducing_over_parameters()
    if function is not None:
        raise UnsupportedError(
            f"{function} would reduce over the parameters of one rank's pipeline stages alone: clip with "
            "autopar.clip_grad_norm_(dist_model, max_norm), and take an optimizer that treats each parameter by itself"
        )


def refuse_module_hooks(module: nn.Module) -> None:
    """Raise UnsupportedError for a module with hooks that calls of the module run."""
    if call_hooks(module):
        raise UnsupportedError(
            "hooks on a distributed module do not run in forward_backward with micro-batches, which run one by one: "
            "remove them, or plan with micro_batches=1"
        )


def refuse_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise UnsupportedError for parameters, by name, of which one has hooks."""
    name = next((name for name, parameter in parameters if has_hooks(parameter)), None)
    if name is not None:
        raise UnsupportedError(
            f"the parameter {name!r} has a hook, which would see gradients before those of all micro-batches and "
            "pipeline stages are added up: remove it, and change .grad after forward_backward"
        )


def put(root: nn.Module, path: str, part: nn.Module) -> None:
    """Replace the submodule of `root` at `path` by `part`."""
    above, _, name = path.rpartition(".")
    parts_of(root.get_submodule(above))[name] = part


def _check_replacement(kind: str, name: str, known: Tensor | None, given: Tensor | None, instead: str) -> None:
    """Raise UnsupportedError unless `given` can replace `known`, the parameter or buffer called `name`."""
    if known is None:
        raise UnsupportedError(f"no {kind} can be added to a distributed module, not {name!r} either: {_BEFORE}")
    if not alike(given, known):
        raise UnsupportedError(f"the {kind} {name!r} of a distributed module can only be replaced by {instead}")
