"""Stock models on meshes of one, two and three axes."""

import pytest

from tests.autopar.comparing import exact, marked
from tests.models import MODELS, llama, tokens


@pytest.mark.parametrize("name", marked(MODELS, {"gpt2"}))
def test_one_axis_of_two(name):
    exact(MODELS[name](), "2", tokens(batch=8))


@pytest.mark.parametrize("name", marked(MODELS, {"llama", "gemma2"}))
def test_one_axis_of_four(name):
    exact(MODELS[name](), "4", tokens(batch=8))


@pytest.mark.parametrize("name", marked(MODELS, {"qwen3"}))
def test_three_axes(name):
    exact(MODELS[name](), "2x2x2", tokens(batch=8))


@pytest.mark.parametrize("objective", marked(["train", "infer"], {"train"}))
def test_padding_mask_on_three_axes(objective):
    exact(llama(), "2x2x2", tokens(batch=8, padding=True, labels=objective == "train"), objective=objective)
