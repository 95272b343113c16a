"""Clusters: which link an axis runs over, and how devices are found."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from passes.cost.cluster import CLUSTERS, Cluster, Device, Link, cluster_of_device, find_cluster
from passes.cost.devices import ALONE, DEVICES, derated
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
    """The name that torch gives a device finds its figures."""
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
        ({"attention": 0.0}, r"attention is 0\.0, but must be a part above 0 and at most 1"),
        ({"streaming": 1.5}, r"streaming is 1\.5, but must be a part above 0 and at most 1"),
        ({"fill": -1.0}, r"fill is -1\.0, but must be zero or a number above it"),
        ({"efficiencies": {"bfloat16": 0.0}}, r"efficiencies\['bfloat16'\] is 0\.0"),
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


def lies(mesh: Mesh, axis: int, node_size: int) -> tuple[int, int]:
    """The most nodes that a group of `axis` lies in, and the fewest devices of one in a node, by looking at all."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(mesh.coordinates()):
        groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank // node_size)
    counts = [Counter(nodes) for nodes in groups.values()]
    crossing = [count for count in counts if len(count) > 1]
    return max(map(len, counts)), min((min(count.values()) for count in crossing), default=mesh.sizes[axis])


SIZES = [
    (4,),
    (6,),
    (12,),
    (24,),
    (2, 6),
    (6, 2),
    (3, 4),
    (4, 3),
    (2, 3, 4),
    (3, 6),
    (6, 3),
    (2, 2, 2, 4),
    (5, 7),
    (8, 8),
]


@pytest.mark.parametrize("node_size", [1, 4, 6, 8, 72])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_lie_in_nodes_as_ranks_do(sizes: tuple[int, ...], node_size: int) -> None:
    """Also where nodes and axes do not divide each other, and a group lies partly in a node."""
    mesh = Mesh(tuple("abcd"[: len(sizes)]), sizes)
    cluster = replace(CLUSTER, node_size=node_size)
    for axis in mesh.dimensions:
        route = cluster.route(mesh, axis)
        assert (route.nodes, route.together) == lies(mesh, axis, node_size)
        assert route.ways == sizes[axis]


def test_adjacent_axes_lie_as_one_axis_does() -> None:
    """The route of several axes is that of one axis of all their ranks."""
    mesh = Mesh(("a", "b", "c"), (3, 4, 2))
    for span, axes in enumerate(mesh.spans):
        sizes = [mesh.sizes[: axes[0]], [mesh.ways(span)], mesh.sizes[axes[-1] + 1 :]]
        merged = [size for some in sizes for size in some]
        one = Mesh(tuple("abc"[: len(merged)]), tuple(merged))
        assert CLUSTER.route(mesh, span) == CLUSTER.route(one, axes[0])


def test_groups_of_an_axis_share_the_cards_of_a_node() -> None:
    """Two axes of four lie in nodes of eight: one crosses nodes, and each of its four groups has two of the eight
    cards; together all groups have the eight."""
    mesh = Mesh(("a", "b"), (4, 4))
    route = CLUSTER.route(mesh, 0)
    groups_in_a_node = CLUSTER.node_size // route.together
    assert CLUSTER.link(mesh, 0).bandwidth * groups_in_a_node == CLUSTER.node_size * CLUSTER.between.bandwidth


def test_meshes_that_are_larger_than_the_cluster() -> None:
    """Are refused, with both numbers."""
    cluster = replace(CLUSTER, devices=16)
    cluster.check(Mesh(("a", "b"), (2, 8)))
    with pytest.raises(MeshError, match=r"mesh a 4 x b 8 has 32 devices, but the cluster 'h100' has 16: make"):
        cluster.check(Mesh(("a", "b"), (4, 8)))
    CLUSTER.check(Mesh(("a",), (1 << 20,)))
    with pytest.raises(ClusterError, match="devices is 0"):
        replace(CLUSTER, devices=0)


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_come_back_from_files_as_they_were(name: str, tmp_path: Path) -> None:
    """Every figure, exactly; and by the name of the file."""
    cluster = replace(CLUSTERS[name], devices=64, machine="NVIDIA Something")
    path = tmp_path / "cluster.json"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert find_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            r"cluster file '.*cluster\.json' cannot be read \(No such file or directory\): write one with `autopar p",
        ),
        ("{", r"cluster\.json' is no JSON"),
        ("[]", r"is no cluster file of this version of autopar: write one with `autopar profile`"),
        ("{}", "is no cluster file of this version"),
        ('{"autopar cluster": 1}', "lacks a figure or has one too many: 'inside'"),
    ],
)
def test_files_that_hold_no_cluster(text: str | None, message: str, tmp_path: Path) -> None:
    """Are refused, with what is wrong with them."""
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        find_cluster(str(path))


