"""Clusters: which link an axis runs over, and how devices are found."""

from dataclasses import replace

import pytest
import torch

from passes.cost.cluster import CLUSTERS, Cluster, Device, Link, cluster_of_device, find_cluster
from passes.ir.errors import ClusterError, MeshError
from passes.ir.mesh import Mesh

CLUSTER = replace(CLUSTERS["h100"], node_size=8, inside=Link(400e9, 1e-6), between=Link(50e9, 10e-6))


@pytest.mark.parametrize(
    ("sizes", "axis", "bandwidth", "latency"),
    [
        ((8,), 0, 400e9, 1e-6),
        ((2, 4), 0, 400e9, 1e-6),
        ((4, 8), 1, 400e9, 1e-6),
        ((4, 8), 0, 50e9, 10e-6),
        ((16,), 0, 400e9, 10e-6),
        ((8, 4), 0, 100e9, 10e-6),
        ((4, 4), 0, 100e9, 10e-6),
        ((4, 4), 1, 400e9, 1e-6),
        ((2, 2, 8), 0, 50e9, 10e-6),
    ],
)
def test_links_of_axes(sizes: tuple[int, ...], axis: int, bandwidth: float, latency: float) -> None:
    """A group in one node has the node's link. One that crosses nodes has a network card for each of its devices in a
    node, but no more than the node's link, and the latency of the network."""
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    assert CLUSTER.link(mesh, axis) == Link(bandwidth, latency)


def test_unknown_clusters_are_refused_with_a_hint() -> None:
    """By name, with the nearest one."""
    assert find_cluster("h100") is CLUSTERS["h100"]
    with pytest.raises(
        MeshError, match=r"unknown cluster 'h10' \(did you mean 'h100'\?\): give one of a100, .*, h100, "
    ):
        find_cluster("h10")


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("cpu", "cpu"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_devices_are_known_by_torch_names(device: str, cluster: str) -> None:
    """What torch calls a device finds its figures."""
    assert cluster_of_device(device) is CLUSTERS[cluster]


def test_unknown_devices_are_refused() -> None:
    """With what to do."""
    with pytest.raises(MeshError, match=r"device 'Abacus': pass cluster=, one of a100, .*or a file that `autopar pro"):
        cluster_of_device("Abacus")
    with pytest.raises(MeshError, match=r"device 'B2000' \(the nearest is 'B200', cluster='b200'\): pass cluster="):
        cluster_of_device("B2000")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": {"bfloat16": 1e12}}, r"device 'H100-SXM': flops has no 'float32'"),
        ({"flops": {"float32": 0.0}}, r"device 'H100-SXM': flops\['float32'\] is 0.0, but must be a number above zero"),
        ({"bandwidth": float("nan")}, r"device 'H100-SXM': bandwidth is nan, but must be a number above zero"),
        ({"efficiency": -0.5}, r"efficiency is -0\.5"),
        ({"launch": float("nan")}, "launch is nan, but must be zero or a number above it"),
    ],
)
def test_devices_that_nothing_runs_on(change: dict[str, object], message: str) -> None:
    """Rates that are zero, negative or no numbers are refused where they are given."""
    with pytest.raises(ClusterError, match=message):
        replace(CLUSTERS["h100"].device, **change)


@pytest.mark.parametrize("link", [(0.0, 1e-6), (float("nan"), 1e-6), (1e9, -1e-6), (1e9, float("nan"))])
def test_links_that_carry_nothing(link: tuple[float, float]) -> None:
    """The same for links."""
    with pytest.raises(ClusterError, match=r"a link: (bandwidth|latency) is"):
        Link(*link)


def test_clusters_without_devices() -> None:
    """A node has a device at least."""
    with pytest.raises(ClusterError, match="cluster 'h100': node_size is 0"):
        replace(CLUSTERS["h100"], node_size=0)


def test_rates_and_memory() -> None:
    """dtypes without a rate run at that of float32; the reserve is not for plans."""
    device = Device("d", {"float32": 10.0, "bfloat16": 40.0}, 0.5, 100.0, 1.0, 0.0, 30.0)
    assert device.rate(torch.bfloat16) == 20.0
    assert device.rate(torch.float64) == 5.0
    assert Cluster("c", device, 1, Link(1, 0), Link(1, 0)).usable_memory == 70.0
