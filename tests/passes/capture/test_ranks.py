"""Answers of torch.distributed to models."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size

from autopar.testing import compare
from passes.capture import as_one_process


class Guarded(nn.Module):
    """Communicates where there are several ranks, and computes with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.SyncBatchNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        y: Tensor = self.norm(self.linear(x))
        if dist.is_initialized() or get_world_size() > 1:
            dist.all_reduce(y)
        return (y * (1 + get_rank())).pow(3).mean() * dist.get_world_size()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_is_no_group_within(group: None) -> None:
    """For this thread, by any name; afterwards all is as it was."""
    model = type("Derived", (Guarded,), {"__module__": "elsewhere"})()
    own = dist.is_initialized, dist.get_rank, dist.get_world_size, get_rank, get_world_size
    seen: list[bool] = []
    with as_one_process(model):
        assert (dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (False, 0, 1)
        assert (get_rank(), get_world_size(dist.group.WORLD)) == (0, 1)
        assert get_rank is not own[3]
        other = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
        other.start()
        other.join()
    assert seen == [True]
    assert (dist.is_initialized, dist.get_rank, dist.get_world_size, get_rank, get_world_size) == own


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}], ids=str)
def test_models_that_ask_for_ranks(mesh: dict[str, int]) -> None:
    """They compute what one process does, in plans and in comparisons."""
    torch.manual_seed(0)
    assert compare(Guarded(), mesh, {"x": torch.randn(8, 6)}, micro_batches=1).worst[1] < 1e-12
