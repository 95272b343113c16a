"""The functions that give parameters and buffers of a model their first values, in the model's own order."""

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from torch import nn

from autopar.models.huggingface import is_huggingface

Initialize = Callable[[nn.Module], None]


class _Initialized(Protocol):
    """A model of `transformers`, which initializes any of its submodules."""

    _init_weights: Initialize


def initializations(model: nn.Module, initialize: Initialize | None = None) -> Iterator[tuple[nn.Module, Initialize]]:
    """The submodules of `model` and the model itself, each with the function that initializes it, in the order of
    `torch.nn.Module.apply`: submodules before the module that has them.

    `initialize` is called with each of them. None takes the rules of the model: in a model of `transformers` those of
    the innermost model that a submodule is in, as its `init_weights` does; elsewhere the methods `reset_parameters`,
    where a submodule has one.
    """
    yield from _in_order(model, lambda module, outer: initialize or _rules(module) or outer, None)


def _in_order(
    module: nn.Module, rules_of: Callable[[nn.Module, Initialize | None], Initialize | None], outer: Initialize | None
) -> Iterator[tuple[nn.Module, Initialize]]:
    rules = rules_of(module, outer)
    for child in module.children():
        yield from _in_order(child, rules_of, rules)
    if rules is not None:
        yield module, rules
    elif callable(getattr(module, "reset_parameters", None)):
        yield module, _reset


def _rules(module: nn.Module) -> Initialize | None:
    """The function by which `module` initializes its submodules, if its class has one."""
    return cast("_Initialized", module)._init_weights if is_huggingface(module) else None


def _reset(module: nn.Module) -> None:
    """Initialize `module` as its constructor does."""
    cast("Callable[[], None]", module.reset_parameters)()
