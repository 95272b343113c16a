"""Ranks start with modules that were preloaded, and are started again where they cannot connect."""

import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.testing.ranks import RankError, connect, run_connected, run_ranks
from passes.ir.errors import ClusterError
from tests.passes.rules.ranks import ranks


def _sum(value: float) -> float:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return float(total)


def _connect_late(fails: int, notes: str, rank: int, ranks: int, folder: str) -> None:
    """`connect`, which fails on rank 1 in the first `fails` attempts; each of its attempts leaves a file."""
    if rank == 1:
        attempt = len(list(Path(notes).iterdir()))
        (Path(notes) / str(attempt)).touch()
        if attempt < fails:
            raise RuntimeError("connection closed by peer")
    connect(rank, ranks, folder)


def test_ranks_that_cannot_connect_are_started_again(tmp_path: Path) -> None:
    payload = pickle.dumps((_sum, (2.0,)))
    assert run_connected(partial(_connect_late, 2, str(tmp_path)), 3, payload, 60.0) == [9.0, 9.0, 9.0]
    assert len(list(tmp_path.iterdir())) == 3


def test_ranks_that_never_connect_are_an_error(tmp_path: Path) -> None:
    payload = pickle.dumps((_sum, (2.0,)))
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*closed by peer"):
        run_connected(partial(_connect_late, 9, str(tmp_path)), 2, payload, 60.0)
    assert len(list(tmp_path.iterdir())) == 3


def _is_imported(module: str) -> bool:
    return module in sys.modules


def test_what_is_preloaded_is_imported_when_a_rank_starts() -> None:
    """`tests/conftest.py` names it; this module does not import it."""
    assert run_ranks(_is_imported, 2, "tests.architectures") == [True, True]


def test_the_fork_server_of_rules_has_what_is_preloaded() -> None:
    """Tests of rules keep ranks of their own, which may be the first that a process starts."""
    assert ranks(2).run(_is_imported, "tests.architectures") == [True, True]


@pytest.mark.parametrize("device_type", ["tpu", "cuda"])
def test_devices_that_are_not_there_are_refused(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank is started."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ClusterError, match=f"there is no device '{device_type}' here: give 'cpu', or 'cuda' where"):
        run_ranks(int, 1, device_type=device_type)
