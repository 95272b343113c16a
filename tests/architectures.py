"""Tiny models of stock architectures, with a loss, and batches for them.

One line per architecture: the stock class, the kind of batch it takes, and what its config needs beyond the sizes that
all share. Nothing is random: no dropout, no dropped layers, no masks drawn in training.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
# A config, the number of samples and the length of a text give a batch.
Kind = Callable[[Any, int, int], Batch]

LENGTH = 16


@dataclass(frozen=True)
class Architecture:
    """A stock model in small: `make` makes it (in float32), `inputs` makes a batch of so many samples.

    `unused` are patterns of parameters that have no part in the loss. `extra` is what is tested at night only.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    dtype: torch.dtype = torch.float64
    unused: tuple[str, ...] = ()
    extra: bool = False


# What a config of any architecture gets of these are those that it has a field for.
_WIDTH, _FEED_FORWARD, _HEADS, _LAYERS = 32, 64, 4, 2
_SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embed_dim", "encoder_hidden_size"), _WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "projection_dim", "encoder_embed_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "d_inner"), _FEED_FORWARD),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _FEED_FORWARD),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "out_hidden_size": _WIDTH,
    "d_kv": 8,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 0,
    "image_size": 16,
    "patch_size": 4,
    "sliding_window": 8,
    "num_labels": 4,
    "apply_spec_augment": False,
    "max_source_positions": 16,
    "num_mel_bins": 8,
}
# Settings that every config takes, with or without a field.
_GENERAL = ("num_labels", "decoder_start_token_id")


def _config(config_class: type, own: Mapping[str, Any]) -> Any:
    """A tiny config: the shared sizes that it has fields for, nothing dropped, and then its own; parts likewise."""
    default = config_class()
    fields = {item.name: getattr(default, item.name, None) for item in dataclasses.fields(config_class)}
    shared = {name: value for name, value in _SIZES.items() if name in fields or name in _GENERAL}
    quiet = {name: 0.0 for name, value in fields.items() if "drop" in name and type(value) in (int, float)}
    parts = {
        name: _config(type(value), own.get(name, {}))
        for name, value in fields.items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return config_class(**{**shared, **quiet, **own, **parts})


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=_random(seed))


def _tokens(config: Any, samples: int, length: int, seed: int = 1) -> Tensor:
    """Ordinary tokens: the first few and the last few of the vocabulary are left to special ones."""
    words = config.get_text_config().vocab_size
    return torch.randint(3, words - 4, (samples, length), generator=_random(seed))


def _labels(tokens: Tensor) -> Tensor:
    """The tokens themselves; of some samples more are ignored than of others."""
    labels = tokens.clone()
    for sample in range(labels.shape[0]):
        labels[sample, : 3 * sample % labels.shape[1]] = -100
    return labels


def _classes(samples: int, classes: int = 4) -> Tensor:
    return torch.arange(samples) % classes


def text(config: Any, samples: int, length: int) -> Batch:
    """Tokens, and themselves as labels."""
    tokens = _tokens(config, samples, length)
    return {"input_ids": tokens, "labels": _labels(tokens)}


def image(config: Any, samples: int, length: int) -> Batch:
    """Images and their classes."""
    return {"pixel_values": _pixels(config, samples), "labels": _classes(samples)}


def _pixels(config: Any, samples: int) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return _normal(samples, getattr(config, "num_channels", 3), size, size)


def pair(config: Any, samples: int, length: int) -> Batch:
    """Texts and images that belong together."""
    return {
        "input_ids": _tokens(config, samples, length),
        "pixel_values": _pixels(config, samples),
        "return_loss": True,
    }


def speech(config: Any, samples: int, length: int) -> Batch:
    """Sound as a waveform, and what was said."""
    said = torch.randint(1, 60, (samples, 4), generator=_random(2))
    return {"input_values": _normal(samples, 25 * length), "labels": said}


