"""Tiny stock models, made from configs, and inputs for them."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def llama(**config: object) -> nn.Module:
    """Two layers, four heads with two of keys and values."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **config}))


def qwen3(**config: object) -> nn.Module:
    """Llama's sizes, with norms of queries and keys."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "head_dim": 8, **config}))


def mistral(**config: object) -> nn.Module:
    """Llama's sizes, with a sliding window shorter than the sequence."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**_SIZES, "sliding_window": 8, **config}))


def gemma2(**config: object) -> nn.Module:
    """Four layers that alternate between a sliding window and full attention, with soft caps."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8}
    return Gemma2ForCausalLM(Gemma2Config(**{**sizes, **config}))


def gpt_oss(**config: object) -> nn.Module:
    """Two layers with sinks, of which the first has a sliding window; experts in any dtype."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = GptOssForCausalLM(GptOssConfig(**{**sizes, "rope_parameters": rope, **config}))
    model.set_experts_implementation("batched_mm")
    return model


def t5(**config: object) -> nn.Module:
    """An encoder and a decoder of two layers, with learned biases; no dropout."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    quiet = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 2}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **quiet, **config}))


def bloom(**config: object) -> nn.Module:
    """Two layers, with scores that fall with distance."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return BloomForCausalLM(BloomConfig(**{**sizes, **quiet, **config}))


def gpt2(**config: object) -> nn.Module:
    """Fused projections of queries, keys and values; biases; a tied head; no dropout."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **quiet, **config}))


def phi3(**config: object) -> nn.Module:
    """One layer with fused projections of queries, keys and values, and of gate and up."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4}
    return Phi3ForCausalLM(Phi3Config(**{**sizes, **config}))


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gpt2": gpt2,
}


def tokens(
    batch: int = 4, length: int = 16, vocabulary: int = 64, *, labels: bool = True, padding: bool = False
) -> dict[str, torch.Tensor]:
    """Random tokens; of the labels more are ignored in some samples than in others. With `padding` samples have
    different lengths, which the mask says."""
    generator = torch.Generator().manual_seed(1)
    found = {"input_ids": torch.randint(0, vocabulary, (batch, length), generator=generator)}
    if padding:
        found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        for sample in range(batch):
            found["attention_mask"][sample, length - sample % 4 :] = 0
    if labels:
        found["labels"] = found["input_ids"].clone()
        for sample in range(batch):
            found["labels"][sample, : 3 * sample % length] = -100
    return found


class Block(nn.Module):
    """A plain residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, width]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and a squared error as loss; not from Hugging Face."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """x, target: [batch, width]."""
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - target).pow(2).mean(), "prediction": x}
