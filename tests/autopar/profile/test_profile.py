"""`autopar profile`: a small one on this machine, and what is done with the file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli import main
from autopar.profile import Measurements, check_machine, device_name, profile
from autopar.testing.ranks import RankError, run_ranks
from passes.cost.cluster import CLUSTERS, Cluster
from passes.ir.errors import ClusterError

TINY = Measurements(
    products=[(64, 64, 64), (96, 64, 32), (128, 128, 128)],
    dtypes=(torch.float32, torch.bfloat16),
    heads=(1, 2, 64),
    streamed=1 << 20,
    messages=[1 << 12, 1 << 16, 1 << 18],
    seconds=1e-4,
)


def _on_two_ranks(folder: str) -> Cluster:
    """Profile, and plan and run with what comes of it."""
    cluster = profile(f"{folder}/cluster.json", measurements=TINY)
    torch.distributed.barrier()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    inputs = {"input": torch.ones(4, 8)}
    module = autopar.parallelize(model, mesh, inputs, cluster=f"{folder}/cluster.json")
    module(**inputs)
    with pytest.raises(ClusterError, match="is a profile from another machine: it was measured on 'Abacus'"):
        autopar.parallelize(model, mesh, inputs, cluster=replace(cluster, machine="Abacus"))
    return cluster


@pytest.mark.long
def test_two_ranks(tmp_path: Path) -> None:
    """Every rank gets figures; the first writes them; plans are made with the file, and refused with that of another
    machine."""
    found = run_ranks(_on_two_ranks, 2, str(tmp_path))
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert cluster == found[0]
    assert cluster.node_size == 2
    assert cluster.machine == cluster.device.name == device_name("cpu")
    assert set(cluster.device.flops) == {"float32", "bfloat16"}
    assert cluster.inside != CLUSTERS["cpu"].inside
    assert cluster.between == CLUSTERS["cpu"].between
    assert not cluster.device.overlaps


def _on_two_nodes() -> Cluster:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return profile(measurements=TINY)


def test_two_nodes() -> None:
    """Ranks on nodes of their own measure the link between."""
    cluster, _ = run_ranks(_on_two_nodes, 2)
    assert cluster.node_size == 1
    assert cluster.inside == CLUSTERS["cpu"].inside
    assert cluster.between != CLUSTERS["cpu"].between


def test_a_profile_of_another_machine_serves_plans(tmp_path: Path) -> None:
    """A profile serves plans without a device to compare it with."""
    path = tmp_path / "there.json"
    replace(CLUSTERS["h100"], machine="NVIDIA H100 80GB HBM3", devices=8).save(path)
    model, inputs = nn.Linear(8, 8), {"input": torch.ones(8, 8)}
    assert autopar.plan(model, {"a": 8}, inputs, cluster=str(path)).mesh
    with pytest.raises(autopar.MeshError, match=r"mesh a 16 has 16 devices, but the cluster 'h100' has 8"):
        autopar.plan(model, {"a": 16}, inputs, cluster=str(path))
    with pytest.raises(ClusterError, match=r"measured on 'NVIDIA H100 80GB HBM3', and the mesh has '.+'; run `autopar"):
        check_machine(Cluster.load(path), "cpu")
    check_machine(CLUSTERS["h100"], "cpu")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`autopar profile` writes a file and prints what is in it; what cannot be done is said in one line."""
    monkeypatch.setattr("autopar.cli.QUICK", TINY)
    path = tmp_path / "cluster.json"
    assert main(["profile", "--quick", "--device", "cpu", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "TFLOP/s" in printed
    cluster = Cluster.load(path)
    assert cluster.device.bandwidth > 0
    if not torch.cuda.is_available():
        assert main(["profile", "--device", "cuda", "--output", str(path)]) == 1
        assert capsys.readouterr().err.startswith("autopar: there is no device 'cuda' here: give 'cpu'")


def test_errors_of_ranks_are_told() -> None:
    """A device that is not there is refused on every rank."""
    with pytest.raises(RankError, match="no device 'tpu' here"):
        run_ranks(profile, 1, None, "tpu")
