"""Gradients of parameters that generated code reads as plain tensors: as autograd gives them on one device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import DistributedModule, parallelize
from autopar.testing.ranks import run_ranks
from passes.ir.errors import InputError
from tests.autopar.test_training import WAYS, batches, error, gradients, made
from tests.autopar.without_engine import without_engine
from tests.models import Stack

Gradients = dict[str, Tensor]

# Weights are split over the ranks, and read as they are stored.
_CONSTRAINTS = {"blocks.*.up/linear": {"method": {"tp": "out"}}, "blocks.*.down/linear": {"method": {"tp": "in"}}}


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}


def _made() -> tuple[nn.Module, DistributedModule]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with without_engine():
        module = parallelize(Stack().double(), mesh, _inputs(), cluster="ideal", constraints=_CONSTRAINTS)
    assert any(isinstance(item, DTensor) and item.placements[0].is_shard() for item in module.parameters())
    return Stack().double(), module


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(**_inputs())["loss"]
    return loss


def _whole(value: object) -> Tensor:
    assert isinstance(value, DTensor | Tensor)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gradients(model: nn.Module) -> Gradients:
    return {name: _whole(item.grad).clone() for name, item in model.named_parameters() if item.grad is not None}


@contextlib.contextmanager
def _after_each(model: nn.Module, hook: Callable[[Tensor], None]) -> Iterator[None]:
    handles = [item.register_post_accumulate_grad_hook(hook) for item in model.parameters()]  # type: ignore[no-untyped-call]
    yield
    for handle in handles:
        handle.remove()


def _plain(model: nn.Module) -> None:
    _loss(model).backward()


def _twice(model: nn.Module) -> None:
    _loss(model).backward()
    _loss(model).backward()


def _retained(model: nn.Module) -> None:
    loss = _loss(model)
    for _ in range(3):
        loss.backward(retain_graph=True)


def _zeroed_before_backward(model: nn.Module) -> None:
    _loss(model).backward()
    loss = _loss(model)
    model.zero_grad()
    loss.backward()


def _zeroed_in_place(model: nn.Module) -> None:
    _loss(model).backward()
    loss = _loss(model)
    model.zero_grad(set_to_none=False)
    loss.backward()


def _two_calls_in_one_backward(model: nn.Module) -> None:
    smaller = {name: tensor[:2] for name, tensor in _inputs().items()}
    (_loss(model) + model(**smaller)["loss"]).backward()


def _after_an_exception(model: nn.Module) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("out of memory")

    first = next(iter(model.parameters()))
    handle = first.register_hook(fail)
    loss = _loss(model)
    with pytest.raises(ValueError, match="out of memory"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    _loss(model).backward()


def _some_frozen(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    _loss(model).backward()


def _unfrozen_again(model: nn.Module) -> None:
    for trained in (False, True):
        for parameter in model.parameters():
            parameter.requires_grad_(trained)
    _loss(model).backward()


def _tensor_hooks(model: nn.Module) -> None:
    handles = []
    for parameter in model.parameters():
        handles += [parameter.register_hook(hook) for hook in (lambda gradient: gradient * 2, lambda gradient: None)]
    _twice(model)
    for handle in handles:
        handle.remove()


def _post_accumulate_hooks(model: nn.Module) -> None:
    """Gradients are added to others under post-accumulate hooks, which see each."""
    found: list[Tensor] = []
    with _after_each(model, lambda item: found.append(item.grad * 1)):
        _twice(model)
    assert len(found) == 2 * len(list(model.parameters()))


def _optimizer_in_backward(model: nn.Module) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    with _after_each(model, step):
        _twice(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()


def _asked_for(model: nn.Module) -> None:
    parameters = list(model.parameters())[::2]
    found = torch.autograd.grad(_loss(model), parameters)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def _inputs_of_backward(model: nn.Module) -> None:
    parameters = list(model.parameters())[::2]
    _loss(model).backward(inputs=parameters)
    _loss(model).backward(inputs=parameters)


def _assigned(model: nn.Module) -> None:
    """Values that come with other memory are those that the next call computes with."""
    other = {name: tensor.detach() * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    _loss(model).backward()


def _stepped(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()


_WAYS: tuple[Callable[[nn.Module], None], ...] = (
    _plain,
    _twice,
    _retained,
    _zeroed_before_backward,
    _zeroed_in_place,
    _two_calls_in_one_backward,
    _after_an_exception,
    _some_frozen,
    _unfrozen_again,
    _tensor_hooks,
    _post_accumulate_hooks,
    _optimizer_in_backward,
    _asked_for,
    _inputs_of_backward,
    _assigned,
    _stepped,
)


def _compared() -> None:
    stock, module = _made()
    for way in _WAYS:
        for model in (stock, module):
            model.zero_grad()
            model.requires_grad_(True)
        way(stock)
        way(module)
        expected, got = _gradients(stock), _gradients(module)
        assert expected.keys() == got.keys(), way.__name__
        for name, gradient in expected.items():
            about = f"{name} after {way.__name__}"
            assert torch.allclose(got[name], gradient, rtol=1e-10, atol=1e-12), about


@pytest.mark.long
def test_gradients_are_those_of_one_device() -> None:
    """Gradients match for every backward setting: accumulation, hooks, freezing, other values, some gradients only."""
    run_ranks(_compared, 2)


def _refusals() -> None:
    _, module = _made()
    loss = _loss(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(InputError, match="second derivatives"):
        _loss(module).backward(create_graph=True)
    with pytest.raises(InputError, match="second derivatives"):
        torch.autograd.grad(_loss(module), list(module.parameters()), create_graph=True)
    next(module.parameters()).register_hook(lambda gradient: gradient.full_tensor())
    with pytest.raises(InputError, match="return a DTensor with the placements"):
        _loss(module).backward()


def test_refusals() -> None:
    """A change in place before backward, second derivatives, a hook that returns another kind of tensor."""
    run_ranks(_refusals, 2)


def _in_units(stored: Mapping[str, str]) -> list[str]:
    data = batches(1)[0]
    model, module = Stack().double(), made(Stack().double(), (2,), data, stored=stored)
    parameters = list(module.parameters())
    said = []
    for ask in (
        lambda loss: torch.autograd.grad(loss, parameters),
        lambda loss: loss.backward(inputs=parameters[-1:]),
    ):
        with pytest.raises(InputError) as raised:
            ask(module(**data)["loss"])
        said.append(str(raised.value))
        assert all(parameter.grad is None for parameter in parameters)
    # Gradients of all of them, and of inputs alone.
    for item in (model, module):
        item(**data)["loss"].backward()
    assert error(gradients(module), gradients(model)) <= 1e-12
    return said


@pytest.mark.parametrize("stored", WAYS)
def test_gradients_of_some_parameters_of_units_are_refused(stored: Mapping[str, str]) -> None:
    """By name; the next backward pass runs."""
    first, second = run_ranks(_in_units, 2, stored)
    assert first == second
    assert "'blocks.0" in first[0]
    assert all("lies in an FSDP unit" in text for text in first)
