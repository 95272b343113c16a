"""Everything that users do around a module that runs in pipeline stages: right, or refused on every rank."""

import copy
import gc
import json
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import autopar
from autopar._torch import group_timeout
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.pipeline import running, schedule
from autopar.testing import LiftFloat32, RankError, run_ranks
from tests.models import gpt2, llama, tokens

Ended = tuple[str, str]
WORD = "transformer.wte.weight"
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def ended(run: Callable[[], object]) -> Ended:
    """The type and message of what a call raises; empty where it raises nothing."""
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def in_stages(model: nn.Module, *sizes: int, **options: Any) -> autopar.DistributedModule:
    """A model in two stages or more, on ("pp") or ("pp", "dp")."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp")[: len(sizes)])
    return autopar.parallelize(model, mesh, options.pop("inputs", tokens()), **{"cluster": "ideal", **options})


def gradient_error(module: autopar.DistributedModule, model: nn.Module) -> float:
    """The largest error of this rank's gradients, relative to the largest of each."""
    errors = [0.0]
    for name, parameter in module.named_parameters():
        expected = model.get_parameter(name).grad
        errors.append(float((whole(parameter.grad) - expected).abs().max() / expected.abs().max().clamp_min(1e-3)))
    return max(errors)


def value_error(module: autopar.DistributedModule, model: nn.Module) -> float:
    """The largest difference of this rank's parameters."""
    pairs = ((whole(item), model.get_parameter(name)) for name, item in module.named_parameters())
    return max(float((found - expected).abs().max()) for found, expected in pairs)


# --- calls that differ between ranks, data, state, optimizers ---------------------------------------------------------


