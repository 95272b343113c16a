"""A stock model, planned freely, in a loop: exceptions that are caught, and modules that are deleted."""

import gc
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import DistributedModule
from autopar.testing import LiftFloat32, run_ranks
from tests.autopar.test_training import Failing, FullError, error, gradients, whole
from tests.models import gpt2, llama, tokens

pytestmark = pytest.mark.slow

# Products of a pass at which an exception is raised: from the first to the last.
_PLACES = 8

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "zero 3": {"zero": 3},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full", "zero": 3},
}


def _made(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, DistributedModule, dict[str, Tensor]]:
    model = {"llama": llama, "tied llama": partial(llama, tie_word_embeddings=True), "gpt2": gpt2}[name]
    batch = tokens(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return model().double(), autopar.parallelize(model().double(), mesh, batch, cluster="ideal", **options), batch


class _FailingProduct(Failing):
    """Raises at a product of a number: ranks run as many, while the number of other ops depends on the rank."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _count(run: Any) -> int:
    with _FailingProduct() as mode:
        run()
    return mode.count


def _recovered(name: str, options: Mapping[str, Any]) -> float:
    with LiftFloat32(torch.float64):
        model, module, batch = _made(name, options)
        optimizers = [torch.optim.AdamW(item.parameters(), lr=1e-3, foreach=False) for item in (model, module)]
        worst = 0.0
        for place in range(2 * _PLACES):
            loss = partial(module, **batch)
            run = loss if place % 2 else loss().loss.backward
            at = 1 + (_count(run) - 1) * (place // 2) // (_PLACES - 1)
            module.zero_grad()
            run = loss if place % 2 else loss().loss.backward
            with pytest.raises(FullError), _FailingProduct(at):
                run()
            # "Skip this batch": the next step is that of one device.
            for item, optimizer in zip((model, module), optimizers, strict=True):
                optimizer.zero_grad()
                item(**batch).loss.backward()
            worst = max(worst, error(gradients(module), gradients(model)))
            for optimizer in optimizers:
                optimizer.step()
        own = {key: whole(item.detach()) for key, item in module.named_parameters()}
        return max(worst, error(own, {key: item.detach() for key, item in model.named_parameters()}))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "tied llama", "gpt2"])
def test_steps_after_exceptions_equal_one_device(name: str, options: str) -> None:
    """At products from the first to the last of the forward and of the backward pass, on every rank."""
    assert max(run_ranks(_recovered, 4, name, OPTIONS[options])) <= 1e-9


def _left(name: str, options: Mapping[str, Any]) -> list[str]:
    _, module, batch = _made(name, options)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module(**batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        module.eval()(**batch)
    watched = {key: weakref.ref(item) for key, item in module.named_parameters()}
    watched |= {f"part of {key}": weakref.ref(item.to_local()) for key, item in module.named_parameters()}  # type: ignore[attr-defined]
    alive = weakref.ref(module)
    del module, optimizer
    gc.collect()
    return [key for key, reference in watched.items() if reference() is not None] + ["module"] * (alive() is not None)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_deleted_modules_are_freed(name: str) -> None:
    """Parameters, the parts that ranks store, and the module."""
    assert run_ranks(_left, 4, name, {}) == [[]] * 4
