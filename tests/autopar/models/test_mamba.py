"""Models with selective state spaces are traced without their loop, and compute the same."""

import importlib
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import autopar
from autopar.models.loops import without_loops
from autopar.models.mamba import mamba_scan
from autopar.testing import LiftFloat32
from tests.autopar.comparing import MESHES, exact
from tests.autopar.simulated import predicted_and_allocated
from tests.models import tokens
from tests.passes.helpers import normalized

_SIZES = {"vocab_size": 64, "hidden_size": 16}


def _mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(**_SIZES, num_hidden_layers=2, state_size=4, time_step_rank=4))


def _falcon_mamba() -> nn.Module:
    """Its steps, and what goes into states and out, are normed."""
    return FalconMambaForCausalLM(FalconMambaConfig(**_SIZES, num_hidden_layers=2, state_size=4, time_step_rank=4))


def _jamba() -> nn.Module:
    """A layer of states and one of attention."""
    sizes = {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 1}
    states = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    layers = {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    return JambaForCausalLM(JambaConfig(**_SIZES, **sizes, **states, **layers))


MODELS: Mapping[str, Callable[[], nn.Module]] = {"mamba": _mamba, "falcon_mamba": _falcon_mamba, "jamba": _jamba}
MODELING = "transformers.models.{0}.modeling_{0}"


def _given(dtype: torch.dtype, length: int) -> dict[str, Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    found = {"hidden_states": drawn(2, 3, length), "dt": drawn(2, 3, length)}
    found |= {"A": (-drawn(3, 4).exp()).detach().requires_grad_(), "B": drawn(2, 4, length), "C": drawn(2, 4, length)}
    return {**found, "D": drawn(3), "z": drawn(2, 3, length), "delta_bias": drawn(3)}


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba"])
@pytest.mark.parametrize("length", [7, 70])
def test_the_scan_of_transformers(family: str, length: int) -> None:
    """Results, the last state and all gradients."""
    modeling = pytest.importorskip(MODELING.format(family))
    torch.manual_seed(0)
    given, made = _given(torch.float64, length), []
    for function in (modeling.mamba_selective_scan, mamba_scan):
        with LiftFloat32(torch.float64):
            result, last = function(**given, delta_softplus=True, return_last_state=True)
            alone = function(*(given[name] for name in ("hidden_states", "dt", "A", "B", "C")))
        loss = result.square().sum() + last.square().sum() + alone.sum()
        made.append([result, last, alone, *torch.autograd.grad(loss, list(given.values()))])
    for own, theirs in zip(*made, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-10)


def test_half_precision() -> None:
    """The results are nearer to those of double precision than the loop's are, which rounds states."""
    torch.manual_seed(0)
    given = {name: each.bfloat16() for name, each in _given(torch.float64, 300).items() if name not in ("D", "z")}
    given |= {"A": given["A"].float(), "dt": given["dt"].abs()}
    del given["delta_bias"]
    exactly = mamba_scan(**{name: each.double() for name, each in given.items()})
    loop = importlib.import_module(MODELING.format("mamba")).mamba_selective_scan
    errors = [(function(**given) - exactly).norm() for function in (loop, mamba_scan)]
    assert errors[1] < errors[0]


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_programs_do_not_grow_with_the_sequence(make: Callable[[], nn.Module]) -> None:
    """One op for all places of a layer."""
    model, programs = make(), []
    for length in (16, 200):
        with without_loops(model):
            programs.append(normalized(model, **tokens(2, length), use_cache=False))
    short, long = ([op.kind for op in program.ops] for program in programs)
    assert short == long
    assert long.count("selective_scan") == (1 if make is _jamba else 2)


@pytest.mark.parametrize("name", ["mamba", pytest.param("falcon_mamba", marks=pytest.mark.slow)])
def test_temporaries_are_counted_in_inference(name: str) -> None:
    """Those of the scan have the peak."""
    inputs = tokens(4, 200, labels=False)
    predicted, allocated = predicted_and_allocated(MODELS[name](), {"dp": 2}, inputs, objective="infer")
    assert allocated == predicted


CASES = [(name, mesh) for name in MODELS for mesh in ("2", "4", "2x2")]


def _fast(name: str, mesh: str) -> list[object]:
    """The cases, of which one is run every time."""
    return [
        pytest.param(*case, marks=[] if case == (name, mesh) else pytest.mark.slow, id="-".join(case)) for case in CASES
    ]


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), _fast("mamba", "2"))
def test_channels_are_split(name: str, mesh: str) -> None:
    """Samples over dp, channels over tp."""
    methods = {axis: "batch" if axis == "dp" else "channels" for axis in MESHES[mesh]}
    torch.manual_seed(0)
    exact(MODELS[name]().double(), mesh, tokens(4, 24), constraints={"@selective_scan": {"method": methods}})


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), _fast("mamba", "2"))
def test_places_are_split(name: str, mesh: str) -> None:
    """The sequence over all axes, in layers between, convolutions and the scan, whose ranks pass states on."""
    axes, inputs = MESHES[mesh], tokens(1, 264)
    constraints = {
        "@linear": {"in": dict.fromkeys(axes, "S(1)")},
        "@padded_conv1d": {"method": dict.fromkeys(axes, "space0")},
        "@selective_scan": {"method": dict.fromkeys(axes, "places")},
    }
    torch.manual_seed(0)
    plan = autopar.plan(MODELS[name](), axes, inputs, cluster="ideal", constraints=constraints)
    assert not plan.unsplit_over_sequence
    exact(MODELS[name]().double(), mesh, inputs, constraints=constraints)
