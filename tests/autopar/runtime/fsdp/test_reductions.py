"""All-reduces of gradients of parameters that are read as they are stored: which ones run, when, and of what."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.fsdp import reductions
from autopar.testing import run_ranks
from tests.autopar.stored import storage
from tests.models import Block


class Optional(nn.Module):
    """Three blocks, of which a call may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (Block(16) for _ in range(3))

    def forward(self, x: Tensor, skip: bool = False) -> dict[str, Tensor]:
        """x: [batch, width]."""
        x = self.first(x)
        x = self.third(x if skip else self.second(x))
        return {"loss": x.pow(2).mean(), "sum": x.sum()}


class Issued(TorchDispatchMode):
    """Writes down all-reduces and products of matrices in the order in which they are issued: the elements of an
    all-reduce, 0 for a product."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func._opname == "all_reduce_":
            self.events.append(args[0].numel())
        elif func._opname in ("mm", "addmm"):
            self.events.append(0)
        return func(*args, **(kwargs or {}))


def _error(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of gradients; infinite where only one has a gradient."""
    found = [0.0]
    for name, parameter in theirs.named_parameters():
        own = ours.get_parameter(name).grad
        if (own is None) != (parameter.grad is None):
            return float("inf")
        if own is not None and parameter.grad is not None:
            found.append(float((own.full_tensor() - parameter.grad).abs().max()))  # type: ignore[attr-defined]
    return max(found)


def _reduced() -> dict[str, object]:
    model, batch = Optional().double(), {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    # The parameters of the second block are stored in parts.
    constraints = {**storage(dp="I"), "second.*": storage(dp="S(0)")["*"]}
    options: dict[str, Any] = {"cluster": "ideal", "memory_limit": 1e12}
    dist_model = autopar.parallelize(model, mesh, batch, constraints=storage(dp="I"), **options)
    mixed = autopar.parallelize(model, mesh, batch, constraints=constraints, **options)
    found: dict[str, object] = {}
    with Issued() as forward:
        output = dist_model(**batch)
    with Issued() as backward:
        output["loss"].backward()
    found["events"] = forward.events, backward.events
    model(**batch)["loss"].backward()
    errors = {"one": _error(dist_model, model)}
    # Two backward passes of one forward pass, of one output and of both; one of two forward passes.
    for item in (dist_model, model, mixed):
        item.zero_grad()
        output, other = item(**batch), item(**batch)
        output["loss"].backward(retain_graph=True)
        output["sum"].backward(retain_graph=True)
        (output["loss"] + output["sum"] + other["loss"]).backward()
    errors["several"], errors["several, some of them in parts"] = _error(dist_model, model), _error(mixed, model)
    # A block that is not used, while its gradients are held back, and in the pass that reduces them.
    for skips in ((False, True), (True, False), (True, True)):
        for item in (dist_model, model, mixed):
            item.zero_grad()
            if item is model:
                item(**batch, skip=skips[0])["loss"].backward()
            else:
                with item.holding_gradients():
                    item(**batch, skip=skips[0])["loss"].backward()
            item(**batch, skip=skips[1])["loss"].backward()
        errors[f"{skips}"], errors[f"{skips}, in parts"] = _error(dist_model, model), _error(mixed, model)
    found["errors"] = errors
    dist_model.zero_grad()
    with pytest.raises(autopar.InputError, match="second derivatives with respect to parameters are not supported"):
        dist_model(**batch)["loss"].backward(create_graph=True)
    dist_model(**batch)["loss"].backward()
    model.zero_grad()
    model(**batch)["loss"].backward()
    found["after create_graph"] = _error(dist_model, model)
    return found


def _interrupted() -> dict[str, object]:
    """Gradients after a backward pass that an exception has ended, with some gradients of a unit computed and others
    not; and the all-reduces of the backward pass after it."""
    model, batch = Optional().double(), {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options: dict[str, Any] = {"cluster": "ideal", "memory_limit": 1e12}
    dist_model = autopar.parallelize(model, mesh, batch, constraints=storage(dp="I"), **options)
    found: dict[str, object] = {}
    unit = next(iter(dist_model._managers.by_stage[0]._reductions._units))
    assert len(unit.leaves) > 1

    def fail(_: Tensor) -> None:
        raise ValueError("out of memory")

    for place, leaf in enumerate(unit.leaves):
        loss = dist_model(**batch)["loss"]
        handle = leaf.parameter.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="out of memory"):
            loss.backward()
        handle.remove()
        for item in (model, dist_model):
            item.zero_grad()
        output = dist_model(**batch)
        with Issued() as backward:
            output["loss"].backward()
        model(**batch)["loss"].backward()
        found[f"place {place}"] = _error(dist_model, model), sum(event > 0 for event in backward.events)
    return found


def _in_batches(run: Callable[[], dict[str, Any]], limit: int) -> dict[str, Any]:
    """`run` with batches of `limit` bytes."""
    with mock.patch.object(reductions, "REDUCTION_BYTES", limit):
        return run()


def test_a_unit_recovers_with_some_of_its_gradients() -> None:
    """An exception comes before, between and after the gradients of a unit; the next pass reduces each unit once."""
    for found in run_ranks(_in_batches, 2, _interrupted, 0):
        for error, reduced in found.values():
            assert error <= 1e-12
            assert reduced == 9


@pytest.mark.long
def test_units_are_reduced_while_the_backward_pass_goes_on() -> None:
    """An all-reduce for each op with parameters, issued before the products of the op before it, or for several that
    fill a batch; the rest at the end. Gradients are those of one device, whatever is used, how often, and in which
    backward pass."""
    down, up, norm = 64 * 16 + 16, 16 * 64 + 64, 2 * 16
    first, second = down + up + norm + down, up + norm + down + up
    expected = {0: [0, 0, down, 0, 0, up, norm] * 3, 20_000: [0] * 6 + [first] + [0] * 6 + [second, norm]}
    found_by_limit = {limit: run_ranks(_in_batches, 2, _reduced, limit) for limit in expected}
    for limit, found in ((limit, found) for limit, ranks in found_by_limit.items() for found in ranks):
        forward, backward = found["events"]
        assert forward == [0, 0] * 3
        assert backward == expected[limit]
        assert max(found["errors"].values()) <= 1e-12, found["errors"]
        assert found["after create_graph"] <= 1e-12
