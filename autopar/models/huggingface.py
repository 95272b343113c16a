"""Support for Hugging Face models: inputs made from the config, and hooks around tracing.

The hooks reach for internals of `transformers` by name; what a version does not have is left out with a warning, and
the trace is then slower at run time, but still exact.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import nn

from autopar.models.flash_attention import LONGEST, without_kernels
from autopar.models.loops import without_loops
from passes.capture.source import replaced
from passes.capture.values import is_readable
from passes.ir.errors import InputError
from passes.ir.log import logger

# Sequences that inputs are made with are at most this long.
_LONGEST = 2048


class Config(Protocol):
    """The fields of a configuration that are read; models have those that apply to them."""

    vocab_size: int
    image_size: int


class Pretrained(Protocol):
    """The attributes of a `transformers` model that are used."""

    config: Config
    dtype: torch.dtype

    def gradient_checkpointing_disable(self) -> None:
        """Keep all that the backward pass reads."""


def is_huggingface(model: nn.Module) -> bool:
    """Whether `model` is a model of `transformers`."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def pretrained_parts(model: nn.Module) -> list[nn.Module]:
    """The models of `transformers` that `model` is, or is made of (a LoRA of one, or a head around it), without their
    own parts."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in model.modules():
        if part not in inside and is_huggingface(part):
            found.append(part)
            inside.update(part.modules())
    return found


def made_inputs(model: nn.Module, objective: str, batch: int) -> dict[str, object]:
    """Inputs from the config: the main input, and labels for training if the model takes them.

    `batch` samples; sequences as long as the model allows, at most 2048. All tensors are on `meta`.

    Raises InputError for a model whose main input is not known here.
    """
    if not is_huggingface(model):
        raise InputError(
            f"{type(model).__name__} is no Hugging Face model, so its inputs are not known: pass example_inputs, "
            "a dict of keyword arguments or a tuple of positional ones with the global batch "
            "(tensors on meta will do)"
        )
    pretrained = cast(Pretrained, model)
    config = pretrained.config
    main = getattr(model, "main_input_name", "input_ids")
    length = min(int(getattr(config, "max_position_embeddings", None) or _LONGEST), _LONGEST)
    inputs: dict[str, object] = {}
    if main == "input_ids":
        inputs[main] = torch.empty(batch, length, dtype=torch.int64, device="meta")
    elif main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        channels = getattr(config, "num_channels", 3)
        inputs[main] = torch.empty(batch, channels, size, size, dtype=pretrained.dtype, device="meta")
    else:
        raise InputError(
            f"{type(model).__name__} takes {main!r}, which cannot be made from its config: pass example_inputs, a dict "
            "of its keyword arguments with the global batch (tensors on meta will do)"
        )
    if objective == "train" and "labels" in inspect.signature(model.forward).parameters:
        whole = type(model).__name__.endswith("Classification") and "Token" not in type(model).__name__
        shape = (batch,) if whole or main != "input_ids" else (batch, length)
        inputs["labels"] = torch.empty(shape, dtype=torch.int64, device="meta")
    return inputs


def completed(model: nn.Module, inputs: Mapping[str, object]) -> dict[str, object]:
    """`inputs` with tensors in place of numbers that differ from batch to batch: those that kernels of flash attention
    take beside cumulative lengths. Other numbers are constants of a plan."""
    if not pretrained_parts(model):
        return dict(inputs)
    numbers = {name: value for name in LONGEST if isinstance(value := inputs.get(name), int)}
    return {**inputs, **{name: torch.tensor(value) for name, value in numbers.items()}}


def settings(forward: inspect.Signature, inputs: Mapping[str, object], objective: str) -> dict[str, object]:
    """Arguments that tracing adds: training leaves the cache out."""
    if objective == "train" and "use_cache" in forward.parameters and "use_cache" not in inputs:
        return {"use_cache": False}
    return {}


@contextlib.contextmanager
def without_inner_caches(model: nn.Module, objective: str) -> Iterator[None]:
    """Within, models of `transformers` inside of `model` keep no cache in training; `settings` says so to one that is
    `model` itself, and names the argument. Changes of configurations within are undone."""
    with _same_configurations(model):
        is_told = is_huggingface(model) and "use_cache" in inspect.signature(model.forward).parameters
        if objective == "train" and not is_told:
            for config in _configurations(model):
                if hasattr(config, "use_cache"):
                    config.use_cache = False
        yield


@contextlib.contextmanager
def tracing(model: nn.Module, inputs: Mapping[str, object], objective: str) -> Iterator[None]:
    """Enter around a trace: causal masks that the model would build are left to attention, and so are masks that it
    makes itself and that mask nothing. The delta rule runs without loops. Caches may be returned. What a forward pass
    sets in configurations is undone.

    Masks stay where the model is given one, and where it is given positions that may pack several sequences into one.
    A module around a model may give it any.
    """
    if not pretrained_parts(model):
        yield
        return
    packed = not is_huggingface(model) or inputs.get("position_ids") is not None
    with contextlib.ExitStack() as stack:
        register_caches(model)
        masks = importlib.import_module("transformers.masking_utils")
        replacements: dict[str, Callable[..., object]] = {
            "is_torchdynamo_exporting": lambda: False,
            "is_tracing": lambda tensor=None: tensor is not None and not is_readable(tensor),
        }
        if not packed:
            replacements["find_packed_sequence_indices"] = lambda positions: None
        for name, replacement in replacements.items():
            if hasattr(masks, name):
                stack.enter_context(replaced(masks, name, replacement))
            else:
                logger.warning("transformers has no masking_utils.%s: causal masks will be built in full", name)
        stack.enter_context(without_kernels(packed))
        stack.enter_context(without_loops(model))
        stack.enter_context(without_inner_caches(model, objective))
        yield


@contextlib.contextmanager
def _same_configurations(model: nn.Module) -> Iterator[None]:
    """Afterwards the configurations are as before. A classifier sets its `problem_type` by the first labels that it
    gets: those of a trace are an example."""
    before = [(vars(item), dict(vars(item))) for item in _configurations(model)]
    try:
        yield
    finally:
        for now, values in before:
            now.clear()
            now.update(values)


def _configurations(model: nn.Module) -> list[object]:
    """The configurations of a model and of its parts, each once."""
    found = {id(item): item for part in model.modules() if hasattr(item := vars(part).get("config"), "__dict__")}
    return list(found.values())


def register_caches(model: nn.Module) -> None:
    """Let caches of keys and values be part of what a trace of `model` returns, if it has Hugging Face models."""
    for part in pretrained_parts(model):
        _register_caches(part)


def _register_caches(model: nn.Module) -> None:
    for place, name, arguments in (
        ("transformers.exporters.exporter_dynamo", "register_cache_pytrees_for_model", (model,)),
        ("transformers.integrations.executorch", "register_dynamic_cache_export_support", ()),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            getattr(importlib.import_module(place), name)(*arguments)
            return
    logger.warning("transformers has no way to return caches from a trace: pass use_cache=False")
