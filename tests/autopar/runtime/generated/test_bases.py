"""Parts of a distributed module that hold parameters."""

from collections.abc import Mapping

import pytest
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import run_ranks
from tests.models import llama, tokens


def _listed(axis: str, options: Mapping[str, object]) -> list[list[str]]:
    """The names of the parts of a list of four layers, as it is read in different ways."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    dist_model = autopar.parallelize(llama(num_hidden_layers=4), mesh, tokens(), cluster="ideal", **options)
    layers = dist_model.model.layers
    names = {part: path.rpartition(".")[2] for path, part in dist_model.named_modules()}
    assert layers
    assert len(layers) == 4
    for part in (dist_model.model, layers.get_submodule(next(iter(names[part] for part in layers)))):
        assert part
        with pytest.raises(TypeError, match="this part of the model is no list of modules"):
            len(part)
        with pytest.raises(TypeError, match="this part of the model is no list of modules"):
            iter(part)
    return [[names[part] for part in parts] for parts in (layers, layers[1:3], layers[::-2], layers[-1:])]


@pytest.mark.long
def test_lists_of_modules() -> None:
    """As the model's own: lengths, loops, slices, and parts that are counted from the end."""
    first, second = run_ranks(_listed, 2, "dp", {})
    assert first == second == [["0", "1", "2", "3"], ["1", "2"], ["3", "1"], ["3"]]


@pytest.mark.long
def test_lists_of_modules_in_stages() -> None:
    """Those that a rank holds, by their numbers in the whole list."""
    cut = autopar.Pipeline(cuts=("model.layers.2",))
    first, second = run_ranks(_listed, 2, "pp", {"micro_batches": 2, "pipeline": cut})
    assert first[0] + second[0] == ["0", "1", "2", "3"]
    assert first[1] + second[1] == ["1", "2"]
    assert second[2] + first[2] == ["3", "1"]
    assert (first[3], second[3]) == ([], ["3"])


def _frozen() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist_model = autopar.parallelize(llama(), mesh, tokens(), cluster="ideal")
    for layer in dist_model.model.layers[:-1]:
        layer.requires_grad_(False)
    dist_model(**tokens())["loss"].backward()
    assert dist_model.model.layers[-1].mlp.up_proj.weight.grad is not None
    return [name for name, item in dist_model.named_parameters() if item.grad is None]


@pytest.mark.long
def test_layers_are_frozen_in_a_loop() -> None:
    """Those parameters alone get no gradients."""
    first, second = run_ranks(_frozen, 2)
    assert first == second
    assert first
    assert all(name.startswith("model.layers.0.") for name in first)
