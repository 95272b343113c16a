"""State of a module while it is traced: mode, parameters, inputs, autograd functions. It is restored afterwards."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
import torch.utils.checkpoint
from torch import nn

from passes import ops
from passes._torch import FakeTensorMode, buffers_of, parameters_of, pytree, version_of
from passes.capture.source import line_of_frame, replaced
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs

_Table = dict[str, nn.Parameter | None] | dict[str, torch.Tensor | None]


def evaluated_parts(module: nn.Module) -> tuple[str, ...]:
    """The paths of the parts that are in evaluation mode, as frozen batch norms are, though `module` is in training
    mode. A module that is in evaluation mode itself, as loaded ones are, has none: as a whole it can be trained."""
    if not module.training:
        return ()
    return tuple(path for path, part in module.named_modules(remove_duplicate=False) if not part.training)


@contextmanager
def mode_of(module: nn.Module, training: bool) -> Iterator[None]:
    """Put `module` into one mode, without gradient checkpointing; afterwards as it was.

    In training mode its `evaluated_parts` stay in evaluation mode.
    """
    modes = [(part, part.training) for part in module.modules()]
    checkpointed = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    try:
        if not (training and module.training):
            module.train(training)
        for part in checkpointed:
            part.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part in checkpointed:
            part.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def autograd_functions_written(gradients: bool) -> Iterator[None]:
    """Calls of custom `autograd.Function`s become operators. `torch.export` itself would keep only their forward: with
    `gradients` their gradients would be silently wrong."""

    def apply(cls: ops.Function, /, *args: object, **kwargs: object) -> object:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            raise CaptureError(
                f"{_calling_line()} checkpoints reentrantly, which a trace does not keep: pass use_reentrant=False"
            )
        if not gradients or ops.is_within() or cls.__module__.split(".")[0] == "torch":
            return cast(Callable[..., object], original)(cls, *args, **kwargs)
        try:
            return _as_operator(cls, args, kwargs)
        except CaptureError as error:
            raise CaptureError(f"{_calling_line()}: {error}") from None

    with replaced(torch.autograd.Function, "apply", apply) as original:
        yield


def _as_operator(cls: ops.Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The results of a function, computed by the operator that stands for it in a graph."""
    call = ops.written(cls, args, kwargs)
    versions = [version_of(tensor) for tensor in call.tensors]
    with ops.results_noted() as noted:
        results = iter(ops.TRACED(call.tensors, call.function, call.arguments, sizes=call.sizes))
    if versions != [version_of(tensor) for tensor in call.tensors]:
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} changes a tensor that it is given: write it without in-place"
        )
    returned = noted[-1]
    if not isinstance(returned, tuple):
        return next(results)
    return tuple(next(results) if isinstance(item, torch.Tensor) else item for item in returned)


def _calling_line() -> str:
    """The line of the model that is being traced."""
    line = line_of_frame(sys._getframe(1))
    return f"{os.path.basename(line.file)}:{line.number}" if line is not None else "the model"


def tensors_on(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Parameters and buffers on meta stand as tensors on `device` that take no memory; afterwards as they were.

    On meta itself a trace would go the ways that models have for devices other than `device`.
    """
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_meta:
            return None
        with mode:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found

    return _replaced_tensors(module, fake)


def parameters_as(module: nn.Module, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Floating parameters stand as empty tensors of `dtype`; afterwards as they were."""

    def empty(tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return None
        return nn.Parameter(torch.empty_like(tensor, dtype=dtype, device=tensor.device), tensor.requires_grad)

    return _replaced_tensors(module, empty)


@contextmanager
def _replaced_tensors(module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Replace parameters and buffers by their `replacement`, unless that is None; afterwards they are as before."""
    made: dict[int, torch.Tensor | None] = {}
    before: list[tuple[_Table, str, torch.Tensor]] = []
    for part in module.modules():
        for table in (parameters_of(part), buffers_of(part)):
            before += [(table, name, tensor) for name, tensor in table.items() if tensor is not None]
    try:
        for table, name, tensor in before:
            if id(tensor) not in made:
                made[id(tensor)] = replacement(tensor)
            if made[id(tensor)] is not None:
                table[name] = made[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor  # type: ignore[assignment]


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer of `module`; the CPU where it has none."""
    return next((item.device for item in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def example_of(module: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Fresh tensors like `inputs`, on the module's device: two inputs that are one tensor stay two inputs."""
    device = device_of(module)

    def fresh(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kept = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return torch.empty(leaf.shape, dtype=kept, device=device, requires_grad=leaf.requires_grad)

    example: Inputs = pytree.tree_map(fresh, dict(inputs))
    return example
