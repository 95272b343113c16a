"""Tiny models of stock architectures, with a loss, and batches for them.

One line per architecture: the stock class, the kind of batch it takes, and what its config needs beyond the sizes that
all share. Nothing is random: no dropout, no dropped layers, no masks drawn in training.
"""

import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
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

    `unused` are patterns of parameters that have no part in the loss. `extra` is what is tested at night only. `large`
    makes the architecture as its config has it by default, but for two layers or four, on meta, with a batch for it;
    None where there is no default. `refused` is what an error says, by objective, where it cannot be traced.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    dtype: torch.dtype = torch.float64
    unused: tuple[str, ...] = ()
    extra: bool = False
    large: Callable[[], tuple[nn.Module, Batch]] | None = None
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


# What a config of any architecture gets of these are those that it has a field for.
_WIDTH, _FEED_FORWARD, _HEADS, _LAYERS = 32, 64, 4, 2
_SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embed_dim", "encoder_hidden_size"), _WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "projection_dim", "encoder_embed_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "d_inner", "dff"), _FEED_FORWARD),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _FEED_FORWARD),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), _LAYERS),
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
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
_DEPTHS = (*_DEPTHS, "num_decoder_layers", "num_encoder_layers")
_STRUCTURE = (
    *_DEPTHS,
    *("layer_types", "layers_block_type", "block_types", "attention_types", "block_sizes", "sliding_window_pattern"),
    *("attn_layer_indices", "attn_layer_period", "attn_layer_offset", "fullatt_block_indexes"),
    *("num_kv_shared_layers", "activation_sparsity_pattern", "first_k_dense_replace", "deepstack_visual_indexes"),
    *("new_decoder_architecture", "multi_query", "alibi", "use_relative_position_bias", "position_embedding_type"),
    *("relative_attention", "pos_att_type", "share_att_key", "attention_type", "vision_feature_layer"),
    *("vision_feature_layers", "mask_time_prob", "pos_embed_rescale", "router_jitter_noise"),
    *("context_length", "prediction_length", "num_input_channels", "num_time_features", "label_length"),
)
# Lengths of the texts that large architectures get; those whose sequences are unrolled in the trace get the short one.
_LONG = 1024

# Settings that every config takes, with or without a field.
_GENERAL = ("num_labels", "decoder_start_token_id")


def _config(config_class: type, own: Mapping[str, Any]) -> Any:
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
        name: _config(type(value), own.get(name, {}))
        for name, value in fields.items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return config_class(**{**shared, **quiet, **own, **parts})


def _zeros(value: object) -> object:
    """Zero in place of every number; None for what is none."""
    if isinstance(value, list | tuple):
        return [_zeros(item) for item in value]
    return type(value)(0) if type(value) in (int, float) else None


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


def whole_text(config: Any, samples: int, length: int) -> Batch:
    """Tokens, as many as there are positions."""
    return text(config, samples, config.max_position_embeddings)


def image(config: Any, samples: int, length: int) -> Batch:
    """Images and their classes."""
    return {"pixel_values": _pixels(config, samples), "labels": _classes(samples)}


def _pixels(config: Any, samples: int) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 224)
    size = size if isinstance(size, int) else size[0]
    return _normal(samples, getattr(config, "num_channels", 3), size, size)


def pair(config: Any, samples: int, length: int) -> Batch:
    """Texts and images that belong together."""
    return {
        "input_ids": _tokens(config, samples, length),
        "pixel_values": _pixels(config, samples),
        "return_loss": True,
    }


