"""The programs that `same_plans.py` plans: stock models on meta, and how each is asked for.

Depth costs tracing only, as a layer is planned once: where it decides nothing, models have few layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One program: `mesh` and `options` are arguments of `autopar.plan`.

    With `replayed` the plan is saved, loaded and planned with again. `ranks` runs the model on gloo ranks instead and
    calls it with `batches` in training and then in evaluation, so that programs for other sizes are planned too.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, object] | None]
    mesh: Mapping[str, int] | int
    options: Mapping[str, Any] = field(default_factory=dict)
    replayed: bool = False
    ranks: int = 0
    batches: Sequence[Callable[[], Batch]] = ()


# --- models -----------------------------------------------------------------------------------------------------------

_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_LLAMA_70B = {**_LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
_LLAMA_1B = {**_LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def stock(kind: str, dtype: torch.dtype = torch.bfloat16, /, **config: Any) -> Callable[[], nn.Module]:
    """A factory of a class of transformers with this configuration, on meta."""

    def make() -> nn.Module:
        found = getattr(transformers, kind)
        with torch.device("meta"):
            model: nn.Module = found(found.config_class(**config))
        return model.to(dtype).train()

    return make


def llama(layers: int = 4, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Callable[[], nn.Module]:
    """A llama of 8B widths, unless `config` has others."""
    return stock("LlamaForCausalLM", dtype, **{**_LLAMA_8B, **config}, num_hidden_layers=layers)


def tiny_llama() -> nn.Module:
    """A llama of tiny sizes in float64, with values."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY)).double()


