"""Parameters that are replaced for some calls and put back, as averages of weights and `functional_call` do it."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils import swap_tensors

from autopar import InputError, UnsupportedError
from autopar.runtime import DistributedModule
from autopar.testing import run_ranks
from tests.autopar.test_training import WAYS, batches, error, gradients, made, whole
from tests.models import Stack

Batch = Mapping[str, torch.Tensor]


def _halves(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(item.detach() * 0.5) for name, item in model.named_parameters()}


def _put(model: nn.Module, values: Mapping[str, nn.Parameter]) -> None:
    for name, item in values.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, item)


@contextmanager
def _assigned(model: nn.Module, halves: Mapping[str, nn.Parameter]) -> Iterator[None]:
    own = dict(model.named_parameters())
    _put(model, halves)
    yield
    _put(model, own)


@contextmanager
def _loaded(model: nn.Module, halves: Mapping[str, nn.Parameter]) -> Iterator[None]:
    own = dict(model.named_parameters())
    model.load_state_dict(halves, assign=True)
    yield
    model.load_state_dict(own, assign=True)


@contextmanager
def _swapped(model: nn.Module, halves: Mapping[str, nn.Parameter]) -> Iterator[None]:
    for name, item in model.named_parameters():
        swap_tensors(item, halves[name])
    yield
    for name, item in model.named_parameters():
        swap_tensors(item, halves[name])


MEANS: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    "assigned": _assigned,
    "loaded": _loaded,
    "swapped": _swapped,
}


def _losses(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Losses with halved parameters and with those that are put back, and the gradients and values of both."""
    found = []
    for means in MEANS.values():
        halves = _halves(model)
        with means(model, halves):
            loss = model(**data[0])["loss"]
            loss.backward()
            found += [loss.detach(), *gradients(model).values()]
            model.zero_grad()
        del loss
        if means is _swapped:
            # torch swaps no tensors that a graph refers to.
            continue
        # The gradient of a forward pass belongs to the parameters that it read.
        with means(model, halves):
            loss = model(**data[1])["loss"]
        loss.backward()
        assert all(item.grad is None for item in model.parameters())
        found += [whole(item.grad) for item in halves.values() if item.grad is not None]
    halves = _halves(model)
    functional_call(model, halves, (), data[1])["loss"].backward()
    found += [whole(item.grad) for item in halves.values() if item.grad is not None]
    with torch.no_grad():
        thirds = {name: item / 3 for name, item in model.named_parameters()}
        found.append(functional_call(model, thirds, (), data[2])["loss"])
    model(**data[2])["loss"].backward()
    return [*found, *gradients(model).values(), *(whole(item.detach()) for item in model.parameters())]


def _error(sizes: tuple[int, ...], stored: Mapping[str, str]) -> float:
    data = batches(3)
    ours = _losses(made(Stack().double(), sizes, data[0], stored=stored), data)
    theirs = _losses(Stack().double(), data)
    return error(dict(enumerate(ours)), dict(enumerate(theirs)))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "stored"), [((2,), WAYS[0]), ((2,), WAYS[1]), pytest.param((2, 2), WAYS[0], marks=pytest.mark.slow)]
)
def test_parameters_are_replaced_and_put_back(sizes: tuple[int, ...], stored: Mapping[str, str]) -> None:
    """Losses, gradients and values equal those of one device; a parameter that is put back has kept its values."""
    assert max(run_ranks(_error, len(sizes) * 2, sizes, stored)) <= 1e-12


def _strided(item: torch.Tensor) -> nn.Parameter:
    """The values of a parameter in memory with gaps."""
    assert isinstance(item, DTensor)
    part = item.to_local().detach()
    gaps = part.new_empty(*part.shape, 2)[..., 0].copy_(part)
    return nn.Parameter(DTensor.from_local(gaps, item.device_mesh, item.placements, shape=item.shape, stride=(2,)))


