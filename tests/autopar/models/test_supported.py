"""Models that are parallel already, without sizes, sparse, or no Python modules, are refused in one sentence."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autopar
from autopar.testing import run_ranks

X = torch.ones(4, 8)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        out: Tensor = self.down(self.up(x).relu())
        return out


def _with(part: nn.Module) -> nn.Module:
    model = Net()
    model.up = part
    return model


def _with_sparse_mask() -> nn.Module:
    model = Net()
    model.register_buffer("mask", torch.eye(8).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.DataParallel(Net()), r"^the model is a DataParallel.*pass its `module`$"),
        (lambda: torch.jit.script(Net()), r"^the model is TorchScript.*pass the Python module$"),  # type: ignore[no-untyped-call]
        (
            lambda: torch.export.export(Net(), (X,)).module(),
            r"^the model was made by torch.export.*pass the module that was exported$",
        ),
        (_with_sparse_mask, r"^'mask' is a sparse_coo tensor: hold a dense one$"),
        (lambda: _with(nn.LazyLinear(16)), r"^'up.weight' has no shape yet: call the model once"),
    ],
)
def test_refused(make: Callable[[], nn.Module], message: str) -> None:
    """By `plan` as by `parallelize`."""
    with pytest.raises(autopar.UnsupportedError, match=message):
        autopar.plan(make(), {"dp": 2}, (X,), cluster="ideal")


def _on_rank() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    sharded = Net()
    fully_shard(sharded.down, mesh=mesh)
    models = [
        nn.parallel.DistributedDataParallel(Net()),
        sharded,
        parallelize_module(Net(), mesh, {"up": ColwiseParallel()}),
        autopar.parallelize(Net(), mesh, (X,), cluster="ideal"),
    ]
    found = []
    for model in models:
        with pytest.raises(autopar.UnsupportedError) as error:
            autopar.parallelize(model, mesh, (X,), cluster="ideal")
        found.append(str(error.value).partition(":")[0])
    return found


def test_parallel_models_are_refused() -> None:
    """On every rank alike."""
    expected = [
        "the model is a DistributedDataParallel, which spreads its batch over ranks",
        "the part 'down' is sharded by `fully_shard` already",
        "'up.weight' is a DTensor",
        "'up.weight' is a DTensor",
    ]
    assert run_ranks(_on_rank, 2) == [expected, expected]
