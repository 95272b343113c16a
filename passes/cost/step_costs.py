"""Seconds of the steps of redistributions on one mesh, for any number of steps at once.

A step takes the time of the fastest algorithm of its collective, and that of the rank's own reads and writes: parts
that are not contiguous are copied before they are sent and after they are received, local conversions read and write
memory, and a conversion between R and I is free. All of it depends only on the span and the kinds of placements, so it
is looked up in tables. Sizes that are figures give seconds that are figures.

A step over several axes runs as one collective, or as one after the other over parts of the axes (`in_parts`): as takes
least, forward and backward together. Few bytes over many nodes are faster axis by axis, where hops count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.communication import Line, collective_lines
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.exchanges import ALONE, Sharing
from passes.ir.figures import Figure, least_of
from passes.ir.mesh import Mesh
from passes.ir.redistribution import COLLECTIVES, RedistributionStep, as_steps, step_in_parts
from passes.ir.redistributions import KINDS, Steps, in_parts

_SPLIT = KINDS.index("S")
# By kinds before and after.
_IS_ALL_REDUCE = np.array([COLLECTIVES.get((before, after)) == "all_reduce" for before, after in product(KINDS, KINDS)])

# An all-to-all of many tensors copies each into one buffer, and out of another: a kernel and a pass over memory each.
_JOINT_KERNELS, _JOINT_TOUCHED = 2, 2


@dataclass(frozen=True)
class Sent:
    """By step: the bytes of an element and of its gradient, and how many tensors share a collective (by field of
    `Sharing`). `flows` says whether there are gradients."""

    size: Integers
    gradient_size: Integers
    joined: Integers
    flows: bool

    def take(self, numbers: Integers) -> "Sent":
        """The same of the steps with these numbers."""
        joined = self.joined.take(numbers, axis=1)
        return Sent(self.size.take(numbers), self.gradient_size.take(numbers), joined, self.flows)


class StepCosts:
    """Seconds of steps on one mesh and cluster.

    `own` is what a rank does itself, [for kernels, per byte before, per byte after] by kinds, cut and join; `lines`
    [algorithm, latency or per byte] by kinds and span are those of collectives (`cost.communication`).
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        kinds, device, spans = len(KINDS), cluster.device, range(len(mesh.spans))
        found = {
            (collective, span): _least_somewhere(collective_lines(collective, cluster.route(mesh, span)))
            for collective in sorted(set(COLLECTIVES.values()))
            for span in spans
        }
        most = max(len(lines) for lines in found.values())
        own = np.zeros((kinds, kinds, 2, 2, 3))
        by_change = np.zeros((kinds, kinds, len(spans), most, 2), dtype=object)
        for (source, target), collective in COLLECTIVES.items():
            change = KINDS.index(source), KINDS.index(target)
            for cut, join in np.ndindex(2, 2):
                own[*change, cut, join] = _touched(source, target, bool(cut), bool(join))
            for span in spans:
                lines = found[collective, span]
                # Where there are fewer algorithms, the last stands in for those that are missing.
                by_change[*change, span] = [*lines, *[lines[-1]] * (most - len(lines))]
        self.own = own.reshape(-1, 3).T * [[device.launch], [1 / device.stream], [1 / device.stream]]
        # Lists become numbers, or objects where the sizes of the mesh are figures.
        self.lines = np.array(by_change.reshape(-1, most, 2).transpose(1, 2, 0).tolist())
        self.shift_lines = [collective_lines("shift", cluster.route(mesh, span)) for span in spans]
        self.joint_rates = np.array([min(each for _, each in found["all_to_all", span]) for span in spans])

    def seconds(self, steps: Steps, itemsize: Integers, joined: Integers) -> Floats:
        """Seconds of the forward pass of each step, for elements of `itemsize` bytes. Tensors that are sent
        together share the latency of a collective: by field of `Sharing` and step, `joined` are their numbers."""
        change = steps.source * len(KINDS) + steps.target
        kernels, at_first, at_last = self.own.take((change * 2 + steps.cut) * 2 + steps.join, axis=1)
        place = change * len(self.mesh.spans) + steps.span
        size = np.maximum(steps.before, steps.after) * itemsize
        together = np.where(_IS_ALL_REDUCE.take(change), *joined)
        sent = least_of([start.take(place) / together + each.take(place) * size for start, each in self.lines])
        seconds: Floats = kernels + (at_first * steps.before + at_last * steps.after) * itemsize + sent
        return seconds

    def both_ways(self, steps: Steps, sent: "Sent") -> Floats:
        """[forward or backward, step]: seconds of each step as it is."""
        forward = self.seconds(steps, sent.size, sent.joined)
        backward = self.seconds(steps.backward, sent.gradient_size, sent.joined) * sent.flows
        found: Floats = np.stack([forward, backward])
        return found

    def cheapest(self, steps: Steps, sent: "Sent") -> tuple[Floats, Integers]:
        """[forward or backward, step]: seconds of each step in its cheapest parts; and by step their number in
        `Mesh.partitions`."""
        seconds, chosen = self.both_ways(steps, sent), np.zeros(len(steps.span), dtype=np.int64)
        may_be_cut = self._may_be_cut(steps, sent.size)
        if sent.flows:
            may_be_cut |= self._may_be_cut(steps.backward, sent.gradient_size)
        cut = np.flatnonzero(may_be_cut)
        spans, splits = steps.span.take(cut), (steps.target == _SPLIT).take(cut)
        for span in range(len(self.mesh.sizes), len(self.mesh.spans) if len(cut) else 0):
            for rows in (cut[(spans == span) & (splits == ends)] for ends in (False, True)):
                own, of_own = steps.take(rows), sent.take(rows)
                for number, parts in enumerate(self.mesh.partitions(span)[1:] if len(rows) else (), 1):
                    each = [self.both_ways(part, of_own) for part in in_parts(own, parts, self.mesh)]
                    other = np.add.reduce(each)
                    is_less = (other.sum(axis=0) < seconds[:, rows].sum(axis=0)).astype(np.bool_)
                    better = rows[is_less]
                    seconds[:, better], chosen[better] = other[:, is_less], number
        return seconds, chosen

    def _may_be_cut(self, steps: Steps, itemsize: Integers) -> Flags:
        """Whether the forward passes of steps may take less time in parts."""
        size = np.maximum(steps.before, steps.after) * itemsize
        place = (steps.source * len(KINDS) + steps.target) * len(self.mesh.spans) + steps.span
        found: Flags = (size < self._most_in_parts.take(place)).astype(np.bool_)
        return found

    @cached_property
    def _most_in_parts(self) -> Floats:
        """By kinds and span the bytes from which on no parts of a step take less time than it does whole. A rank itself
        has less to do for the whole."""
        axes, spans = len(self.mesh.sizes), len(self.mesh.spans)
        found = np.zeros((len(KINDS), len(KINDS), spans))
        if self.lines.dtype == object:
            found[:, :, axes:] = np.inf
            return found.ravel()
        for (source, target), collective in COLLECTIVES.items():
            change = KINDS.index(source), KINDS.index(target)
            for span in range(axes, spans if collective != "convert" else axes):
                ways = self.mesh.ways(span)
                sizes = (1 if kind == "S" and target != source else ways for kind in (source, target))
                one, around, first, last, before, after = np.array([[0, span, *change, *sizes]]).T
                whole = Steps(one, around, first, last, before, after, one > 0, one > 0)
                for parts in self.mesh.partitions(span)[1:]:
                    cut = [
                        self._lines_of(each) * [1.0, max(each.before[0], each.after[0]) / ways]
                        for each in in_parts(whole, parts, self.mesh)
                    ]
                    found[*change, span] = max(found[*change, span], _last_above(self._lines_of(whole), cut))
        return found.ravel()

    def _lines_of(self, step: Steps) -> Floats:
        """[algorithm, latency or per byte] of a single step."""
        change = step.source[0] * len(KINDS) + step.target[0]
        found: Floats = self.lines[:, :, change * len(self.mesh.spans) + step.span[0]]
        return found

    def cheapest_steps(
        self, steps: Sequence[RedistributionStep], itemsize: int, gradient_itemsize: int | None, joined: Sharing
    ) -> tuple[RedistributionStep, ...]:
        """`steps`, each in its cheapest parts; `gradient_itemsize` None: without a gradient."""
        if all(step.span < len(self.mesh.sizes) for step in steps):
            return tuple(steps)
        size, gradient_size = np.full((2, len(steps)), [[itemsize], [gradient_itemsize or 0]])
        sent = Sent(size, gradient_size, _for_each(joined, steps), gradient_itemsize is not None)
        _, chosen = self.cheapest(as_steps(steps), sent)
        parts = (self.mesh.partitions(step.span)[number] for step, number in zip(steps, chosen.tolist(), strict=True))
        return tuple(
            part for step, own in zip(steps, parts, strict=True) for part in step_in_parts(step, own, self.mesh)
        )

    def shift_seconds(self, span: int, size: float) -> float:
        """Seconds of a shift of `size` bytes along a span of axes."""
        return min(start + each * size for start, each in self.shift_lines[span])

    def joint_seconds(self, steps: Steps, itemsize: Integers) -> Floats:
        """Seconds that each of `steps`, which are all-to-alls, adds to one that carries many tensors: these share its
        latency."""
        device = self.cluster.device
        rate = self.joint_rates.take(steps.span) + 2 * _JOINT_TOUCHED / device.stream
        seconds: Floats = _JOINT_KERNELS * device.launch + rate * (steps.before * itemsize)
        return seconds

    def total(self, steps: Sequence[RedistributionStep], itemsize: int, joined: Sharing = ALONE) -> float:
        """Seconds of the forward pass of `steps`, one after the other."""
        sizes = np.full(len(steps), itemsize)
        found: list[float] = self.seconds(as_steps(steps), sizes, _for_each(joined, steps)).tolist() if steps else []
        return sum(found)

    def joint_total(self, steps: Sequence[RedistributionStep], itemsize: int) -> float:
        """The sum of `joint_seconds` of `steps`."""
        sizes = np.full(len(steps), itemsize)
        found: list[float] = self.joint_seconds(as_steps(steps), sizes).tolist() if steps else []
        return sum(found)


