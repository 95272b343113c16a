"""Planned memory is what torch's MemTracker finds when the generated module runs, byte by byte."""

import random
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from autopar import Precision
from tests.autopar.comparing import MESHES
from tests.autopar.fuzzing import random_solution
from tests.autopar.simulated import predicted_and_measured
from tests.autopar.solving import solved_by
from tests.models import MODELS, tokens

MIXED = Precision(compute=torch.bfloat16, master=torch.float32)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def _check(model: nn.Module, mesh: str, inputs: dict[str, torch.Tensor], **options: object) -> None:
    given = {"cluster": "ideal", **options}
    if given.get("objective") != "infer":
        given = {"micro_batches": 1, "recompute": "none", **given}
    predicted, measured, _ = predicted_and_measured(model, MESHES[mesh], inputs, **given)
    assert predicted == measured


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", "2x2", {"precision": MIXED}),
        ("gpt2", "2", {"optimizer": "sgd"}),
        ("qwen3", "2x2", {"objective": "infer"}),
        *(
            pytest.param(name, mesh, options, marks=pytest.mark.slow)
            for name in MODELS
            for mesh in ("2", "2x2")
            for options in ({"optimizer": "adamw"}, {"optimizer": "adam", "precision": MIXED})
        ),
    ],
)
def test_best_plans(name: str, mesh: str, options: dict[str, object]) -> None:
    """The plan that the solver chooses, in training and inference."""
    training = options.get("objective") != "infer"
    _check(MODELS[name](), mesh, tokens(length=8, labels=training), **options)


def test_copies_are_counted() -> None:
    """Of many layers most are counted and not run."""
    _check(MODELS["llama"](num_hidden_layers=7), "2", tokens(length=4), optimizer="sgd")


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [
        ("llama", "2", 1),
        *(
            pytest.param(name, mesh, seed, marks=pytest.mark.slow)
            for name in MODELS
            for mesh in ("2", "2x2")
            for seed in range(6)
        ),
    ],
)
def test_random_plans(name: str, mesh: str, seed: int) -> None:
    """Random strategies, random storage, and random gathers made again in the backward pass."""
    with solved_by(partial(random_solution, random.Random(seed))):
        _check(MODELS[name](), mesh, tokens(length=8))


@pytest.mark.parametrize(
    ("name", "mesh", "level"),
    [
        ("llama", "2", "full"),
        pytest.param("llama", "2x2", "full", marks=pytest.mark.slow),
        pytest.param("llama", "2", "selective", marks=pytest.mark.slow),
    ],
)
def test_recompute(name: str, mesh: str, level: str) -> None:
    """What is computed again in the backward pass, up to where all is there that the pass needs."""
    _check(MODELS[name](num_hidden_layers=7), mesh, tokens(length=4), optimizer="sgd", recompute=level, micro_batches=1)


@pytest.mark.parametrize(
    ("name", "mesh", "level"), [("llama", "2", "none"), pytest.param("gpt2", "2x2", "full", marks=pytest.mark.slow)]
)
def test_micro_batches(name: str, mesh: str, level: str) -> None:
    """Gradients and what earlier micro-batches returned stay. Parts of inputs are counted as copies; some are views."""
    inputs = tokens(8, 8)
    predicted, measured, _ = predicted_and_measured(
        MODELS[name](), MESHES[mesh], inputs, cluster="ideal", micro_batches=4, recompute=level
    )
    copies = 2 * sum(tensor.nbytes for tensor in inputs.values())
    assert measured <= predicted <= measured + copies


def _vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
    inputs = {"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), inputs


def _bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=64)), tokens()


@pytest.mark.slow
@pytest.mark.parametrize("make", [_vit, _bert])
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_other_families(make, mesh: str) -> None:
    """Convolutions, dropout, encoders."""
    model, inputs = make()
    _check(model, mesh, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_on_other_devices(mesh: str) -> None:
    """A plan for CUDA counts whole blocks of its allocator and optimizers that handle all parameters together: never
    less than what is needed, and not much more."""
    for optimizer in ("adam", "adamw", "sgd", "sgd_momentum", "rmsprop", "adagrad"):
        model = MODELS["llama"](hidden_size=64)
        predicted, measured, _ = predicted_and_measured(
            model, MESHES[mesh], tokens(), cluster="h100", optimizer=optimizer
        )
        assert measured <= predicted <= 1.05 * measured + 2**20
