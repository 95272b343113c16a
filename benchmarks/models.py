"""Stock Transformers classes for the models of published runs, without values."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True)
class Dimensions:
    """A dense model as a record describes it; `tied` is None where the record does not mention embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    sequence: int
    tied: bool | None = None


@dataclass(frozen=True)
class Family:
    """A stock class as the replay needs it: how to demand Megatron's splits of it.

    `gated` says that the MLP has three products. `rows` are the ops whose weights are split by rows, `layer` the module
    of a layer, `norm` the one at its beginning, `scores` the op of attention where it is one, `table` the module of
    token embeddings, `after` the one that follows the layers.
    """

    name: str
    gated: bool
    rows: tuple[str, ...]
    layer: str
    norm: str
    scores: str
    table: str
    after: str


_LLAMA_ROWS = ("*.self_attn.o_proj/linear", "*.mlp.down_proj/linear")
_LLAMA_SCORES = "*.self_attn/scaled_dot_product_attention"
GPT = Family(
    "gpt2",
    gated=False,
    rows=("*.attn.c_proj/addmm", "*.mlp.c_proj/addmm"),
    layer="transformer.h.[0-9]",
    norm="*.ln_1",
    scores="*.attn/scaled_dot_product_attention",
    table="transformer.wte",
    after="transformer.ln_f",
)
LLAMA, MISTRAL, QWEN2, QWEN3 = (
    Family(
        name,
        True,
        _LLAMA_ROWS,
        "model.layers.[0-9]",
        "*.input_layernorm",
        _LLAMA_SCORES,
        "model.embed_tokens",
        "model.norm",
    )
    for name in ("llama", "mistral", "qwen2", "qwen3")
)

# What the name of a model begins with -> its family.
_NAMED: tuple[tuple[str, Family], ...] = (
    (r"gpt|mpt|bloom|opt|turing|megatron", GPT),
    (r"qwen-?3", QWEN3),
    (r"qwen", QWEN2),
    (r"mistral", MISTRAL),
    (r"llama|internlm|yi|deepseek-?llm|tinyllama", LLAMA),
)


def find_family(dimensions: Dimensions) -> Family | None:
    """The family of a dense model: by its name, or by its dimensions (an MLP of four widths over whole heads is GPT's).

    None where a name says GPT and the heads do not make the width, which no stock class has.
    """
    name = dimensions.name.lower()
    plain = dimensions.ffn == 4 * dimensions.hidden and dimensions.heads == dimensions.kv_heads
    found = next((family for pattern, family in _NAMED if re.match(pattern, name)), GPT if plain else LLAMA)
    if found is GPT and (dimensions.kv_heads != dimensions.heads or dimensions.hidden % dimensions.heads):
        return None
    return found


def build(family: Family, dimensions: Dimensions, layers: int, flash: bool, dropout: float) -> nn.Module:
    """The model on meta, in bfloat16, of `layers` layers. Without `flash` the scores of attention are written out."""
    attention = "sdpa" if flash else "eager"
    with torch.device("meta"):
        if family is GPT:
            model: nn.Module = GPT2LMHeadModel(_gpt(dimensions, layers, attention, dropout))
        else:
            model = _llama_like(family, dimensions, layers, attention)
    return model.to(torch.bfloat16)


def _gpt(dimensions: Dimensions, layers: int, attention: str, dropout: float) -> GPT2Config:
    return GPT2Config(
        n_embd=dimensions.hidden,
        n_layer=layers,
        n_head=dimensions.heads,
        n_inner=dimensions.ffn,
        vocab_size=dimensions.vocab,
        n_positions=dimensions.sequence,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=dimensions.tied is not False,
        **_attention(attention),
    )


def _attention(name: str) -> Any:
    """Arguments that every configuration takes besides those that it declares."""
    return {"attn_implementation": name, "loss_type": "ForCausalLM"}


def _llama_like(family: Family, dimensions: Dimensions, layers: int, attention: str) -> nn.Module:
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family.name]
    config = config_class(
        hidden_size=dimensions.hidden,
        intermediate_size=dimensions.ffn,
        num_hidden_layers=layers,
        num_attention_heads=dimensions.heads,
        num_key_value_heads=dimensions.kv_heads,
        head_dim=dimensions.head_size,
        vocab_size=dimensions.vocab,
        max_position_embeddings=dimensions.sequence,
        tie_word_embeddings=dimensions.tied is True,
        **_attention(attention),
    )
    model: nn.Module = model_class(config)
    return model