def sound(config: Any, samples: int, length: int) -> Batch:
    """Sound as a waveform, and its class."""
    return {"input_values": _normal(samples, 25 * length), "labels": _classes(samples)}


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
    taken = getattr(config, "image_seq_length", None) or (vision.image_size // vision.patch_size) ** 2
    batch = text(config, samples, taken + length)
    batch["input_ids"][:, :taken] = config.image_token_id
    batch["labels"][:, :taken] = -100
    return {**batch, "pixel_values": _pixels(config, samples)}


def patches(config: Any, samples: int, length: int) -> Batch:
    """Images of four patches per word, all patches in one row, and the grid of each image."""
    side = math.isqrt(4 * length)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {
        "hidden_states": _normal(side * side * samples, width),
        "grid_thw": torch.tensor([[1, side, side]] * samples),
    }


def seen(config: Any, samples: int, length: int) -> Batch:
    """Texts with an image in each, of two sizes."""
    return images_in_texts(config, [[1, 4, 4 + 4 * (sample % 2)] for sample in range(samples)], length)


def images_in_texts(config: Any, grids: list[list[int]], length: int) -> Batch:
    """Texts with an image of t x h x w patches each, which takes a quarter as many tokens, and `length` others."""
    vision = config.vision_config
    sizes = torch.tensor(grids)
    taken = (sizes.prod(-1) // vision.spatial_merge_size**2).tolist()
    tokens = _tokens(config, len(grids), max(taken) + length)
    kinds = torch.zeros_like(tokens)
    for sample, count in enumerate(taken):
        tokens[sample, 1] = config.vision_start_token_id
        tokens[sample, 2 : 2 + count] = config.image_token_id
        kinds[sample, 2 : 2 + count] = 1
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": tokens,
        "mm_token_type_ids": kinds,
        "pixel_values": _normal(int(sizes.prod(-1).sum()), width, seed=sum(taken)),
        "image_grid_thw": sizes,
        "labels": _labels(tokens).masked_fill(kinds == 1, -100),
    }


def video(config: Any, samples: int, length: int) -> Batch:
    """Videos and their classes."""
    size = config.image_size
    pixels = _normal(samples, config.num_frames, 3, size, size)
    return {"pixel_values": pixels, "labels": _classes(samples)}


def spectrogram(config: Any, samples: int, length: int) -> Batch:
    """Spectrograms and their classes."""
    return {"input_values": _normal(samples, config.max_length, config.num_mel_bins), "labels": _classes(samples)}


def filterbank(config: Any, samples: int, length: int) -> Batch:
    """Spectrograms of features that each have a place of their own, and what was said."""
    features = _normal(samples, 4 * length, config.input_feat_per_channel)
    return {"input_features": features, "labels": _labels(_tokens(config, samples, length))}


def captioned(config: Any, samples: int, length: int) -> Batch:
    """Images and what they show."""
    return {"pixel_values": _pixels(config, samples), **text(config, samples, length)}


def question(config: Any, samples: int, length: int) -> Batch:
    """Images, questions on them, and how right each answer is."""
    answers = torch.rand(samples, 4, generator=_random(2))
    return {"input_ids": _tokens(config, samples, length), "pixel_values": _pixels(config, samples), "labels": answers}


def series(config: Any, samples: int, length: int) -> Batch:
    """Past and future values."""
    channels = config.num_input_channels
    past = _normal(samples, config.context_length, channels)
    return {"past_values": past, "future_values": _normal(samples, config.prediction_length, channels, seed=2)}


def forecast(config: Any, samples: int, length: int) -> Batch:
    """Past and future values, with their time features."""
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": _normal(samples, past),
        "past_time_features": _normal(samples, past, config.num_time_features, seed=2),
        "past_observed_mask": torch.ones(samples, past),
        "future_values": _normal(samples, config.prediction_length, seed=3),
        "future_time_features": _normal(samples, config.prediction_length, config.num_time_features, seed=4),
    }


def trajectory(config: Any, samples: int, length: int) -> Batch:
    """States, and what was done in them for what reward."""
    return {
        "states": _normal(samples, length, config.state_dim),
        "actions": _normal(samples, length, config.act_dim, seed=2),
        "rewards": _normal(samples, length, 1, seed=3),
        "returns_to_go": _normal(samples, length, 1, seed=4),
        "timesteps": torch.arange(length).repeat(samples, 1),
        "attention_mask": torch.ones(samples, length),
    }


