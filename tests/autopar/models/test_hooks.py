"""Hooks that a stock model has before it is planned."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook

import autopar
from autopar.testing import compare
from tests.models import Stack

MESH = {"dp": 2}


def _batch() -> dict[str, torch.Tensor]:
    return {name: torch.ones(4, 16) for name in ("x", "target")}


def _ignore(*_: object) -> None:
    pass


# What is registered, and the beginning of the sentence.
LOST: dict[str, tuple[Callable[[Stack], object], str]] = {
    "parameter": (
        lambda model: model.blocks[0].up.weight.register_hook(_ignore),
        "the parameter 'blocks.0.up.weight' has a hook",
    ),
    "parameter, accumulated": (
        lambda model: model.blocks[1].up.bias.register_post_accumulate_grad_hook(_ignore),
        "the parameter 'blocks.1.up.bias' has a hook",
    ),
    "part": (
        lambda model: model.blocks[0].register_full_backward_hook(_ignore),
        "the part 'blocks.0' has a backward hook",
    ),
    "part, before": (
        lambda model: model.blocks[0].register_full_backward_pre_hook(_ignore),
        "the part 'blocks.0' has a backward hook",
    ),
    "model": (lambda model: model.register_full_backward_hook(_ignore), "Stack has a backward hook"),
}


@pytest.mark.parametrize("name", LOST)
def test_hooks_on_gradients_are_refused(name: str) -> None:
    """They would be lost; for inference they do not matter."""
    register, said = LOST[name]
    model = Stack()
    register(model)
    with pytest.raises(autopar.UnsupportedError, match=said):
        autopar.plan(model, MESH, _batch(), cluster="ideal")
    autopar.plan(model, MESH, _batch(), cluster="ideal", objective="infer")


def test_backward_hooks_on_all_modules_are_refused() -> None:
    """They would be lost, and do not matter for inference."""
    handle = register_module_full_backward_hook(_ignore)
    try:
        with pytest.raises(autopar.UnsupportedError, match="torch has a backward hook on all modules"):
            autopar.plan(Stack(), MESH, _batch(), cluster="ideal")
        autopar.plan(Stack(), MESH, _batch(), cluster="ideal", objective="infer")
    finally:
        handle.remove()


def _doubled(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def _more(_: nn.Module, __: object, output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**output, "loss": 3 * output["loss"]}


def test_forward_hooks_are_traced(caplog: pytest.LogCaptureFixture) -> None:
    """Outputs and gradients are those with the hooks, on a part and on the model; a warning says that they are not
    called."""
    model = Stack().double()
    model.blocks[0].up.register_forward_hook(_doubled)
    model.register_forward_hook(_more)
    data = {name: item.double() for name, item in _batch().items()}
    with caplog.at_level(logging.WARNING, "autopar"):
        autopar.plan(model, MESH, data, cluster="ideal")
    comparison = compare(model, MESH, data, cluster="ideal")
    assert comparison.worst[1] <= 1e-12, str(comparison)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Stack and the part 'blocks.0.up' have forward hooks: they are traced with the model")


# A hook of a state dict that is not called, by how it is registered.
_STATE: dict[str, Callable[[nn.Module], object]] = {
    "saved": lambda part: part.register_state_dict_post_hook(_ignore),
    "to be saved": lambda part: part.register_state_dict_pre_hook(_ignore),
    "loaded": lambda part: part.register_load_state_dict_post_hook(_ignore),
    "to be loaded": lambda part: part.register_load_state_dict_pre_hook(_ignore),
}


@pytest.mark.parametrize("name", _STATE)
def test_hooks_on_state_dicts_are_told_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the parts; methods by which a class reads its own older checkpoints are none."""
    model = Stack()
    for part in model.modules():
        _STATE[name](part)
    with caplog.at_level(logging.WARNING, "autopar"):
        autopar.plan(model, MESH, _batch(), cluster="ideal")
    (said,) = [record.getMessage() for record in caplog.records]
    more = sum(1 for _ in model.modules()) - 3
    named = f"Stack, the part 'blocks', the part 'blocks.0' and {more} more"
    assert said.startswith(f"{named} have hooks on the state dict")


class _OfOlder(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.renamed)

    def renamed(self, *_: object) -> None:
        """Rename what earlier versions have saved."""


def test_a_class_that_reads_older_checkpoints_is_told_nothing_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        autopar.plan(_OfOlder(), MESH, _batch(), cluster="ideal")
    assert not caplog.records


def _hooked(_: nn.Module, __: object, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: 2 * gradient)


def test_hooks_on_activations_are_refused() -> None:
    """A trace would drop them, and with them what they do to gradients."""
    model = Stack()
    model.blocks[0].up.register_forward_hook(_hooked)
    with pytest.raises(autopar.CaptureError, match=r"test_hooks.py:\d+ .*: it registers a hook on the gradient"):
        autopar.plan(model, MESH, _batch(), cluster="ideal")


def test_hooks_of_frozen_parameters_do_not_matter() -> None:
    """Autograd calls none of them."""
    model = Stack()
    weight = model.blocks[0].up.weight
    weight.register_hook(_ignore)
    weight.requires_grad_(False)
    autopar.plan(model, MESH, _batch(), cluster="ideal")