@pytest.mark.parametrize(
    ("part", "figure", "value", "message"),
    [
        ("device", "bandwidth", 0.0, r"bandwidth is 0\.0, but must be a number above zero"),
        ("device", "efficiency", float("nan"), "efficiency is nan"),
        ("device", "launch", "5 us", "lacks a figure"),
        ("inside", "bandwidth", float("nan"), "a link: bandwidth is nan"),
        ("between", "latency", -1.0, r"a link: latency is -1\.0"),
        ("inside", "protocols", [{"start": 0.0, "latency": 0.0, "share": 0.0}], r"a protocol: share is 0\.0"),
        ("between", "speed", 1.0, "one too many: .*'speed'"),
    ],
)
def test_files_with_figures_that_nothing_runs_at(
    part: str, figure: str, value: object, message: str, tmp_path: Path
) -> None:
    """The same as where they are given in Python."""
    path = tmp_path / "cluster.json"
    CLUSTER.save(path)
    held = json.loads(path.read_text())
    held[part][figure] = value
    path.write_text(json.dumps(held))
    with pytest.raises(ClusterError, match=message):
        Cluster.load(path)


def test_figures_of_devices_are_those_of_their_vendors() -> None:
    """Peaks in bfloat16 in TFLOP/s, memory in GB, TB/s, GB/s inside and between nodes: hardware tables of
    stas00/ml-engineering and data sheets."""
    rows = {
        "a100": (312, 80, 2.0, 300, 25),
        "a100-40gb": (312, 40, 1.555, 300, 25),
        "h100": (989, 80, 3.35, 450, 50),
        "h100-pcie": (756, 80, 2.0, 63, 50),
        "h100-nvl": (835, 94, 3.9, 63, 50),
        "h100-hbm2e": (989, 96, 2.4, 450, 50),
        "h200": (989, 141, 4.8, 450, 50),
        "h20": (148, 96, 4.0, 450, 50),
        "b200": (2250, 180, 8.0, 900, 50),
        "b300": (2250, 288, 8.0, 900, 100),
        "gb200": (2500, 186, 8.0, 900, 50),
        "mi300x": (1300, 192, 5.3, 448, 50),
        "l40s": (362, 48, 0.864, 31, 25),
        "rtx4090": (165.2, 24, 1.008, 31, 25),
    }
    for name, (flops, memory, bandwidth, inside, between) in rows.items():
        cluster = CLUSTERS[name]
        assert cluster.device.peak(torch.bfloat16) == pytest.approx(flops * 1e12), name
        assert (cluster.device.memory, cluster.device.bandwidth) == (memory * 1e9, bandwidth * 1e12), name
        assert (cluster.inside.bandwidth, cluster.between.bandwidth) == (inside * 1e9, between * 1e9), name
        assert cluster.usable_memory > 0.85 * cluster.device.memory, name


def test_devices_of_an_architecture_lose_alike_in_training() -> None:
    """Those without runs lose of their rates alone what the fitted one does, so more clocks are more rate."""
    lost = {
        name: (DEVICES[name].efficiency / alone.efficiency, DEVICES[name].attention / alone.attention)
        for name, alone in ALONE.items()
    }
    for fitted, *others in (("a100", "a100-pcie"), ("h100", "h100-pcie", "h200", "h20", "l40s"), ("b200", "gb200")):
        for name in others:
            assert lost[name] == pytest.approx(lost[fitted])
            assert all(part < 1 for part in lost[name])
    rates = {name: DEVICES[name].attention * DEVICES[name].peak(torch.bfloat16) for name in ALONE}
    assert rates["h100-pcie"] < rates["h100"]
    assert rates["gb200"] / rates["b200"] == pytest.approx(2500 / 2250)
    assert derated(DEVICES["cpu"], "CPU core") == DEVICES["cpu"]
