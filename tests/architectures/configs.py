"""Configs of stock architectures: tiny ones, and those with their own sizes but few layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import transformers

# What a config of any architecture gets of these are those that it has a field for.
_WIDTH, _FEED_FORWARD, _HEADS, LAYERS = 32, 64, 4, 2


_SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embed_dim", "encoder_hidden_size"), _WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "projection_dim", "encoder_embed_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "d_inner", "dff"), _FEED_FORWARD),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _FEED_FORWARD),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("max_seq_len", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("mlp_ratio", "expansion_ratio"), 2),
    **dict.fromkeys(("attention_heads", "num_attn_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("state_size", "mamba_d_state", "time_step_rank", "mamba_dt_rank", "rotary_dim"), 4),
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "out_hidden_size": _WIDTH,
    "d_kv": 8,
    "d_head": 8,
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


# What is depth, and what else makes an architecture rather than its size: this goes into large configs too.
DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
DEPTHS = (*DEPTHS, "num_decoder_layers", "num_encoder_layers")


_STRUCTURE = (
    *DEPTHS,
    *("layer_types", "layers_block_type", "block_types", "attention_types", "block_sizes", "sliding_window_pattern"),
    *("attn_layer_indices", "attn_layer_period", "attn_layer_offset", "fullatt_block_indexes"),
    *("num_kv_shared_layers", "activation_sparsity_pattern", "first_k_dense_replace", "deepstack_visual_indexes"),
    *("new_decoder_architecture", "multi_query", "alibi", "use_relative_position_bias", "position_embedding_type"),
    *("relative_attention", "pos_att_type", "share_att_key", "attention_type", "vision_feature_layer"),
    *("vision_feature_layers", "mask_time_prob", "pos_embed_rescale", "router_jitter_noise"),
    *("context_length", "prediction_length", "num_input_channels", "num_time_features", "label_length"),
)


# Settings that every config takes, with or without a field.
_GENERAL = ("num_labels", "decoder_start_token_id")


def small_config(config_class: type, own: Mapping[str, Any]) -> Any:
    """A tiny config: the shared sizes that it has fields for, nothing dropped, and then its own; parts likewise."""
    default = config_class()
    fields = {item.name: getattr(default, item.name, None) for item in dataclasses.fields(config_class)}
    shared = {
        name: type(fields[name])(value) if type(fields.get(name)) in (int, float) else value
        for name, value in _SIZES.items()
        if name in _GENERAL or (name in fields and not isinstance(fields[name], list | tuple))
    }
    quiet = {name: _zeros(value) for name, value in fields.items() if "drop" in name and _zeros(value) is not None}
    parts = {
        name: small_config(type(value), own.get(name, {}))
        for name, value in fields.items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return config_class(**{**shared, **quiet, **own, **parts})


def _zeros(value: object) -> object:
    """Zero in place of every number; None for what is none."""
    if isinstance(value, list | tuple):
        return [_zeros(item) for item in value]
    return type(value)(0) if type(value) in (int, float) else None


def large_config(config_class: type, own: Mapping[str, Any]) -> Any:
    """The default config with few layers; parts likewise."""
    default = config_class()
    fields = {item.name: getattr(default, item.name, None) for item in dataclasses.fields(config_class)}
    few = {name: LAYERS for name in DEPTHS if type(fields.get(name)) is int}
    quiet = {name: _zeros(value) for name, value in fields.items() if "drop" in name and _zeros(value) is not None}
    kept = {name: value for name, value in own.items() if name in _STRUCTURE}
    if "num_experts_per_tok" in fields and fields["num_experts_per_tok"] is None:
        kept["num_experts_per_tok"] = _SIZES["num_experts_per_tok"]
    parts = {
        name: large_config(type(value), own.get(name, {}))
        for name, value in fields.items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return config_class(**{"apply_spec_augment": False, "decoder_start_token_id": 0, **few, **quiet, **kept, **parts})


DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


LATENT = {
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


CONVOLVED = {
    "conv_dim": [16, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "classifier_proj_size": 16,
}
