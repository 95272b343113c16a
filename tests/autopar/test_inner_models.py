"""Models of transformers inside of other modules: adapters, heads around a backbone, sequences that a module packs."""

import pytest
from torch import nn
from transformers import PreTrainedModel

import autopar
from autopar.models.huggingface import pretrained_parts, without_inner_caches
from autopar.testing import compare
from tests.autopar.comparing import TOLERANCE, exact, marked
from tests.autopar.wrapped import WRAPPED, Adapted
from tests.models import gpt2, llama, tokens


def test_parts_are_outermost() -> None:
    """Not the parts of those."""
    model = Adapted()
    assert pretrained_parts(model) == [model.model]
    assert pretrained_parts(model.model) == [model.model]
    assert not pretrained_parts(nn.Linear(2, 2))
    backbones = nn.ModuleList([gpt2(), llama()])
    assert pretrained_parts(backbones) == list(backbones)


def test_inner_models_keep_no_cache_in_training() -> None:
    """Their configurations are the same afterwards."""
    model = Adapted()
    inner = model.model
    assert isinstance(inner, PreTrainedModel)
    with without_inner_caches(model, "train"):
        assert not inner.config.use_cache
        assert model(**tokens()).past_key_values is None
    with without_inner_caches(model, "infer"):
        assert inner.config.use_cache
    with without_inner_caches(inner, "train"):
        assert inner.config.use_cache
    plan = autopar.plan(model, {"dp": 2}, tokens(), cluster="ideal")
    assert not any("past_key" in name or "cache" in name for name in plan.programs["train"].stages[0].decisions)
    assert inner.config.use_cache


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2x2", pytest.param("4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", marked(WRAPPED, {"adapted", "preference"}))
def test_equal_to_one_device(name: str, mesh: str) -> None:
    """Outputs and gradients; frozen parameters have none."""
    make, inputs = WRAPPED[name]
    exact(make(), mesh, inputs())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(("objective", "micro_batches"), [("train", 2), ("infer", None)])
def test_equal_in_stages(name: str, objective: str, micro_batches: int | None) -> None:
    """And in inference, with the cache."""
    make, inputs = WRAPPED[name]
    options = {"objective": objective, "micro_batches": micro_batches}
    comparison = compare(make(), {"pp": 2}, inputs(), cluster="ideal", **options)
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
