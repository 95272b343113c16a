"""The things that torch does with any module: a distributed module does them, or raises one sentence."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar import AutoparError, DistributedModule, UnsupportedError
from autopar.testing import run_ranks
from tests.autopar.test_training import batches, error, made, steps_error, whole
from tests.models import Stack


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice `x`."""
        return 2 * x


def _block(module: DistributedModule) -> nn.Module:
    return module.get_submodule("blocks.0.up")


def _parametrize(module: DistributedModule) -> None:
    parametrize.register_parametrization(_block(module), "weight", _Twice())


def _replace_part(module: DistributedModule) -> None:
    module.get_submodule("blocks.0").up = nn.Linear(16, 64)


def _ignore(*_: object) -> None:
    pass


# By what is refused: what to do, and a part of the sentence.
REFUSED: dict[str, tuple[Callable[[DistributedModule], object], str]] = {
    "deepcopy": (copy.deepcopy, "lerp_"),
    "copy": (copy.copy, "cannot be copied"),
    "pickle": (pickle.dumps, "cannot be copied or pickled"),
    "save": (lambda module: torch.save(module, "/dev/null"), "state_dict()"),
    "deepcopy of a part": (lambda module: copy.deepcopy(_block(module)), "cannot be copied"),
    "average": (lambda module: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)), "for an average"),
    "dtype": (lambda module: module.to(torch.bfloat16), "stays in the dtype"),
    "half": (lambda module: module.half(), "stays in the dtype"),
    "half of a part": (lambda module: _block(module).half(), "stays in the dtype"),
    "device": (lambda module: module.to("meta"), "stays in the dtype"),
    "to empty": (lambda module: module.to_empty(device="cpu"), "stays in the dtype"),
    "share memory": (lambda module: module.share_memory(), "parallelize in each process"),
    "apply": (lambda module: module.apply(_ignore), "initialize the model"),
    "compile": (torch.compile, "compiled=True"),
    "trainer": (lambda module: getattr(module, "hf_device_map", None), "transformers.Trainer"),
    "compile in place": (lambda module: module.compile(), "compiled=True"),
    "script": (torch.jit.script, "torch.jit"),
    "trace": (lambda module: torch.jit.trace(module, example_kwarg_inputs=batches(1)[0]), "torch.jit"),
    "export": (lambda module: torch.export.export(module, (), batches(1)[0]), "cannot be exported"),
    "data parallel": (lambda module: DataParallel(module).module._replicate_for_data_parallel(), "parallel already"),
    "distributed data parallel": (DistributedDataParallel, "reduces its gradients itself"),
    "fully_shard": (fully_shard, "parallel already"),
    "fully_shard of a part": (lambda module: fully_shard(_block(module)), "parallel already"),
    "parametrize": (_parametrize, "parametrized"),
    "weight norm": (lambda module: parametrizations.weight_norm(_block(module)), "parametrized"),
    "spectral norm": (lambda module: spectral_norm(_block(module)), "cannot be"),
    "prune": (lambda module: prune.l1_unstructured(_block(module), "weight", 0.5), "no parameter can be added"),
    "buffer": (lambda module: module.register_buffer("more", torch.zeros(2)), "no buffer can be added"),
    "parameter": (lambda module: setattr(_block(module), "more", nn.Parameter(torch.zeros(2))), "no parameter"),
    "plain parameter": (lambda module: setattr(_block(module), "weight", nn.Parameter(torch.zeros(64, 16))), "DTensor"),
    "no parameter": (lambda module: setattr(_block(module), "bias", None), "cannot be removed"),
    "part": (lambda module: setattr(module, "more", nn.Linear(2, 2)), "cannot become a part"),
    "another part": (_replace_part, "cannot become"),
    "added part": (lambda module: module.add_module("more", nn.Linear(2, 2)), "no part can be added"),
    "forward hook": (lambda module: _block(module).register_forward_hook(_ignore), "never be called"),
    "forward pre-hook": (lambda module: _block(module).register_forward_pre_hook(_ignore), "never be called"),
    "backward hook": (lambda module: _block(module).register_full_backward_hook(_ignore), "never be called"),
    "backward pre-hook": (lambda module: _block(module).register_full_backward_pre_hook(_ignore), "never be called"),
    "call of a part": (lambda module: _block(module)(torch.zeros(1, 16)), "cannot be called on its own"),
}


