"""Costs of redistributions, for all pairs of layouts of many tensors at once.

`ir/redistributions` gives the steps of all pairs as arrays, `cost/step_costs` the seconds of each step.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.step_costs import StepCosts
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import EdgeGroup
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.redistributions import KINDS, Pairs, Steps, all_steps

_WHOLE, _EQUAL, _SPLIT = (KINDS.index(kind) for kind in "RIS")


@dataclass(frozen=True)
class TensorLayouts:
    """A tensor that is redistributed from each of `sources` to each of `targets`. `in_unit` says that it is a parameter
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
class RedistributionSeconds:
    """Seconds of redistributions from every source (row) to every target, for one occurrence: `forward`, `backward`,
    and in `exchange` those that run once before a forward pass (see `cost.step.BlockSeconds`). `inline` are those of a
    parameter that nothing hides (see `Redistribution.inline`)."""

    forward: Floats
    backward: Floats
    exchange: Floats
    inline: Flags

    def __mul__(self, times: float) -> "RedistributionSeconds":
        return RedistributionSeconds(self.forward * times, self.backward * times, self.exchange * times, self.inline)


class RedistributionCosts:
    """Seconds of redistributions on one mesh and cluster; those of tensors and layouts that were priced before are
    remembered."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = StepCosts(cluster, mesh)
        self.found: dict[Hashable, RedistributionSeconds] = {}

    def seconds(self, tensors: Sequence[TensorLayouts]) -> list[RedistributionSeconds]:
        """The seconds of all redistributions of `tensors`."""
        keys = [each.key for each in tensors]
        new = {key: each for key, each in zip(keys, tensors, strict=True) if key not in self.found}
        for gradient in (False, True):
            some = {key: each for key, each in new.items() if each.group.gradient == gradient}
            self.found.update(zip(some, self._new(list(some.values()), gradient=gradient), strict=True))
        return [self.found[key] for key in keys]

    def _new(self, tensors: Sequence[TensorLayouts], *, gradient: bool) -> Iterator[RedistributionSeconds]:
        """The seconds of tensors through all or none of which a gradient flows back."""
        pairs = [Pairs(each.sources, each.targets, each.group.type.shape, each.group.strided) for each in tensors]
        counts = [len(each.sources) * len(each.targets) for each in tensors]
        itemsizes = np.repeat([each.group.type.dtype.itemsize for each in tensors], counts)
        gradient_itemsizes = np.repeat([each.group.gradient_itemsize for each in tensors], counts)
        joined = np.repeat([each.group.joined for each in tensors], counts)
        forward, backward = np.zeros((2, sum(counts)))
        exchanges = _Exchanges(tensors, counts, gradient, self.steps)
        for steps in all_steps(pairs, self.mesh):
            pair = steps.pair
            seconds = np.zeros((2, len(pair)))
            seconds[0] = self.steps.seconds(steps, itemsizes[pair], joined[pair])
            if gradient:
                seconds[1] = self.steps.seconds(steps.backward, gradient_itemsizes[pair], joined[pair])
            exchanges.take_first(steps, seconds, (itemsizes, gradient_itemsizes))
            forward[pair] += seconds[0]
            backward[pair] += seconds[1]
        gathered = exchanges.gathered()
        forward += exchanges.alone[0] * ~gathered
        backward += np.where(gathered, exchanges.joint[1] * gradient, exchanges.alone[1])
        exchange, inline = exchanges.joint[0] * gathered, (exchanges.axes > 0) & ~gathered
        # The part after the last end is empty.
        parts = (np.split(found, np.cumsum(counts)) for found in (forward, backward, exchange, inline))
        for each, *own in zip(tensors, *parts, strict=False):
            yield RedistributionSeconds(*(part.reshape(len(each.sources), len(each.targets)) for part in own))


class _Exchanges:
    """The all-to-alls with which redistributions of parameters begin. Those whose results an FSDP unit gathers are
    combined with those of other parameters.

    By pair: `axes` (bits) are those of the all-to-alls, `alone` and `joint` [forward or backward, pair] their seconds
    one by one and together with others.
    """

    def __init__(
        self, tensors: Sequence[TensorLayouts], counts: Sequence[int], trainable: bool, costs: StepCosts
    ) -> None:
        self.tensors, self.counts, self.trainable, self.costs = tensors, counts, trainable, costs
        self.is_parameter = np.repeat([each.group.parameter for each in tensors], counts)
        self.first = self.is_parameter.copy()
        self.axes = np.zeros(len(self.first), dtype=np.int64)
        self.alone, self.joint = np.zeros((2, 2, len(self.first)))

    def take_first(self, steps: Steps, seconds: Floats, itemsizes: Sequence[Integers]) -> None:
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
            self.joint[way, pair] += is_first * self.costs.joint_seconds(steps, sizes[pair])

    def gathered(self) -> Flags:
        """Whether a unit gathers the results of a pair's all-to-alls."""
        found = np.zeros(len(self.axes), dtype=np.bool_)
        end = 0
        for count, each in zip(self.counts, self.tensors, strict=True):
            start, end = end, end + count
            some = np.flatnonzero(self.axes[start:end])
            if each.in_unit and len(some):
                axes = self.axes[start + some]
                found[start + some] = _is_data(each, some, axes, self.trainable, self.costs.mesh)
        return found


def _is_data(tensor: TensorLayouts, pairs: Integers, exchanged: Integers, trainable: bool, mesh: Mesh) -> Flags:
    """Whether a unit has an axis to gather or to reduce over, for some pairs after all-to-alls on the axes `exchanged`
    (bits): one on which all is read, and which splits the most significant digit of what a rank then holds."""
    row, column = np.divmod(pairs, len(tensor.targets))
    source, target = _placements(tensor.sources)[..., row], _placements(tensor.targets)[..., column]
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