def _calls(module: autopar.DistributedModule) -> dict[str, Ended]:
    """Calls that are refused, on every rank."""
    rank, batch = dist.get_rank(), tokens()
    step = lambda: module.forward_backward(**batch)  # noqa: E731
    other = {**batch, "labels": batch["labels"].roll(rank // 2, 1)}
    found = {
        "values": ended(lambda: module.forward_backward(**other)),
        "arguments": ended(lambda: module.forward_backward(**(batch if rank else {"labels": batch["labels"]}))),
        "raised": ended(lambda: module.forward_backward(**{**batch, **({"input_ids": "no"} if rank == 3 else {})})),
        "forward": ended(lambda: module(**batch)),
        "no gradients": ended(lambda: torch.no_grad()(step)()),
    }
    with torch.set_grad_enabled(rank != 3):
        found["gradients on some"] = ended(lambda: module(**batch))
    module.train(rank != 1)
    found["mode"] = ended(step)
    module.train()
    word = module.get_parameter(WORD)
    word.requires_grad_(rank < 2)
    found["tied flags"] = ended(step)
    word.requires_grad_(True)
    last = list(module.parameters())[-1]
    last.requires_grad_(rank != 2)
    found["flags"] = ended(step)
    last.requires_grad_(True)
    for name, register in {
        "hook": lambda: module.register_forward_hook(lambda *_: None),
        "tensor hook": lambda: last.register_hook(lambda _: None),
        "post-accumulate hook": lambda: last.register_post_accumulate_grad_hook(lambda _: None),
    }.items():
        handle = register() if rank == 3 else None
        found[name] = ended(step)
        if handle is not None:
            handle.remove()
    return found


# Parts of the messages on each rank.
REFUSED: Mapping[str, str] = {
    "values": "labels had other values on rank 2 of the mesh than on rank 0",
    "arguments": "rank 1 of the mesh has input_ids int64[4, 16], rank 0 has input_ids left out",
    "raised": "input_ids must be a tensor, got str",
    "forward": "a module in pipeline stages computes gradients with the forward pass: call dist_model.forward_backward",
    "no gradients": "forward_backward computes gradients: call it without torch.no_grad()",
    "gradients on some": "a module in pipeline stages computes gradients with the forward pass",
    "mode": "rank 1 of the mesh is in evaluation mode, rank 0 is in training mode",
    "tied flags": f"the parameter '{WORD}' requires a gradient on rank 0 of the mesh, but not on rank 2",
    "flags": "requires a gradient on rank 3 of the mesh, but not on rank 2",
    "hook": "hooks on a distributed module do not run in forward_backward with micro-batches",
    "tensor hook": "has a hook, which would see gradients before those of all micro-batches and pipeline stages",
    "post-accumulate hook": "has a hook, which would see gradients before those of all micro-batches",
}


def _frozen(module: autopar.DistributedModule, model: nn.Module) -> float:
    """The error of gradients where each rank has frozen a parameter of its own stages."""
    name, last = list(module.named_parameters())[-1]
    last.requires_grad_(False)
    module.forward_backward(**tokens())
    model(**tokens()).loss.backward()
    assert last.grad is None
    last.grad = torch.zeros_like(last)
    model.get_parameter(name).grad.zero_()
    error = gradient_error(module, model)
    last.requires_grad_(True)
    module.zero_grad()
    model.zero_grad()
    return error


def _tied_frozen(module: autopar.DistributedModule, model: nn.Module) -> float:
    """The error of gradients where the parameter that two stages share is frozen between two steps: it keeps its own,
    which counts in the norm."""
    for trains in (True, False, True):
        for item in (module, model):
            item.get_parameter(WORD).requires_grad_(trains)
        module.forward_backward(**tokens())
        model(**tokens()).loss.backward()
    error = gradient_error(module, model)
    norms = autopar.clip_grad_norm_(module, 1e9), nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    module.zero_grad()
    model.zero_grad()
    return max(error, relative(*norms))


def _data(module: autopar.DistributedModule) -> dict[str, object]:
    """Batches of data loaders."""
    rank, batch = dist.get_rank(), tokens()
    own = {name: item[2 * (rank % 2) :][:2] for name, item in batch.items()}
    wrong = {name: item.flip(0) if rank > 1 else item for name, item in own.items()}
    found: dict[str, object] = {
        "axis": ended(lambda: module.from_local(own, axes=("pp", "dp"))),
        "share of axis": ended(lambda: module.data_rank("pp")),
        "rows": ended(lambda: module.from_local({key: item[: 1 + rank // 2] for key, item in own.items()}, ("dp",))),
        "values": ended(lambda: module.from_local(wrong, axes=("dp",))),
        "share": (module.data_rank(("dp",)), module.data_size(("dp",))),
        "layouts": {axis for layout in module.input_layouts.values() for axis in layout},
    }
    given = module.from_local(own, axes=("dp",))
    found["whole"] = all(torch.equal(whole(given[name]), item) for name, item in batch.items())
    found["loss"] = float(module.forward_backward(**given).loss)
    elsewhere = {"input_ids": DTensor.from_local(batch["input_ids"], module.mesh), "labels": batch["labels"]}
    found["mesh"] = ended(lambda: module.forward_backward(**elsewhere))
    module.zero_grad()
    return found


def _state(module: autopar.DistributedModule, model: nn.Module, folder: Path) -> dict[str, object]:
    """State dicts of the whole model go in and out; at the end both have the same new values."""
    rank = dist.get_rank()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    state = model.state_dict()
    names = [name for name in state if ".h.0." in name]
    bad = {**state, "new": torch.zeros(1), names[0]: torch.zeros(3)}
    del bad[names[1]]
    found: dict[str, object] = {"bad": ended(lambda: module.load_state_dict(bad))}
    keys = module.load_state_dict(state)
    found["loaded"] = value_error(module, model), keys.missing_keys, keys.unexpected_keys
    module.load_state_dict(module.state_dict())
    less = {name: item for name, item in state.items() if name not in names}
    keys = module.load_state_dict({**less, "new": torch.zeros(1)}, strict=False)
    held = set(module.state_dict())
    found["less"] = set(keys.missing_keys) == held & set(names), keys.unexpected_keys
    exported = module.full_state_dict()
    found["export"] = (
        [name for name, item in exported.items() if not torch.equal(item, state[name])],
        set(state) - set(exported) if rank == 0 else set(exported),
    )
    if rank == 0:
        copy.deepcopy(model).save_pretrained(folder, state_dict=exported)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        found["again"] = all(torch.equal(item, state[name]) for name, item in again.state_dict().items())
    optimizer = torch.optim.AdamW(module.parameters())
    found["whole"] = [
        ended(lambda: get_model_state_dict(module, options=FULL)),
        ended(lambda: get_state_dict(module, optimizer, options=FULL)),
        ended(lambda: get_optimizer_state_dict(module, optimizer, options=FULL)),
    ]
    found["nested"] = ended(lambda: get_state_dict(module, optimizer))
    found["own"] = set(get_model_state_dict(module)) == held
    for options in (FULL, BROADCAST):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        given = dict(state) if rank == 0 or options is FULL else {}
        set_model_state_dict(module, given, options=options)
        found[f"set, broadcast {options.broadcast_from_rank0}"] = value_error(module, model)
    return found


def _training(module: autopar.DistributedModule, model: nn.Module) -> dict[str, object]:
    """Steps of AdamW with accumulation, clipping and a schedule, beside the single device."""
    batch = tokens()
    pairs = [(item, torch.optim.AdamW(item.parameters(), lr=0.01)) for item in (module, model)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pairs]
    norms = []
    for largest, order in ((0.1, 2.0), (1.0, 3.0), (1e3, float("inf"))):
        for _ in range(2):
            module.forward_backward(**batch)
        (2 * model(**batch).loss).backward()
        found = autopar.clip_grad_norm_(module, largest, order)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), largest, order)
        norms.append(abs(float(found / expected) - 1))
        for (item, optimizer), decay in zip(pairs, schedules, strict=True):
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in item.parameters())
    results: dict[str, object] = {"norms": norms, "values": value_error(module, model)}
    word = whole(module.get_parameter("lm_head.weight"))
    words = [torch.empty_like(word) for _ in range(dist.get_world_size())]
    dist.all_gather(words, word)
    results["tied"] = all(torch.equal(item, word) for item in words)

    (2 * model(**batch).loss).backward()
    with module.holding_gradients():
        module.forward_backward(**batch)
    module.forward_backward(**batch)
    results["held"] = gradient_error(module, model)
    module.zero_grad()
    with module.keeping_parameters():
        module.forward_backward(**batch)
        module.forward_backward(**batch)
    results["kept"] = gradient_error(module, model)
    rank = dist.get_rank()
    results["no number"] = ended(lambda: autopar.clip_grad_norm_(module, "1" if rank else "one"))
    results["other number"] = ended(lambda: autopar.clip_grad_norm_(module, 1.0 if rank else 2.0))
    last = list(module.parameters())[-1]
    last.grad = None if rank == 1 else last.grad
    results["no gradient"] = ended(lambda: autopar.clip_grad_norm_(module, 1.0))
    next(iter(module.parameters())).grad.fill_(float("nan"))
    last.grad = None
    results["not finite"] = ended(lambda: autopar.clip_grad_norm_(module, 1.0, error_if_nonfinite=True))
    results["own stages"] = [
        ended(lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)),
        ended(lambda: torch.nn.utils.get_total_norm(item.grad for item in module.parameters())),
        ended(lambda: torch.optim.LBFGS(module.parameters())),
    ]
    torch.nn.utils.clip_grad_value_(module.parameters(), 1.0)
    results["other module"] = ended(lambda: autopar.clip_grad_norm_(model, 1.0))  # type: ignore[arg-type]
    return results


def _around(folder: Path) -> dict[str, Any]:
    # gpt2 computes its loss in float32.
    with LiftFloat32(torch.float64):
        return _all_around(folder)


def _loss_on_one_device() -> float:
    # Weights drawn within the mode are drawn in float64, as those of the ranks are.
    with LiftFloat32(torch.float64):
        return float(gpt2().double()(**tokens()).loss.detach())


def _all_around(folder: Path) -> dict[str, Any]:
    model = gpt2().double()
    module = in_stages(model, 2, 2)
    return {
        "calls": _calls(module),
        "frozen": _frozen(module, model),
        "tied and frozen": _tied_frozen(module, model),
        "data": _data(module),
        "state": _state(module, model, folder),
        "training": _training(module, model),
        "timeout": group_timeout(module.mesh.get_group("dp")) == group_timeout(dist.group.WORLD),
    }


@pytest.mark.long
def test_around_a_module_in_stages(tmp_path: Path) -> None:
    """Calls that differ between stages end on all ranks; rows, state dicts, exports, optimizers and clipping are those
    of the whole model, tied embeddings included."""
    expected = _loss_on_one_device()
    for rank, found in enumerate(run_ranks(_around, 4, tmp_path)):
        for name, (kind, said) in found["calls"].items():
            assert REFUSED[name] in said, (name, said)
            assert kind in ("InputError", "UnsupportedError"), (name, kind)
        assert max(found["frozen"], found["tied and frozen"]) < 1e-9
        _check_data(rank, found["data"], expected)
        _check_state(rank, found["state"])
        _check_training(found["training"])


def _check_data(rank: int, data: Mapping[str, Any], loss: float) -> None:
    for name in ("axis", "share of axis"):
        assert data[name][0] == "InputError"
        assert "pipeline stages run along pp, so ranks along it give the same rows" in data[name][1]
    assert (
        "rank 2 of the mesh gives from_local() 2 rows, rank 0 gives 1, but both have the same place" in data["rows"][1]
    )
    assert "had other values on rank 2 of the mesh than on rank 0" in data["values"][1]
    assert "it is split over dp, so ranks along pp must give the same part" in data["values"][1]
    assert "on another mesh than the model" in data["mesh"][1]
    assert (data["share"], data["layouts"], data["whole"]) == ((rank % 2, 2), {"dp"}, True)
    assert abs(data["loss"] - loss) < 1e-12 * loss


def _check_state(rank: int, state: Mapping[str, Any]) -> None:
    kind, said = state["bad"]
    assert kind == "CheckpointError"
    assert "missing transformer.h.0.ln_1.bias; additional new; transformer.h.0.ln_1.weight has shape [3]" in said
    assert state["loaded"] == (0.0, [], [])
    assert state["less"] == (True, ["new"])
    assert state["export"] == ([], set())
    assert rank or state["again"]
    assert all(kind == "UnsupportedError" and "full_state_dict()" in said for kind, said in state["whole"])
    assert state["nested"][0] == "UnsupportedError"
    assert "flatten_optimizer_state_dict=True" in state["nested"][1]
    assert state["own"]
    assert state["set, broadcast True"] == state["set, broadcast False"] == 0.0


def _check_training(found: Mapping[str, Any]) -> None:
    assert max(found["norms"]) < 1e-12
    assert max(found[name] for name in ("values", "held", "kept")) < 1e-9
    assert found["tied"]
    assert "max_norm is 'one': it must be a number of at least 0" in found["no number"][1]
    assert "rank 1 of the mesh has max_norm 1.0, rank 0 has max_norm 2.0" in found["other number"][1]
    assert (
        "has a gradient on rank 1 of the mesh" in found["no gradient"][1] or "not on rank 1" in found["no gradient"][1]
    )
    assert found["not finite"][0] == "RuntimeError"
    assert "takes a module that parallelize returned" in found["other module"][1]
    assert [kind for kind, _ in found["own stages"]] == ["UnsupportedError"] * 3
    names = "clip_grad.clip_grad_norm_", "clip_grad._get_total_norm", "optim.LBFGS"
    for (_, said), name in zip(found["own stages"], names, strict=True):
        assert f"{name} would reduce over the parameters of one rank's pipeline stages alone" in said


# --- checkpoints ------------------------------------------------------------------------------------------------------


class AppState:
    """A model with its optimizer, as torch's tutorial on checkpoints has it, with flat states of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """All state, under the names of parameters."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over all state."""
        model, optimizer = state_dict["model"], state_dict["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FLAT)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model and of its optimizer, whole, by name; and the learning rate."""
    found = {name: whole(item).clone() for name, item in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{kind}"] = whole(torch.as_tensor(value)).clone()
    return {**found, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def _journey(folder: Path, meshes: list[dict[str, int]]) -> list[tuple[list[str], list[str]]]:
    """Stock -> each mesh -> stock: the names of what is other than it was, and of what no rank has."""
    stock = gpt2().double()
    optimizer = torch.optim.AdamW(stock.parameters(), lr=0.1)
    for _ in range(2):
        stock(**tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = states(stock, optimizer)
    dcp.save({"app": AppState(stock, optimizer)}, checkpoint_id=folder / "0")
    found = []
    for number, sizes in enumerate([*meshes, {}]):
        model: nn.Module = gpt2().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
        if sizes:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            model = autopar.parallelize(model, mesh, tokens(), cluster="ideal")
        own = torch.optim.AdamW(model.parameters(), lr=0.5)
        dcp.load({"app": AppState(model, own)}, checkpoint_id=folder / str(number))
        arrived = states(model, own)
        dcp.save({"app": AppState(model, own)}, checkpoint_id=folder / str(number + 1))
        every: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(every, set(arrived))
        different = [name for name, item in arrived.items() if not torch.equal(item, expected[name])]
        found.append((different, sorted(set(expected) ^ set().union(*every))))
    return found


@pytest.mark.long
def test_checkpoints_go_into_stages_and_out(tmp_path: Path) -> None:
    """Stock -> (pp 2) -> stock, bit for bit, with AdamW, its learning rate and a tied embedding."""
    for found in run_ranks(_journey, 2, tmp_path, [{"pp": 2}]):
        assert found == [([], [])] * 2


@pytest.mark.slow
def test_checkpoints_go_between_pipelines(tmp_path: Path) -> None:
    """Stock -> (pp 2, dp 2) -> (pp 4) -> (dp 2, tp 2) -> (pp 2, dp 2) -> stock, bit for bit."""
    meshes = [{"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
    for found in run_ranks(_journey, 4, tmp_path, meshes):
        assert found == [([], [])] * 5


def _bytes(folder: Path) -> dict[str, int]:
    """Bytes that this rank holds of parameters, gradients and the optimizer, and saves."""
    model = llama(num_hidden_layers=4)
    module = in_stages(model, 2, pipeline=autopar.Pipeline(virtual_stages=1))
    optimizer = torch.optim.AdamW(module.parameters())
    module.forward_backward(**tokens())
    optimizer.step()
    dcp.save({"app": AppState(module, optimizer)}, checkpoint_id=folder)
    parts = [item.to_local() if isinstance(item, DTensor) else item for item in module.parameters()]
    states = [
        value.to_local() if isinstance(value, DTensor) else value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    planned = module.plan.parameters
    own = [name for name, item in planned.items() if dist.get_rank() in item.stages]
    return {
        "model": sum(item.nbytes for item in model.parameters()),
        "planned": sum(model.get_parameter(name).nbytes for name in own),
        "parameters": sum(item.nbytes for item in parts),
        "gradients": sum(item.grad.nbytes for item in module.parameters() if item.grad is not None),
        "optimizer": sum(item.nbytes for item in states),
        "saved wrongly": len(_saved_by(dist.get_rank(), folder) ^ {name for name, _ in module.named_parameters()}),
    }


def _saved_by(rank: int, folder: Path) -> set[str]:
    """The names of the parameters that a rank has saved."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    found = {index.fqn for index, where in stored.items() if where.relative_path.startswith(f"__{rank}_")}
    return {name.removeprefix("app.model.") for name in found if name.startswith("app.model.")}


@pytest.mark.slow
def test_ranks_hold_the_bytes_of_their_stages(tmp_path: Path) -> None:
    """Parameters, gradients and states of the optimizer, in memory and on disk: no rank has those of others."""
    every = run_ranks(_bytes, 2, tmp_path)
    for found in every:
        assert 0 < found["parameters"] == found["planned"] < 0.7 * found["model"]
        assert found["gradients"] == found["parameters"]
        assert found["optimizer"] == 2 * found["parameters"]
        assert found["saved wrongly"] == 0
    assert sum(found["parameters"] for found in every) == every[0]["model"]


# --- other modes, sizes and options -----------------------------------------------------------------------------------


def relative(found: Tensor | None, expected: Tensor) -> float:
    """The largest difference, relative to the largest element; 0 where this rank has nothing."""
    return 0.0 if found is None else float((whole(found) - expected).abs().max() / expected.abs().max())


class DroppingLayer(nn.Module):
    """A product of which elements are dropped, and what is left of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, 16]."""
        x = self.linear(x)
        mask = self.drop(torch.ones_like(x))
        return x * mask, mask


class Dropping(nn.Module):
    """Layers that each drop elements of ones, which the model also returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(DroppingLayer() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, 16]."""
        found = {}
        for number, layer in enumerate(self.layers):
            x, found[f"mask{number}"] = layer(x)
        return {"loss": x.square().sum(), **found}


def _dropout() -> tuple[bool, bool, bool]:
    """Whether stages draw different numbers, a seed brings all back, and the next step draws others."""
    x = {"x": torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    module = in_stages(Dropping().double(), 2, inputs=x, outputs="full")
    runs = []
    for seed in (0, 0, None):
        if seed is not None:
            module.random.seed(seed)
        module.zero_grad()
        output = module.forward_backward(**x)
        masks = [output[f"mask{number}"] for number in range(4)]
        gradients = [whole(item.grad).clone() for item in module.parameters()]
        runs.append((masks, gradients))
    masks = runs[0][0]
    apart = all(not torch.equal(one, other) for at, one in enumerate(masks) for other in masks[:at])
    # The masks of a layer's micro-batches, too.
    rows = torch.cat(masks)
    apart = apart and len(rows.unique(dim=0)) > 0.98 * len(rows)
    same = all(
        torch.equal(one, other) for kind in (0, 1) for one, other in zip(runs[0][kind], runs[1][kind], strict=True)
    )
    return apart, same, not torch.equal(masks[0], runs[2][0][0])


def _replayed(module: autopar.DistributedModule, model: nn.Module, path: Path) -> dict[str, object]:
    """A second module of the same plan, which is read from a file; and how much of it is left once it is deleted."""
    module.plan.save(path)
    again = in_stages(model, 2, plan=autopar.Plan.load(path))
    losses = [item.forward_backward(**tokens()).loss for item in (module, again)]
    # Of DTensors torch.equal is a collective of the whole job, and stages have different numbers of parameters.
    gradients = [[whole(item.grad) for item in other.parameters()] for other in (module, again)]
    equal = torch.equal(*losses) and all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    found: dict[str, object] = {"replayed": equal}
    try:
        autopar.replace_part(nn.Sequential(model), "0", again)
    except autopar.InputError as error:
        found["part"] = str(error)
    left = [weakref.ref(item) for item in (again, *again.parameters())]
    gc.collect()
    gc.disable()
    del again
    found["left"] = sum(item() is not None for item in left)
    gc.enable()
    return found


def _clipped_without_stages() -> float:
    """The largest error of the norm, and of gradients that are clipped by it, on data-parallel ranks."""
    model = gpt2(n_layer=1).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = autopar.parallelize(model, mesh, tokens(), cluster="ideal")
    module.forward_backward(**tokens())
    model(**tokens()).loss.backward()
    found = autopar.clip_grad_norm_(module, 0.1)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert not isinstance(found, DTensor)
    return max(abs(float(found / expected) - 1), gradient_error(module, model))


def _modes(folder: Path) -> dict[str, Any]:
    model = gpt2().double()
    module = in_stages(model, 2)
    found: dict[str, Any] = {"evaluated": [], "trained": []}
    for inputs in (tokens(), tokens(6, 12), tokens(1, 5), tokens(3, 9, labels=False)):
        module.eval()
        with torch.no_grad():
            output, expected = module(**inputs), model.eval()(**inputs)
        found["evaluated"].append(relative(output.logits, expected.logits))
        if expected.loss is not None:
            # It is in float32.
            assert relative(output.loss, expected.loss) < 1e-6
    module.train()
    model.train()
    for inputs in (tokens(8, 16), tokens(4, 9), tokens(3, 8), tokens(1, 8)):
        module.forward_backward(**inputs)
        model(**inputs).loss.backward()
        found["trained"].append(gradient_error(module, model))
        module.zero_grad()
        model.zero_grad()
    found["no labels"] = ended(lambda: module.forward_backward(**tokens(labels=False)))
    filled = in_stages(gpt2().double(), 2, pipeline=autopar.Pipeline(schedule="1f1b"))
    found["too small"] = ended(lambda: filled.forward_backward(**tokens(1)))

    found.update(_replayed(module, model, folder / f"plan{dist.get_rank()}.json"))
    found["dropout"] = _dropout()
    found["clipped"] = _clipped_without_stages()
    return found


@pytest.mark.slow
def test_modes_and_sizes(tmp_path: Path) -> None:
    """Evaluation, other batches, dropout, replay and deletion are as without stages."""
    for found in run_ranks(_modes, 2, tmp_path):
        assert max(*found["evaluated"], *found["trained"]) < 1e-9
        assert found["no labels"][0] == found["too small"][0] == "InputError"
        assert "a batch of 1 cannot be cut into micro-batches that the schedule 1f1b runs" in found["too small"][1]
        assert "there is no output called loss" in found["no labels"][1]
        assert found["replayed"]
        assert "runs in stages along pp, and cannot hand gradients" in found["part"]
        assert found["left"] == 0
        assert found["clipped"] < 1e-12
        assert found["dropout"] == (True, True, True)


def _next_token(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _options() -> dict[str, float]:
    batch = tokens()
    found = {}
    for name, options in {
        "full": {"outputs": "full"},
        "recompute": {"recompute": "full"},
        "selective": {"recompute": "selective"},
    }.items():
        model = llama().double()
        module = in_stages(model, 2, **options)
        output, expected = module.forward_backward(**batch), model(**batch)
        expected.loss.backward()
        found[name] = max(gradient_error(module, model), relative(output.logits, expected.logits))
        if name == "full":
            assert type(output.logits) is Tensor
    model = llama().double()
    given = {"input_ids": batch["input_ids"], "target": batch["input_ids"].roll(1, 1)}
    module = in_stages(model, 2, inputs=given, loss=_next_token)
    loss, expected = module.forward_backward(**given).loss, _next_token(model(batch["input_ids"]), given["target"])
    expected.backward()
    found["loss"] = max(relative(loss, expected.detach()), gradient_error(module, model))
    model = llama()
    module = in_stages(model, 2, precision=torch.bfloat16)
    module.forward_backward(**batch)
    model(**batch).loss.backward()
    assert {item.grad.dtype for item in module.parameters()} == {torch.float32}
    found["bfloat16"] = gradient_error(module, model)
    return found


@pytest.mark.slow
def test_options() -> None:
    """Whole outputs, both kinds of recompute and a loss outside of the model; half precision, roughly."""
    for found in run_ranks(_options, 2):
        assert 0 < found.pop("bfloat16") < 0.05
        assert max(found.values()) < 1e-9, found


# --- faults -----------------------------------------------------------------------------------------------------------

TIMEOUT_S = 4.0


def _raise(error: BaseException) -> None:
    raise error


def _failing(where: str, rank: int, fail: Callable[[], None]) -> Any:
    """A context in which `rank` (-1: each) fails in its third forward pass, or at the first gradient of a weight."""
    run, count = FSDPManager.run, iter(range(100))

    def failing(*given: Any) -> object:
        mine = rank in (dist.get_rank(), -1) and next(count) == 2
        if mine and where == "forward":
            fail()
        results = run(*given)
        if mine and where == "backward":
            next(item for item in results if isinstance(item, Tensor) and item.requires_grad).register_hook(
                lambda _: fail()
            )
        return results

    return mock.patch.object(FSDPManager, "run", failing)


def _raising() -> dict[str, Any]:
    """The errors of all ranks where one or all raise in a schedule, the seconds until then, and the gradients of the
    next step."""
    model = llama(num_hidden_layers=3).double()
    module = in_stages(model, 3, micro_batches=6, inputs=tokens(6))
    model(**tokens(6)).loss.backward()
    found: dict[str, Any] = {}
    for name, where, rank, error in (
        ("first", "backward", 0, ValueError("no luck")),
        ("middle", "forward", 1, torch.OutOfMemoryError("out of memory")),
        ("last", "backward", 2, ValueError("no luck")),
        ("all", "forward", -1, ValueError("no luck")),
    ):
        module.forward_backward(**tokens(6))
        with _failing(where, rank, partial(_raise, error)):
            found[name] = ended(lambda: module.forward_backward(**tokens(6)))
        assert all(item.grad is None for item in module.parameters())
        module.forward_backward(**tokens(6))
        found[f"{name}, next"] = gradient_error(module, model)
        module.zero_grad()
    with torch.no_grad(), _failing("forward", 1, partial(_raise, ValueError("no luck"))):
        found["plain"] = max(ended(lambda: module(**tokens(6))) for _ in range(4))
    with torch.no_grad():
        found["plain, next"] = relative(module(**tokens(6)).logits, model(**tokens(6)).logits)
    return found


@pytest.mark.long
def test_an_exception_in_a_stage_is_raised_on_all_ranks_at_once() -> None:
    """The rank raises its own, the others say which; no gradients are left, and the next step is as if nothing was."""
    every = run_ranks(_raising, 3)
    for rank, found in enumerate(every):
        for number, name in enumerate(("first", "middle", "last")):
            kind, text = ("OutOfMemoryError", "out of memory") if number == 1 else ("ValueError", "no luck")
            if rank == number:
                assert found[name] == (kind, text)
            else:
                assert found[name][0] == "RankFailedError"
                assert f"rank {number} of the mesh raised in its pipeline stages: {kind}: {text}" in found[name][1]
        assert found["all"] == ("ValueError", "no luck")
        assert found["plain"][0] == ("ValueError" if rank == 1 else "RankFailedError")
        assert max(found[f"{name}, next"] for name in ("first", "middle", "last", "all", "plain")) < 1e-9, found


def _without_memory(module: ModuleType, name: str, rank: int, at: int) -> Any:
    """A context in which an allocation of a module fails once on `rank`: that by its function `name` for the `at`-th
    time."""
    make, count = getattr(module, name), iter(range(1000))

    def failing(*given: Any) -> object:
        if dist.get_rank() == rank and next(count) == at:
            raise torch.OutOfMemoryError("out of memory")
        return make(*given)

    return mock.patch.object(module, name, failing)


# (module, function, allocation) on the middle one of three ranks, in a step: buffers for messages, and outputs.
_ALLOCATIONS = (
    *((schedule, "empty_like", at) for at in (0, 1, 4, 17)),
    (running, "empty_like", 0),
)


def _lacking(schedule_name: str) -> dict[str, Any]:
    """The errors of all ranks where memory runs out between stages, and the gradients of the next step."""
    model = llama(num_hidden_layers=6).double()
    pipeline = autopar.Pipeline(schedule=schedule_name)
    module = in_stages(model, 3, micro_batches=6, inputs=tokens(6), pipeline=pipeline)
    model(**tokens(6)).loss.backward()
    found: dict[str, Any] = {}
    for number, (place, name, at) in enumerate(_ALLOCATIONS):
        with _without_memory(place, name, 1, at):
            found[f"{number}"] = ended(lambda: module.forward_backward(**tokens(6)))
        assert all(item.grad is None for item in module.parameters())
        module.forward_backward(**tokens(6))
        found[f"{number}, next"] = gradient_error(module, model)
        module.zero_grad()
    with torch.no_grad(), _without_memory(running, "empty_like", 1, 0):
        found["plain"] = ended(lambda: module(**tokens(6)))
    with torch.no_grad():
        found["plain, next"] = relative(module(**tokens(6)).logits, model(**tokens(6)).logits)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1"])
def test_memory_that_runs_out_between_stages_is_raised_on_all_ranks(name: str) -> None:
    """It is that for a message, whose sender waits, or for an output: all ranks raise, and the next step is right."""
    every = run_ranks(_lacking, 3, name)
    said = "rank 1 of the mesh raised in its pipeline stages: OutOfMemoryError: out of memory"
    for rank, found in enumerate(every):
        for where in (*map(str, range(len(_ALLOCATIONS))), "plain"):
            assert max(found.pop(f"{where}, next"), 0.0) < 1e-9
            kind, text = found.pop(where)
            assert (kind, text) == ("OutOfMemoryError", "out of memory") if rank == 1 else said in text
        assert not found


def _lost(number: int, folder: Path) -> None:
    """The end of a job whose last rank gets a signal in its third micro-batch, and the seconds until then."""
    rank, count = dist.get_rank(), dist.get_world_size()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    line = dist.new_group(list(range(count)), timeout=timedelta(seconds=TIMEOUT_S))
    with mock.patch("autopar.runtime.pipeline.ranks.line_group", return_value=line):
        pipeline = autopar.Pipeline(schedule="1f1b", virtual_stages=1)
        module = in_stages(llama(num_hidden_layers=3), count, micro_batches=6, inputs=tokens(6), pipeline=pipeline)
    module.forward_backward(**tokens(6))
    began = time.monotonic()
    with _failing("forward", count - 1, lambda: os.kill(os.getpid(), number)):
        found = ended(lambda: module.forward_backward(**tokens(6)))
    (folder / f"part{rank}").write_text(json.dumps([*found, time.monotonic() - began]))
    (folder / f"part{rank}").rename(folder / f"rank{rank}")
    while not all((folder / f"rank{other}").exists() for other in range(count - 1)):
        # It stays: it is not what ends the others.
        time.sleep(0.1)
    os.kill(int((folder / f"pid{count - 1}").read_text()), signal.SIGCONT)


def _check_lost(folder: Path, count: int) -> None:
    for rank in range(count - 1):
        kind, said, seconds = json.loads((folder / f"rank{rank}").read_text())
        assert kind == "RankFailedError"
        assert "call 2 of LlamaForCausalLM" in said
        assert f"rank {count - 1} has died: there is no sign of life" in said
        assert seconds < 5 * TIMEOUT_S


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_stage_ends_the_others(tmp_path: Path) -> None:
    """When its connections close, with an error that names it."""
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(_lost, 2, signal.SIGKILL, tmp_path)
    _check_lost(tmp_path, 2)


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_others(tmp_path: Path) -> None:
    """By the timeout, with an error that names it: also the first stage, which it sends nothing to."""
    run_ranks(_lost, 3, signal.SIGSTOP, tmp_path)
    _check_lost(tmp_path, 3)


# --- gradients that are reduced after the schedule --------------------------------------------------------------------


def _reduced_at_the_end() -> tuple[float, bool, Ended]:
    torch.manual_seed(0)
    model = llama().double()
    stock = copy.deepcopy(model)
    with LiftFloat32(torch.float64):
        options = {"pipeline": autopar.Pipeline(schedule="zb_h1"), "micro_batches": 2, "zero": 3}
        module = in_stages(model, 2, 2, inputs=tokens(4), **options)
        # Micro-batches of one sample, which ranks cannot share, so that no FSDP unit runs before those of two do.
        for rows in (2, 4):
            module.forward_backward(**tokens(rows))
            stock(**tokens(rows)).loss.backward()
        found = gradient_error(module, stock)
        module.zero_grad()
        with module.holding_gradients():
            module.forward_backward(**tokens(4))
        gradients = [item.grad for item in module.parameters()]
        held = any(isinstance(item, DTensor) and item.placements[0].is_partial() for item in gradients)
        # What is held back is in `.grad`, and nowhere else.
        module.zero_grad()
        module.forward_backward(**tokens(4))
        stock.zero_grad()
        stock(**tokens(4)).loss.backward()
    failing = dist.get_rank() >= 2
    found = max(found, gradient_error(module, stock))
    with mock.patch.object(FSDPManager, "reduce_gradients", side_effect=OSError("no links") if failing else None):
        return found, held, ended(lambda: module.forward_backward(**tokens(4)))


@pytest.mark.long
def test_gradients_that_are_reduced_after_the_schedule() -> None:
    """They are those of one device, also where another size than the planned one comes first; within
    `holding_gradients` they are held back in `.grad`; an exception while they are reduced is raised on all ranks at
    once."""
    found = run_ranks(_reduced_at_the_end, 4, timeout=300)
    assert max(error for error, *_ in found) <= 1e-9
    assert all(held for _, held, _ in found)
    for rank, (*_, (kind, message)) in enumerate(found):
        assert "no links" in message, (rank, kind, message)
