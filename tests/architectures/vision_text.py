"""Models that read images and write text."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.architectures.architecture import Architecture, stock_model
from tests.architectures.batches import captioned, image_text, in_places, question, seen
from tests.architectures.configs import DEEP, MROPE

# Images of several tiles, each in the sizes that a tile may have.
_TILED = {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]], "vision_feature_layer": -1}
# The pooling of a vision model, which is left out.
_HEAD = ("*.vision_tower.head.*",)


def vision_text() -> Iterator[Architecture]:
    """Features of images are read by cross attention, or stand among those of words."""
    yield stock_model("blip", "BlipForConditionalGeneration", captioned)
    yield stock_model("git", "GitForCausalLM", captioned)
    yield stock_model("vilt", "ViltForQuestionAnswering", question)
    for name, stock, vision_config in (
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"window_size": 16, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", DEEP),
    ):
        yield stock_model(
            name,
            stock,
            seen,
            image_token_id=60,
            vision_start_token_id=61,
            vision_config=vision_config,
            text_config={"rope_parameters": MROPE},
        )
    yield stock_model(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        image_text,
        unused=("*.vision_tower.head.*",),
        image_token_index=63,
    )
    yield stock_model(
        "internvl",
        "InternVLForConditionalGeneration",
        image_text,
        image_token_id=63,
        vision_config={"image_size": [16, 16], "patch_size": [4, 4]},
        image_seq_length=4,
    )
    yield stock_model(
        "vipllava",
        "VipLlavaForConditionalGeneration",
        image_text,
        image_token_index=63,
        image_seq_length=16,
        vision_feature_layers=[-1, -2],
        unused=("*.post_layernorm.*",),
    )
    placed: Mapping[str, tuple[str, tuple[int, *tuple[str, ...]], Mapping[str, Any]]] = {
        "gemma3": (
            "Gemma3ForConditionalGeneration",
            (4, "token_type_ids"),
            {"mm_tokens_per_image": 4, "unused": _HEAD},
        ),
        "cohere2_vision": ("Cohere2VisionForConditionalGeneration", (4,), {"unused": _HEAD}),
        "aya_vision": ("AyaVisionForConditionalGeneration", (4,), {"unused": (*_HEAD, "*.post_layernorm.*")}),
        "got_ocr2": ("GotOcr2ForConditionalGeneration", (1,), {}),
        "ovis2": ("Ovis2ForConditionalGeneration", (16,), {}),
        "blip-2": ("Blip2ForConditionalGeneration", (4,), {"num_query_tokens": 4}),
        "instructblip": ("InstructBlipForConditionalGeneration", (4, "qformer_input_ids"), {"num_query_tokens": 4}),
        "mistral3": ("Mistral3ForConditionalGeneration", (4, "image_sizes"), {}),
        "llava_next": (
            "LlavaNextForConditionalGeneration",
            (88, "image_sizes"),
            {**_TILED, "unused": ("*.post_layernorm.*",)},
        ),
        "llava_onevision": (
            "LlavaOnevisionForConditionalGeneration",
            (88, "image_sizes"),
            {**_TILED, "unused": (*_HEAD, "*.post_layernorm.*")},
        ),
    }
    for name, (stock, batch, own) in placed.items():
        made = stock_model(name, stock, in_places(*batch), image_token_id=63, **own)
        # By default images take another number of tokens.
        yield replace(made, large=None)
