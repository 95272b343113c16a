"""Prices of redistributions, for all pairs of layouts of many tensors at once.

`steps` tells the steps of all pairs as arrays; what the lines of a step are (`cost/communication`) depends on its axis
and the kinds of its letters alone, so that these are looked up in tables.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from passes.cost.cluster import Cluster
from passes.cost.communication import Line, collective_lines, touched
from passes.ir.choices import Group
from passes.ir.layout import Layout, Letter
from passes.ir.mesh import Mesh
from passes.ir.redistribution import COLLECTIVES
from passes.solving.steps import KINDS, Flags, Integers, Pairs, Steps, all_steps

__all__ = ["Flags", "Floats", "Integers", "Prices"]

Floats = NDArray[np.float64]
# A group, and from which layouts to which.
Asked = tuple[Group, Sequence[Layout], Sequence[Layout]]


class Prices:
    """Seconds of redistributions on one mesh and cluster.

    Every step takes the least of what its algorithms take, each something fixed and something per byte of the larger of
    what a rank holds before and after; then there is what the rank reads and writes itself.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.forward, self.backward = (_Tables(cluster, mesh, backward=way) for way in (False, True))
        self.found: dict[Hashable, tuple[Floats, Floats]] = {}

    def matrices(self, asked: Sequence[Asked]) -> list[tuple[Floats, Floats]]:
        """Seconds forward and backward from every source to every target, for one occurrence of each group."""
        keys = [_key(*each) for each in asked]
        new = {key: each for key, each in zip(keys, asked, strict=True) if key not in self.found}
        for gradient in (False, True):
            some = {key: each for key, each in new.items() if each[0].gradient == gradient}
            self.found.update(zip(some, self._priced(list(some.values()), gradient=gradient), strict=True))
        return [self.found[key] for key in keys]

    def _priced(self, asked: Sequence[Asked], *, gradient: bool) -> Iterator[tuple[Floats, Floats]]:
        """What is asked, of groups through all or none of which a gradient flows back."""
        pairs = [Pairs(sources, targets, group.type.shape, group.strided) for group, sources, targets in asked]
        counts = [len(sources) * len(targets) for _, sources, targets in asked]
        itemsizes = np.repeat([group.type.dtype.itemsize for group, _, _ in asked], counts)
        gradient_itemsizes = np.repeat([group.gradient_itemsize for group, _, _ in asked], counts)
        joined = np.repeat([group.joined for group, _, _ in asked], counts)
        forward, backward = np.zeros((2, sum(counts)))
        for steps in all_steps(pairs, self.mesh):
            forward[steps.pair] += self.forward.seconds(steps, itemsizes[steps.pair], joined[steps.pair])
            if gradient:
                backward[steps.pair] += self.backward.seconds(steps, gradient_itemsizes[steps.pair], joined[steps.pair])
        end = 0
        for count, (_, sources, targets) in zip(counts, asked, strict=True):
            start, end = end, end + count
            size = len(sources), len(targets)
            yield forward[start:end].reshape(size), backward[start:end].reshape(size)


def _key(group: Group, sources: Sequence[Layout], targets: Sequence[Layout]) -> Hashable:
    """What prices of one occurrence depend on."""
    itemsizes = group.type.dtype.itemsize, group.gradient_itemsize
    return group.type.shape, itemsizes, group.gradient, group.strided, group.joined, tuple(sources), tuple(targets)


class _Tables:
    """Seconds of steps forward, or backward, by the kinds of letters that change forward.

    `own` is what a rank does itself, [for kernels, per byte before, per byte after] by kinds, cut and join (flat);
    `lines` [algorithm, fixed or per byte] by kinds and axis (flat) are those of collectives, where `is_sent`.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, *, backward: bool) -> None:
        kinds, self.axes = len(KINDS), len(mesh.sizes)
        own = np.zeros((3, kinds, kinds, 2, 2))
        self.is_sent = np.zeros((kinds, kinds), dtype=np.bool_)
        sent: dict[tuple[int, int, int], tuple[Line, ...]] = {}
        for source, target, one, other in _changes(backward=backward):
            for cut, join in np.ndindex(2, 2):
                # Backward a step begins with what it ends with forward.
                kernels, *ends = touched(one, other, *((join, cut) if backward else (cut, join)))
                own[:, source, target, cut, join] = (kernels, *(ends[::-1] if backward else ends))
            collective = COLLECTIVES[one, other]
            self.is_sent[source, target] = collective != "convert"
            for axis in mesh.dimensions if collective != "convert" else ():
                sent[source, target, axis] = collective_lines(collective, cluster.route(mesh, axis))
        device = cluster.device
        self.own = own.reshape(3, -1) * [[device.launch], [1 / device.stream], [1 / device.stream]]
        most = max(len(found) for found in sent.values())
        lines = np.zeros((most, 2, kinds, kinds, self.axes))
        for place, found in sent.items():
            # Where there are fewer algorithms, the last stands in for those that are missing.
            lines[(..., *place)] = (*found, *[found[-1]] * (most - len(found)))
        self.lines = lines.reshape(most, 2, -1)

    def seconds(self, steps: Steps, itemsize: Integers, joined: Integers) -> Floats:
        """Seconds of each of the steps, for elements of `itemsize` bytes and `joined` tensors together (by step)."""
        change = steps.source * len(KINDS) + steps.target
        kernels, at_first, at_last = self.own.take((change * 2 + steps.cut) * 2 + steps.join, axis=1)
        seconds: Floats = kernels + (at_first * steps.before + at_last * steps.after) * itemsize
        sent = np.flatnonzero(self.is_sent.take(change))
        place = (change * self.axes + steps.axis).take(sent)
        size = np.maximum(steps.before, steps.after).take(sent) * itemsize.take(sent).astype(np.float64)
        together = joined.take(sent)
        least = np.full(len(sent), np.inf)
        for fixed, each in self.lines:
            np.minimum(least, fixed.take(place) / together + each.take(place) * size, out=least)
        seconds[sent] += least
        return seconds


def _changes(*, backward: bool) -> Iterator[tuple[int, int, str, str]]:
    """All changes of a letter, as places in `KINDS`, and what they are forward or backward."""
    for source, kind in enumerate(KINDS):
        for target, other in enumerate(KINDS):
            if (kind, other) in COLLECTIVES:
                one, two = Letter(kind), Letter(other)
                yield source, target, *((two.gradient.kind, one.gradient.kind) if backward else (kind, other))