def _for_each(joined: Sharing, steps: Sequence[RedistributionStep]) -> Integers:
    """By field of `Sharing` and step: how many tensors share a collective."""
    return np.repeat(np.array([joined], dtype=np.int64).T, len(steps), axis=1)


def _least_somewhere(lines: Sequence[Line]) -> Sequence[Line]:
    """Those of `lines` that are the least at some size; all where they are figures."""
    if any(isinstance(number, Figure) for line in lines for number in line):
        return lines
    found: list[Line] = []
    for start, slope in sorted(set(lines)):
        if found and slope >= found[-1][1]:
            continue
        while len(found) > 1:
            (first, first_slope), (last, last_slope) = found[-2:]
            # Whether the last one is below the first where this one meets it.
            if (last - first) * (first_slope - slope) < (start - first) * (first_slope - last_slope):
                break
            found.pop()
        found.append((start, slope))
    return found


def _last_above(lines: Floats, others: Sequence[Floats]) -> float:
    """A size from which on the least of `lines` [line, value at 0 or slope] is not above the sum of the least of each
    of `others`; infinite where it is above at last."""
    corners = [0.0]
    for each in (lines, *others):
        start, slope = each.T
        with np.errstate(divide="ignore", invalid="ignore"):
            meeting = ((start - start[:, None]) / (slope[:, None] - slope)).ravel()
        corners += meeting[np.isfinite(meeting) & (meeting > 0)].tolist()
    sizes = np.array([*sorted(corners), 2 * max(corners) + 1, 4 * max(corners) + 2])
    least, *rest = ((each[:, :1] + each[:, 1:] * sizes).min(axis=0) for each in (lines, *others))
    (above,) = np.nonzero(least > sum(rest))
    if not len(above):
        return 0.0
    return float(sizes[above[-1] + 1]) if above[-1] + 1 < len(sizes) else np.inf


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
