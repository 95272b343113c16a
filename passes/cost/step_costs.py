"""Seconds of the steps of redistributions on one mesh, for any number of steps at once.

A step takes the time of the fastest algorithm of its collective, and that of the rank's own reads and writes: parts
that are not contiguous are copied before they are sent and after they are received, local conversions read and write
memory, and a conversion between R and I is free. All of it depends only on the axis and the kinds of placements, so it
is looked up in tables. Sizes that are figures give seconds that are figures.
"""

from collections.abc import Sequence

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.communication import collective_lines
from passes.ir.arrays import Floats, Integers
from passes.ir.figures import least_of
from passes.ir.mesh import Mesh
from passes.ir.redistribution import COLLECTIVES, RedistributionStep, as_steps
from passes.ir.redistributions import KINDS, Steps

# An all-to-all of many tensors copies each into one buffer, and out of another: a kernel and a pass over memory each.
_JOINT_KERNELS, _JOINT_TOUCHED = 2, 2


class StepCosts:
    """Seconds of steps on one mesh and cluster.

    `own` is what a rank does itself, [for kernels, per byte before, per byte after] by kinds, cut and join; `lines`
    [algorithm, latency or per byte] by kinds and axis are those of collectives (`cost.communication`).
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        kinds, device = len(KINDS), cluster.device
        found = {
            (collective, axis): collective_lines(collective, cluster.route(mesh, axis))
            for collective in sorted(set(COLLECTIVES.values()))
            for axis in mesh.dimensions
        }
        most = max(len(lines) for lines in found.values())
        own = np.zeros((kinds, kinds, 2, 2, 3))
        by_change = np.zeros((kinds, kinds, len(mesh.sizes), most, 2), dtype=object)
        for (source, target), collective in COLLECTIVES.items():
            change = KINDS.index(source), KINDS.index(target)
            for cut, join in np.ndindex(2, 2):
                own[*change, cut, join] = _touched(source, target, bool(cut), bool(join))
            for axis in mesh.dimensions:
                lines = found[collective, axis]
                # Where there are fewer algorithms, the last stands in for those that are missing.
                by_change[*change, axis] = [*lines, *[lines[-1]] * (most - len(lines))]
        self.own = own.reshape(-1, 3).T * [[device.launch], [1 / device.stream], [1 / device.stream]]
        # Lists become numbers, or objects where the sizes of the mesh are figures.
        self.lines = np.array(by_change.reshape(-1, most, 2).transpose(1, 2, 0).tolist())
        self.joint_rates = np.array([min(each for _, each in found["all_to_all", axis]) for axis in mesh.dimensions])

    def seconds(self, steps: Steps, itemsize: Integers, joined: Integers) -> Floats:
        """Seconds of the forward pass of each step, for elements of `itemsize` bytes; `joined` tensors are sent
        together and share the latency of a collective (by step)."""
        change = steps.source * len(KINDS) + steps.target
        kernels, at_first, at_last = self.own.take((change * 2 + steps.cut) * 2 + steps.join, axis=1)
        place = change * len(self.mesh.sizes) + steps.axis
        size = np.maximum(steps.before, steps.after) * itemsize
        sent = least_of([start.take(place) / joined + each.take(place) * size for start, each in self.lines])
        seconds: Floats = kernels + (at_first * steps.before + at_last * steps.after) * itemsize + sent
        return seconds

    def joint_seconds(self, steps: Steps, itemsize: Integers) -> Floats:
        """Seconds that each of `steps`, which are all-to-alls, adds to one that carries many tensors: these share its
        latency."""
        device = self.cluster.device
        rate = self.joint_rates.take(steps.axis) + 2 * _JOINT_TOUCHED / device.stream
        seconds: Floats = _JOINT_KERNELS * device.launch + rate * (steps.before * itemsize)
        return seconds

    def total(self, steps: Sequence[RedistributionStep], itemsize: int, joined: int = 1) -> float:
        """Seconds of the forward pass of `steps`, one after the other."""
        sizes, together = np.full((2, len(steps)), [[itemsize], [joined]])
        found: list[float] = self.seconds(as_steps(steps), sizes, together).tolist() if steps else []
        return sum(found)

    def joint_total(self, steps: Sequence[RedistributionStep], itemsize: int) -> float:
        """The sum of `joint_seconds` of `steps`."""
        sizes = np.full(len(steps), itemsize)
        found: list[float] = self.joint_seconds(as_steps(steps), sizes).tolist() if steps else []
        return sum(found)


def _touched(source: str, target: str, cut: bool, join: bool) -> tuple[int, int, int]:
    """Memory accesses of a rank for a step between placements of these kinds, with `cut` and `join` of the step: the
    number of kernels, and the multiples of its elements before and after that it reads and writes."""
    if COLLECTIVES[source, target] != "convert":
        first, last = int(cut and target == "S"), int(join and source == "S")
        return first + last, 2 * first, 2 * last
    if {source, target} == {"R", "I"}:
        return 0, 0, 0
    # The smaller tensor is read: the part that is sliced out, or the one that is padded.
    return (1, 1, 1) if source == "S" else (1, 0, 2)
