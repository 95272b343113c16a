"""Clusters: devices in nodes, the links between them, and the link that each axis of a mesh uses."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from math import ceil, lcm
from pathlib import Path

import numpy as np

from passes.cost.devices import DEVICES, LINKS
from passes.cost.hardware import GIB, Device, Link, Protocol, check_positive
from passes.ir.errors import ClusterError, MeshError
from passes.ir.files import write_atomically
from passes.ir.mesh import Mesh

__all__ = ["CLUSTERS", "GIB", "Cluster", "Device", "Link", "Protocol", "Route", "cluster_of_device", "find_cluster"]


@dataclass(frozen=True)
class Route:
    """The nodes and links of the groups of one axis.

    A group of `ways` devices spans `nodes` nodes, with at least `together` devices in each (all of them in a single
    node). `inside` and `between` are the links within and between nodes.
    """

    ways: int
    nodes: int
    together: int
    inside: Link
    between: Link

    def ring(self, inside: float = 1.0, between: float = 1.0) -> float:
        """Bytes/s of a ring with these efficiencies of the links: across nodes it uses the network cards of all devices
        of the group in a node."""
        within = self.inside.among(self.together) * inside
        if self.nodes == 1:
            return within
        cards = self.together * self.between.bandwidth * between
        return min(within, cards) if self.together > 1 else cards


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes of `node_size`: `inside` is the link within a node, `between` the link between nodes.

    `host` is the rate in bytes/s at which a device reads its part of a batch from its host. `devices` is their number
    (None: that of the mesh). `machine` is the name of the profiled device ("" for figures that were not measured here).
    """

    name: str
    device: Device
    node_size: int
    inside: Link
    between: Link
    host: float = field(default=25e9)
    devices: int | None = None
    machine: str = ""

    def __post_init__(self) -> None:
        about = f"cluster {self.name!r}"
        check_positive(about, {"node_size": self.node_size, "host": self.host})
        if self.devices is not None:
            check_positive(about, {"devices": self.devices})

    def check(self, mesh: Mesh) -> None:
        """Raise MeshError if `mesh` has more devices than the cluster."""
        if self.devices is not None and mesh.size > self.devices:
            raise MeshError(
                f"the mesh {mesh} has {mesh.size} devices, but the cluster {self.name!r} has {self.devices}: "
                "make the mesh smaller, or say how many there are with Cluster(devices=...)"
            )

    def route(self, mesh: Mesh, span: int) -> Route:
        """The route of the groups of a span of `mesh`; if they differ in placement, that of the slowest."""
        ways = mesh.ways(span)
        nodes, together = _placed(mesh.size, mesh.stride(span), ways, self.node_size)
        return Route(ways, nodes, together, self.inside, self.between)

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The link that the groups of `axis` use.

        A group within one node uses the node's link. A group that spans nodes uses the network cards of all its devices
        in a node together, limited by the link inside the node.
        """
        route = self.route(mesh, axis)
        if route.nodes == 1:
            return self.inside if self.inside.pair is None else replace(self.inside, bandwidth=route.ring())
        return replace(self.between, bandwidth=route.ring())

    @property
    def usable_memory(self) -> float:
        """Bytes of one device that a plan may use."""
        return self.device.memory - self.device.reserve

    def save(self, path: str | Path) -> None:
        """Write the cluster to a JSON file, from which `load` reads it exactly."""
        write_atomically(path, json.dumps({"autopar cluster": _FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read a cluster that `save` wrote.

        Raises ClusterError if the file is missing or malformed, or if a figure is out of range.
        """
        path = Path(path)
        try:
            read = json.loads(path.read_text())
        except OSError as error:
            raise ClusterError(
                f"the cluster file {str(path)!r} cannot be read ({error.strerror}): write one with `autopar profile "
                f"--output {path}`"
            ) from None
        except ValueError as error:
            raise ClusterError(f"the cluster file {str(path)!r} is no JSON: {error}") from None
        if not isinstance(read, dict) or read.pop("autopar cluster", None) != _FORMAT:
            raise ClusterError(
                f"{str(path)!r} is no cluster file of this version of autopar: write one with `autopar profile`"
            )
        try:
            links = []
            for where in ("inside", "between"):
                figures = read.pop(where)
                protocols = tuple(Protocol(**item) for item in figures.pop("protocols"))
                links.append(Link(**figures, protocols=protocols))
            inside, between = links
            return cls(device=Device(**read.pop("device")), inside=inside, between=between, **read)
        except (AttributeError, KeyError, TypeError) as error:
            raise ClusterError(f"the cluster file {str(path)!r} lacks a figure or has one too many: {error}") from None


# Version of the files that `save` writes.
_FORMAT = 1