class Scored(nn.Module):
    """A model without a loss, and the mean square of what it makes as its loss."""

    def __init__(self, model: nn.Module, output: str = "") -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The loss, and what the model makes."""
        found = self.model(**inputs)
        found = getattr(found, self.output) if self.output else found
        return {"loss": found.square().mean(), "found": found}


class Classifier(nn.Module):
    """A small convolutional network with all that these are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)
        self.group_norm = nn.GroupNorm(4, 16)
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """images: [batch, 3, height, width], labels: [batch]."""
        x = self.pool(torch.relu(self.norm(self.stem(images))))
        x = nn.functional.gelu(self.group_norm(self.grouped(x + self.depthwise(x))))
        logits = self.head(self.average(x).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Segmenter(nn.Module):
    """A small U-Net: down, up, and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.MaxPool2d(2)
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """images: [batch, 3, height, width], labels: [batch, height, width]."""
        fine = self.first(images)
        coarse = self.middle(self.down(fine))
        logits = self.head(self.last(torch.cat([fine, self.up(coarse)], dim=1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Translator(nn.Module):
    """torch's own transformer between two languages."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(64, 32)
        self.target = nn.Embedding(64, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """All [batch, length]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


# Samples in the batch of a large architecture, where it is not 128; the ones they were trained with are as large.
# Patches are of images of their own sizes, each of which stands in the trace by itself.
_BATCHES: Mapping[Kind, int] = {image: 1024, pair: 1024, sound: 256, spectrogram: 256, patches: 8}


def _large_config(config_class: type, own: Mapping[str, Any]) -> Any:
    """The default config with few layers; parts likewise."""
    default = config_class()
    fields = {item.name: getattr(default, item.name, None) for item in dataclasses.fields(config_class)}
    few = {name: _LAYERS for name in _DEPTHS if type(fields.get(name)) is int}
    quiet = {name: _zeros(value) for name, value in fields.items() if "drop" in name and _zeros(value) is not None}
    kept = {name: value for name, value in own.items() if name in _STRUCTURE}
    if "num_experts_per_tok" in fields and fields["num_experts_per_tok"] is None:
        kept["num_experts_per_tok"] = _SIZES["num_experts_per_tok"]
    parts = {
        name: _large_config(type(value), own.get(name, {}))
        for name, value in fields.items()
        if isinstance(value, transformers.PreTrainedConfig)
    }
    return config_class(**{"apply_spec_augment": False, "decoder_start_token_id": 0, **few, **quiet, **kept, **parts})


def _mixture(name: str, stock: str, kind: Kind, **own: Any) -> Iterator[Architecture]:
    """A mixture of experts, once with every way of computing its experts that can be traced."""
    for implementation, dtype in (("batched_mm", torch.float64), ("grouped_mm", torch.float32)):

        def with_experts(model: Any, implementation: str = implementation) -> nn.Module:
            model.set_experts_implementation(implementation)
            return model

        yield _changed(_stock(f"{name}-{implementation}", stock, kind, dtype=dtype, **own), with_experts)


def _scored(one: Architecture, output: str) -> Architecture:
    """An architecture without a loss, whose output by this name is scored."""
    return _changed(one, lambda model: Scored(model, output))


def _changed(one: Architecture, change: Callable[[nn.Module], nn.Module]) -> Architecture:
    """An architecture whose models are changed once they are made."""

    def large() -> tuple[nn.Module, Batch]:
        assert one.large is not None
        model, batch = one.large()
        return change(model), batch

    return dataclasses.replace(one, make=lambda: change(one.make()), large=large)


def _stock(
    name: str,
    stock: str,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.float64,
    unused: tuple[str, ...] = (),
    unrolled: bool = False,
    refused: Mapping[str, str] | None = None,
    **own: Any,
) -> Architecture:
    """An architecture of transformers: its class, the kind of its batch, and what its config has of its own."""

    def config() -> Any:
        return _config(getattr(transformers, stock).config_class, own)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return _stirred(getattr(transformers, stock)(config()))

    def large() -> tuple[nn.Module, Batch]:
        made = _large_config(getattr(transformers, stock).config_class, own)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, stock)(made)
        limits = (
            getattr(made.get_text_config(), name, None) for name in ("max_position_embeddings", "max_target_positions")
        )
        longest = min(_LONG, *(limit for limit in limits if limit and limit > 0), _LONG)
        return model.train(), kind(made, _BATCHES.get(kind, 128), LENGTH if unrolled else longest)

    def inputs(samples: int) -> Batch:
        return kind(config(), samples, LENGTH)

    return Architecture(name, make, inputs, dtype, unused, large=large, refused=refused or {})


def _stirred(model: nn.Module) -> nn.Module:
    """The model with noise on its weights: those that are all zeros or ones would hide what goes wrong with them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


def _module(name: str, make: Callable[[], nn.Module], inputs: Callable[[int], Batch]) -> Architecture:
    """An architecture that is not of transformers."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return _stirred(make())

    return Architecture(name, made, inputs)


def _integers(*shape: int, seed: int = 1, below: int = 64) -> Tensor:
    return torch.randint(0, below, shape, generator=_random(seed))


def _others() -> Iterator[Architecture]:
    """Architectures from torch alone, without transformers."""
    yield _module("convolutional", Classifier, lambda n: {"images": _normal(n, 3, 16, 16), "labels": _classes(n)})
    yield _module(
        "unet", Segmenter, lambda n: {"images": _normal(n, 3, 16, 16), "labels": _integers(n, 16, 16, below=4)}
    )
    yield _module(
        "transformer",
        Translator,
        lambda n: {"source": _integers(n, 16), "target": _integers(n, 16, seed=2), "labels": _integers(n, 16, seed=3)},
    )


def _packages() -> Iterator[Architecture]:
    """Models of other packages."""
    yield _module("x_transformers-decoder", _x_transformers("Decoder"), lambda n: {"x": _integers(n, 16)})
    yield _module("x_transformers-encoder", _x_transformers("Encoder"), lambda n: {"x": _integers(n, 16)})
    for file, name in (("vit", "ViT"), ("simple_vit", "SimpleViT"), ("cait", "CaiT")):
        yield _module(f"vit_pytorch-{file}", _vit_pytorch(file, name), lambda n: {"img": _normal(n, 3, 16, 16)})
    yield _module(
        "conformer",
        lambda: Scored(
            _made("conformer.Conformer", dim=32, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=7)
        ),
        lambda n: {"x": _normal(n, 16, 32)},
    )
    blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
    yield _module(
        "diffusers-unet",
        lambda: Scored(
            _made(
                "diffusers.UNet2DModel",
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=8,
                **blocks,
            ),
            "sample",
        ),
        lambda n: {"sample": _normal(n, 3, 8, 8), "timestep": _integers(n)},
    )
    yield _module(
        "diffusers-unet-conditioned",
        lambda: Scored(
            _made(
                "diffusers.UNet2DConditionModel",
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                attention_head_dim=4,
                cross_attention_dim=16,
                **blocks,
            ),
            "sample",
        ),
        lambda n: {"sample": _normal(n, 4, 8, 8), "timestep": _integers(n), "encoder_hidden_states": _normal(n, 6, 16)},
    )
    yield _module(
        "diffusers-sd3",
        lambda: Scored(
            _made(
                "diffusers.SD3Transformer2DModel",
                sample_size=8,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=16,
                caption_projection_dim=32,
                pooled_projection_dim=16,
                out_channels=4,
                pos_embed_max_size=8,
            ),
            "sample",
        ),
        lambda n: {
            "hidden_states": _normal(n, 4, 8, 8),
            "encoder_hidden_states": _normal(n, 6, 16, seed=2),
            "pooled_projections": _normal(n, 16, seed=3),
            "timestep": _integers(n),
        },
    )
    yield _module(
        "diffusers-autoencoder",
        lambda: Scored(
            _made(
                "diffusers.AutoencoderKL",
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                **blocks,
            ),
            "sample",
        ),
        lambda n: {"sample": _normal(n, 3, 8, 8)},
    )


def _made(place: str, **settings: Any) -> nn.Module:
    """A model of another package, by its full name."""
    package, _, name = place.rpartition(".")
    found: nn.Module = getattr(importlib.import_module(package), name)(**settings)
    return found


def _x_transformers(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = _made(
            f"x_transformers.{kind}", dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True
        )
        return Scored(_made("x_transformers.TransformerWrapper", num_tokens=64, max_seq_len=32, attn_layers=layers))

    return make


_SEEING: Mapping[str, Mapping[str, object]] = {
    "vit": {"depth": 2},
    "simple_vit": {"depth": 2},
    "cait": {"depth": 2, "cls_depth": 1},
}


def _without_init(name: str) -> None:
    """Let a package be imported file by file, without what its __init__ imports besides."""
    found = importlib.util.find_spec(name)
    if found is not None and name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = list(found.submodule_search_locations or ())
        sys.modules[name] = package


# It imports torchvision, of which every build fits one build of torch alone.
_without_init("vit_pytorch")


def _vit_pytorch(file: str, name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        settings: dict[str, object] = {"image_size": 16, "patch_size": 4, "num_classes": 4, "dim": 32, "heads": 4}
        settings.update(mlp_dim=64, dim_head=8, **_SEEING[file])
        return Scored(_made(f"vit_pytorch.{file}.{name}", **settings))

    return make


_DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
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
    "classifier_proj_size": 16,
}


def _required() -> Iterator[Architecture]:
    """The architectures that users bring most."""
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
        unrolled=True,
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
        num_hidden_layers=5,
        layer_types=[*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
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
    yield _stock("gptj", "GPTJForCausalLM", text)
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
    yield _stock("wav2vec2", "Wav2Vec2ForSequenceClassification", sound, **_CONVOLVED)
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
        vision_config=_DEEP,
        text_config={"rope_parameters": _MROPE},
    )
    yield _stock("mamba", "MambaForCausalLM", text, unrolled=True)
    yield _stock("rwkv", "RwkvForCausalLM", text, unrolled=True, rescale_every=0, attention_hidden_size=32)


_CHUNKED = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_STAGES = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 32}


_KIMI = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}


def _recent() -> Iterator[Architecture]:
    """Text models that older versions of transformers lack."""
    latent = {**_LATENT, "num_key_value_heads": 2}
    few = {name: size for name, size in _LATENT.items() if name.endswith(("_rank", "_dim", "_heads"))}
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
        "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", _LATENT),
        "deepseek_v32": (
            "DeepseekV32ForCausalLM",
            {**_LATENT, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "unused": ("*.indexer.*",)},
        ),
        "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
        "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"unused": ("*.e_score_correction_bias",)}),
        "flex_olmo": ("FlexOlmoForCausalLM", {}),
        "minimax": ("MiniMaxForCausalLM", {"block_size": 8}),
        "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
        "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
        "exaone_moe": ("ExaoneMoeForCausalLM", {}),
        "kimi_linear": ("KimiLinearForCausalLM", {**_LATENT, **_KIMI}),
        "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
        "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "solar_open": ("SolarOpenForCausalLM", latent),
        "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    }
    for name, (stock, own) in models.items():
        if hasattr(transformers, stock):
            yield _stock(name, stock, text, **own)
    for name, (stock, own) in mixtures.items():
        if hasattr(transformers, stock):
            yield from _mixture(name, stock, text, **own)


def _extra() -> Iterator[Architecture]:
    """Other architectures, as different as possible."""
    decoders: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "stablelm": ("StableLmForCausalLM", {}),
        "persimmon": ("PersimmonForCausalLM", {}),
        "nemotron": ("NemotronForCausalLM", {}),
        "exaone4": ("Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
        "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
        "ernie4_5": ("Ernie4_5ForCausalLM", {}),
        "helium": ("HeliumForCausalLM", {}),
        "glm4": ("Glm4ForCausalLM", {}),
        "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 4}),
        "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4}),
        "apertus": ("ApertusForCausalLM", {}),
        "arcee": ("ArceeForCausalLM", {}),
        "nanochat": ("NanoChatForCausalLM", {}),
        "seed_oss": ("SeedOssForCausalLM", {}),
        "diffllama": ("DiffLlamaForCausalLM", {}),
        "xglm": ("XGLMForCausalLM", {"dtype": torch.float32}),
        "biogpt": ("BioGptForCausalLM", {}),
        "codegen": ("CodeGenForCausalLM", {}),
        "mpt": ("MptForCausalLM", {}),
        "gpt_bigcode": ("GPTBigCodeForCausalLM", {}),
        "ctrl": ("CTRLLMHeadModel", {}),
        "openai-gpt": ("OpenAIGPTLMHeadModel", {}),
        "xlnet": ("XLNetLMHeadModel", {"unused": ("*.mask_emb", "*.r_s_bias", "*.seg_embed")}),
        "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "falcon_mamba": ("FalconMambaForCausalLM", {"unrolled": True}),
        "mamba2": ("Mamba2ForCausalLM", _CHUNKED),
        "bamba": ("BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1]}),
        "zamba2": (
            "Zamba2ForCausalLM",
            {
                "layers_block_type": ["linear_attention", "hybrid"],
                "n_mamba_heads": 4,
                "chunk_size": 8,
                "attention_head_dim": 16,
                "adapter_rank": 4,
            },
        ),
        "recurrent_gemma": ("RecurrentGemmaForCausalLM", {"unrolled": True, "num_hidden_layers": 3, "lru_width": 32}),
        "longformer": ("LongformerForMaskedLM", {"unused": ("*_global.*",), "attention_window": 4}),
        "big_bird": ("BigBirdForMaskedLM", {"unused": ("*.pooler.*",), "attention_type": "original_full"}),
        "funnel": ("FunnelForMaskedLM", {"block_sizes": [1, 1]}),
        "mpnet": ("MPNetForMaskedLM", {}),
        "camembert": ("CamembertForMaskedLM", {}),
        "xlm_roberta": ("XLMRobertaForMaskedLM", {}),
        "ernie": ("ErnieForMaskedLM", {}),
        "modernbert": ("ModernBertForMaskedLM", {"num_hidden_layers": 4, "local_attention": 8}),
        "convbert": ("ConvBertForMaskedLM", {}),
        "squeezebert": ("SqueezeBertForMaskedLM", {"unused": ("*.pooler.*",)}),
        "nystromformer": (
            "NystromformerForMaskedLM",
            {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 5},
        ),
        "roformer": ("RoFormerForMaskedLM", {}),
        "rembert": ("RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 32}),
        "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "mobilebert": (
            "MobileBertForMaskedLM",
            {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        ),
        "fnet": ("FNetForMaskedLM", {"unused": ("*.pooler.*",)}),
        "esm": ("EsmForMaskedLM", {"unused": ("*.contact_head.*",), "position_embedding_type": "rotary"}),
        "layoutlm": ("LayoutLMForMaskedLM", {"unused": ("*.pooler.*",)}),
        "pegasus": ("PegasusForConditionalGeneration", {}),
        "mbart": ("MBartForConditionalGeneration", {}),
        "blenderbot": ("BlenderbotForConditionalGeneration", {}),
        "led": ("LEDForConditionalGeneration", {"unused": ("*_global.*",), "attention_window": 4}),
        "longt5": ("LongT5ForConditionalGeneration", {"local_radius": 4}),
        "umt5": ("UMT5ForConditionalGeneration", {}),
        "prophetnet": ("ProphetNetForConditionalGeneration", {}),
        "m2m_100": ("M2M100ForConditionalGeneration", {}),
    }
    for name, (stock, own) in decoders.items():
        yield _stock(name, stock, text, **own)
    yield from _mixture("granitemoe", "GraniteMoeForCausalLM", text)
    yield from _mixture("phimoe", "PhimoeForCausalLM", text, router_jitter_noise=0.0)
    yield from _mixture(
        "jamba", "JambaForCausalLM", text, unrolled=True, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1
    )
    yield from _mixture("glm4_moe", "Glm4MoeForCausalLM", text, **{**_LATENT, "num_key_value_heads": 2})
    yield from _mixture("qwen3_next", "Qwen3NextForCausalLM", text, unrolled=True, **_LINEAR)
    yield from _recent()
    vision: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "beit": ("BeitForImageClassification", {"use_relative_position_bias": True}),
        "dinov2": ("Dinov2ForImageClassification", {"unused": ("*.mask_token",)}),
        "ijepa": ("IJepaForImageClassification", {}),
        "convnextv2": ("ConvNextV2ForImageClassification", _STAGES),
        "resnet": ("ResNetForImageClassification", {**_STAGES, "embedding_size": 8}),
        "regnet": ("RegNetForImageClassification", {**_STAGES, "embedding_size": 8, "groups_width": 8}),
        "bit": ("BitForImageClassification", {**_STAGES, "embedding_size": 8, "num_groups": 2}),
        "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}),
        "efficientnet": (
            "EfficientNetForImageClassification",
            {"width_coefficient": 0.25, "depth_coefficient": 0.2, "image_size": 32, "hidden_dim": 320},
        ),
        "segformer": ("SegformerForImageClassification", {**_STAGES, "num_attention_heads": [1, 2, 4, 4]}),
        "pvt": (
            "PvtForImageClassification",
            {
                **_STAGES,
                "image_size": 64,
                "sequence_reduction_ratios": [4, 2, 1, 1],
                "num_attention_heads": [1, 2, 4, 4],
            },
        ),
        "pvt_v2": (
            "PvtV2ForImageClassification",
            {**_STAGES, "image_size": 64, "sr_ratios": [4, 2, 1, 1], "num_attention_heads": [1, 2, 4, 4]},
        ),
        "levit": (
            "LevitForImageClassification",
            {
                "patch_size": 16,
                "hidden_sizes": [16, 32, 32],
                "num_attention_heads": [2, 4, 4],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
                "image_size": 64,
            },
        ),
        "mobilevit": (
            "MobileViTForImageClassification",
            {"hidden_sizes": [16, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 32, 32], "image_size": 64},
        ),
        "poolformer": ("PoolFormerForImageClassification", _STAGES),
        "cvt": (
            "CvtForImageClassification",
            {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "image_size": 32},
        ),
        "focalnet": ("FocalNetForImageClassification", {"embed_dim": 8, "depths": [1, 1, 1, 1], "image_size": 32}),
        "swinv2": (
            "Swinv2ForImageClassification",
            {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
        ),
        "swiftformer": (
            "SwiftFormerForImageClassification",
            {"embed_dims": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 64},
        ),
        "hiera": (
            "HieraForImageClassification",
            {
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 2, 4, 8],
                "image_size": [64, 64],
                "masked_unit_size": [8, 8],
            },
        ),
    }
    for name, (stock, own) in vision.items():
        yield _stock(name, stock, image, **own)
    yield _stock("videomae", "VideoMAEForVideoClassification", video, num_frames=4)
    yield _stock("timesformer", "TimesformerForVideoClassification", video, num_frames=4)
    yield _stock("vivit", "VivitForVideoClassification", video, num_frames=4, tubelet_size=[2, 4, 4])
    yield _stock("wav2vec2-ctc", "Wav2Vec2ForCTC", speech, **_CONVOLVED)
    for name, stock in {
        "hubert": "Hubert",
        "wavlm": "WavLM",
        "unispeech": "UniSpeech",
        "sew": "SEW",
        "data2vec_audio": "Data2VecAudio",
        "wav2vec2_conformer": "Wav2Vec2Conformer",
    }.items():
        unused = ("*.pos_conv_embed.*",) if "conformer" in name else ()
        own = {**_CONVOLVED, "max_source_positions": 128}
        yield _stock(name, f"{stock}ForSequenceClassification", sound, **own, unused=unused)
    yield _stock(
        "audio_spectrogram_transformer",
        "ASTForAudioClassification",
        spectrogram,
        max_length=16,
        frequency_stride=4,
        time_stride=4,
    )
    yield _stock(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        filterbank,
        conv_channels=32,
        input_feat_per_channel=8,
        max_source_positions=64,
    )
    yield _stock("blip", "BlipForConditionalGeneration", captioned)
    yield _stock("git", "GitForCausalLM", captioned)
    yield _stock("vilt", "ViltForQuestionAnswering", question)
    for name, stock, vision_config in (
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"window_size": 16, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", _DEEP),
    ):
        yield _stock(
            name,
            stock,
            seen,
            image_token_id=60,
            vision_start_token_id=61,
            vision_config=vision_config,
            text_config={"rope_parameters": _MROPE},
        )
    yield _stock(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        image_text,
        unused=("*.vision_tower.head.*",),
        image_token_index=63,
    )
    yield _stock(
        "internvl",
        "InternVLForConditionalGeneration",
        image_text,
        image_token_id=63,
        vision_config={"image_size": [16, 16], "patch_size": [4, 4]},
        image_seq_length=4,
    )
    yield _stock(
        "vipllava",
        "VipLlavaForConditionalGeneration",
        image_text,
        image_token_index=63,
        image_seq_length=16,
        vision_feature_layers=[-1, -2],
        unused=("*.post_layernorm.*",),
    )
    yield _stock(
        "patchtst",
        "PatchTSTForPrediction",
        series,
        context_length=32,
        prediction_length=8,
        num_input_channels=4,
        patch_length=4,
        patch_stride=4,
    )
    yield _stock(
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        series,
        context_length=32,
        prediction_length=8,
        num_input_channels=4,
    )
    yield _stock(
        "time_series_transformer",
        "TimeSeriesTransformerForPrediction",
        forecast,
        context_length=16,
        prediction_length=8,
        num_time_features=2,
    )
    yield _stock(
        "autoformer",
        "AutoformerForPrediction",
        forecast,
        dtype=torch.float32,
        refused={"train": "a size depends on the values of a tensor"},
        context_length=16,
        prediction_length=8,
        num_time_features=2,
        label_length=4,
        moving_average=5,
    )
    yield _scored(
        _stock(
            "decision_transformer",
            "DecisionTransformerModel",
            trajectory,
            unused=("*.wte.*", "*.predict_state.*", "*.predict_return.*"),
        ),
        "action_preds",
    )
    yield _scored(
        _stock("dinov3_vit", "DINOv3ViTModel", image, pos_embed_rescale=None, unused=("*.mask_token",)), "pooler_output"
    )
    yield _stock(
        "perceiver",
        "PerceiverForMaskedLM",
        whole_text,
        max_position_embeddings=LENGTH,
        num_latents=8,
        d_latents=32,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    **{item.name: item for item in (*_required(), *_others())},
    **{item.name: dataclasses.replace(item, extra=True) for item in (*_extra(), *_packages())},
}
