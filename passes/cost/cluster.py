"""Clusters: what devices and links can do, as data.

Rates are in units per second (FLOP/s, bytes/s), sizes in bytes, latencies in seconds. Device and link figures are the
vendors' (dense FLOP/s; unidirectional bytes/s per device); `efficiency` is the part of the peak that a large matrix
product reaches (A100 0.87 and H100 0.80 at best, measured by stas00/ml-engineering; in training somewhat less).
The figures for "cpu" were measured on two cores with gloo.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch

from passes.ir.errors import ClusterError, MeshError
from passes.ir.mesh import Mesh

GIB = 1024**3


def _check_positive(about: str, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        if not value > 0:
            raise ClusterError(f"{about}: {name} is {value}, but must be a number above zero")


def _check_no_less(about: str, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        if not value >= 0:
            raise ClusterError(f"{about}: {name} is {value}, but must be zero or a number above it")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    `flops` is the peak by dtype ("bfloat16"); dtypes that are missing run at the rate of float32. `launch` is what
    starting one op costs, `reserve` the memory that a plan may not use (context, communication buffers, allocator).
    """

    name: str
    flops: Mapping[str, float]
    efficiency: float
    memory: float
    bandwidth: float
    launch: float
    reserve: float

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ClusterError(f"device {self.name!r}: flops has no 'float32', at which other dtypes would run")
        about = f"device {self.name!r}"
        _check_positive(about, {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()})
        _check_positive(about, {"efficiency": self.efficiency, "memory": self.memory, "bandwidth": self.bandwidth})
        _check_no_less(about, {"launch": self.launch, "reserve": self.reserve})

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s that a large matrix product reaches in `dtype`."""
        return self.efficiency * self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


@dataclass(frozen=True)
class Link:
    """What connects devices: bytes/s that each can send, and seconds for one hop."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_positive("a link", {"bandwidth": self.bandwidth})
        _check_no_less("a link", {"latency": self.latency})


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes of `node_size`: `inside` links those of one node, `between` those of different ones.

    `host` is the rate in bytes/s at which a device reads its part of a batch from its host.
    """

    name: str
    device: Device
    node_size: int
    inside: Link
    between: Link
    host: float = field(default=25e9)

    def __post_init__(self) -> None:
        _check_positive(f"cluster {self.name!r}", {"node_size": self.node_size, "host": self.host})

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The link that the groups of `axis` run over.

        A group within one node has the node's own. One that crosses nodes has the network cards of all its devices in
        a node together, at most what links them inside.
        """
        stride = mesh.stride(axis)
        if stride * mesh.sizes[axis] <= self.node_size:
            return self.inside
        together = max(1, min(mesh.sizes[axis], self.node_size // stride))
        bandwidth = (
            min(self.inside.bandwidth, together * self.between.bandwidth) if together > 1 else self.between.bandwidth
        )
        return Link(bandwidth, self.between.latency)

    @property
    def usable_memory(self) -> float:
        """Bytes of one device that a plan may use."""
        return self.device.memory - self.device.reserve


_A100 = Device(
    "A100-SXM-80GB",
    {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 9.7e12},
    efficiency=0.75,
    memory=80e9,
    bandwidth=2.0e12,
    launch=5e-6,
    reserve=4 * GIB,
)
_H100 = Device(
    "H100-SXM",
    {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 34e12},
    efficiency=0.70,
    memory=80e9,
    bandwidth=3.35e12,
    launch=5e-6,
    reserve=4 * GIB,
)
_CPU = Device(
    "CPU core",
    {"float32": 60e9, "float64": 30e9, "bfloat16": 15e9, "float16": 15e9},
    efficiency=0.8,
    memory=8 * GIB,
    bandwidth=8e9,
    launch=5e-6,
    reserve=1 * GIB,
)
_IDEAL = Device("ideal", _H100.flops, 1.0, 1e18, 1e12, launch=0.0, reserve=0.0)
_FREE = Link(float("inf"), 0.0)

CLUSTERS: dict[str, Cluster] = {
    "a100": Cluster("a100", _A100, 8, Link(300e9, 3e-6), Link(25e9, 10e-6)),
    "h100": Cluster("h100", _H100, 8, Link(450e9, 3e-6), Link(50e9, 10e-6)),
    "cpu": Cluster("cpu", _CPU, 64, Link(1e9, 200e-6), Link(1e8, 500e-6), host=8e9),
    "ideal": Cluster("ideal", _IDEAL, 1 << 30, _FREE, _FREE, host=1e12),
}

# What torch calls a device -> the cluster it is taken for.
_DEVICE_NAMES = {"H100": "h100", "H200": "h100", "A100": "a100"}


def find_cluster(name: str) -> Cluster:
    """The cluster called `name`.

    Raises MeshError for an unknown name, with those that there are.
    """
    if name not in CLUSTERS:
        close = get_close_matches(name, CLUSTERS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise MeshError(f"unknown cluster {name!r}{hint}: give one of {', '.join(CLUSTERS)} or an autopar.Cluster")
    return CLUSTERS[name]


def cluster_of_device(name: str) -> Cluster:
    """The cluster whose devices torch calls `name`, such as "NVIDIA H100 80GB HBM3" or "cpu".

    Raises MeshError if there is none.
    """
    if name == "cpu":
        return CLUSTERS["cpu"]
    for part, cluster in _DEVICE_NAMES.items():
        if part in name:
            return CLUSTERS[cluster]
    raise MeshError(f"no figures are known for the device {name!r}: pass cluster=autopar.Cluster(...)")
