"""The least memory that any choice of an instance takes, to report infeasible limits early."""

from dataclasses import replace

import numpy as np

from passes.cost.memory import MemoryUse, memory_by_kind
from passes.cost.program_points import Phase
from passes.ir.arrays import Floats
from passes.solve.instance import Instance
from passes.solve.lagrangian.relaxation import ROUNDING, Multipliers
from passes.solve.limits import infeasible
from passes.solve.optimum import optimum


def refuse_if_hopeless(instance: Instance) -> None:
    """Raise InfeasibleError if the sum of the least bytes of each node and each saved tensor does not fit."""
    least = _least(instance, int(_least_at_all(instance).argmax()))
    if least.peak > instance.limits.memory:
        raise infeasible(instance.limits, least, "at least ")


def refuse_if_impossible(instance: Instance, where: int) -> None:
    """Raise InfeasibleError if even the choice of least memory at a point does not fit."""
    limit = instance.limits.memory
    scale = instance.arrays.value([0] * len(instance.arrays.costs)) / limit
    bytes = [scale if point == where else 0.0 for point in instance.points]
    multipliers = Multipliers(1e-9, bytes, [0.0] * len(instance.arrays.overlaps))
    best = optimum(instance.relaxed(multipliers))
    # Seconds and tie_break_total weigh a little, too.
    if best.bound / scale > limit * (1 + ROUNDING):
        raise infeasible(instance.limits, instance.use(instance.cheapest(best.picks, multipliers)))


def smallest(instance: Instance, multipliers: Multipliers) -> MemoryUse:
    """The memory of a choice that minimizes bytes, at the multipliers of each point."""
    dear = replace(multipliers, bytes=[max(1e6 * price, 1e-30) for price in multipliers.bytes])
    return instance.use(instance.cheapest(optimum(instance.relaxed(dear)).picks, dear))


def _least_at_all(instance: Instance) -> Floats:
    """The bytes of `_least` at each point."""
    fractions = instance.bytes.fractions
    found = np.zeros(len(fractions))
    for size in instance.bytes.nodes:
        if len(size.ranges):
            found += (fractions.of(size.ranges) @ size.sizes).min(axis=1)
    for group, saving in zip(instance.bytes.groups, instance.bytes.saved, strict=True):
        if saving and group.source is not None:
            # Few ranges hold the source in all its layouts: of each the smallest layout counts.
            ranges, layouts = np.unique(group.source, axis=1, return_inverse=True)
            smallest = np.full(ranges.shape[1], np.inf)
            np.minimum.at(smallest, layouts.ravel(), group.source_bytes)
            live = fractions.of(ranges.ravel()).reshape(len(found), *ranges.shape).sum(axis=1)
            target = fractions.of(group.target).sum(axis=1) * group.target_bytes.min()
            found += np.minimum((live * smallest).min(axis=1), target)
    return found


def _least(instance: Instance, point: int) -> MemoryUse:
    """The least bytes of nodes and saved tensors at a point, each by itself."""
    model = instance.bytes
    fractions = model.at(point)
    live: dict[str, float] = {}
    optimizer = 0.0
    for size in model.nodes:
        pick = int(size.at(fractions).argmin())
        for kind, number, sizes in zip(size.kinds, size.ranges.tolist(), size.sizes, strict=True):
            live[kind] = live.get(kind, 0.0) + float(fractions[number] * sizes[pick])
            is_gradient = model.ranges[number].phase is Phase.ACCUMULATED
            optimizer += instance.limits.optimizer_states * float(sizes[pick]) * is_gradient
    for group, saving in zip(model.groups, model.saved, strict=True):
        if saving:
            saved = group.saved(fractions)
            live["saved"] = live.get("saved", 0.0) + float(min(saved.source.min(), saved.target.min()))
    return memory_by_kind(live, optimizer, model.points[point].name)
