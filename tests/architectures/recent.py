"""Text models that older versions of transformers lack."""

from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from tests.architectures.architecture import Architecture, mixture, stock_model
from tests.architectures.batches import text
from tests.architectures.configs import LATENT

_KIMI = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}


def recent() -> Iterator[Architecture]:
    """Text models that older versions of transformers lack."""
    latent = {**LATENT, "num_key_value_heads": 2}
    few = {name: size for name, size in LATENT.items() if name.endswith(("_rank", "_dim", "_heads"))}
    models: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "bitnet": ("BitNetForCausalLM", {}),
        "vaultgemma": ("VaultGemmaForCausalLM", {}),
        "ministral3": ("Ministral3ForCausalLM", {}),
        "modernbert-decoder": ("ModernBertDecoderForCausalLM", {"num_hidden_layers": 4, "local_attention": 8}),
        "doge": ("DogeForCausalLM", {}),
        "cwm": ("CwmForCausalLM", {}),
        "youtu": ("YoutuForCausalLM", few),
        "jais2": ("Jais2ForCausalLM", {}),
        "hyperclovax": ("HyperCLOVAXForCausalLM", {}),
    }
    mixtures: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "dots1": ("Dots1ForCausalLM", {**latent, "n_shared_experts": 1}),
        "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT),
        "deepseek_v32": (
            "DeepseekV32ForCausalLM",
            {**LATENT, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "unused": ("*.indexer.*",)},
        ),
        "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
        "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"unused": ("*.e_score_correction_bias",)}),
        "flex_olmo": ("FlexOlmoForCausalLM", {}),
        "minimax": ("MiniMaxForCausalLM", {"block_size": 8}),
        "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
        "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
        "exaone_moe": ("ExaoneMoeForCausalLM", {}),
        "kimi_linear": ("KimiLinearForCausalLM", {**LATENT, **_KIMI}),
        "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
        "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "solar_open": ("SolarOpenForCausalLM", latent),
        "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    }
    for name, (stock, own) in models.items():
        if hasattr(transformers, stock):
            yield stock_model(name, stock, text, **own)
    for name, (stock, own) in mixtures.items():
        if hasattr(transformers, stock):
            yield from mixture(name, stock, text, **own)
