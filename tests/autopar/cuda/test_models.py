"""Stock models on ranks of NCCL equal themselves on one device: outputs, loss and every gradient.

On a machine with fewer devices than ranks, these share them.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Pipeline
from autopar.testing import compare, run_ranks
from tests.autopar.test_mixtures import mixtral
from tests.models import bloom, gemma2, gpt2, gpt_oss, llama, mistral, phi3, qwen3, t5, tokens

ATTENTION = "@scaled_dot_product_attention"
# Relative errors that are allowed: of rounding.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


@dataclass(frozen=True)
class Case:
    """A model on a mesh of CUDA devices."""

    model: Callable[[], nn.Module]
    mesh: Mapping[str, int]
    options: Mapping[str, object] = field(default_factory=dict)
    inputs: Callable[[], Mapping[str, object]] = tokens
    dtype: torch.dtype = torch.float64


def _methods(**methods: str) -> dict[str, object]:
    return {"constraints": {ATTENTION: {"method": methods}}}


def _sequences() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(3, 64, (4, length), generator=generator) for name, length in _LENGTHS.items()}


def _packed() -> dict[str, object]:
    return {**tokens(), "position_ids": torch.cat([torch.arange(10), torch.arange(6)]).repeat(4, 1)}


def _deep() -> nn.Module:
    return llama(num_hidden_layers=4)


_LENGTHS = {"input_ids": 12, "labels": 8}
_SQUARE = {"dp": 2, "tp": 2}
_SINGLE = torch.float32
CASES: Mapping[str, Case] = {
    "llama": Case(llama, _SQUARE),
    "gpt2": Case(gpt2, _SQUARE),
    "qwen3": Case(qwen3, {"tp": 4}),
    "gemma2": Case(gemma2, _SQUARE),
    "mistral": Case(mistral, _SQUARE),
    "bloom": Case(bloom, _SQUARE),
    "phi3": Case(phi3, _SQUARE),
    "t5": Case(t5, _SQUARE, inputs=_sequences),
    "gpt_oss": Case(gpt_oss, _SQUARE),
    "mixtral": Case(lambda: mixtral(balanced=True), _SQUARE),
    "padding": Case(llama, _SQUARE, inputs=lambda: tokens(padding=True)),
    "single precision": Case(llama, _SQUARE, dtype=_SINGLE),
    "micro-batches": Case(llama, _SQUARE, {"micro_batches": 2}),
    "recompute": Case(_deep, _SQUARE, {"recompute": "full"}),
    "selective": Case(_deep, _SQUARE, {"recompute": "selective"}),
    "ZeRO 1": Case(llama, {"dp": 2}, {"zero": 1, "micro_batches": 2}),
    "ZeRO 3": Case(llama, {"dp": 4}, {"zero": 3, "micro_batches": 2}),
    "compiled": Case(llama, _SQUARE, {"compiled": True}, dtype=_SINGLE),
    "ring": Case(llama, _SQUARE, _methods(dp="ring", tp="ring@2")),
    "ring in single precision": Case(llama, _SQUARE, _methods(dp="ring", tp="ring@2"), dtype=_SINGLE),
    "ring beside heads": Case(qwen3, _SQUARE, _methods(dp="ring", tp="heads"), dtype=_SINGLE),
    "queries": Case(gpt2, _SQUARE, _methods(dp="queries", tp="queries@2"), dtype=_SINGLE),
    "stripes with padding": Case(llama, {"cp": 2}, _methods(cp="ring@8"), lambda: tokens(padding=True), dtype=_SINGLE),
    "documents in a ring": Case(llama, {"cp": 2}, _methods(cp="ring"), _packed, dtype=_SINGLE),
    "windows in a ring": Case(mistral, {"cp": 2}, _methods(cp="ring"), dtype=_SINGLE),
    "stages": Case(llama, {"pp": 2, "dp": 2}),
    "stages of a tied model": Case(gpt2, {"pp": 2, "tp": 2}, {"micro_batches": 2}),
    "virtual stages": Case(
        _deep,
        {"pp": 2},
        {"pipeline": Pipeline(schedule="interleaved_1f1b", virtual_stages=2), "micro_batches": 4},
    ),
    "zero bubble": Case(_deep, {"pp": 2}, {"pipeline": Pipeline(schedule="zbv"), "micro_batches": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name: str) -> None:
    case = CASES[name]
    options = {"cluster": "ideal", **case.options}
    found = compare(
        case.model(), case.mesh, case.inputs(), case.dtype, lifted=case.dtype is torch.float64, device_type="cuda",
        **options,
    )  # fmt: skip
    assert found.worst[1] <= TOLERANCES[case.dtype], str(found)


def _half(methods: Mapping[str, str], recompute: str) -> tuple[float, float]:
    """Errors of the gradients of a llama in bfloat16, relative to their norm in float64: distributed, and stock."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = {name: tensor.cuda() for name, tensor in tokens(4, 32).items()}
    exact = llama(hidden_size=64).cuda().double()
    stock = copy.deepcopy(exact).bfloat16()
    module = autopar.parallelize(
        copy.deepcopy(stock), mesh, batch, cluster="ideal", recompute=recompute, **_methods(**methods)
    )
    for model in (exact, stock, module):
        model(**batch)["loss"].backward()
    return _off(module, exact), _off(stock, exact)


def _off(model: nn.Module, exact: nn.Module) -> float:
    found = dict(model.named_parameters())
    wrong = total = 0.0
    for name, parameter in exact.named_parameters():
        gradient = found[name].grad
        whole: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        wrong += float((whole.double() - parameter.grad).square().sum())
        total += float(parameter.grad.square().sum())
    return (wrong / total) ** 0.5


@pytest.mark.parametrize(
    ("methods", "recompute"),
    [
        ({"dp": "batch", "tp": "heads"}, "none"),
        ({"dp": "ring", "tp": "ring@2"}, "none"),
        ({"dp": "ring", "tp": "heads"}, "selective"),
        ({"dp": "queries", "tp": "queries@2"}, "full"),
    ],
    ids=["heads", "ring", "ring beside heads", "queries"],
)
def test_half_precision_is_as_exact_as_on_one_device(methods: dict[str, str], recompute: str) -> None:
    """By flash attention."""
    for found, stock in run_ranks(_half, 4, methods, recompute, device_type="cuda"):
        assert found < 1.5 * stock < 0.1
