"""Models with the gated delta rule are traced without its loops, and compute the same."""

import importlib
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import autopar
from autopar.models.delta_rule import gated_delta_rule
from autopar.models.loops import without_loops
from autopar.testing import LiftFloat32
from passes.ir.program import Program
from tests.autopar.comparing import MESHES, exact
from tests.models import tokens
from tests.passes.helpers import normalized

MODELING = "transformers.models.qwen3_next.modeling_qwen3_next"
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


def _qwen3_next() -> nn.Module:
    """A layer of linear attention and one of attention, without experts."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1],
        linear_key_head_dim=4,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return Qwen3NextForCausalLM(config)


def _kimi_linear() -> nn.Module:
    """A layer of linear attention whose channels have decays of their own, and one of attention, without experts."""
    transformers = pytest.importorskip("transformers.models.kimi_linear")
    torch.manual_seed(0)
    config = transformers.KimiLinearConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
        linear_head_dim=8,
        linear_num_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.KimiLinearForCausalLM(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"decays of heads": _qwen3_next, "of channels": _kimi_linear}
SPLIT = [
    pytest.param(make, id=name, marks=[] if make is _qwen3_next else pytest.mark.slow) for name, make in MODELS.items()
]


def _given(length: int, *, state: bool, channels: bool = False) -> dict[str, Tensor]:
    """Two heads of queries and keys, four of values; four of all, and decays of their channels, with `channels`."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    heads, decays = (4, (3,)) if channels else (2, ())
    found = {"query": drawn(2, length, heads, 3), "key": drawn(2, length, heads, 3), "value": drawn(2, length, 4, 5)}
    found |= {"g": (-drawn(2, length, 4, *decays).exp()).detach().requires_grad_(), "beta": drawn(2, length, 4)}
    return {**found, "initial_state": drawn(2, 4, 3, 5)} if state else found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("length", "state"), [(11, False), (16, True)])
def test_the_rule_of_transformers(family: str, length: int, state: bool) -> None:
    """Results, the last state and all gradients, also where the last chunk is not full."""
    original = importlib.import_module(f"transformers.models.{family}.modeling_{family}").torch_chunk_gated_delta_rule
    torch.manual_seed(0)
    given = _given(length, state=state)
    made = []
    for function in (original, gated_delta_rule):
        with LiftFloat32(torch.float64):
            result, last = function(**given, chunk_size=4, output_final_state=state, use_qk_l2norm_in_kernel=not state)
        loss = result.square().sum() + (last.square().sum() if state else 0.0)
        made.append([result, *torch.autograd.grad(loss, list(given.values()))])
        assert (last is not None) == state
    for own, theirs in zip(*made, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "glm5_next"])
@pytest.mark.parametrize(("length", "chunk", "state"), [(11, 4, False), (70, 32, True)])
def test_the_rule_with_decays_of_channels(family: str, length: int, chunk: int, state: bool) -> None:
    """Also where a chunk has several blocks of places, and where decays leave nothing."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    original = modeling.chunk_kimi_delta_attention
    torch.manual_seed(0)
    given = _given(length, state=state, channels=True)
    with torch.no_grad():
        given["g"][:, 5] *= 1e3
    made = []
    for function in (original, gated_delta_rule):
        with LiftFloat32(torch.float64):
            result, last = function(
                **given, chunk_size=chunk, output_final_state=state, use_qk_l2norm_in_kernel=not state
            )
        loss = result.square().sum() + (last.square().sum() if state else 0.0)
        made.append([result, *torch.autograd.grad(loss, list(given.values()))])
    for own, theirs in zip(*made, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)


def _program(model: nn.Module, length: int) -> Program:
    with without_loops(model):
        return normalized(model, **tokens(2, length), use_cache=False)


@pytest.mark.long
@pytest.mark.parametrize("make", SPLIT)
def test_programs_do_not_grow_with_the_sequence(make: Callable[[], nn.Module]) -> None:
    """One op for all chunks, and no loop over their places."""
    model = make()
    short, long = (_program(model, length) for length in (64, 256))
    assert [op.kind for op in long.ops].count("delta_scan") == 1
    assert [op.kind for op in short.ops] == [op.kind for op in long.ops]


def test_documents_are_refused_as_ever() -> None:
    """Arguments that only kernels take are left to transformers, which names them."""
    model = _qwen3_next()
    with without_loops(model), pytest.raises(ValueError, match="packed sequences"):
        importlib.import_module(MODELING).torch_chunk_gated_delta_rule(
            **_given(8, state=False), cu_seqlens=torch.tensor([0, 4, 8])
        )


@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
@pytest.mark.parametrize("make", SPLIT)
@pytest.mark.slow
def test_heads_are_split(make: Callable[[], nn.Module], mesh: str) -> None:
    """Samples over dp, heads over tp: of linear attention, and of its scan."""
    constraints = {"@delta_scan": {"method": {axis: "batch" if axis == "dp" else "heads" for axis in MESHES[mesh]}}}
    plan = autopar.plan(make(), MESHES[mesh], tokens(4, 24), cluster="ideal", constraints=constraints)
    assert not plan.whole_ops
    exact(make().double(), mesh, tokens(4, 24), constraints=constraints)


@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
@pytest.mark.parametrize("make", SPLIT)
@pytest.mark.slow
def test_chunks_are_split(make: Callable[[], nn.Module], mesh: str) -> None:
    """The sequence over all axes, in layers between, convolutions and the scan, whose ranks pass states on."""
    axes, inputs = MESHES[mesh], tokens(1, 256)
    constraints = {
        "*.mlp.*": {"in": dict.fromkeys(axes, "S(1)")},
        "@padded_conv1d": {"method": dict.fromkeys(axes, "space0")},
        "@delta_scan": {"method": dict.fromkeys(axes, "chunks")},
    }
    plan = autopar.plan(make(), axes, inputs, cluster="ideal", constraints=constraints)
    assert not plan.unsplit_over_sequence
    exact(make().double(), mesh, inputs, constraints=constraints)
