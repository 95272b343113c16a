"""Models on meta: ranks make their own parts alone, and values come from a state dict, a checkpoint or the model."""

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import DistributedModule
from autopar.testing import LiftFloat32, run_ranks
from tests.models import llama, tokens

OPTIONS: Mapping[str, Any] = {"cluster": "ideal", "optimizer": "adamw"}


def _on_meta(**config: object) -> nn.Module:
    with torch.device("meta"):
        return llama(**config).double()


def _stock(**config: object) -> nn.Module:
    """The model as its own function initializes it."""
    model = llama(**config).double()
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    torch.manual_seed(3)
    model.init_weights()  # type: ignore[operator]
    return model


def _distributed(axes: tuple[str, str], **config: object) -> DistributedModule:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    options = {"zero": 3, "micro_batches": 2, "recompute": "none"}
    model = _on_meta(**config)
    torch.manual_seed(3)
    return autopar.parallelize(model, mesh, tokens(), **OPTIONS, **options)


def _message(dist_model: DistributedModule) -> str:
    with pytest.raises(autopar.InputError) as error:
        dist_model.forward_backward(**tokens())
    return str(error.value)


def _trains_as(dist_model: DistributedModule, stock: nn.Module) -> None:
    """Parameters, loss and all gradients are those of one device."""
    found, expected = dist_model.forward_backward(**tokens()), stock(**tokens())
    expected.loss.backward()
    assert torch.allclose(found.loss.detach(), expected.loss, rtol=1e-9)  # type: ignore[attr-defined]
    assert len(list(dist_model.parameters()))
    for name, parameter in dist_model.named_parameters():
        theirs = stock.get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.full_tensor(), theirs)
        assert torch.allclose(parameter.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


def _initialized(axes: tuple[str, str]) -> str:
    with LiftFloat32(torch.float64):
        return _initialized_in_float64(axes)


def _initialized_in_float64(axes: tuple[str, str]) -> str:
    dist_model = _distributed(axes)
    message = _message(dist_model)
    dist_model.init_weights()
    _trains_as(dist_model, _stock())
    # Again: nothing is left to do.
    before = {name: item.to_local().clone() for name, item in dist_model.state_dict().items()}
    dist_model.init_weights(seed=4)
    assert all(torch.equal(item.to_local(), before[name]) for name, item in dist_model.state_dict().items())
    return message


@pytest.mark.long
@pytest.mark.parametrize("axes", [("dp", "tp"), pytest.param(("pp", "dp"), marks=pytest.mark.slow)], ids=" x ".join)
def test_the_model_initializes_itself(axes: tuple[str, str]) -> None:
    """A call before that names what has no values. Ties, FSDP units and stages get what one device has."""
    for message in run_ranks(_initialized, 4, axes):
        assert "others have no values, because the model was on meta: load a state dict, or call" in message


def _loaded(folder: str) -> list[str]:
    with LiftFloat32(torch.float64):
        return _loaded_in_float64(folder)


def _loaded_in_float64(folder: str) -> list[str]:
    """Values by each way that a state dict comes: what no state dict has is missing after it."""
    stock, messages = _stock(), []
    ways = ("plain", "broadcast", "safetensors")
    for way in ways:
        dist_model = _distributed(("dp", "tp"))
        if way == "plain":
            dist_model.load_state_dict(stock.state_dict())
        elif way == "broadcast":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(dist_model, stock.state_dict() if dist.get_rank() == 0 else {}, options=options)
        else:
            state = dist_model.state_dict()
            dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
            dist_model.load_state_dict(state)
        messages.append(_message(dist_model))
        dist_model.init_weights(seed=100)
        _trains_as(dist_model, _stock())
    return messages


@pytest.mark.long
def test_values_are_loaded(tmp_path: Path) -> None:
    _stock().save_pretrained(tmp_path)  # type: ignore[operator]
    for messages in run_ranks(_loaded, 4, str(tmp_path)):
        for message in messages:
            assert message.startswith("'model.rotary_emb.inv_freq' and 1 others have no values")


def _growth(on_meta: bool) -> tuple[float, float]:
    """MiB that a rank takes for the module, and those of the whole model."""
    config = {"vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 1}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = _on_meta(**config) if on_meta else llama(**config).double()
    dist_model = autopar.parallelize(model, mesh, tokens(), **OPTIONS, micro_batches=2)
    whole = sum(item.numel() * item.element_size() for item in model.parameters())
    own = sum(item.to_local().numel() * item.element_size() for item in dist_model.parameters())  # type: ignore[attr-defined]
    assert own < 0.6 * whole
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10, whole / 2**20


@pytest.mark.slow
def test_ranks_make_their_own_parts_alone() -> None:
    """The rank that does not plan takes half of the model's memory where it is on meta, and more than all of it where
    it has values."""
    (_, (deferred, whole)) = run_ranks(_growth, 2, True)
    (_, (real, _)) = run_ranks(_growth, 2, False)
    assert deferred < 0.7 * whole
    assert real > whole
