"""The least memory that any choice of an instance takes, to refuse early what cannot fit."""

from dataclasses import replace

import numpy as np

from passes.cost.memory import MemoryUse
from passes.cost.moments import Span
from passes.solving.instance import Instance
from passes.solving.limits import infeasible
from passes.solving.memory import ROUNDING, Weights
from passes.solving.optimum import optimum
from passes.solving.prices import Floats


def refuse_if_hopeless(instance: Instance) -> None:
    """Raise InfeasibleError if what nodes and kept tensors take at least, each by itself, does not fit."""
    least = _least(instance, int(_least_at_all(instance).argmax()))
    if least.peak > instance.limits.memory:
        raise infeasible(instance.limits, least, "at least ")


def refuse_if_impossible(instance: Instance, where: int) -> None:
    """Raise InfeasibleError if even the choice of least memory at a point does not fit."""
    limit = instance.limits.memory
    scale = instance.arrays.value([0] * len(instance.arrays.costs)) / limit
    bytes = [scale if point == where else 0.0 for point in instance.points]
    weights = Weights(1e-9, bytes, [0.0] * len(instance.arrays.overlaps))
    best = optimum(instance.priced(weights))
    # Seconds and ties weigh a little, too.
    if best.bound / scale > limit * (1 + ROUNDING):
        raise infeasible(instance.limits, instance.use(instance.cheapest(best.picks, weights)))


def smallest(instance: Instance, weights: Weights) -> MemoryUse:
    """What a choice takes for which bytes are all that counts."""
    dear = replace(weights, bytes=[max(1e6 * price, 1e-30) for price in weights.bytes])
    return instance.use(instance.cheapest(optimum(instance.priced(dear)).picks, dear))


def _least_at_all(instance: Instance) -> Floats:
    """The bytes of `_least` at each moment."""
    parts = instance.bytes.table.parts
    found = np.zeros(len(parts))
    for size in instance.bytes.nodes:
        if len(size.places):
            found += (parts[:, size.places] @ size.sizes).min(axis=1)
    for group, held in zip(instance.arrays.groups, instance.bytes.groups, strict=True):
        if any(edge.saved for edge in group.edges) and held.source is not None:
            source = (parts[:, held.source] * group.source_bytes).min(axis=1)
            found += np.minimum(source, parts[:, held.target].sum(axis=1) * group.target_bytes.min())
    return found


def _least(instance: Instance, moment: int) -> MemoryUse:
    """What nodes and kept tensors take at least at a moment, each by itself."""
    table = instance.bytes.table
    parts, spans = instance.bytes.parts(moment), [place.span for place in table.numbers]
    there: dict[str, float] = {}
    optimizer = 0.0
    for size in instance.bytes.nodes:
        pick = int(size.at(parts).argmin())
        for kind, place, sizes in zip(size.kinds, size.places.tolist(), size.sizes, strict=True):
            there[kind] = there.get(kind, 0.0) + float(parts[place] * sizes[pick])
            optimizer += instance.limits.optimizer_states * float(sizes[pick]) * (spans[place] is Span.SUM)
    kept = there.get("kept", 0.0)
    for group, held in zip(instance.arrays.groups, instance.bytes.groups, strict=True):
        if any(edge.saved for edge in group.edges):
            own = held.kept(parts)
            source = float((own.source * group.source_bytes).min())
            kept += min(source, own.target * float(group.target_bytes.min()))
    parameters = there.get("parameter", 0.0) - optimizer
    buffers, inputs, outputs = (there.get(kind, 0.0) for kind in ("buffer", "input", "output"))
    gradients, transient = there.get("gradient", 0.0), there.get("transient", 0.0)
    name = table.moments[moment].name
    return MemoryUse(parameters, optimizer, buffers, inputs, outputs, gradients, kept, transient, name)
