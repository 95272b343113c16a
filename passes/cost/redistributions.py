"""Costs of redistributions, for all pairs of layouts of many tensors at once.

`ir/redistributions` gives the steps of all pairs as arrays, `cost/step_costs` the seconds of each step.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.step_costs import Sent, StepCosts
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import EdgeGroup
from passes.ir.grouping import grouped
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.redistributions import KINDS, Pairs, Steps, all_steps
from passes.ir.unit_axes import is_leading

_WHOLE, _EQUAL, _SPLIT, _PENDING = (KINDS.index(kind) for kind in "RISP")


@dataclass(frozen=True)
class TensorLayouts:
    """A tensor that is redistributed from each of `sources` to each of `targets`. `in_unit` says that it is a parameter
    that an FSDP unit may hold."""

    group: EdgeGroup
    sources: Sequence[Layout]
    targets: Sequence[Layout]
    in_unit: bool = False

    @property
    def key(self) -> tuple[Hashable, Hashable, Hashable]:
        """Everything that the costs of one occurrence depend on: the tensor, its sources and its targets."""
        group = self.group
        tensor = group.type.shape, group.type.dtype.itemsize, group.gradient_itemsize, group.gradient, group.strided
        return (*tensor, group.joined, group.parameter, self.in_unit), tuple(self.sources), tuple(self.targets)


@dataclass(frozen=True)
class RedistributionSeconds:
    """Seconds of redistributions from every source (row) to every target, for one occurrence: `forward`, `backward`,
    and in `exchange` those that run once before a forward pass (see `cost.step.BlockSeconds`). `inline` are those of a
    parameter that nothing hides (see `Redistribution.inline`)."""

    forward: Floats
    backward: Floats
    exchange: Floats
    inline: Flags

    def take(self, sources: Sequence[int], targets: Sequence[int]) -> "RedistributionSeconds":
        """The seconds from these sources to these targets, by number."""
        rows = np.ix_(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))
        return RedistributionSeconds(self.forward[rows], self.backward[rows], self.exchange[rows], self.inline[rows])

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
        # Tensors that differ in their layouts alone have most pairs of layouts in common: each is priced once.
        alike = grouped((key[0], key) for key in new)
        whole = {tensor: _together([new[key] for key in each]) for tensor, each in alike.items()}
        priced: dict[Hashable, RedistributionSeconds] = {}
        for gradient, parameter in product((False, True), repeat=2):
            kind = gradient, parameter
            some = {key: each for key, each in whole.items() if (each.group.gradient, each.group.parameter) == kind}
            priced.update(zip(some, self._new(list(some.values()), *kind), strict=True))
        for tensor, own_keys in alike.items():
            sources, targets = _numbers(whole[tensor].sources), _numbers(whole[tensor].targets)
            for key in own_keys:
                own = [sources[each] for each in new[key].sources], [targets[each] for each in new[key].targets]
                self.found[key] = priced[tensor].take(*own)
        return [self.found[key] for key in keys]

    def _new(
        self, tensors: Sequence[TensorLayouts], gradient: bool, parameter: bool
    ) -> Iterator[RedistributionSeconds]:
        """The seconds of tensors through all or none of which a gradient flows back, and which are all or none
        parameters."""
        counts = [len(each.sources) * len(each.targets) for each in tensors]
        price = self._parameters if parameter else self._activations
        # The part after the last end is empty.
        split = (np.split(each, np.cumsum(counts)) for each in price(tensors, _sent(tensors, counts, gradient)))
        for each, *own in zip(tensors, *split, strict=False):
            yield RedistributionSeconds(*(part.reshape(len(each.sources), len(each.targets)) for part in own))

    def _activations(self, tensors: Sequence[TensorLayouts], sent: Sent) -> tuple[Floats, Floats, Floats, Flags]:
        """The fields of `RedistributionSeconds`, for all pairs of tensors that are no parameters."""
        found = np.zeros((2, len(sent.size)))
        for steps in _steps(tensors, self.mesh):
            found[:, steps.pair] += self.steps.cheapest(steps, sent.take(steps.pair))[0]
        none = np.zeros(len(sent.size))
        return found[0], found[1], none, none > 0

    def _parameters(self, tensors: Sequence[TensorLayouts], sent: Sent) -> tuple[Floats, Floats, Floats, Flags]:
        """The fields of `RedistributionSeconds`, for all pairs of parameters."""
        # Forward and backward: all but the all-to-alls that come first, where a unit takes its steps as they are and
        # where none does; and the all-to-alls, one by one and with others.
        in_unit, later, alone, joint = np.zeros((4, 2, len(sent.size)))
        parts = _UnitParts(tensors, sent.flows, self.mesh)
        every = list(_steps(tensors, self.mesh))
        sent = _reduced_by_unit(sent, every)
        for steps in every:
            pair = steps.pair
            own = sent.take(pair)
            is_first, is_unit = parts.follow(steps)
            seconds, chosen = self.steps.cheapest(steps, own)
            later[:, pair] += ~is_first * seconds
            alone[:, pair] += is_first * seconds
            whole = self.steps.both_ways(steps, own) if (chosen > 0).any() else seconds
            in_unit[:, pair] += ~is_first * np.where(is_unit, whole, seconds)
            for way, sizes in enumerate((own.size, own.gradient_size)):
                joint[way, pair] += is_first * self.steps.joint_seconds(steps, sizes)
        exchanges, taken = parts.exchanged > 0, parts.taken()
        forward = np.where(taken, in_unit[0], later[0] + alone[0])
        backward = np.where(taken, in_unit[1] + joint[1] * sent.flows, later[1] + alone[1])
        return forward, backward, joint[0] * taken, exchanges & ~taken


def _together(tensors: Sequence[TensorLayouts]) -> TensorLayouts:
    """One tensor with the sources and targets of all of `tensors`, which differ in these alone."""
    sources, targets = (
        tuple(dict.fromkeys(layout for layouts in every for layout in layouts))
        for every in ([each.sources for each in tensors], [each.targets for each in tensors])
    )
    return replace(tensors[0], sources=sources, targets=targets)


def _numbers(layouts: Sequence[Layout]) -> dict[Layout, int]:
    return {layout: number for number, layout in enumerate(layouts)}


def _sent(tensors: Sequence[TensorLayouts], counts: Sequence[int], flows: bool) -> Sent:
    """The sizes that each pair of layouts sends: tensor i has `counts[i]` pairs."""
    groups = [each.group for each in tensors]
    fields = [(group.type.dtype.itemsize, group.gradient_itemsize, *group.joined) for group in groups]
    size, gradient_size, *joined = np.repeat(np.array(fields, dtype=np.int64).reshape(-1, 4).T, counts, axis=1)
    return Sent(size, gradient_size, np.array(joined), flows)


def _reduced_by_unit(sent: Sent, every: Sequence[Steps]) -> Sent:
    """`sent`, where pairs whose forward pass communicates share all-reduces in a unit (`Redistribution.sharing`)."""
    moves = np.zeros(len(sent.size), dtype=np.bool_)
    for steps in every:
        moves[steps.pair] |= (steps.source == _SPLIT) & (steps.target != _PENDING)
    all_reduce, other = sent.joined
    return replace(sent, joined=np.stack([np.where(moves, other, all_reduce), other]))


def _steps(tensors: Sequence[TensorLayouts], mesh: Mesh) -> Iterator[Steps]:
    """The steps of all pairs of layouts of `tensors`."""
    return all_steps(
        [Pairs(each.sources, each.targets, each.group.type.shape, each.group.strided) for each in tensors], mesh
    )


class _UnitParts:
    """The parts of redistributions of parameters that FSDP units take, found step by step: `ir.unit_axes`, for all
    pairs at once.

    By pair: `exchanged`, `sharded` and `replicated` are axes as bits: of the all-to-alls that come first, and those of
    the unit. `layout` is that of the copy (by its number in `layouts`), `phase` how far the steps are: all-to-alls,
    those of the unit, or others.
    """

    def __init__(self, tensors: Sequence[TensorLayouts], trainable: bool, mesh: Mesh) -> None:
        self.tensors, self.trainable, self.mesh = tensors, trainable, mesh
        counts = [len(each.sources) * len(each.targets) for each in tensors]
        self.tensor = np.repeat(np.arange(len(tensors)), counts)
        self.first = np.cumsum([0, *counts])
        self.phase, self.exchanged, self.sharded, self.replicated = np.zeros((4, sum(counts)), dtype=np.int64)
        self.bits = np.array([sum(1 << axis for axis in axes) for axes in mesh.spans])
        self.is_wide = np.array([mesh.ways(span) > 1 for span in range(len(mesh.spans))])
        self.shrinks = np.zeros(sum(counts), dtype=np.bool_)
        self.layouts: dict[Layout, int] = {}
        rows = [[self.layouts.setdefault(source, len(self.layouts)) for source in each.sources] for each in tensors]
        columns = [len(each.targets) for each in tensors]
        numbers = [np.repeat(own, count) for own, count in zip(rows, columns, strict=True)]
        self.layout = np.concatenate([np.array([], dtype=np.int64), *numbers])
        self.leading = np.zeros((0, 1 << len(mesh.sizes)), dtype=np.bool_)

    def follow(self, steps: Steps) -> tuple[Flags, Flags]:
        """Whether each of the next steps of some pairs is an all-to-all that comes first, and whether it is one that a
        unit takes, if there is one."""
        pair, bits = steps.pair, self.bits.take(steps.span)
        self.shrinks[pair] |= steps.after < steps.before
        splits = steps.source == _SPLIT
        is_first = (self.phase[pair] == _EXCHANGES) & splits & (steps.target == _SPLIT)
        self.exchanged[pair] |= is_first * bits
        begins = pair[(self.phase[pair] == _EXCHANGES) & ~is_first]
        self.phase[begins] = _UNIT
        self._make_copies(begins[self.exchanged[begins] > 0])
        is_wide = self.is_wide.take(steps.span)
        becomes_whole = is_wide & (steps.target == _WHOLE)
        converts = becomes_whole & (steps.source == _EQUAL) & self.trainable
        self.replicated[pair] |= converts * bits
        gathers = (self.phase[pair] == _UNIT) & splits & becomes_whole & self._are_leading(pair, bits)
        self.sharded[pair] |= gathers * bits
        self.phase[pair[(self.phase[pair] == _UNIT) & splits & is_wide & ~gathers]] = _OTHERS
        return is_first, converts | gathers

    def _make_copies(self, pairs: Integers) -> None:
        """Note the layouts of pairs after the all-to-alls that they begin with."""
        for pair in pairs.tolist():
            number = self.tensor[pair]
            each = self.tensors[number]
            source, target = divmod(pair - int(self.first[number]), len(each.targets))
            placements = zip(each.sources[source], each.targets[target], strict=True)
            bits = int(self.exchanged[pair])
            copy = tuple(after if bits >> axis & 1 else before for axis, (before, after) in enumerate(placements))
            self.layout[pair] = self.layouts.setdefault(copy, len(self.layouts))

    def _are_leading(self, pair: Integers, bits: Integers) -> Flags:
        """Whether a unit can gather some pairs over further axes (as bits), besides those that it gathers over."""
        known = len(self.leading)
        if known < len(self.layouts):
            sets = [
                tuple(axis for axis in self.mesh.dimensions if bits >> axis & 1)
                for bits in range(self.leading.shape[1])
            ]
            more = [[_leads(axes, layout, self.mesh) for axes in sets] for layout in [*self.layouts][known:]]
            self.leading = np.concatenate([self.leading, np.array(more, dtype=np.bool_)])
        before = self.sharded[pair]
        found: Flags = self.leading[self.layout[pair], before | bits] & (before < bits)
        return found

    def taken(self) -> Flags:
        """Whether a unit takes a part of a pair."""
        in_unit = np.array([each.in_unit for each in self.tensors], dtype=np.bool_)[self.tensor]
        return in_unit & ~self.shrinks & (self.sharded + self.replicated > 0)


# How far the steps of a redistribution are (see `_UnitParts`).
_EXCHANGES, _UNIT, _OTHERS = range(3)


def _leads(axes: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    return all(layout[axis].kind == "S" for axis in axes) and is_leading(axes, layout, mesh)
