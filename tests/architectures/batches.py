"""Batches for tiny models, by what a model takes: one function for each kind."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]


# A config, the number of samples and the length of a text give a batch.
Kind = Callable[[Any, int, int], Batch]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def ordinary_tokens(config: Any, samples: int, length: int, seed: int = 1) -> Tensor:
    """Ordinary tokens: the first few and the last few of the vocabulary are left to special ones."""
    words = config.get_text_config().vocab_size
    return torch.randint(3, words - 4, (samples, length), generator=generator(seed))


def labels_of(tokens: Tensor) -> Tensor:
    """The tokens themselves; of some samples more are ignored than of others."""
    labels = tokens.clone()
    for sample in range(labels.shape[0]):
        labels[sample, : 3 * sample % labels.shape[1]] = -100
    return labels


def class_labels(samples: int, classes: int = 4) -> Tensor:
    return torch.arange(samples) % classes


def text(config: Any, samples: int, length: int) -> Batch:
    """Tokens, and themselves as labels."""
    tokens = ordinary_tokens(config, samples, length)
    return {"input_ids": tokens, "labels": labels_of(tokens)}


def whole_text(config: Any, samples: int, length: int) -> Batch:
    """Tokens, as many as there are positions."""
    return text(config, samples, config.max_position_embeddings)


def image(config: Any, samples: int, length: int) -> Batch:
    """Images and their classes."""
    return {"pixel_values": pictures(config, samples), "labels": class_labels(samples)}


def pictures(config: Any, samples: int) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 224)
    size = size if isinstance(size, int) else size[0]
    return normal(samples, getattr(config, "num_channels", 3), size, size)


def pair(config: Any, samples: int, length: int) -> Batch:
    """Texts and images that belong together."""
    return {
        "input_ids": ordinary_tokens(config, samples, length),
        "pixel_values": pictures(config, samples),
        "return_loss": True,
    }


def sound(config: Any, samples: int, length: int) -> Batch:
    """Sound as a waveform, and its class."""
    return {"input_values": normal(samples, 25 * length), "labels": class_labels(samples)}


def speech(config: Any, samples: int, length: int) -> Batch:
    """Sound as a waveform, and what was said."""
    said = torch.randint(1, 60, (samples, 4), generator=generator(2))
    return {"input_values": normal(samples, 25 * length), "labels": said}


def transcript(config: Any, samples: int, length: int) -> Batch:
    """A spectrogram, and what was said."""
    tokens = ordinary_tokens(config, samples, length)
    return {
        "input_features": normal(samples, config.num_mel_bins, 2 * config.max_source_positions),
        "labels": labels_of(tokens),
    }


def image_text(config: Any, samples: int, length: int) -> Batch:
    """Texts with an image in each, whose tokens come first."""
    vision = config.vision_config
    taken = getattr(config, "image_seq_length", None) or (vision.image_size // vision.patch_size) ** 2
    batch = text(config, samples, taken + length)
    batch["input_ids"][:, :taken] = config.image_token_id
    batch["labels"][:, :taken] = -100
    return {**batch, "pixel_values": pictures(config, samples)}


def _image_sizes(config: Any, tokens: Tensor) -> Tensor:
    """Of an image in tiles, an overview and four, or of one in a single tile."""
    ways = 2 if _is_tiled(config) else 1
    return torch.tensor([[ways * config.vision_config.image_size] * 2] * len(tokens))


def _is_tiled(config: Any) -> bool:
    return bool(getattr(config, "image_grid_pinpoints", None))


# Further inputs of models that read images, from the tokens.
_FURTHER: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "image_sizes": _image_sizes,
    "token_type_ids": lambda config, tokens: (tokens == config.image_token_id).long(),
    "qformer_input_ids": lambda config, tokens: ordinary_tokens(config, len(tokens), 6),
}


def in_places(count: int, *further: str) -> Kind:
    """Texts with an image in each, which takes `count` tokens, and the `further` inputs of a model."""

    def kind(config: Any, samples: int, length: int) -> Batch:
        tokens = ordinary_tokens(config, samples, count + length)
        tokens[:, 1 : 1 + count] = config.image_token_id
        places = tokens == config.image_token_id
        batch = {"input_ids": tokens, "labels": labels_of(tokens).masked_fill(places, -100)}
        size = config.vision_config.image_size
        batch["pixel_values"] = normal(samples, 5, 3, size, size) if _is_tiled(config) else pictures(config, samples)
        return {**batch, **{name: _FURTHER[name](config, tokens) for name in further}}

    return kind


def patches(config: Any, samples: int, length: int) -> Batch:
    """Images of four patches per word, all patches in one row, and the grid of each image."""
    side = math.isqrt(4 * length)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {
        "hidden_states": normal(side * side * samples, width),
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
    tokens = ordinary_tokens(config, len(grids), max(taken) + length)
    kinds = torch.zeros_like(tokens)
    for sample, count in enumerate(taken):
        tokens[sample, 1] = config.vision_start_token_id
        tokens[sample, 2 : 2 + count] = config.image_token_id
        kinds[sample, 2 : 2 + count] = 1
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": tokens,
        "mm_token_type_ids": kinds,
        "pixel_values": normal(int(sizes.prod(-1).sum()), width, seed=sum(taken)),
        "image_grid_thw": sizes,
        "labels": labels_of(tokens).masked_fill(kinds == 1, -100),
    }


def video(config: Any, samples: int, length: int) -> Batch:
    """Videos and their classes."""
    size = config.image_size
    pixels = normal(samples, config.num_frames, 3, size, size)
    return {"pixel_values": pixels, "labels": class_labels(samples)}


def spectrogram(config: Any, samples: int, length: int) -> Batch:
    """Spectrograms and their classes."""
    return {"input_values": normal(samples, config.max_length, config.num_mel_bins), "labels": class_labels(samples)}


def filterbank(config: Any, samples: int, length: int) -> Batch:
    """Spectrograms of features that each have a place of their own, and what was said."""
    features = normal(samples, 4 * length, config.input_feat_per_channel)
    return {"input_features": features, "labels": labels_of(ordinary_tokens(config, samples, length))}


def captioned(config: Any, samples: int, length: int) -> Batch:
    """Images and what they show."""
    return {"pixel_values": pictures(config, samples), **text(config, samples, length)}


def question(config: Any, samples: int, length: int) -> Batch:
    """Images, questions on them, and how right each answer is."""
    answers = torch.rand(samples, 4, generator=generator(2))
    return {
        "input_ids": ordinary_tokens(config, samples, length),
        "pixel_values": pictures(config, samples),
        "labels": answers,
    }


def series(config: Any, samples: int, length: int) -> Batch:
    """Past and future values."""
    channels = config.num_input_channels
    past = normal(samples, config.context_length, channels)
    return {"past_values": past, "future_values": normal(samples, config.prediction_length, channels, seed=2)}


def forecast(config: Any, samples: int, length: int) -> Batch:
    """Past and future values, with their time features."""
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": normal(samples, past),
        "past_time_features": normal(samples, past, config.num_time_features, seed=2),
        "past_observed_mask": torch.ones(samples, past),
        "future_values": normal(samples, config.prediction_length, seed=3),
        "future_time_features": normal(samples, config.prediction_length, config.num_time_features, seed=4),
    }


def trajectory(config: Any, samples: int, length: int) -> Batch:
    """States, and what was done in them for what reward."""
    return {
        "states": normal(samples, length, config.state_dim),
        "actions": normal(samples, length, config.act_dim, seed=2),
        "rewards": normal(samples, length, 1, seed=3),
        "returns_to_go": normal(samples, length, 1, seed=4),
        "timesteps": torch.arange(length).repeat(samples, 1),
        "attention_mask": torch.ones(samples, length),
    }


def integers(*shape: int, seed: int = 1, below: int = 64) -> Tensor:
    return torch.randint(0, below, shape, generator=generator(seed))
