"""Stock models on meshes of one, two and three axes."""

import pytest

from tests.autopar.comparing import exact
from tests.models import MODELS, llama, tokens


@pytest.mark.parametrize("mesh", ["2", "4", "2x2x2"])
@pytest.mark.parametrize("name", MODELS)
def test_meshes(name, mesh):
    exact(MODELS[name](), mesh, tokens(batch=8))


@pytest.mark.parametrize("objective", ["train", "infer"])
def test_padding_mask_on_three_axes(objective):
    exact(llama(), "2x2x2", tokens(batch=8, padding=True, labels=objective == "train"), objective=objective)
