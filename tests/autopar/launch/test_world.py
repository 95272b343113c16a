"""The ranks of a job: two on one device, and one that is not in the mesh, are told."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.launch.world import LocalDevice, described_device, local_device, refuse_shared_devices
from autopar.testing import run_ranks
from tests.models import Stack


def test_ranks_on_different_devices() -> None:
    """On two nodes, whose devices have the same numbers; and without any."""
    devices = [LocalDevice(f"cuda:{rank % 2}", f"node{rank // 2}", f"GPU-{rank}", False) for rank in range(4)]
    refuse_shared_devices(devices)
    refuse_shared_devices([None] * 4)


def test_a_device_that_is_the_only_one_may_be_shared() -> None:
    refuse_shared_devices([LocalDevice("cuda:0", "node0", "GPU-0", True)] * 2)


@pytest.mark.parametrize(
    ("uuids", "visible", "backend", "expected"),
    [
        (True, 2, "cpu:gloo,cuda:nccl", LocalDevice("cuda:1", "node", "node GPU-1", False)),
        (True, 1, "cpu:gloo,cuda:nccl", LocalDevice("cuda:1", "node", "node GPU-1", False)),
        (True, 1, "cpu:gloo,cuda:gloo", LocalDevice("cuda:1", "node", "node GPU-1", True)),
        (False, 2, "cpu:gloo,cuda:nccl", LocalDevice("cuda:1", "node", "node 0,1 1", False)),
    ],
)
def test_devices_are_told_apart(
    uuids: bool, visible: int, backend: str, expected: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their UUID, where they have one: launchers may show every rank another device under the number 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    properties = SimpleNamespace(uuid="GPU-1") if uuids else SimpleNamespace()
    with (
        mock.patch("torch.cuda.current_device", return_value=1),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.device_count", return_value=visible),
        mock.patch("torch.distributed.get_backend_config", return_value=backend),
        mock.patch("socket.gethostname", return_value="node"),
    ):
        assert described_device(local_device("cuda")) == expected
    assert described_device(local_device("cpu")) is None


def test_hosts_are_told_apart_as_nccl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL runs ranks on one device that are on several hosts, as far as it knows."""
    properties, found = SimpleNamespace(uuid="GPU-1"), []
    for host in ("a", "b"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        with (
            mock.patch("torch.cuda.get_device_properties", return_value=properties),
            mock.patch("torch.cuda.device_count", return_value=1),
            mock.patch("torch.distributed.get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        ):
            found.append(described_device(torch.device("cuda", 0)))
    refuse_shared_devices(found)
    with pytest.raises(autopar.MeshError, match="ranks 0 and 1 of the mesh both run on cuda:0 of the host 'a'"):
        refuse_shared_devices([found[0], found[0]])


def test_all_ranks_are_told_of_a_device_that_two_run_on() -> None:
    (first,) = set(run_ranks(_sharing, 2))
    assert first == (
        "ranks 0 and 1 of the mesh both run on cuda:0 of the host 'node': call "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) on every rank before the mesh is made'
    )


def _sharing() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    device = LocalDevice("cuda:0", "node", "GPU-0", False)
    with (
        mock.patch("autopar.launch.world.described_device", return_value=device),
        pytest.raises(autopar.MeshError) as caught,
    ):
        autopar.parallelize(Stack(), mesh, {}, cluster="ideal")
    return str(caught.value)


@pytest.mark.long
def test_a_rank_outside_of_the_mesh() -> None:
    assert run_ranks(_outside, 4) == ["", "", *[f"rank {rank} is not in the mesh of the ranks [0, 1]: call parallelize "
                                              "on these alone" for rank in (2, 3)]]  # fmt: skip


def _outside() -> str:
    mesh = dist.device_mesh.DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("dp",))
    inputs = {name: torch.zeros(4, 16) for name in ("x", "target")}
    try:
        autopar.parallelize(Stack(depth=1), mesh, inputs, cluster="ideal")
    except autopar.MeshError as error:
        return str(error)
    return ""
