"""Costs of redistributions, for all pairs of layouts of many tensors at once.

`ir/redistributions` gives the steps of all pairs as arrays. The cost lines of a step (`cost/communication`) depend only
on its axis and the kinds of its placements, so they are looked up in tables.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.cost.cluster import Cluster
from passes.cost.communication import (
    Line,
    collective_lines,
    joint_rate,
    joint_seconds_at,
    touched,
)
from passes.ir.choices import EdgeGroup
from passes.ir.layout import Layout, Placement
from passes.ir.mesh import Mesh
from passes.ir.redistribution import COLLECTIVES
from passes.ir.redistributions import KINDS, Flags, Integers, Pairs, Steps, all_steps

__all__ = ["Flags", "Floats", "Integers", "Prices"]

Floats = NDArray[np.float64]
_WHOLE, _EQUAL, _SPLIT = (KINDS.index(kind) for kind in "RIS")


@dataclass(frozen=True)
class Pricing:
    """A tensor whose redistributions are priced, with source and target layouts. `in_unit` says that it is a parameter
    that an FSDP unit may hold."""

    group: EdgeGroup
    sources: Sequence[Layout]
    targets: Sequence[Layout]
    in_unit: bool = False

    @property
    def key(self) -> Hashable:
        """Everything that the costs of one occurrence depend on."""
        group = self.group
        tensor = group.type.shape, group.type.dtype.itemsize, group.gradient_itemsize, group.gradient, group.strided
        return *tensor, group.joined, self.in_unit, tuple(self.sources), tuple(self.targets)


@dataclass(frozen=True)
class Matrices:
    """Seconds of redistributions from every source (row) to every target, for one occurrence: `forward`, `backward`,
    and in `exchange` those that run once before a forward pass (see `cost.step.Part`). `inline` are those of a
    parameter that nothing hides (see `Redistribution.inline`)."""

    forward: Floats
    backward: Floats
    exchange: Floats
    inline: Flags

    def __mul__(self, times: float) -> "Matrices":
        return Matrices(self.forward * times, self.backward * times, self.exchange * times, self.inline)


class Prices:
    """Seconds of redistributions on one mesh and cluster.

    Every step takes the time of its fastest algorithm: a fixed time plus a time per byte of the larger of a rank's
    tensors before and after. The time of the rank's own reads and writes is added.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.forward, self.backward = (_Tables(cluster, mesh, backward=way) for way in (False, True))
        self.found: dict[Hashable, Matrices] = {}

    def matrices(self, asked: Sequence[Pricing]) -> list[Matrices]:
        """The seconds of all redistributions in `asked`."""
        keys = [each.key for each in asked]
        new = {key: each for key, each in zip(keys, asked, strict=True) if key not in self.found}
        for gradient in (False, True):
            some = {key: each for key, each in new.items() if each.group.gradient == gradient}
            self.found.update(zip(some, self._priced(list(some.values()), gradient=gradient), strict=True))
        return [self.found[key] for key in keys]

    def _priced(self, asked: Sequence[Pricing], *, gradient: bool) -> Iterator[Matrices]:
        """The matrices of groups, through all or none of which a gradient flows back."""
        pairs = [Pairs(each.sources, each.targets, each.group.type.shape, each.group.strided) for each in asked]
        counts = [len(each.sources) * len(each.targets) for each in asked]
        itemsizes = np.repeat([each.group.type.dtype.itemsize for each in asked], counts)
        gradient_itemsizes = np.repeat([each.group.gradient_itemsize for each in asked], counts)
        joined = np.repeat([each.group.joined for each in asked], counts)
        forward, backward = np.zeros((2, sum(counts)))
        exchanges = _Exchanges(asked, counts, gradient, self.mesh)
        for steps in all_steps(pairs, self.mesh):
            pair = steps.pair
            seconds = np.zeros((2, len(pair)))
            seconds[0] = self.forward.seconds(steps, itemsizes[pair], joined[pair])
            if gradient:
                seconds[1] = self.backward.seconds(steps, gradient_itemsizes[pair], joined[pair])
            exchanges.take_first(steps, seconds, (itemsizes, gradient_itemsizes), self.forward)
            forward[pair] += seconds[0]
            backward[pair] += seconds[1]
        gathered = exchanges.gathered()
        forward += exchanges.alone[0] * ~gathered
        backward += np.where(gathered, exchanges.joint[1] * gradient, exchanges.alone[1])
        exchange, inline = exchanges.joint[0] * gathered, (exchanges.axes > 0) & ~gathered
        end = 0
        for count, each in zip(counts, asked, strict=True):
            start, end = end, end + count
            size = len(each.sources), len(each.targets)
            own = [found[start:end].reshape(size) for found in (forward, backward, exchange)]
            yield Matrices(own[0], own[1], own[2], inline[start:end].reshape(size))


