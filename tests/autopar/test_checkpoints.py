"""Checkpoints between stock and distributed models and between meshes: bit for bit, through torch's own functions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import autopar
from autopar.runtime import DistributedModule
from autopar.testing import run_ranks
from tests.models import Stack, gpt2, llama, phi3, tokens

AXES: Mapping[int, tuple[str, ...]] = {1: ("tp",), 2: ("dp", "tp")}
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def partly_frozen() -> nn.Module:
    """A llama of which the embedding and the first norm do not train."""
    model = llama(num_hidden_layers=1)
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt2(n_layer=1),
    "phi3": phi3,
    "llama": lambda: llama(num_hidden_layers=1),
    "tied llama": lambda: llama(num_hidden_layers=1, tie_word_embeddings=True),
    "partly frozen llama": partly_frozen,
}

# Fused projections are used as parts of each of them: what they are stored in must be another layout.
FUSED: Mapping[str, dict[str, dict[str, dict[str, str]]]] = {
    "gpt2": {"*.c_attn.weight": {"used": {"tp": "S(1, 3)"}}},
    "phi3": {"*.qkv_proj.weight": {"used": {"tp": "S(0, 3)"}}, "*.gate_up_proj.weight": {"used": {"tp": "S(0, 2)"}}},
}


class AppState(Stateful):
    """A model with its optimizer, as torch's tutorial on checkpoints has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """All state, under the names of parameters."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over all state."""
        model, optimizer = state_dict["model"], state_dict["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model and of its optimizer, whole, by name."""
    found = {name: whole(item).detach().clone() for name, item in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{kind}"] = whole(torch.as_tensor(value)).clone()
    return found


def different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not equal bit for bit, or are on one side only."""
    names = {**found, **expected}
    return [
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


def distributed(name: str, sizes: tuple[int, ...]) -> tuple[DistributedModule, torch.optim.Optimizer]:
    """A distributed model with other values than the stock one, and its optimizer."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[len(sizes)])
    constraints = FUSED.get(name)
    module = autopar.parallelize(model, mesh, tokens(), cluster="ideal", constraints=constraints)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stock model after two steps."""
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _journey(name: str, folder: Path) -> dict[str, list[str]]:
    """Stock -> (2, 2) -> (4) -> (2, 2) -> stock: at every stop the names of what is not as it was."""
    stock = trained(name)
    expected = states(*stock)
    dcp.save({"app": AppState(*stock)}, checkpoint_id=folder / "0")
    found = {}
    stops: list[tuple[str, nn.Module, torch.optim.Optimizer]] = []
    square, row, back = distributed(name, (2, 2)), distributed(name, (4,)), distributed(name, (2, 2))
    new = MODELS[name]()
    stops += [("(2, 2)", *square), ("(4)", *row), ("back", *back), ("stock", new, torch.optim.AdamW(new.parameters()))]
    for number, (stop, model, optimizer) in enumerate(stops):
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder / str(number))
        found[stop] = different(states(model, optimizer), expected)
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / str(number + 1))
    # What arrived is also what runs.
    batch = tokens()
    losses = [model.eval()(**batch).loss for model in (stock[0], square[0], row[0])]
    found["loss"] = [] if all(torch.allclose(loss, losses[0], rtol=1e-4) for loss in losses) else ["loss"]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*["phi3"], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "phi3")]
)
def test_checkpoints_go_everywhere(name: str, tmp_path: Path) -> None:
    """A stock checkpoint is loaded on (2, 2), saved, loaded on (4), saved, and so on back to the stock model: model and
    states of AdamW are the same bit for bit at every stop."""
    for found in run_ranks(_journey, 4, name, tmp_path):
        assert not any(found.values()), found


def _whole_and_back(names: list[str]) -> list[tuple[list[str], ...]]:
    """Whole state dicts go in and out: broadcast from the first rank, given on all, given plainly."""
    found = []
    for name in names:
        stock = MODELS[name]().state_dict()
        module, _ = distributed(name, (2, 2))
        set_model_state_dict(module, dict(stock) if dist.get_rank() == 0 else {}, options=BROADCAST)
        broadcast = different(get_model_state_dict(module, options=FULL), stock)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        set_model_state_dict(module, dict(stock), options=FULL)
        given = different(states(module, torch.optim.SGD(module.parameters())), stock)
        found.append((broadcast, given))
    return found


@pytest.mark.slow
def test_whole_state_dicts_go_in_and_out() -> None:
    """`set_model_state_dict` with whole tensors, broadcast or not, and `get_model_state_dict` with whole tensors."""
    for found in run_ranks(_whole_and_back, 4, list(MODELS)):
        assert found == [([], [])] * len(MODELS)


# --- load_state_dict --------------------------------------------------------------------------------------------------


def _message(run: Callable[[], object]) -> str:
    """The message of the CheckpointError that is raised."""
    with pytest.raises(autopar.CheckpointError) as caught:
        run()
    return str(caught.value)


def _load_plain(name: str) -> dict[str, object]:
    """Every way to call `load_state_dict`."""
    stock, (module, optimizer) = MODELS[name]().state_dict(), distributed(name, (2, 2))
    before, found = states(module, optimizer), dict[str, object]()
    first, second, *_ = stock

    # What does not fit is refused, and nothing is changed.
    bad = {**stock, "new": torch.zeros(2), second: torch.zeros(3, 5)}
    del bad[first]
    found["strict"] = _message(lambda: module.load_state_dict(bad))
    found["shape"] = _message(lambda: module.load_state_dict(bad, strict=False))
    found["kind"] = _message(lambda: module.load_state_dict({**stock, first: 3}))
    found["meta"] = _message(lambda: module.load_state_dict({**stock, first: stock[first].to("meta")}))
    found["empty"] = _message(lambda: module.load_state_dict({}))
    found["refused"] = different(states(module, optimizer), before)

    # A part of the names, of which the others keep their values.
    parameter = module.get_parameter(second)
    keys = module.load_state_dict({second: stock[second].double(), "new": torch.zeros(2)}, strict=False)
    found["keys"] = (set(keys.missing_keys) == set(stock) - {second}, keys.unexpected_keys)
    expected = {**before, second: stock[second]}
    found["partly"] = different(states(module, optimizer), expected)
    found["in place"] = module.get_parameter(second) is parameter and parameter.dtype == torch.float32

    # All of it: whole tensors, distributed ones, both, and a part of the model.
    module.load_state_dict(stock)
    found["plain"] = different(states(module, optimizer), stock)
    own = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict({**own, second: stock[second]})
    found["mixed"] = different(states(module, optimizer), stock)
    part, _, rest = second.partition(".")
    module.get_submodule(part).load_state_dict({rest: -stock[second]}, strict=False)
    found["part"] = torch.equal(whole(module.get_parameter(second)), -stock[second])

    # New parameters, in the planned dtype, and tied as before.
    tied = {name for name, _ in module.named_parameters()}
    module.load_state_dict({key: value.double() for key, value in stock.items()}, assign=True)
    found["assigned"] = different(states(module, optimizer), stock)
    found["tied"] = {name for name, _ in module.named_parameters()} == tied
    found["new"] = module.get_parameter(second) is not parameter and parameter.dtype == torch.float32
    module(**tokens()).loss.backward()
    found["gradients"] = all(item.grad is not None for item in module.parameters() if item.requires_grad)
    return found


@pytest.mark.long
def test_load_state_dict_takes_whole_tensors() -> None:
    """`load_state_dict` takes whole tensors, distributed ones and both, and refuses by name what does not fit; then
    nothing is changed."""
    for found in run_ranks(_load_plain, 4, "tied llama"):
        strict, shape, kind, meta, empty = (str(found.pop(key)) for key in ("strict", "shape", "kind", "meta", "empty"))
        assert "missing model.embed_tokens.weight; additional new; model.layers.0" in strict
        assert "has shape [3, 5], but must have [32, 32]" in strict
        assert "missing" not in shape
        assert "has shape [3, 5], but must have [32, 32]" in shape
        assert "model.embed_tokens.weight is int, not a tensor" in kind
        assert "model.embed_tokens.weight is on meta, without data" in meta
        assert "broadcast_from_rank0=True" in empty
        assert found.pop("keys") == (True, ["new"])
        for key in ("refused", "partly", "plain", "mixed", "assigned"):
            assert found.pop(key) == [], key
        assert found == dict.fromkeys(("in place", "part", "tied", "new", "gradients"), True)


class Bare(nn.Module):
    """A model with a parameter and a buffer of its own, of which no other module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("passing", torch.tensor(3.0), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, 4]."""
        return {"loss": ((x @ self.weight.T) * self.scale * self.passing).sum()}


def _load_in_other_places() -> dict[str, object]:
    """Buffers, parameters of the model itself, other meshes, and a model around a parallelized part."""
    found: dict[str, object] = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch = {"x": torch.ones(4, 4)}
    module = autopar.parallelize(
        Bare(), mesh, batch, cluster="ideal", constraints={"weight": {"stored": {"dp": "S(0)"}}}
    )
    state = {"weight": torch.full((8, 4), 5.0), "scale": torch.tensor([7.0])}
    for assign in (False, True):
        module.load_state_dict({key: value + assign for key, value in state.items()}, assign=assign)
        loss = module(**batch)["loss"].item()
        found[f"loss, assign={assign}"] = loss == (5.0 + assign) * 4 * 8 * 4 * (7.0 + assign) * 3
    found["buffers"] = set(module.state_dict())
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    elsewhere = torch.distributed.tensor.distribute_tensor(torch.zeros(8, 4), other)
    found["mesh"] = _message(lambda: module.load_state_dict({**state, "weight": elsewhere}))
    turned = torch.distributed.tensor.distribute_tensor(
        torch.full((8, 4), 9.0), mesh, [torch.distributed.tensor.Shard(1)]
    )
    module.load_state_dict({**state, "weight": turned})
    found["turned"] = torch.equal(whole(module.weight), torch.full((8, 4), 9.0))

    # A stock model around a parallelized part loads its own state dict.
    outer = nn.Sequential(Stack(), Stack())
    given = {key: torch.randn_like(value) for key, value in outer.state_dict().items()}
    dist.broadcast_object_list(objects := [given], src=0)
    x = {"x": torch.ones(4, 16), "target": torch.zeros(4, 16)}
    outer[1] = autopar.parallelize(
        outer[1], mesh, x, cluster="ideal", constraints={"*.weight": {"stored": {"dp": "S(0)"}}}
    )
    outer.load_state_dict(objects[0])
    found["around"] = different({key: whole(item) for key, item in outer.state_dict().items()}, objects[0])
    return found


def test_load_state_dict_in_other_places() -> None:
    """Buffers are loaded, not those that are not saved; a parameter that hangs on the model itself is replaced for the
    program, too; a tensor on another mesh is refused; a model around a part loads whole tensors."""
    for found in run_ranks(_load_in_other_places, 2):
        assert found.pop("buffers") == {"weight", "scale"}
        assert "weight is on another mesh" in str(found.pop("mesh"))
        assert found.pop("around") == []
        assert found == dict.fromkeys(("loss, assign=False", "loss, assign=True", "turned"), True)


# --- export, and other ways to save -----------------------------------------------------------------------------------


def _export(name: str, folder: Path) -> list[str]:
    """The names that differ between what was trained and what `from_pretrained` reads."""
    model = MODELS[name]()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = autopar.parallelize(model, mesh, tokens(), cluster="ideal")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(**tokens()).loss.backward()
    optimizer.step()
    expected = states(module, torch.optim.SGD(module.parameters()))
    # Every rank takes part in what follows, the first alone writes.
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    return different(AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tied llama", pytest.param("llama", marks=pytest.mark.slow)])
def test_trained_model_is_exported(name: str, tmp_path: Path) -> None:
    """`get_model_state_dict` and the stock model's `save_pretrained` write a folder that `from_pretrained` reads."""
    for found in run_ranks(_export, 4, name, tmp_path):
        assert found == []


def _other_ways(folder: Path) -> dict[str, object]:
    """Saving in the background, and what each rank writes by itself."""
    module, optimizer = distributed("partly frozen llama", (2, 2))
    expected = states(module, optimizer)
    dcp.async_save(module.state_dict(), checkpoint_id=folder / "background").result()
    torch.save(module.state_dict(), folder / f"{dist.get_rank()}.pt")
    found: dict[str, object] = {}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder / "background")
    found["background"] = different(states(module, optimizer), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt"))
    found["own file"] = different(states(module, optimizer), expected)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    module(**tokens()).loss.backward()
    optimizer.step()
    _, state = get_state_dict(module, optimizer)
    found["frozen"] = [name for name in frozen if name in state["state"]]
    found["states"] = len(state["state"]) == len(list(module.parameters())) - len(frozen)
    return found


@pytest.mark.slow
def test_other_ways_to_save(tmp_path: Path) -> None:
    """`async_save`, and `torch.save` of each rank's state dict; frozen parameters have no states."""
    for found in run_ranks(_other_ways, 4, tmp_path):
        assert found == {"background": [], "own file": [], "frozen": [], "states": True}
