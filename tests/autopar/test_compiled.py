"""Regions that torch compiles compute what they do uncompiled, and plans know that chains of cheap ops are joined."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import compare_on_mesh
from autopar.testing.ranks import run_ranks
from tests.models import gpt2, llama, tokens

_MODELS = {"llama": llama, "gpt2": gpt2}
_CONSTRAINED = {
    "model.layers.*.mlp.up_proj.weight": {"stored": {"dp": "S(1)"}},
    "model.layers.*.input_layernorm": {"out": {"tp": "S(1)"}},
}


def _compared(
    name: str, mesh: Mapping[str, int], backend: str, options: Mapping[str, object], config: Mapping[str, object]
) -> tuple[dict[str, float], int, int]:
    """All errors of a rank, how many graphs were compiled, and how often one broke off."""
    made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    torch.manual_seed(0)
    model = _MODELS[name](**config).double()
    compiling, torch.compile = torch.compile, partial(torch.compile, backend=backend)
    try:
        found = compare_on_mesh(model, made, tokens(), torch.float64, cluster="ideal", compiled=True, **options)
    finally:
        torch.compile = compiling
    counters = torch._dynamo.utils.counters
    return dict(found.errors), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "backend", "options", "config"),
    [
        # More layers than torch would compile one by one.
        pytest.param("llama", {"tp": 2}, "aot_eager", {}, {"num_hidden_layers": 10}, id="llama on 2"),
        pytest.param("llama", {"dp": 2, "tp": 2}, "inductor", {}, {}, id="llama, inductor", marks=pytest.mark.slow),
        pytest.param("gpt2", {"dp": 2, "tp": 2}, "aot_eager", {}, {}, id="gpt2 on 2x2", marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2}, "aot_eager", {"micro_batches": 2}, {}, id="parts", marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2}, "aot_eager", {"recompute": "full"}, {}, id="full", marks=pytest.mark.slow),
        pytest.param(
            "llama", {"dp": 2}, "aot_eager", {"recompute": "selective"}, {}, id="some", marks=pytest.mark.slow
        ),
        pytest.param(
            "llama",
            {"dp": 2, "tp": 2},
            "aot_eager",
            {"constraints": _CONSTRAINED},
            {},
            id="gathered",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equal_to_one_device(
    name: str, mesh: Mapping[str, int], backend: str, options: Mapping[str, object], config: Mapping[str, object]
) -> None:
    """Outputs, loss and gradients; one graph serves all layers, and another those that are computed again, where the
    comparison's modes are not entered."""
    ranks = 1
    for size in mesh.values():
        ranks *= size
    for errors, graphs, breaks in run_ranks(_compared, ranks, name, mesh, backend, options, config):
        assert max(errors.values()) < 1e-9, max(errors, key=lambda item: errors[item])
        assert sum(item.startswith("gradient of ") for item in errors) > 4
        assert (graphs, breaks) == (2 if options.get("recompute") == "full" else 1, 0)


def _trained() -> tuple[int, int]:
    """How many graphs were compiled for two steps with full recompute, and how often one broke off."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiling, torch.compile = torch.compile, partial(torch.compile, backend="aot_eager")
    try:
        module = autopar.parallelize(llama(), mesh, tokens(), cluster="ideal", compiled=True, recompute="full")
        for _ in range(2):
            module(**tokens()).loss.backward()
    finally:
        torch.compile = compiling
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.long
def test_layers_that_are_computed_again_have_the_same_graph() -> None:
    assert run_ranks(_trained, 2) == [(1, 0)] * 2


def _plan(**options: object) -> autopar.Plan:
    with torch.device("meta"):
        model: nn.Module = llama(hidden_size=256, intermediate_size=512).bfloat16()
    return autopar.plan(model, {"tp": 2}, tokens(), cluster="h100", **options)  # type: ignore[arg-type]


@pytest.mark.long
def test_prices_know_and_plans_say_it() -> None:
    """A compiled plan is predicted to be faster, says that it is compiled, and is read back as it was."""
    plain, compiled = _plan(), _plan(compiled=True)
    assert not plain.compiled
    assert compiled.compiled
    assert compiled.programs["train"].seconds["forward compute"] < plain.programs["train"].seconds["forward compute"]
    assert compiled.programs["train"].seconds["backward compute"] < plain.programs["train"].seconds["backward compute"]
    assert compiled.programs["train"].seconds_on_one < plain.programs["train"].seconds_on_one
    assert autopar.Plan.from_json(compiled.to_json()) == compiled
    assert "compiled" in str(compiled)
    assert "compiled" not in str(plain)


@pytest.mark.slow
def test_formulas_have_the_prices_of_compiled_code() -> None:
    """They are checked against the plan when they are made."""
    plan = _plan(compiled=True, symbolic=True)
    at = dict(plan.expressions.sizes) if plan.expressions else {}
    assert float(plan.step_time_expression().subs(at)) == pytest.approx(sum(plan.programs["train"].seconds.values()))


@pytest.mark.long
def test_replaying() -> None:
    """A plan is replayed as it was made; what was planned for uncompiled code is not called compiled."""
    plain, compiled = _plan(), _plan(compiled=True)
    assert _plan(plan=compiled) == compiled
    assert _plan(plan=compiled, compiled=True) == compiled
    with pytest.raises(autopar.PlanMismatchError, match="compiled=True is asked for"):
        _plan(plan=plain, compiled=True)
    assert replace(plain, compiled=True) != plain


def _dropped(compiled: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = gpt2(resid_pdrop=0.25).double()
    compiling, torch.compile = torch.compile, partial(torch.compile, backend="aot_eager")
    try:
        module = autopar.parallelize(model, mesh, tokens(), cluster="ideal", compiled=compiled)
        module(**tokens()).loss.backward()
    finally:
        torch.compile = compiling
    whole = {}
    for name, item in module.named_parameters():
        assert item.grad is not None
        whole[name] = item.grad.full_tensor() if isinstance(item.grad, DTensor) else item.grad
    return whole


def _both() -> float:
    plain, compiled = _dropped(False), _dropped(True)
    return max(float((plain[name] - compiled[name]).abs().max()) for name in plain)


@pytest.mark.slow
def test_random_numbers_are_those_of_uncompiled_code() -> None:
    assert max(run_ranks(_both, 2)) < 1e-9