def _refused() -> tuple[dict[str, str], float]:
    model, data = Stack().double(), batches(3)
    module, said = made(model, (2,), data[0]), {}
    for name, (ask, _) in REFUSED.items():
        try:
            ask(module)
            said[name] = "nothing"
        except UnsupportedError as found:
            said[name] = str(found)
        except Exception as found:
            said[name] = f"{type(found).__name__}: {found}"
    # No trace of it is left.
    return said, steps_error(module, model, data)


@pytest.mark.long
def test_what_is_refused() -> None:
    """Each raises one sentence on every rank, and leaves the module as it was."""
    for said, worst in run_ranks(_refused, 2):
        assert {name: text for name, text in said.items() if REFUSED[name][1] not in text} == {}
        assert all("\n" not in text for text in said.values())
        assert worst <= 1e-12


def _hooked() -> tuple[dict[str, str], float]:
    model, data = Stack().double(), batches(3)
    module = made(model, (2,), data[0])
    said: dict[str, str] = {}
    for register in (register_module_full_backward_hook, register_module_full_backward_pre_hook):
        # On one rank alone, too.
        for ranks in ((0, 1), (1,)):
            handle = register(_ignore) if dist.get_rank() in ranks else None
            with torch.no_grad():
                module(**data[0])
            for run in (module, module.forward_backward):
                try:
                    run(**data[0])
                except AutoparError as error:
                    said[f"{register.__name__} on {ranks}, {run is module}"] = str(error)
            if handle is not None:
                handle.remove()
    return said, steps_error(module, model, data)


def test_backward_hooks_on_all_modules_are_refused() -> None:
    """A call that computes gradients raises on every rank; the module goes on when they are gone."""
    for said, worst in run_ranks(_hooked, 2):
        assert len(said) == 8
        assert all("a backward hook on all modules" in text for text in said.values())
        assert worst <= 1e-12


def _allowed() -> dict[str, bool]:
    model, data = Stack().double(), batches(3)
    module = made(model, (2,), data[0])
    found = {
        "the same dtype": all(item is module for item in (module.to(torch.float64), module.double())),
        "the same device": all(item is module for item in (module.to("cpu"), module.cpu(), module.to(data[0]["x"]))),
    }
    # Hooks on the module itself.
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_: called.append("before")),
        module.register_forward_hook(lambda *_: called.append("after")),
        module.register_full_backward_hook(lambda *_: called.append("backward")),
    ]
    module(**data[0])
    for handle in handles:
        handle.remove()
    found["hooks of the module"] = called == ["before", "after"]
    # A parameter in the place of another one.
    with torch.no_grad():
        up = model.get_submodule("blocks.0.up")
        up.weight.mul_(2)
        old = _block(module).weight
        _block(module).weight = nn.Parameter(old.detach() * 2)
    found["another parameter"] = steps_error(module, model, data) <= 1e-12
    # An average of weights.
    averages = [{name: item.detach().clone() for name, item in each.named_parameters()} for each in (module, model)]
    found["steps"] = steps_error(module, model, data) <= 1e-12
    for each, average in zip((module, model), averages, strict=True):
        for name, parameter in each.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)
    ours, theirs = averages
    found["average"] = error({name: whole(item) for name, item in ours.items()}, theirs) <= 1e-12
    found["placements"] = all(isinstance(item, DTensor) for item in ours.values())
    # All are frozen and trained again.
    module.requires_grad_(False)
    found["frozen"] = not module(**data[0])["loss"].requires_grad
    module.requires_grad_(True)
    found["trained again"] = steps_error(module, model, data) <= 1e-12
    return found


@pytest.mark.long
def test_what_works() -> None:
    """Conversions that change nothing, hooks on the module, replaced parameters, averages of weights, freezing."""
    for found in run_ranks(_allowed, 2):
        assert all(found.values()), found
