"""Optimizers of torch on the parameters of a distributed module, and the scaling of losses."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import autopar
from autopar.testing import run_ranks
from tests.autopar.comparing import TOLERANCE
from tests.autopar.stored import storage
from tests.models import Stack

_Make = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: Mapping[str, _Make] = {
    "SGD": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda own: torch.optim.Adam(own, 1e-2, amsgrad=True),
    "AdamW": lambda own: torch.optim.AdamW(own, 1e-2, foreach=False),
    "AdamW, foreach": lambda own: torch.optim.AdamW(own, 1e-2, foreach=True),
    "AdamW, fused": lambda own: torch.optim.AdamW(own, 1e-2, fused=True),
    "Adamax": lambda own: torch.optim.Adamax(own, 1e-2),
    "NAdam": lambda own: torch.optim.NAdam(own, 1e-2),
    "RAdam": lambda own: torch.optim.RAdam(own, 1e-2),
    "Adagrad": lambda own: torch.optim.Adagrad(own, 1e-2),
    "Adadelta": lambda own: torch.optim.Adadelta(own, 1.0),
    "RMSprop": lambda own: torch.optim.RMSprop(own, 1e-2, momentum=0.9),
    "ASGD": lambda own: torch.optim.ASGD(own, 1e-2),
    "Muon": lambda own: torch.optim.Muon([item for item in own if item.dim() == 2], 1e-2),
}
STEPS = 3


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}


def _trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Train for some steps."""
    batch = _batch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        if isinstance(model, autopar.DistributedModule) and model.plan.pipeline_axis:
            model.forward_backward(**batch)
        else:
            model(**batch)["loss"].backward()
        optimizer.step()


def _errors(sizes: Mapping[str, int], options: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """The largest error of a parameter after some steps of each optimizer, on the first rank."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found: dict[str, float] = {}
    # Muon makes its matrices orthogonal in bfloat16.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        for name in names:
            model = Stack().double()
            dist_model = autopar.parallelize(copy.deepcopy(model), mesh, _batch(), cluster="ideal", **options)
            for each in (model, dist_model):
                _trained(each, OPTIMIZERS[name](list(each.parameters())))
            # In stages the first rank has it alone.
            if whole := dist_model.full_state_dict():
                pairs = [(whole[key], value) for key, value in model.state_dict().items()]
                found[name] = max(float((ours - value).abs().max() / value.abs().max()) for ours, value in pairs)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options", "names"),
    [
        ({"dp": 2, "tp": 2}, {}, ("SGD", "AdamW, fused", "Muon")),
        pytest.param({"dp": 2, "tp": 2}, {}, tuple(OPTIMIZERS), marks=pytest.mark.slow),
        pytest.param({"dp": 4}, {"zero": 3}, tuple(OPTIMIZERS), marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {}, tuple(OPTIMIZERS), marks=pytest.mark.slow),
    ],
    ids=["some", "2x2", "zero 3", "stages"],
)
def test_optimizers_equal_those_of_one_device(
    sizes: Mapping[str, int], options: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    """Each optimizer, after three steps."""
    errors = run_ranks(_errors, 4, sizes, options, names)[0]
    assert errors.keys() == set(names)
    assert max(errors.values()) <= TOLERANCE, errors


def _scaled() -> list[float]:
    """The scales of a loss after each of four steps, where one rank's part of a gradient is infinite in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    constraints = storage(dp="S(0)")
    dist_model = autopar.parallelize(Stack().double(), mesh, _batch(), cluster="ideal", constraints=constraints)
    optimizer = torch.optim.SGD(dist_model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(dist_model(**_batch())["loss"]).backward()
        first = next(iter(dist_model.parameters()))
        before = first.detach().clone()
        if step == 1 and dist.get_rank() == 0:
            assert isinstance(first.grad, DTensor)
            first.grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert bool((first == before).all()) == (step == 1)
        scales.append(scaler.get_scale())
    return scales


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    """The scale is halved on all ranks alike, and grows after two good steps."""
    assert run_ranks(_scaled, 4) == [[1024.0, 512.0, 512.0, 1024.0]] * 4
