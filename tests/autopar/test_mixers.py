"""Stock models that mix tokens by states and convolutions, with the sequence split, against one device in float64.

Projections are forced to have the sequence split, and causal convolutions to take their halo from the rank before; what
runs over chunks is split as the planner chooses.
"""

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import autopar
from tests.autopar.comparing import MESHES, exact
from tests.models import tokens

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _mamba2() -> nn.Module:
    """Chunks of eight tokens."""
    sizes = {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8, "expand": 2}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, **sizes))


def _nemotron_h() -> nn.Module:
    """A layer of states and one of attention."""
    sizes = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 4,
        "chunk_size": 8,
        "head_dim": 8,
    }
    layers = {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]}
    return NemotronHForCausalLM(NemotronHConfig(**_SIZES, **sizes, **layers))


def _bamba() -> nn.Module:
    """A layer of states and one of attention, both with a gated feed-forward part."""
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_d_state": 4}
    return BambaForCausalLM(BambaConfig(**_SIZES, **sizes, num_hidden_layers=2, attn_layer_indices=[1]))


def _granite() -> nn.Module:
    """Layers of states alone, whose caches have no length; it takes `use_cache` among other arguments."""
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_d_state": 4}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**_SIZES, **sizes, num_hidden_layers=2, shared_intermediate_size=32, num_local_experts=0)
    )


MIXERS: Mapping[str, Callable[[], nn.Module]] = {
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "granite": _granite,
}


class DeltaRule(nn.Module):
    """The gated delta rule of Qwen3-Next, in chunks of four tokens, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.project = nn.Linear(16, 28)
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """input_ids: [batch, length]; two heads of four."""
        mixed = self.project(self.embed(input_ids))
        query, key, value = (mixed[..., 8 * part : 8 * part + 8].unflatten(-1, (2, 4)) for part in range(3))
        decay, rate = -nn.functional.softplus(mixed[..., 24:26]), mixed[..., 26:].sigmoid()
        made, _ = torch_chunk_gated_delta_rule(
            query, key, value, decay, rate, chunk_size=4, use_qk_l2norm_in_kernel=True
        )
        return {"loss": self.head(made.flatten(2)).square().mean()}


def _over_the_sequence(mesh: str) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    axis = next(iter(MESHES[mesh]))
    split = {"@linear": {"in": {axis: "S(1)"}}, "@padded_conv1d": {"method": {axis: "space0"}}}
    return {"constraints": split}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mamba2", "2"),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name in MIXERS
            for mesh in ("2", "4", "2x2")
            if (name, mesh) != ("mamba2", "2")
        ),
    ],
)
def test_states_of_chunks(name: str, mesh: str) -> None:
    """A chunk or more on each rank."""
    torch.manual_seed(0)
    exact(MIXERS[name]().double(), mesh, tokens(2, 32), **_over_the_sequence(mesh))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2", pytest.param("4", marks=pytest.mark.slow)])
def test_the_delta_rule_of_chunks(mesh: str) -> None:
    """Ops within chunks are split by chunks; states pass from chunk to chunk in other splits."""
    torch.manual_seed(0)
    axis = next(iter(MESHES[mesh]))
    constraints = {"@linear": {"in": {axis: "S(1)"}}, "@cumsum": {"method": {axis: "d2"}}}
    inputs = {"input_ids": tokens(1, 16)["input_ids"]}
    plan = autopar.plan(DeltaRule(), MESHES[mesh], inputs, cluster="ideal", constraints=constraints)
    assert re.search(r"/select \(\d+ ops\) takes one place of dim 2 of size 4", plan.unsplit_over_sequence[0])
    exact(DeltaRule().double(), mesh, inputs, constraints=constraints)


def test_plans_say_where_states_are_passed_on() -> None:
    """Ops that carry states from chunk to chunk need all chunks; no op on tokens does."""
    plan = autopar.plan(_mamba2(), {"dp": 2}, tokens(2, 32), cluster="ideal", **_over_the_sequence("2"))
    (line,) = plan.unsplit_over_sequence
    assert "backbone.layers.*.mixer/cat joins along dim 1 of size 4" in line
    assert "of size 32" not in line
