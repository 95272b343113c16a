"""Parameters on `fully_shard` that are used in other layouts than they are stored in, and gradients in other dtypes."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime import DistributedModule
from autopar.runtime.generated.collectives import exchange
from autopar.testing import LiftFloat32, compare_on_mesh, run_ranks
from tests.autopar.fsdp.shared import batch_of, gradients, made_with, mesh_of
from tests.autopar.stored import Spy
from tests.models import Stack, llama, phi3, tokens

# Used as parts of both fused projections, which no checkpoint stores: split over the other dim when stored.
TURNED = [
    {"stored": {"dp": "S(1)", "tp": "S(1, 2)"}, "used": {"dp": "R", "tp": "S(0, 2)"}},
    {"stored": {"dp": "I", "tp": "S(1)"}, "used": {"dp": "R", "tp": "S(0, 2)"}},
]


def _take_steps(model: nn.Module, dist_model: DistributedModule, batch: Mapping[str, torch.Tensor]) -> None:
    """Two steps of both models, each with gradients of three passes: one is held back, two keep parameters."""
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, dist_model)]
    for _ in range(2):
        for _ in range(3):
            model(**batch).loss.backward()
        with dist_model.holding_gradients():
            dist_model(**batch).loss.backward()
        with dist_model.keeping_parameters():
            for _ in range(2):
                dist_model(**batch).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _hook_calls(dist_model: DistributedModule) -> list[bool]:
    """A list that grows with each call of a hook of a fused projection: whether there is a gradient then."""
    calls: list[bool] = []
    for name, parameter in dist_model.named_parameters():
        if "gate_up_proj" in name:
            parameter.register_post_accumulate_grad_hook(lambda item: calls.append(item.grad is not None))
    return calls


def _turned(constraints: list[Mapping[str, Mapping[str, str]]]) -> list[dict[str, object]]:
    """For each way to store the fused projections: what the engine keeps, how far it is from one device, how many
    all-to-alls a step takes, and how many gradients hooks see."""
    found = []
    mesh, batch = mesh_of((2, 2)), tokens()
    for demanded in constraints:
        options: dict[str, Any] = {"cluster": "ideal", "constraints": {"*.gate_up_proj.weight": demanded}}
        with Spy() as spy:
            model = phi3(num_hidden_layers=2).double()
            error = compare_on_mesh(model, mesh, batch, torch.float64, memory_limit=1e12, **options).worst
        with LiftFloat32(torch.float64):
            model = phi3(num_hidden_layers=2).double()
            dist_model = autopar.parallelize(model, mesh, batch, **options)
            with mock.patch("autopar.runtime.fsdp.turns.exchange", wraps=exchange) as exchanges:
                dist_model(**batch).loss.backward()
            dist_model.zero_grad()
            hooked = _hook_calls(dist_model)
            _take_steps(model, dist_model, batch)
        weights = dict(model.named_parameters())
        far = max(
            (parameter.full_tensor() - weights[name]).abs().max().item()
            for name, parameter in dist_model.named_parameters()
        )
        kept = {
            name: [str(placement) for placement in layout]
            for seen in spy.seen
            for group in seen.units.units
            for name, layout in group.turned.items()
        }
        found.append({"error": error, "far": far, "kept": kept, "sent": exchanges.call_count, "hooked": hooked})
    return found


@pytest.mark.slow
def test_copies_in_other_layouts_are_gathered() -> None:
    """A parameter that is turned by an all-to-all before it is gathered: gradients, accumulation with gradients held
    back and parameters kept, and steps of an optimizer are those of one device. Those of all layers share one
    all-to-all forward and one backward."""
    results = run_ranks(_turned, 4, TURNED)
    names = [f"model.layers.{number}.mlp.gate_up_proj.weight" for number in range(2)]
    for found, placements in zip(results[0], (["S(1)", "S(0, 2)"], ["I", "S(0, 2)"]), strict=True):
        assert found["kept"] == dict.fromkeys(names, placements)
        assert found["sent"] == 2
        # Two of the three backward passes of each of two steps reduce gradients, of two parameters.
        assert found["hooked"] == [True] * 8
        assert found["error"][1] <= 1e-9, found
    assert all(found["far"] <= 1e-9 for result in results for found in result)


# Gathered over one axis by a unit, over the other one by the code that reads it.
COPIED = {"*.o_proj.weight": {"stored": {"dp": "S(0, 2)", "tp": "S(0)"}, "used": {"dp": "R", "tp": "I"}}}


def _copied() -> dict[str, object]:
    mesh, batch = mesh_of((2, 2)), tokens()
    options: dict[str, Any] = {"cluster": "ideal", "constraints": COPIED}
    with Spy() as spy:
        error = compare_on_mesh(llama().double(), mesh, batch, torch.float64, memory_limit=1e12, **options).worst
    with LiftFloat32(torch.float64):
        model = llama().double()
        dist_model = autopar.parallelize(model, mesh, batch, **options)
        _take_steps(model, dist_model, batch)
    weights = dict(model.named_parameters())
    far = max(
        (parameter.full_tensor() - weights[name]).abs().max().item()
        for name, parameter in dist_model.named_parameters()
    )
    units = [
        unit for seen in spy.seen for unit in seen.units.units if any("o_proj" in name for name in unit.parameters)
    ]
    return {"error": error[1], "far": far, "read": {(unit.saved, unit.regathered) for unit in units}}


@pytest.mark.long
def test_parameters_that_are_copied_after_their_gather_are_freed() -> None:
    """The backward pass reads the copy: gradients, accumulation and steps of an optimizer are those of one device."""
    results = run_ranks(_copied, 4)
    assert results[0]["read"] == {(False, True)}
    assert results[0]["error"] <= 1e-9, results[0]
    assert all(found["far"] <= 1e-9 for found in results)


def _held_in(reduce: torch.dtype) -> dict[str, object]:
    precision = autopar.Precision(compute=torch.bfloat16, reduce=reduce, master=torch.float32)
    first, second = ({name: value.float() for name, value in batch_of(seed).items()} for seed in (0, 1))
    dist_model = made_with(Stack(), (2,), first, precision=precision)
    for batch in (first, second):
        dist_model(**batch)["loss"].backward()
    expected = gradients(dist_model)
    found: dict[str, object] = {"largest": max(float(item.abs().max()) for item in expected.values())}
    for name in ("zeros", "none"):
        dist_model.zero_grad(set_to_none=name == "none")
        with dist_model.holding_gradients():
            for _ in range(2):
                dist_model.zero_grad(set_to_none=name == "none")
                dist_model(**first)["loss"].backward()
            found["held"] = {item.grad.dtype for item in dist_model.parameters()}
        dist_model(**second)["loss"].backward()
        found["reduced"] = {item.grad.dtype for item in dist_model.parameters()}
        found[name] = max(float((item - expected[key]).abs().max()) for key, item in gradients(dist_model).items())
    return found


@pytest.mark.long
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_gradients_are_held_in_the_dtype_of_the_reduction(reduce: torch.dtype) -> None:
    """They are as exact as that, and can be zeroed."""
    for found in run_ranks(_held_in, 2, reduce):
        assert found["held"] == {reduce}
        assert found["reduced"] == {torch.float32}
        # A sum of two, rounded twice.
        allowed = 2 * torch.finfo(reduce).eps * found["largest"]
        assert found["zeros"] <= allowed
        assert found["none"] <= allowed
