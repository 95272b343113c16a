"""Architectures from torch alone, and of packages other than transformers."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from tests.architectures.architecture import Architecture, other_model
from tests.architectures.batches import class_labels, integers, normal
from tests.architectures.modules import Classifier, Scored, Segmenter, Translator


def others() -> Iterator[Architecture]:
    """Architectures from torch alone, without transformers."""
    yield other_model(
        "convolutional", Classifier, lambda n: {"images": normal(n, 3, 16, 16), "labels": class_labels(n)}
    )
    yield other_model(
        "unet", Segmenter, lambda n: {"images": normal(n, 3, 16, 16), "labels": integers(n, 16, 16, below=4)}
    )
    yield other_model(
        "transformer",
        Translator,
        lambda n: {"source": integers(n, 16), "target": integers(n, 16, seed=2), "labels": integers(n, 16, seed=3)},
    )


def packages() -> Iterator[Architecture]:
    """Models of other packages."""
    yield other_model("x_transformers-decoder", _x_transformers("Decoder"), lambda n: {"x": integers(n, 16)})
    yield other_model("x_transformers-encoder", _x_transformers("Encoder"), lambda n: {"x": integers(n, 16)})
    for file, name in (("vit", "ViT"), ("simple_vit", "SimpleViT"), ("cait", "CaiT")):
        yield other_model(f"vit_pytorch-{file}", _vit_pytorch(file, name), lambda n: {"img": normal(n, 3, 16, 16)})
    yield other_model(
        "conformer",
        lambda: Scored(
            _made("conformer.Conformer", dim=32, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=7)
        ),
        lambda n: {"x": normal(n, 16, 32)},
    )
    blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
    yield other_model(
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
        lambda n: {"sample": normal(n, 3, 8, 8), "timestep": integers(n)},
    )
    yield other_model(
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
        lambda n: {"sample": normal(n, 4, 8, 8), "timestep": integers(n), "encoder_hidden_states": normal(n, 6, 16)},
    )
    yield other_model(
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
            "hidden_states": normal(n, 4, 8, 8),
            "encoder_hidden_states": normal(n, 6, 16, seed=2),
            "pooled_projections": normal(n, 16, seed=3),
            "timestep": integers(n),
        },
    )
    yield other_model(
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
        lambda n: {"sample": normal(n, 3, 8, 8)},
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
