"""Hooks of a stock model: a distributed module has what they compute in the forward pass, and calls none of them."""

from collections.abc import Sequence

from torch import nn

from autopar._torch import backward_hooks, call_hooks, global_backward_hooks, has_hooks, state_dict_hooks
from passes.ir.errors import UnsupportedError
from passes.ir.log import logger


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise UnsupportedError for hooks on gradients of parameters and parts of `model`, and for backward hooks on all
    modules, which would be lost."""
    if global_backward_hooks():
        raise UnsupportedError(
            "torch has a backward hook on all modules, which the distributed module would not call for its layers: "
            "remove it; a hook on a parameter of the distributed module sees gradients"
        )
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


# Parts that a warning names.
_NAMED = 3


def warn_of_hooks(model: nn.Module) -> None:
    """Warn of hooks that calls of `model` and its parts run, which are traced with it, and of hooks on state dicts."""
    called = [_called(model, path) for path, part in model.named_modules() if call_hooks(part, backward=False)]
    if called:
        logger.warning(
            "%s forward hooks: they are traced with the model, so that what they compute is part of the plan, and are "
            "not called any more",
            _have(called),
        )
    asked = [_called(model, path) for path, part in model.named_modules() if state_dict_hooks(part)]
    if asked:
        logger.warning(
            "%s hooks on the state dict, which the distributed module does not call: its state dict has the parameters "
            "and buffers as they are; apply what the hooks do to it before it is saved, or before it is loaded",
            _have(asked),
        )


def _have(parts: Sequence[str]) -> str:
    """The subject of a sentence, and its verb."""
    return f"{listed(parts)} {'has' if len(parts) == 1 else 'have'}"


def listed(parts: Sequence[str]) -> str:
    """The first parts, and how many more there are: "a, b, c and 2 more"."""
    more = len(parts) - _NAMED
    named = [*parts[:_NAMED], *([f"{more} more"] if more > 0 else ())]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _called(model: nn.Module, path: str) -> str:
    return f"the part {path!r}" if path else type(model).__name__