@lru_cache(maxsize=4096)
def _placed(size: int, stride: int, ways: int, node_size: int) -> tuple[int, int]:
    """For the groups of an axis in a mesh of `size` devices: the largest number of nodes that a group spans, and the
    smallest number of its devices in a node.

    Ranks fill nodes in order. If node sizes and blocks of `stride * ways` ranks divide each other, all blocks are
    alike; otherwise one period of blocks is enumerated.
    """
    block = stride * ways
    if ways == 1 or size <= node_size or node_size % block == 0:
        return 1, ways
    if block % node_size == 0 and (node_size % stride == 0 or stride % node_size == 0):
        together = max(1, node_size // stride)
        return ways // together, together
    blocks = ceil(min(size, lcm(block, node_size)) / block)
    nodes = np.moveaxis(np.arange(blocks * block).reshape(blocks, ways, stride), 1, 2).reshape(-1, ways) // node_size
    starts = np.ones_like(nodes, dtype=bool)
    starts[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
    counts = starts.sum(axis=1)
    crossing = nodes[counts > 1]
    if len(crossing) == 0:
        return 1, ways
    fewest = min(int(np.unique(group, return_counts=True)[1].min()) for group in crossing)
    return int(counts.max()), fewest


# Cluster -> device, devices in a node, links inside and between nodes.
_TABLE: Mapping[str, tuple[str, int, str, str]] = {
    "a100": ("a100", 8, "nvlink3", "hdr"),
    "a100-40gb": ("a100-40gb", 8, "nvlink3", "hdr"),
    "a100-pcie": ("a100-pcie", 8, "pcie4", "hdr"),
    "a100-pcie-40gb": ("a100-pcie-40gb", 8, "pcie4", "hdr"),
    "a800": ("a100", 8, "nvlink3 of the A800", "hdr"),
    "h100": ("h100", 8, "nvlink4", "ndr"),
    "h100-pcie": ("h100-pcie", 8, "pcie5", "ndr"),
    "h100-nvl": ("h100-nvl", 8, "pcie5", "ndr"),
    "h100-hbm2e": ("h100-hbm2e", 8, "nvlink4", "ndr"),
    "h800": ("h100", 8, "nvlink4 of the H800", "ndr"),
    "h200": ("h200", 8, "nvlink4", "ndr"),
    "h20": ("h20", 8, "nvlink4", "ndr"),
    "b200": ("b200", 8, "nvlink5", "ndr"),
    "b200-limited": ("b200-limited", 8, "nvlink5", "ndr"),
    "b300": ("b300", 8, "nvlink5", "xdr"),
    "gb200": ("gb200", 72, "nvlink5", "ndr"),
    "mi300x": ("mi300x", 8, "xgmi", "ndr"),
    "l40s": ("l40s", 8, "pcie4", "hdr"),
    "rtx4090": ("rtx4090", 8, "pcie4 through the host", "hdr"),
}

CLUSTERS: dict[str, Cluster] = {
    name: Cluster(name, DEVICES[device], node_size, LINKS[inside], LINKS[between])
    for name, (device, node_size, inside, between) in _TABLE.items()
}
CLUSTERS["cpu"] = Cluster("cpu", DEVICES["cpu"], 64, LINKS["gloo inside"], LINKS["gloo between"], host=8e9)
CLUSTERS["ideal"] = Cluster("ideal", DEVICES["ideal"], 1 << 30, LINKS["free"], LINKS["free"], host=1e12)

# Words that all stand in what torch calls a device -> its cluster; the first that fits.
_DEVICE_NAMES: tuple[tuple[str, str], ...] = (
    ("A100 PCIE 40GB", "a100-pcie-40gb"),
    ("A100 PCIE", "a100-pcie"),
    ("A100 40GB", "a100-40gb"),
    ("A100", "a100"),
    ("A800", "a800"),
    ("H100 PCIE", "h100-pcie"),
    ("H100 NVL", "h100-nvl"),
    ("H100 HBM2E", "h100-hbm2e"),
    ("H100", "h100"),
    ("H800", "h800"),
    ("H200", "h200"),
    ("H20", "h20"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("MI300X", "mi300x"),
    ("L40S", "l40s"),
    ("RTX 4090", "rtx4090"),
)


def find_cluster(name: str) -> Cluster:
    """The cluster called `name`, in any case, or that of a cluster file (`*.json`).

    Raises MeshError for an unknown name, with the known names and the nearest; ClusterError for a file that cannot be
    read.
    """
    if name.endswith(".json"):
        return Cluster.load(name)
    known = name.lower()
    if known not in CLUSTERS:
        close = get_close_matches(known, CLUSTERS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise MeshError(
            f"unknown cluster {name!r}{hint}: give one of {', '.join(CLUSTERS)}, an autopar.Cluster or a file that "
            "`autopar profile` wrote"
        )
    return CLUSTERS[known]


def cluster_of_device(name: str) -> Cluster:
    """The cluster of devices with torch's device name `name`, such as "NVIDIA H100 80GB HBM3" or "cpu".

    Raises MeshError for an unknown device, with the known devices and the nearest.
    """
    if name == "cpu":
        return CLUSTERS["cpu"]
    own = set(re.split(r"[\s\-_/]+", name.upper()))
    for words, cluster in _DEVICE_NAMES:
        if own.issuperset(words.split()):
            return CLUSTERS[cluster]
    known = {cluster.device.name: key for key, cluster in CLUSTERS.items()}
    close = [known[found] for found in get_close_matches(name, known, 1)]
    # Where the whole name is like none, a word of it may be: the model's, next to the vendor's.
    close += [found for word in name.lower().split() for found in get_close_matches(word, CLUSTERS, 1)]
    hint = f" (the nearest is {CLUSTERS[close[0]].device.name!r}, cluster={close[0]!r})" if close else ""
    raise MeshError(
        f"no figures are known for the device {name!r}{hint}: pass cluster=, one of {', '.join(CLUSTERS)}, an "
        "autopar.Cluster(...), or a file that `autopar profile` wrote on it"
    )
