"""Numbers of every rank, gathered in one collective or by messages."""

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.ranks import agreement
from autopar.testing import LiftFloat32
from autopar.testing.ranks import run_ranks


def _gathered(few: int) -> tuple[list[list[int]], list[list[int]]]:
    rank = dist.get_rank()
    # The order of the mesh is not that of the ranks.
    found = agreement.Agreement(DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",)))
    with mock.patch.object(agreement, "FEW_RANKS", few):
        return found.numbers([10 * rank, -rank]), found.numbers([rank, 2**62 + rank, 1])


def test_numbers_in_the_order_of_the_mesh() -> None:
    """Every rank gets those of all."""
    for few in (1, 3):
        for first, second in run_ranks(_gathered, 3, few):
            assert first == [[20, -2], [0, 0], [10, -1]]
            assert second == [[2, 2**62 + 2, 1], [0, 2**62, 1], [1, 2**62 + 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_tensors_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    """Modes that change dtypes do not reach what is sent: bytes of float32 are not those of float64."""
    sent = torch.arange(3).to(dtype)
    with LiftFloat32(torch.float64):
        (received,) = agreement.unpickled(pickle.dumps([sent]))  # type: ignore[misc]
    assert received.dtype == dtype
    assert torch.equal(received, sent)
