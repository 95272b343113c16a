"""Losses outside of a model: a module that runs the model and its loss, and has the model's parts under their names."""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import NamedTuple

from torch import Tensor, nn

from autopar._torch import call_hooks
from autopar.models.fingerprint import callable_fingerprint, trainable_tensors
from passes.ir.errors import CaptureError, InputError

Loss = Callable[..., object]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class LossOutput(NamedTuple):
    """The result of a call of a module with a loss outside of the model: the loss, and the model's output.

    `loss` is None where the call left out what the loss needs, as an evaluation without labels does.
    """

    loss: Tensor | None
    output: object


def with_loss(model: nn.Module, loss: Loss | None) -> nn.Module:
    """A module that returns `LossOutput(loss(output, ...), output)` of the output of `model`; `model` itself without a
    loss.

    It is of the model's class and shares its parts, parameters and buffers, under the same names. Its forward takes the
    arguments of both: the model gets those in the signature of its forward, the loss those in its own, and both get
    those in both.

    Raises InputError for a loss that cannot be called with an output, and CaptureError for one that holds parameters or
    other trainable tensors, or a model with forward hooks of its own.
    """
    if loss is None:
        return model
    if call_hooks(model, backward=False):
        raise CaptureError(
            f"{type(model).__name__} has forward hooks of its own, which see other arguments with loss=: remove them, "
            "or register them on a part of the model"
        )
    trainable = trainable_tensors(loss)
    if trainable:
        raise CaptureError(
            f"the loss holds or refers to the parameter or trainable tensor {trainable[0].lstrip('.')}: a loss "
            "outside of the model has none; put it into the model, or take the numbers that the loss needs out of it "
            "first"
        )
    joined = object.__new__(type(model))
    vars(joined).update(vars(model))
    vars(joined)["forward"] = JoinedForward(joined, model, loss)
    return joined


def joined_loss(model: nn.Module) -> "JoinedForward | None":
    """The forward of a model that was joined with a loss; None for others."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, JoinedForward) else None


class JoinedForward:
    """The forward of a model and its loss. `required` are the arguments that the loss needs, `fingerprint` is that of
    the loss."""

    def __init__(self, joined: nn.Module, model: nn.Module, loss: Loss) -> None:
        own, names = inspect.signature(model.forward), _names_of(loss)
        forward: Callable[..., object] = model.forward
        if isinstance(forward, MethodType) and forward.__self__ is model:
            # As a method of the module whose mode is set, and that is copied.
            forward = MethodType(forward.__func__, joined)
        self.forward = forward
        self.loss = loss
        self.fingerprint = callable_fingerprint(loss)
        self.loss_names = frozenset(names)
        self.model_names = frozenset(own.parameters)
        self.required = tuple(name for name, item in names.items() if item.default is inspect.Parameter.empty)
        self.__signature__ = _merged(own, names)

    def __call__(self, *args: object, **kwargs: object) -> LossOutput:
        """Run the model, and the loss where all that it needs is given."""
        taken = {name: kwargs[name] for name in self.loss_names if name in kwargs}
        if args:
            bound = self.__signature__.bind_partial(*args, **kwargs).arguments
            taken = {name: bound[name] for name in self.loss_names if name in bound}
        own = {name: item for name, item in kwargs.items() if name not in self.loss_names or name in self.model_names}
        output = self.forward(*args, **own)
        if any(taken.get(name) is None for name in self.required):
            return LossOutput(None, output)
        found = self.loss(output, **taken)
        if not isinstance(found, Tensor) or found.dim() != 0 or not found.is_floating_point():
            what = (
                f"a tensor of shape {list(found.shape)} and {found.dtype}" if isinstance(found, Tensor) else repr(found)
            )
            raise CaptureError(f"the loss returns {what}: it must return a scalar tensor of a floating dtype")
        return LossOutput(found, output)


def _names_of(loss: Loss) -> dict[str, inspect.Parameter]:
    """The arguments of a loss besides the output, by name."""
    if not callable(loss):
        raise InputError(f"loss is {loss!r}: give a callable, called with the model's output and arguments by name")
    try:
        first, *rest = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        first, rest = None, []
    if first is None or first.kind is first.KEYWORD_ONLY or first.kind is first.VAR_KEYWORD:
        raise InputError(
            "loss must take the model's output as its first argument, and name the others: "
            "def loss(output, labels): ..."
        )
    hidden = [item.name for item in rest if item.kind is item.POSITIONAL_ONLY]
    if hidden:
        raise InputError(f"loss takes {hidden[0]} by position alone: it is called with arguments by name")
    return {item.name: item for item in rest if item.kind in _NAMED}


def _merged(own: inspect.Signature, names: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """The signature of a model with the arguments of its loss, which may be left out."""
    parameters = list(own.parameters.values())
    at = len(parameters) - any(item.kind is item.VAR_KEYWORD for item in parameters)
    parameters[at:at] = [
        item.replace(
            kind=item.KEYWORD_ONLY,
            default=None if item.default is inspect.Parameter.empty else item.default,
            annotation=inspect.Parameter.empty,
        )
        for name, item in names.items()
        if name not in own.parameters
    ]
    return own.replace(parameters=parameters, return_annotation=LossOutput)
