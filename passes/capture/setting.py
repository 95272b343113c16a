"""State of a module while it is traced: mode, parameters, inputs, autograd functions. It is restored afterwards."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.utils.checkpoint
from torch import nn

from passes import ops
from passes._torch import FakeTensorMode, buffers_of, parameters_of, pytree, version_of
from passes.capture.per_thread import replaced
from passes.capture.source import line_of_frame
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs


@contextlib.contextmanager
def mode_of(module: nn.Module, training: bool) -> Iterator[None]:
    """Put every part of `module` into one mode, without gradient checkpointing; afterwards as it was."""
    modes = [(part, part.training) for part in module.modules()]
    checkpointed = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    try:
        module.train(training)
        for part in checkpointed:
            part.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part in checkpointed:
            part.gradient_checkpointing = True  # type: ignore[assignment]


@contextlib.contextmanager
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


@contextlib.contextmanager
def tensors_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters and buffers on meta stand as tensors on `device` that take no memory; afterwards as they were.

    On meta itself a trace would go the ways that models have for devices other than `device`.
    """
    fakes: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, nn.Parameter | None] | dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    mode = FakeTensorMode()
    try:
        for part in module.modules():
            for holder in (parameters_of(part), buffers_of(part)):
                for name, tensor in holder.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in fakes:
                        with mode:
                            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    undo.append((holder, name, tensor))
        for holder, name, tensor in undo:
            holder[name] = fakes[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for holder, name, tensor in undo:
            holder[name] = tensor  # type: ignore[assignment]


@contextlib.contextmanager
def parameters_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Floating parameters and buffers stand as empty tensors of `dtype`; afterwards as they were."""
    replaced: dict[int, nn.Parameter] = {}
    undo: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for part in module.modules():
            for name, parameter in parameters_of(part).items():
                if parameter is not None and parameter.is_floating_point():
                    if id(parameter) not in replaced:
                        cast = torch.empty_like(parameter, dtype=dtype, device=parameter.device)
                        replaced[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
                    undo.append((parameters_of(part), name, parameter))
        for holder, name, parameter in undo:
            holder[name] = replaced[id(parameter)]
        yield
    finally:
        for holder, name, parameter in undo:
            holder[name] = parameter


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def example_of(module: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Fresh tensors like `inputs`, on the module's device: two inputs that are one tensor stay two inputs."""
    device = _device(module)

    def fresh(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        floating = leaf.is_floating_point() and dtype is not None
        kept = dtype if floating else leaf.dtype
        return torch.empty(leaf.shape, dtype=kept, device=device, requires_grad=leaf.requires_grad)

    example: Inputs = pytree.tree_map(fresh, dict(inputs))
    return example