def dropped_gpt2() -> nn.Module:
    """A GPT-2 of tiny sizes in float64, with values and dropout: its evaluation is another program."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config).double()


def adapted() -> nn.Module:
    """A llama of which the norms and the head alone are trained."""
    model = llama()()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "lm_head" in name)
    return model


def frozen_whole() -> nn.Module:
    """A llama of which the last layer alone is trained."""
    model = llama(4, **_LLAMA_1B)()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".3." in name)
    return model


# --- inputs -----------------------------------------------------------------------------------------------------------


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")


def tokens(batch: int, length: int = 8192, *, labels: bool = True, mask: bool = False) -> Callable[[], Batch]:
    """Token ids, on meta."""
    ids = _ids(batch, length)
    found = {"input_ids": ids, **({"labels": ids} if labels else {}), **({"attention_mask": ids} if mask else {})}
    return lambda: dict(found)


def values(batch: int, length: int = 16) -> Callable[[], Batch]:
    """Token ids with values, as tiny models take them."""

    def make() -> Batch:
        ids = torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    return make


def images(batch: int) -> Callable[[], Batch]:
    """Images and their classes."""
    return lambda: {
        "pixel_values": torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta"),
        "labels": _ids(batch),
    }


def sounds(batch: int) -> Callable[[], Batch]:
    """Spectrograms and what was said."""
    return lambda: {
        "input_features": torch.empty(batch, 80, 3000, dtype=torch.bfloat16, device="meta"),
        "labels": _ids(batch, 448),
    }


def targets(batch: int, length: int = 8192) -> Callable[[], Batch]:
    """Token ids, and the next ones under a name that models do not take."""
    return lambda: {"input_ids": _ids(batch, length), "targets": _ids(batch, length)}


def next_token(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of logits and tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


# --- options ----------------------------------------------------------------------------------------------------------

H100: Mapping[str, Any] = {"cluster": "h100"}
A100: Mapping[str, Any] = {"cluster": "a100"}
PLENTY: Mapping[str, Any] = {"cluster": "h100", "memory_limit": 1e12}

_BATCH = {"dp": "S(0)", "tp": "S(0, 8)"}
MEGATRON = {
    "*": {"stored": {"dp": "I"}, "used": {"dp": "R"}},
    "model.embed_tokens.weight": {"used": {"tp": "S(0)"}},
    "*norm": {"in": {"dp": "S(0)", "tp": "S(1)"}, "out": {"dp": "S(0)", "tp": "S(1)"}},
    "*.[qkv]_proj": {"in": {"tp": "R"}, "out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.o_proj": {"in": {"tp": "S(2)"}, "out": {"dp": "S(0)", "tp": "P"}},
    "*.gate_proj": {"out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.up_proj": {"out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.down_proj": {"in": {"tp": "S(2)"}, "out": {"dp": "S(0)", "tp": "P"}},
    "lm_head": {"in": {"tp": "R"}, "out": {"dp": "S(0)", "tp": "S(2)"}},
}
FSDP = {
    "*": {"stored": _BATCH, "used": {"dp": "R", "tp": "R"}},
    "@embedding": {"out": _BATCH},
    "@linear": {"in": _BATCH, "out": _BATCH},
    "@scaled_dot_product_attention": {"in": _BATCH, "out": _BATCH},
}

_DP_TP = {"dp": 8, "tp": 8}
_GPT2_XL = {"n_embd": 1600, "n_layer": 4, "n_head": 25, "vocab_size": 50257, "n_positions": 1024}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "num_experts_per_tok": 2, "num_hidden_layers": 2}
_BATCHED = {"experts_implementation": "batched_mm"}
_PHI3 = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 32}
_GEMMA2 = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
_T5 = {"d_model": 1024, "d_ff": 4096, "num_layers": 3, "num_heads": 16, "decoder_start_token_id": 0}
_BART = {"encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0}

CASES: tuple[Case, ...] = (
    # Sizes of published models.
    Case("llama-8b on 8x8", llama(32), tokens(64), _DP_TP, H100),
    Case("llama-8b searched on 64", llama(32), tokens(64), 64, H100),
    Case("llama-70b on 8x8 within 60 GB", llama(80, **_LLAMA_70B), tokens(8), _DP_TP, {**H100, "memory_limit": 60e9}),
    # Meshes that are given.
    Case("llama on 16", llama(), tokens(16), {"dp": 16}, H100),
    Case("llama on 8x8", llama(), tokens(8), _DP_TP, PLENTY),
    Case("llama on 2x4x8", llama(), tokens(64), {"pod": 2, "dp": 4, "tp": 8}, H100),
    Case("llama on 8x1", llama(), tokens(8), {"dp": 8, "tp": 1}, H100),
    Case("qwen3 on 8x8, a100", stock("Qwen3ForCausalLM", num_hidden_layers=4), tokens(32, 4096), _DP_TP, A100),
    Case("mistral on 8x8", stock("MistralForCausalLM", num_hidden_layers=4), tokens(16), _DP_TP, H100),
    # Meshes that are searched.
    Case("llama searched on 6", llama(4, **_LLAMA_1B), tokens(12, 2048), 6, H100),
    Case("llama searched on 32, a100", llama(), tokens(32), 32, A100),
    Case("gpt2 searched on 16", stock("GPT2LMHeadModel", **_GPT2_XL, **_QUIET), tokens(64, 1024), 16, H100),
    Case("llama searched on 4 cpus", llama(2, torch.float32, **_LLAMA_1B), tokens(8, 512), 4, {"cluster": "cpu"}),
    # Memory that decides: micro-batches, recompute and ZeRO stages.
    Case("llama-1b within 16 GB", llama(16, **_LLAMA_1B), tokens(64, 4096), {"dp": 8}, {**H100, "memory_limit": 16e9}),
    Case("llama-1b within 10 GB", llama(16, **_LLAMA_1B), tokens(64, 4096), {"dp": 8}, {**H100, "memory_limit": 10e9}),
    Case("llama-1b within 6 GB, sgd", llama(16, **_LLAMA_1B), tokens(64, 4096), {"dp": 8},
         {**H100, "memory_limit": 6e9, "optimizer": "sgd"}),
    Case("llama-1b searched on 8 within 8 GB", llama(16, **_LLAMA_1B), tokens(64, 4096), 8,
         {**H100, "memory_limit": 8e9}),
    Case("llama too large", llama(16), tokens(8), {"dp": 2, "tp": 2}, {**H100, "memory_limit": 12e9}),
    Case("micro-batches given", llama(), tokens(64), _DP_TP, {**H100, "micro_batches": 4}),
    Case("recompute full", llama(), tokens(64, 4096), {"dp": 8}, {**H100, "recompute": "full"}),
    Case("recompute selective", llama(), tokens(64, 4096), _DP_TP, {**H100, "recompute": "selective"}),
    Case("recompute by region, micro-batches given", llama(), tokens(32), {"dp": 4, "tp": 4},
         {**H100, "recompute": {"model.layers.*": "full"}, "micro_batches": 2}),
    Case("recompute none within 30 GB", llama(8), tokens(16), _DP_TP, {**PLENTY, "recompute": "none",
                                                                      "memory_limit": 30e9}),
    # Inference.
    Case("llama infers", llama(), tokens(8, labels=False), _DP_TP, {**H100, "objective": "infer"}),
    Case("llama infers one token, searched", llama(), tokens(64, 1, labels=False), 8, {**A100, "objective": "infer"}),
    Case("vit infers, outputs full", stock("ViTForImageClassification", num_hidden_layers=4), images(256), {"dp": 8},
         {**H100, "objective": "infer", "outputs": "full"}),
    # Dtypes, constraints, losses, outputs, frozen parameters.
    Case("bf16 of float32", llama(4, torch.float32), tokens(16), _DP_TP, {**H100, "precision": torch.bfloat16}),
    Case("megatron", llama(), tokens(16), _DP_TP, {**PLENTY, "constraints": MEGATRON}),
    Case("fsdp", llama(), tokens(64), _DP_TP, {**PLENTY, "constraints": FSDP}),
    Case("loss outside", llama(), targets(16), _DP_TP, {**H100, "loss": next_token}),
    Case("outputs full", llama(2), tokens(16, 2048), {"dp": 4, "tp": 2}, {**H100, "outputs": "full"}),
    Case("norms and head trained", adapted, tokens(64, 4096), _DP_TP, H100),
    Case("last layer trained", frozen_whole, tokens(64, 4096), {"dp": 8}, {**H100, "memory_limit": 12e9}),
    Case("compiled", llama(), tokens(16), _DP_TP, {**H100, "compiled": True}),
    Case("symbolic", llama(2), tokens(8, 4096), {"dp": 2, "tp": 4}, {**H100, "symbolic": True}),
    # Tied and fused weights, encoders and decoders, experts.
    Case("gpt2 with dropout, tied and fused", stock("GPT2LMHeadModel", **_GPT2_XL), tokens(32, 1024, mask=True),
         {"dp": 4, "tp": 5}, A100),
    Case("phi3, fused", stock("Phi3ForCausalLM", **_PHI3), tokens(16, 4096), {"dp": 2, "tp": 8}, H100),
    Case("gemma2, tied", stock("Gemma2ForCausalLM", **_GEMMA2, num_hidden_layers=4), tokens(16, 4096), _DP_TP, H100),
    Case("t5, tied", stock("T5ForConditionalGeneration", **_T5),
         tokens(32, 512), {"dp": 4, "tp": 4}, A100),
    Case("bart, ideal", stock("BartForConditionalGeneration", **_BART), tokens(32, 1024), {"dp": 4, "tp": 4},
         {"cluster": "ideal"}),
    Case("whisper", stock("WhisperForConditionalGeneration", encoder_layers=2, decoder_layers=2), sounds(32),
         {"dp": 8}, H100),
    Case("bert, ideal", stock("BertForMaskedLM", num_hidden_layers=4), tokens(64, 512, mask=True), {"dp": 4, "tp": 3},
         {"cluster": "ideal"}),
    Case("mixtral", stock("MixtralForCausalLM", **_EXPERTS, **_BATCHED), tokens(16, 1024), {"dp": 8}, H100),
    # Plans that are saved, loaded and replayed.
    Case("replay of micro-batches", llama(16, **_LLAMA_1B), tokens(64, 4096), {"dp": 8},
         {**H100, "memory_limit": 16e9}, replayed=True),
    Case("replay of a searched mesh", llama(2), tokens(16, 4096), 8, H100, replayed=True),
    Case("replay of inference", stock("GPT2LMHeadModel", **_GPT2_XL), tokens(16, 1024, labels=False), {"tp": 4},
         {**A100, "objective": "infer", "outputs": "full"}, replayed=True),
    # Programs for evaluation and for other sizes, as they are planned between ranks.
    Case("other sizes", tiny_llama, values(4), {"dp": 2, "tp": 2}, {"cluster": "ideal"}, ranks=4,
         batches=(values(4), values(6), values(4, 12))),
    Case("other sizes, evaluation, micro-batches", dropped_gpt2, values(8), {"dp": 2},
         {"cluster": "cpu", "micro_batches": 2}, ranks=2, batches=(values(8), values(4))),
)  # fmt: skip