class _Exchanges:
    """The all-to-alls with which redistributions of parameters begin. Those whose results an FSDP unit gathers are
    combined with those of other parameters.

    By pair: `axes` (bits) are those of the all-to-alls, `alone` and `joint` [forward or backward, pair] their seconds
    one by one and together with others.
    """

    def __init__(self, asked: Sequence[Pricing], counts: Sequence[int], trainable: bool, mesh: Mesh) -> None:
        self.asked, self.counts, self.trainable, self.mesh = asked, counts, trainable, mesh
        self.first = np.repeat([each.group.parameter for each in asked], counts)
        self.is_parameter = self.first.copy()
        self.axes = np.zeros(len(self.first), dtype=np.int64)
        self.alone, self.joint = np.zeros((2, 2, len(self.first)))

    def take_first(self, steps: Steps, seconds: Floats, itemsizes: Sequence[Integers], tables: "_Tables") -> None:
        """Take the all-to-alls that no other step precedes out of `seconds`, those of the next steps of some pairs."""
        at = np.flatnonzero(self.is_parameter.take(steps.pair))
        if not len(at):
            return
        steps = steps.take(at)
        pair = steps.pair
        is_first = self.first[pair] & (steps.source == _SPLIT) & (steps.target == _SPLIT)
        self.first[pair] = is_first
        self.axes[pair] |= is_first.astype(np.int64) << steps.axis
        self.alone[:, pair] += is_first * seconds[:, at]
        seconds[:, at] *= ~is_first
        for way, sizes in enumerate(itemsizes):
            self.joint[way, pair] += is_first * tables.joint_seconds(steps, sizes[pair])

    def gathered(self) -> Flags:
        """Whether a unit gathers the results of a pair's all-to-alls."""
        found = np.zeros(len(self.axes), dtype=np.bool_)
        end = 0
        for count, each in zip(self.counts, self.asked, strict=True):
            start, end = end, end + count
            some = np.flatnonzero(self.axes[start:end])
            if each.in_unit and len(some):
                axes = self.axes[start + some]
                found[start + some] = _is_data(each, some, axes, self.trainable, self.mesh)
        return found


def _is_data(asked: Pricing, pairs: Integers, exchanged: Integers, trainable: bool, mesh: Mesh) -> Flags:
    """Whether a unit has an axis to gather or to reduce over, for some pairs after all-to-alls on the axes `exchanged`
    (bits): one on which all is read, and which splits the most significant digit of what a rank then holds."""
    row, column = np.divmod(pairs, len(asked.targets))
    source, target = _placements(asked.sources)[..., row], _placements(asked.targets)[..., column]
    sizes = np.array(mesh.sizes)[:, None]
    kind, dim, major = np.where(exchanged >> np.arange(len(sizes))[:, None] & 1, target, source)
    is_split = kind == _SPLIT
    found = np.zeros(len(pairs), dtype=np.bool_)
    for axis in mesh.dimensions:
        above = is_split & (dim == dim[axis]) & (major < major[axis])
        leads = is_split[axis] & (major[axis] == np.where(above, sizes, 1).prod(axis=0))
        is_read = (target[0, axis] == _WHOLE) & (mesh.sizes[axis] > 1)
        found |= is_read & (leads | (trainable & (kind[axis] == _EQUAL)))
    return found


def _placements(layouts: Sequence[Layout]) -> Integers:
    """[kind, dim or major, axis, layout]."""
    placements = [[(KINDS.index(kind), dim, major) for kind, dim, major in layout] for layout in layouts]
    return np.array(placements, dtype=np.int64).transpose(2, 1, 0)


class _Tables:
    """Seconds of steps forward, or backward, by the kinds of placements that change forward.

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
                # In backward a step begins with the placement that it ends with in forward.
                kernels, *ends = touched(one, other, *((join, cut) if backward else (cut, join)))
                own[:, source, target, cut, join] = (kernels, *(ends[::-1] if backward else ends))
            collective = COLLECTIVES[one, other]
            self.is_sent[source, target] = collective != "convert"
            for axis in mesh.dimensions if collective != "convert" else ():
                sent[source, target, axis] = collective_lines(collective, cluster.route(mesh, axis))
        self.device = device = cluster.device
        self.joint_rates = np.array([joint_rate(cluster.route(mesh, axis)) for axis in mesh.dimensions])
        self.own = own.reshape(3, -1) * [[device.launch], [1 / device.stream], [1 / device.stream]]
        most = max(len(found) for found in sent.values())
        lines = np.zeros((most, 2, kinds, kinds, self.axes))
        for place, found in sent.items():
            # Where there are fewer algorithms, the last stands in for those that are missing.
            lines[(..., *place)] = (*found, *[found[-1]] * (most - len(found)))
        self.lines = lines.reshape(most, 2, -1)

    def joint_seconds(self, steps: Steps, itemsize: Integers) -> Floats:
        """`joint_seconds` of each of the steps, which are all-to-alls."""
        elements, itemsizes = steps.before.astype(np.float64), itemsize.astype(np.float64)
        return joint_seconds_at(elements, itemsizes, self.joint_rates.take(steps.axis), self.device)

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
    """All changes of a placement, as positions in `KINDS`, and their kinds forward or backward."""
    for source, kind in enumerate(KINDS):
        for target, other in enumerate(KINDS):
            if (kind, other) in COLLECTIVES:
                one, two = Placement(kind), Placement(other)
                yield source, target, *((two.gradient.kind, one.gradient.kind) if backward else (kind, other))
