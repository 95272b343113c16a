"""Inputs from configs, and what surrounds the trace of a Hugging Face model."""

import inspect
import logging
import threading
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import masking_utils

import autopar
from autopar.models import huggingface
from autopar.testing import run_ranks
from passes.capture import Tracing, capture
from passes.ir.program import Program
from passes.normalize import normalize
from tests.architectures import ARCHITECTURES
from tests.autopar.wrapped import WRAPPED
from tests.models import Stack, llama, mistral, tokens

# --- inputs -----------------------------------------------------------------------------------------------------------


def shapes(inputs: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Shapes by name; none has values."""
    found = {}
    for name, leaf in inputs.items():
        assert isinstance(leaf, torch.Tensor)
        assert leaf.is_meta
        found[name] = tuple(leaf.shape)
    return found


def test_inputs_of_language_models():
    """As many positions as there are, labels for training alone."""
    assert shapes(huggingface.made_inputs(llama(), "train", 4)) == {"input_ids": (4, 32), "labels": (4, 32)}
    assert shapes(huggingface.made_inputs(llama(), "infer", 4)) == {"input_ids": (4, 32)}
    long = llama(max_position_embeddings=131072)
    assert shapes(huggingface.made_inputs(long, "infer", 1)) == {"input_ids": (1, 2048)}


def test_inputs_of_classifiers():
    """One label for each text, and for each word where words are classified."""
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
    texts = transformers.BertForSequenceClassification(config)
    words = transformers.BertForTokenClassification(config)
    assert shapes(huggingface.made_inputs(texts, "train", 3))["labels"] == (3,)
    assert shapes(huggingface.made_inputs(words, "train", 3))["labels"] == (3, 512)


def test_inputs_of_vision_models():
    """Images in the dtype of the model."""
    model = ARCHITECTURES["vit"].make().to(torch.bfloat16)
    inputs = huggingface.made_inputs(model, "train", 2)
    assert shapes(inputs) == {"pixel_values": (2, 3, 16, 16), "labels": (2,)}
    assert inputs["pixel_values"].dtype == torch.bfloat16


def test_inputs_that_no_config_tells():
    with pytest.raises(
        autopar.InputError, match="WhisperForConditionalGeneration takes 'input_features', which cannot"
    ):
        huggingface.made_inputs(ARCHITECTURES["whisper"].make(), "train", 2)


def test_training_leaves_the_cache_out():
    """Unless it was asked for."""
    assert huggingface.settings(inspect.signature(llama().forward), tokens(), "train") == {"use_cache": False}
    assert huggingface.settings(inspect.signature(llama().forward), tokens(), "infer") == {}
    assert huggingface.settings(inspect.signature(llama().forward), {**tokens(), "use_cache": True}, "train") == {}
    assert huggingface.settings(inspect.signature(ARCHITECTURES["bert"].make().forward), {}, "train") == {}


# --- masks ------------------------------------------------------------------------------------------------------------


def program_of(model: nn.Module, inputs: Mapping[str, object]) -> Program:
    """The normal form of a model."""
    given = {**inputs, **huggingface.settings(inspect.signature(model.forward), inputs, "train")}
    return normalize(capture(model, given, Tracing(True, True, huggingface.tracing(model, given, "train"))))


def masks(model: nn.Module, inputs: Mapping[str, object]) -> set[str]:
    """The mask of attention: "documents", "window", "mask", "causal" or "none"."""
    hides = {"query_documents": "documents", "window": "window", "attn_mask": "mask"}
    return {
        next(
            (kind for name, kind in hides.items() if op.arguments.get(name) is not None),
            "causal" if op.arguments["is_causal"] else "none",
        )
        for op in program_of(model, inputs).ops
        if op.kind == "scaled_dot_product_attention"
    }


IDS = {"input_ids": tokens()["input_ids"]}
SHAPE = tuple(IDS["input_ids"].shape)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, "causal"),
        ({"attention_mask": torch.ones(SHAPE, dtype=torch.int64)}, "mask"),
        ({"position_ids": torch.arange(SHAPE[1]).expand(SHAPE)}, "documents"),
    ],
    ids=["ids alone", "mask", "positions"],
)
def test_causal_masks(inputs, expected):
    """They are left to attention, unless there may be padding or several sequences in one."""
    assert masks(llama(), {**IDS, **inputs}) == {expected}


@pytest.mark.parametrize(
    ("name", "expected"), [("adapted", "causal"), ("preference", "causal"), ("packing", "documents")]
)
def test_masks_of_inner_models(name, expected):
    """A module around a model may pack sequences: its positions say so."""
    make, inputs = WRAPPED[name]
    assert masks(make(), inputs()) == {expected}


def test_sliding_windows():
    """They are left to attention."""
    assert masks(mistral(), IDS) == {"window"}


def test_positions_in_three_dims_pack_nothing():
    """Those of images in text say where words are seen, and masks need them not."""
    model = ARCHITECTURES["qwen2_5_vl-language"].make()
    positions = torch.zeros(3, 2, 8, dtype=torch.int64)
    assert masks(model.model.language_model, {"inputs_embeds": torch.empty(2, 8, 32), "position_ids": positions}) == {
        "causal"
    }


@pytest.mark.parametrize("given", [False, True])
def test_masks_that_models_make(given):
    """A mask of ones that a model makes itself masks nothing, which it may see; one that is given may mask anything."""
    one = ARCHITECTURES["roformer"]
    inputs = {"input_ids": one.inputs(2)["input_ids"]}
    if given:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    attentions = [op for op in program_of(one.make(), inputs).ops if op.kind.endswith("_attention")]
    assert attentions
    assert all((op.arguments["attn_mask"] is not None) == given for op in attentions)


def test_everything_is_as_it_was_afterwards():
    """Also after an error."""
    names = ("is_torchdynamo_exporting", "is_tracing", "find_packed_sequence_indices")
    before = [getattr(masking_utils, name) for name in names]

    def fail() -> None:
        with huggingface.tracing(llama(), IDS, "train"):
            assert all(getattr(masking_utils, name) is not item for name, item in zip(names, before, strict=True))
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert [getattr(masking_utils, name) for name in names] == before


def test_other_threads_get_the_functions_of_transformers():
    tensor = torch.ones(2)
    names = ("is_torchdynamo_exporting", "is_tracing")
    arguments = ((), (tensor,))

    def answers() -> list[object]:
        return [getattr(masking_utils, name)(*given) for name, given in zip(names, arguments, strict=True)]

    plain = answers()
    found: list[list[object]] = []
    with huggingface.tracing(llama(), IDS, "train"):
        thread = threading.Thread(target=lambda: found.append(answers()))
        thread.start()
        thread.join()
        assert answers() == [False, True] != plain
    assert found == [plain]


def test_other_models_are_left_alone():
    with huggingface.tracing(Stack(), {}, "train"):
        assert masking_utils.is_tracing.__module__.startswith("transformers")


def test_what_a_version_lacks_is_left_out(caplog):
    """With a warning; the trace is as right."""
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", create=True):
        del masking_utils.find_packed_sequence_indices
        with caplog.at_level(logging.WARNING, logger="autopar"), huggingface.tracing(llama(), IDS, "train"):
            pass
    assert ["causal masks will be built in full" in record.message for record in caplog.records] == [True]


def _surface() -> dict[str, str]:
    """The message of each missing method."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = llama()
    dist_model = autopar.parallelize(model, mesh, tokens(), cluster="ideal")
    assert dist_model.config is model.config
    said = {}
    for name in INSTEAD:
        assert hasattr(model, name)
        assert not hasattr(dist_model, name)
        with pytest.raises(autopar.UnsupportedAttributeError) as caught:
            getattr(dist_model, name)()
        said[name] = str(caught.value)
    assert getattr(dist_model, "is_loaded_in_8bit", False) is False
    with pytest.raises(AttributeError, match="'DistributedModule' object has no attribute 'nothing_of_the_kind'"):
        _ = dist_model.nothing_of_the_kind
    return said


INSTEAD = {
    "generate": "a plan has no steps of decoding",
    "save_pretrained": "dist_model.full_state_dict()",
    "push_to_hub": "dist_model.full_state_dict()",
    "gradient_checkpointing_enable": "pass recompute=",
    "gradient_checkpointing_disable": "pass recompute=",
    "resize_token_embeddings": "resize the model before autopar.parallelize",
    "get_input_embeddings": "ask the model itself",
}


def test_methods_that_are_not_there_say_what_to_do():
    """The configuration is the model's; other methods raise one sentence, and `hasattr` is false for them."""
    for said in run_ranks(_surface, 2):
        for name, instead in INSTEAD.items():
            assert said[name].startswith(f"LlamaForCausalLM.{name} is not available on the distributed module: ")
            assert instead in said[name]
            assert "\n" not in said[name]
