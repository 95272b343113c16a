"""The first values of models on meta, without ranks: those that the model's own functions give on one device."""

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from autopar.models.info import structure_of
from autopar.models.initialization import initializations
from autopar.runtime.initialization import (
    DeferredModel,
    Initialize,
    MissingValues,
    blank,
    initialize_missing,
)
from autopar.runtime.ranks.agreement import Agreement
from passes.ir.errors import InputError
from tests.architectures import ARCHITECTURES

CPU = torch.device("cpu")
# Tied and scaled at the end; drawn again where out of bounds; written to by the parent; buffers; experts; scans.
FAST = {"gpt2", "vit", "t5", "llama", "mixtral-grouped_mm", "mamba"}
# Architectures whose `init_weights` gives no values to some parameters, and the first of these.
UNSET = {
    "apertus": "model.layers.0.mlp.act_fn.alpha_n",
    "clip": "logit_scale",
    "hubert": "hubert.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "levit": "levit.encoder.stages.0.layers.0.module.attention_biases",
    "openai-gpt": "transformer.h.0.attn.c_attn.bias",
    "perceiver": "embedding_decoder.bias",
    "regnet": "regnet.encoder.stages.0.layers.0.layer.2.attention.0.bias",
    "sew": "sew.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "timesformer": "timesformer.embeddings.time_embeddings",
    "unispeech": "unispeech.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "vilt": "vilt.embeddings.cls_token",
    "wav2vec2": "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "wav2vec2-ctc": "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "wav2vec2_conformer": "wav2vec2_conformer.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "wavlm": "wavlm.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
}


class _Alone:
    """One rank; `others` are what further ranks say."""

    def __init__(self, *others: object) -> None:
        self.others = others

    def gathered(self, item: object, phase: str = "") -> list[object]:
        return [item, *self.others]


def _named(model: nn.Module) -> dict[str, Tensor]:
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return dict((*parameters, *buffers))


def _blanked(model: nn.Module) -> nn.Module:
    """A copy without values."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in _named(copied).values():
            tensor.copy_(blank(tensor.shape, tensor.dtype, CPU))
    return copied


def _initialize(
    model: nn.Module, root: nn.Module, initialize: Initialize | None = None, ranks: _Alone | None = None
) -> None:
    missing = MissingValues(root, _named(root).keys())
    deferred = DeferredModel(structure_of(model), initializations)
    initialize_missing(deferred, missing, cast("Agreement", ranks or _Alone()), initialize, 5, CPU)
    missing.check()


def _of_transformers(name: str) -> nn.Module | None:
    model = ARCHITECTURES[name].make()
    return model if hasattr(model, "init_weights") else None


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_values_are_those_of_the_model(name: str) -> None:
    """Bit for bit those of `init_weights` on one device, parameters and buffers; what it leaves out is refused."""
    model = _of_transformers(name)
    if model is None:
        pytest.skip("no model of transformers")
    state, root, expected = torch.get_rng_state(), _blanked(model), _blanked(model)
    if name in UNSET:
        with pytest.raises(InputError, match=rf"does not initialize (.*, )?{UNSET[name]}"):
            _initialize(model, root)
        return
    _initialize(model, root)
    assert torch.equal(torch.get_rng_state(), state)
    for module in expected.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    torch.manual_seed(5)
    cast("Callable[[], None]", expected.init_weights)()
    assert all(torch.equal(value, _named(expected)[key]) for key, value in _named(root).items())


class Own(nn.Module):
    """Layers of torch, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))


class OwnWithReset(Own):
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)


def test_layers_of_torch() -> None:
    """They initialize themselves; a parameter that nobody does is named, and a given function is called instead."""
    with pytest.raises(InputError, match="Own does not initialize scale: pass initialize="):
        _initialize(Own(), _blanked(Own()))
    root = _blanked(OwnWithReset())
    _initialize(OwnWithReset(), root)
    torch.manual_seed(5)
    expected = (nn.Linear(3, 4), nn.LayerNorm(4), torch.rand(4))
    assert torch.equal(root.get_parameter("first.bias"), expected[0].bias)
    assert torch.equal(root.get_parameter("norm.weight"), expected[1].weight)
    assert torch.equal(root.get_parameter("scale"), expected[2])
    root = _blanked(Own())
    _initialize(Own(), root, lambda module: [nn.init.constant_(item, 2.0) for item in module.parameters(False)])  # type: ignore[arg-type, return-value]
    assert all(bool((item == 2).all()) for item in root.parameters())


def test_replaced_parameters() -> None:
    """A function may replace a parameter of its module instead of writing to it."""

    def initialize(module: nn.Module) -> None:
        for name, item in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.full(item.shape, 3.0)))

    root = _blanked(Own())
    _initialize(Own(), root, initialize)
    assert all(bool((item == 3).all()) for item in root.parameters())


def test_loaded_values_stay() -> None:
    """Only what has no values gets some."""
    root = _blanked(OwnWithReset())
    with torch.no_grad():
        root.get_parameter("first.weight").fill_(7.0)
    _initialize(OwnWithReset(), root)
    assert bool((root.get_parameter("first.weight") == 7).all())
    assert not bool(root.get_parameter("first.bias").isnan().any())


def test_a_part_alone() -> None:
    def initialize(module: nn.Module) -> None:
        with torch.no_grad():
            for item in module.parameters(recurse=False):
                item[:2] = 1.0

    with pytest.raises(
        InputError, match=r"the initialization of Linear writes to a part of 'first\.(weight|bias)' alone"
    ):
        _initialize(Own(), _blanked(Own()), initialize)


def test_ranks_agree_on_the_seed() -> None:
    with pytest.raises(InputError, match=r"ranks initialize the model with different seeds, \[5, 6\]"):
        _initialize(Own(), _blanked(Own()), ranks=_Alone((frozenset(), 6)))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]
)
def test_values_are_noticed(dtype: torch.dtype) -> None:
    """However they came; booleans have them once they were loaded."""
    model = nn.Module()
    model.register_buffer("own", blank((2, 3), dtype, CPU))
    missing = MissingValues(model, {"own"})
    with pytest.raises(InputError, match="'own' has no values, because the model was on meta"):
        missing.check()
    if dtype == torch.bool:
        missing.loaded({"own"})
    else:
        model.get_buffer("own").detach().view(-1)[0] = 1
    missing.check()
