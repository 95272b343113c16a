"""Hooks of a stock model: a distributed module has what they compute in the forward pass, and calls none of them."""

from torch import nn

from autopar._torch import backward_hooks, call_hooks, has_hooks
from passes.ir.errors import UnsupportedError
from passes.ir.log import logger


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise UnsupportedError for hooks on gradients of parameters and parts of `model`, which would be lost."""
    for name, parameter in model.named_parameters():
        # Autograd computes none of a frozen one.
        if parameter.requires_grad and has_hooks(parameter):
            raise UnsupportedError(
                f"the parameter {name!r} has a hook, which the distributed module would not call: remove it, and "
                "register it on the parameter of this name of the distributed module"
            )
    for path, part in model.named_modules():
        if backward_hooks(part):
            raise UnsupportedError(
                f"{_called(model, path)} has a backward hook, which the distributed module would not call: remove it; "
                "a hook on a parameter of the distributed module sees gradients"
            )


def warn_of_forward_hooks(model: nn.Module) -> None:
    """Warn of hooks that calls of `model` and its parts run: they are traced with it."""
    for path, part in model.named_modules():
        if call_hooks(part, backward=False):
            logger.warning(
                "%s has a forward hook: it is traced with the model, so that what it computes is part of the plan, and "
                "is not called any more",
                _called(model, path),
            )


def _called(model: nn.Module, path: str) -> str:
    return f"the part {path!r}" if path else type(model).__name__
