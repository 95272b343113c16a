"""The cluster that a record names."""

import re
from dataclasses import replace

from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import Run
from passes.cost.cluster import CLUSTERS, Cluster

# Pattern in a record's device -> cluster of the table. The first that is found counts.
_DEVICES: tuple[tuple[str, str], ...] = (
    (r"A100.*40", "a100-40gb"),
    (r"A100", "a100"),
    (r"A800", "a800"),
    (r"H100.*(HBM2e|96)", "h100-hbm2e"),
    (r"H100", "h100"),
    (r"H800", "h800"),
    (r"H200", "h200"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200-180|B200.*power", "b200-limited"),
    (r"B200|SM100", "b200"),
    (r"MI300X", "mi300x"),
    (r"L40S", "l40s"),
    (r"4090", "rtx4090"),
)
# Bits/s that the network of a node reached, where that was measured and is far from what its cards could do: Omni-Path
# at Jean Zay in 2022 had 135 Gb/s of 400 (stas00/ml-engineering, network, at 744d01e1, by who ran BLOOM there).
_REACHED: tuple[tuple[str, float], ...] = ((r"Jean Zay|4x100Gb OPA", 135e9),)
# Bytes/s of one device's network card per what sources write.
_CARDS = re.compile(r"(\d+)\s*x\s*(\d+)\s*Gb", re.IGNORECASE)
_EACH = re.compile(r"(?:NDR|HDR)\s*(\d+)(?:/GPU| per GPU)|(\d+)\s*Gb/s[^,]*per GPU", re.IGNORECASE)
_NODE = re.compile(r"(\d+)\s*Gbps node", re.IGNORECASE)


def network_bandwidth(interconnect: str, node_size: int) -> float | None:
    """Bytes/s to other nodes that each device has, from text such as "4x100Gb OPA/node"; None where it says none."""
    if found := _NODE.search(interconnect):
        rate = float(found.group(1)) / node_size
    elif found := _EACH.search(interconnect):
        rate = float(found.group(1) or found.group(2))
    elif found := _CARDS.search(interconnect):
        rate = float(found.group(1)) * float(found.group(2)) / node_size
    else:
        return None
    return rate * 1e9 / 8 if 0 < rate < float("inf") else None


def devices_per_card(interconnect: str, node_size: int) -> float:
    """The number of devices of a node per network card, from text such as "4x100Gb OPA/node"; 1 if not given."""
    found = _CARDS.search(interconnect)
    cards = float(found.group(1)) if found else 0.0
    return max(1.0, node_size / cards) if cards else 1.0


def name_of(device: str) -> str:
    """The cluster of the table that has a device. Raises SkippedError where none has."""
    for pattern, name in _DEVICES:
        if re.search(pattern, device, re.IGNORECASE) and name in CLUSTERS:
            return name
    raise SkippedError(Reason.DEVICE, device)


def cluster_of(run: Run) -> tuple[str, Cluster]:
    """The cluster of a run, with the network that its source names."""
    name = name_of(run.device)
    cluster = CLUSTERS[name]
    for site, rate in _REACHED:
        if re.search(site, run.interconnect, re.IGNORECASE):
            reached = replace(cluster.between, bandwidth=rate / 8 / cluster.node_size, efficiency=1.0, exchange=1.0)
            return name, replace(cluster, between=reached)
    bandwidth = network_bandwidth(run.interconnect, cluster.node_size)
    if bandwidth is None:
        return name, cluster
    return name, replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))
