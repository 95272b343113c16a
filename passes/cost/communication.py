"""Seconds for the steps of a redistribution.

Rings of n ranks: an all-gather or reduce-scatter takes (n - 1) hops and sends (n - 1)/n of the whole tensor per rank,
an all-reduce both, an all-to-all sends (n - 1)/n of a rank's own part (Thakur, Rabenseifner, Gropp 2005, section 4).
Parts that
do not lie in one piece are copied. Local conversions read and write memory; a change between R and I does nothing.
"""

from math import prod

from passes.cost.cluster import Cluster
from passes.ir.mesh import Mesh
from passes.ir.redistribution import Step


def step_seconds(step: Step, itemsize: int, cluster: Cluster, mesh: Mesh) -> float:
    """Seconds that the forward of `step` takes for elements of `itemsize` bytes."""
    ways = mesh.sizes[step.axis]
    collective = step.collective
    if collective == "convert":
        return _local_seconds(step, itemsize, cluster)
    link = cluster.link(mesh, step.axis)
    hops, whole = _TRAFFIC[collective]
    size = max(prod(step.before), prod(step.after)) * itemsize
    sent = (ways - 1) * hops * link.latency + whole * size * (ways - 1) / ways / link.bandwidth
    return sent + _copy_seconds(step, itemsize, cluster)


# Collective -> rings of hops, and how often the larger of its input and output travels.
_TRAFFIC = {"all_gather": (1, 1), "reduce_scatter": (1, 1), "all_to_all": (1, 1), "all_reduce": (2, 2)}


def _copy_seconds(step: Step, itemsize: int, cluster: Cluster) -> float:
    """Parts that do not lie in one piece are copied before they are sent, and after they are received."""
    device = cluster.device
    seconds = 0.0
    if step.cut and step.target.kind == "S":
        seconds += device.launch + 2 * prod(step.before) * itemsize / device.bandwidth
    if step.join and step.source.kind == "S":
        seconds += device.launch + 2 * prod(step.after) * itemsize / device.bandwidth
    return seconds


def _local_seconds(step: Step, itemsize: int, cluster: Cluster) -> float:
    kinds = {step.source.kind, step.target.kind}
    if kinds == {"R", "I"}:
        return 0.0
    moved = (min(prod(step.before), prod(step.after)) + prod(step.after)) * itemsize
    return cluster.device.launch + moved / cluster.device.bandwidth


def redistribution_seconds(
    steps: tuple[Step, ...], itemsize: int, gradient_itemsize: int, differentiable: bool, cluster: Cluster, mesh: Mesh
) -> tuple[float, float]:
    """Seconds forward and backward; nothing runs backward where no gradient flows."""
    forward = sum(step_seconds(step, itemsize, cluster, mesh) for step in steps)
    if not differentiable:
        return forward, 0.0
    return forward, sum(step_seconds(step.backward, gradient_itemsize, cluster, mesh) for step in reversed(steps))