def transcript(config: Any, samples: int, length: int) -> Batch:
    """A spectrogram, and what was said."""
    tokens = _tokens(config, samples, length)
    return {
        "input_features": _normal(samples, config.num_mel_bins, 2 * config.max_source_positions),
        "labels": _labels(tokens),
    }


def image_text(config: Any, samples: int, length: int) -> Batch:
    """Texts with an image in each, whose tokens come first."""
    vision = config.vision_config
    taken = (vision.image_size // vision.patch_size) ** 2
    batch = text(config, samples, taken + length)
    batch["input_ids"][:, :taken] = config.image_token_id
    batch["labels"][:, :taken] = -100
    return {**batch, "pixel_values": _pixels(config, samples)}


def patches(config: Any, samples: int, length: int) -> Batch:
    """Images of 8 x 8 patches, all patches in one row, and the grid of each image."""
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {
        "hidden_states": _normal(64 * samples, width),
        "grid_thw": torch.tensor([[1, 8, 8]] * samples),
    }


class Scored(nn.Module):
    """A model without a loss, and the mean square of what it makes as its loss."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The loss, and what the model makes."""
        found = getattr(self.model(**inputs), self.output)
        return {"loss": found.square().mean(), "found": found}


def _scored(one: Architecture, output: str) -> Architecture:
    return dataclasses.replace(one, make=lambda: Scored(one.make(), output))


def _mixture(name: str, stock: str, kind: Kind, **own: Any) -> Iterator[Architecture]:
    """A mixture of experts, once with every way of computing its experts that can be traced."""
    for implementation, dtype in (("batched_mm", torch.float64), ("grouped_mm", torch.float32)):
        one = _stock(f"{name}-{implementation}", stock, kind, dtype=dtype, **own)
        yield dataclasses.replace(one, make=partial(_with_experts, one.make, implementation))


def _with_experts(make: Callable[[], nn.Module], implementation: str) -> nn.Module:
    model: Any = make()
    model.set_experts_implementation(implementation)
    return model


def _stock(
    name: str,
    stock: str,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.float64,
    unused: tuple[str, ...] = (),
    extra: bool = False,
    **own: Any,
) -> Architecture:
    """An architecture of transformers: its class, the kind of its batch, and what its config has of its own."""
    return Architecture(
        name,
        partial(_make, stock, own),
        lambda samples: kind(_tiny(stock, own), samples, LENGTH),
        dtype,
        unused,
        extra,
    )


def _tiny(stock: str, own: Mapping[str, Any]) -> Any:
    return _config(getattr(transformers, stock).config_class, own)


def _make(stock: str, own: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, stock)(_tiny(stock, own))
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights that start as zeros or ones would hide what goes wrong with them.
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_CONVOLVED = {
    "conv_dim": [16, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}


def _required() -> Iterator[Architecture]:
    """What users bring most."""
    yield _stock("llama", "LlamaForCausalLM", text)
    yield _stock(
        "llama4_text", "Llama4ForCausalLM", text, num_hidden_layers=4, intermediate_size_mlp=64, attention_chunk_size=8
    )
    yield _stock("qwen2", "Qwen2ForCausalLM", text)
    yield _stock("qwen3", "Qwen3ForCausalLM", text)
    yield _stock(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        text,
        num_hidden_layers=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    yield _stock("mistral", "MistralForCausalLM", text)
    yield _stock("gemma", "GemmaForCausalLM", text)
    yield _stock("gemma2", "Gemma2ForCausalLM", text, num_hidden_layers=4)
    yield _stock(
        "gemma3_text",
        "Gemma3ForCausalLM",
        text,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    yield _stock(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        text,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
    )
    yield _stock("phi", "PhiForCausalLM", text)
    yield _stock("phi3", "Phi3ForCausalLM", text, original_max_position_embeddings=64)
    yield _stock("gpt2", "GPT2LMHeadModel", text)
    yield _stock("gpt_neo", "GPTNeoForCausalLM", text, attention_types=[[["global", "local"], 1]], window_size=8)
    yield _stock("gpt_neox", "GPTNeoXForCausalLM", text)
    yield _stock("gptj", "GPTJForCausalLM", text, rotary_dim=4)
    yield _stock("opt", "OPTForCausalLM", text)
    yield _stock("bloom", "BloomForCausalLM", text)
    yield _stock("falcon", "FalconForCausalLM", text, new_decoder_architecture=True)
    yield _stock("falcon-multi-query-alibi", "FalconForCausalLM", text, multi_query=True, alibi=True)
    yield _stock("starcoder2", "Starcoder2ForCausalLM", text)
    yield _stock("olmo", "OlmoForCausalLM", text)
    yield _stock("olmo2", "Olmo2ForCausalLM", text)
    yield _stock("granite", "GraniteForCausalLM", text)
    yield _stock("cohere", "CohereForCausalLM", text)
    yield _stock("glm", "GlmForCausalLM", text)
    yield from _mixture("deepseek_v2", "DeepseekV2ForCausalLM", text, **_LATENT)
    yield from _mixture("deepseek_v3", "DeepseekV3ForCausalLM", text, **_LATENT)
    yield from _mixture("gpt_oss", "GptOssForCausalLM", text)
    yield from _mixture("mixtral", "MixtralForCausalLM", text)
    yield from _mixture("qwen2_moe", "Qwen2MoeForCausalLM", text)
    yield from _mixture("qwen3_moe", "Qwen3MoeForCausalLM", text)
    yield from _mixture("olmoe", "OlmoeForCausalLM", text)
    yield _stock("bert", "BertForMaskedLM", text)
    yield _stock("roberta", "RobertaForMaskedLM", text)
    yield _stock("distilbert", "DistilBertForMaskedLM", text)
    yield _stock("albert", "AlbertForMaskedLM", text)
    yield _stock("electra", "ElectraForMaskedLM", text)
    yield _stock(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        text,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
    )
    yield _stock("t5", "T5ForConditionalGeneration", text)
    yield _stock("bart", "BartForConditionalGeneration", text)
    yield _stock("marian", "MarianMTModel", text)
    yield _stock("vit", "ViTForImageClassification", image)
    yield _stock("deit", "DeiTForImageClassification", image)
    yield _stock(
        "swin",
        "SwinForImageClassification",
        image,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=2,
        patch_size=2,
    )
    yield _stock(
        "convnext",
        "ConvNextForImageClassification",
        image,
        hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 2, 1],
        image_size=32,
    )
    yield _stock("clip", "CLIPModel", pair)
    yield _stock("siglip", "SiglipModel", pair)
    yield _stock("whisper", "WhisperForConditionalGeneration", transcript)
    yield _stock("wav2vec2", "Wav2Vec2ForCTC", speech, **_CONVOLVED)
    yield _stock(
        "llava",
        "LlavaForConditionalGeneration",
        image_text,
        image_token_index=63,
        image_seq_length=16,
        vision_feature_layer=-1,
        unused=("*.post_layernorm.*",),
    )
    yield _scored(
        _stock(
            "qwen2_5_vl-vision",
            "Qwen2_5_VisionTransformerPretrainedModel",
            patches,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
        "pooler_output",
    )
    yield _stock(
        "qwen2_5_vl-language",
        "Qwen2_5_VLForConditionalGeneration",
        text,
        unused=("model.visual.*",),
        text_config={"rope_parameters": _MROPE},
    )
    yield _scored(
        _stock(
            "qwen3_vl-vision",
            "Qwen3VLVisionModel",
            patches,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0],
            unused=("*.deepstack*",),
        ),
        "pooler_output",
    )
    yield _stock(
        "qwen3_vl-language",
        "Qwen3VLForConditionalGeneration",
        text,
        unused=("model.visual.*",),
        vision_config={"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config={"rope_parameters": _MROPE},
    )
    yield _stock("mamba", "MambaForCausalLM", text, state_size=4, time_step_rank=4)
    yield _stock("rwkv", "RwkvForCausalLM", text, attention_hidden_size=32)


ARCHITECTURES: Mapping[str, Architecture] = {item.name: item for item in _required()}