def _refused() -> list[str]:
    data = batches(1)[0]
    dist_model: DistributedModule = made(Stack().double(), (2,), data)
    own = dict(dist_model.named_parameters())
    said = []
    for change in (
        lambda item: item * 2,
        lambda item: item.detach().full_tensor(),
        lambda item: item.detach().float(),
    ):
        with pytest.raises(InputError) as raised:
            functional_call(dist_model, {name: change(item) for name, item in own.items()}, (), data)
        said.append(str(raised.value))
    square = "blocks.0.norm.weight"
    for other in ({square: own["blocks.1.norm.weight"]}, {square: _strided(own[square])}):
        with pytest.raises(InputError) as raised:
            functional_call(dist_model, other, (), data)
        said.append(str(raised.value))
    with dist_model.keeping_parameters():
        loss = dist_model(**data)["loss"]
        _put(dist_model, _halves(dist_model))
        with pytest.raises(InputError) as raised:
            dist_model(**data)
        said.append(str(raised.value))
        _put(dist_model, own)
    # It has not run with the others.
    loss.backward()
    assert len(gradients(dist_model)) == len(own)
    loss = dist_model(**data)["loss"]
    model = Stack().double()
    assert error({"loss": loss}, {"loss": model(**data)["loss"]}) <= 1e-12
    return said


def test_what_cannot_replace_a_parameter_is_refused() -> None:
    """On all ranks alike; the next call runs."""
    first, second = run_ranks(_refused, 2)
    assert first == second
    computed, plain, other, tied, strided, kept = first
    assert "was replaced by a computed tensor" in computed
    assert "shape, dtype or placements" in plain
    assert "shape, dtype or placements" in other
    assert "'blocks.0.norm.weight' and 'blocks.1.norm.weight' were two parameters" in tied
    assert "with the strides (2,) on this rank, not (1,)" in strided
    assert "within keeping_parameters()" in kept


def _run_between(options: Mapping[str, object]) -> str:
    """The error of a backward pass after a run with other biases; the next step equals one device."""
    data = batches(1)[0]
    model = Stack().double()
    dist_model = made(Stack().double(), (2,), data, **options)
    biases = {name: item for name, item in _halves(dist_model).items() if name.endswith("up.bias")}
    loss = dist_model(**data)["loss"]
    with torch.no_grad():
        functional_call(dist_model, biases, (), data)
    with pytest.raises(UnsupportedError) as raised:
        loss.backward()
    dist_model.zero_grad()
    for each in (dist_model, model):
        each(**data)["loss"].backward()
    assert error(gradients(dist_model), gradients(model)) <= 1e-12
    return str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"stored": WAYS[0]},
        {"stored": WAYS[1]},
        # Leaves that are in no unit.
        {"constraints": {"*.up": {"method": {"dp": "out"}}}},
    ],
    ids=["parts", "whole", "leaves"],
)
def test_a_run_with_others_between_forward_and_backward_is_refused(options: Mapping[str, object]) -> None:
    """Gradients would go to the parameters of the later run, or nowhere, though nothing that is read has changed."""
    first, second = run_ranks(_run_between, 2, options)
    assert first == second
    # The first one of the model.
    assert re.match("the parameter 'blocks.0.up.bias' was replaced after this forward pass", first)


def _with_held_gradients(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gradients of two batches added up, with a backward pass of other parameters between (as SAM has it)."""
    held = model.holding_gradients() if isinstance(model, DistributedModule) else nullcontext()
    with held:
        model(**data[0])["loss"].backward()
    halves = _halves(model)
    functional_call(model, halves, (), data[0])["loss"].backward()
    model(**data[1])["loss"].backward()
    return {**gradients(model), **{f"half of {name}": whole(item.grad) for name, item in halves.items()}}


def _held_error(stored: Mapping[str, str]) -> float:
    data = batches(2)
    ours = _with_held_gradients(made(Stack().double(), (2,), data[0], stored=stored), data)
    return error(ours, _with_held_gradients(Stack().double(), data))


@pytest.mark.parametrize("stored", WAYS, ids=["parts", "whole"])
def test_held_gradients_stay_with_their_parameters(stored: Mapping[str, str]) -> None:
    """They are reduced by the next backward pass of the same parameters."""
    assert max(run_ranks(_held_error, 2, stored)) <= 1e-12
