"""A lower bound on the step time on a number of devices, whatever the mesh, the layouts and the configuration.

Every op is split over all devices, and nothing is communicated. On a mesh of n devices the busiest rank has at least
1/n of an op's multiplications, and 1/n of each of its operands and results; its products share one split of the op's
factors (`splits`). Parameters and inputs are split as well. More micro-batches take no less time: they launch as many
kernels more, and their products have smaller results, or sum over less.

This holds for pipelines, too: m micro-batches in p stages' ranks take at least as long as q <= m/p of them, of which
q = 1 is the whole batch. Of n devices n/p share each op, so that the busiest rank has m/p times the seconds of one
micro-batch on n/p devices, on average over stages. These launch m/p times as many kernels, and their products split as
those of m/p micro-batches on n devices do that split the batch p times further: results that carry the batch are as
large, and others sum over as much. For m < p one micro-batch passes all stages, which takes as long as q = 1 at least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from passes.cost.cluster import Cluster
from passes.cost.compute import Work
from passes.cost.fusion import joined
from passes.cost.hardware import Device
from passes.cost.price import update_seconds, work_alone
from passes.cost.splits import Kind, Product, full_rate_s, kinds_of, least_products
from passes.cost.walk import Optimizer
from passes.ir.folded import Folded
from passes.ir.rule import Rule
from passes.rules import find_rule


@dataclass(frozen=True)
class LeastWork:
    """Lower bounds on the seconds of one pass of a program on the busiest of so many devices: of all ops forward,
    backward, and besides these in `either` pass, all of the longest op, and of each op in one copy of its region
    forward."""

    forward_s: float
    backward_s: float
    either_s: float
    longest_s: float
    ops_s: Mapping[str, float]


def least_work(folded: Folded, cluster: Cluster, devices: int) -> LeastWork:
    """Lower bounds on the work of one pass of `folded` on so many devices."""
    by_op = _least_phases(folded, cluster, devices)
    runs = [(count, by_op[op.key]) for op, count in folded.runs if op.key in by_op]
    return LeastWork(
        sum(count * least.forward_s for count, least in runs),
        sum(count * least.backward_s for count, least in runs),
        sum(count * least.either_s for count, least in runs),
        max((sum(least) for _, least in runs), default=0.0),
        {key: least.forward_s for key, least in by_op.items()},
    )


def least_once_s(folded: Folded, cluster: Cluster, optimizer: Optimizer, devices: int) -> float:
    """A lower bound on the seconds of a step of the program `folded`, of the whole batch, that its inputs and the
    optimizer take on the busiest of so many devices."""
    program = folded.program
    inputs = sum(item.type.size * item.type.dtype.itemsize for item in program.inputs) / cluster.host / devices
    updated = (item.type.size * (optimizer.dtype or item.type.dtype).itemsize for item in program.updated)
    return sum((update_seconds(size / devices, optimizer.states, cluster) for size in updated), inputs)


def least_step_s(folded: Folded, cluster: Cluster, optimizer: Optimizer, devices: int) -> float:
    """A lower bound on the seconds of every step of the program `folded`, of the whole batch, on so many devices."""
    computing = sum(least_by_op(folded, cluster, devices).values())
    return computing + least_once_s(folded, cluster, optimizer, devices)


def least_by_op(folded: Folded, cluster: Cluster, devices: int) -> dict[str, float]:
    """A lower bound on the seconds of each op, forward and backward, in all copies of its region, by key."""
    found: dict[str, float] = {}
    by_op = _least_phases(folded, cluster, devices)
    for op, count in folded.runs:
        if op.key in by_op:
            found[op.key] = found.get(op.key, 0.0) + count * sum(by_op[op.key])
    return found


class _LeastSeconds(NamedTuple):
    """Lower bounds on the seconds of an op, forward, backward, and besides these in either pass."""

    forward_s: float
    backward_s: float
    either_s: float = 0.0


class _Products(NamedTuple):
    """The products of an op in both passes, and the kinds of methods that split them, as `kinds_of` gives them without
    the factors that split a part of the multiplications: the `parts` of both passes that each of these splits."""

    forward: Sequence[Product]
    backward: Sequence[Product]
    kinds: Sequence[Kind] | None
    parts: Sequence[tuple[float, float]] = ()

    def least(self, phases: tuple[bool, bool], work: Work, device: Device, devices: int) -> float:
        """A lower bound on their seconds in these of the two passes together.

        A factor that splits a `part` of the multiplications into s leaves a rank s (1 - part + part / s) times as many
        as others would, and at least 2 - part times.
        """
        passes = (self.forward, self.backward)
        chosen = [each for products, is_asked in zip(passes, phases, strict=True) if is_asked for each in products]
        least = least_products(chosen, self.kinds, work, device, devices)
        for parts in self.parts:
            flops = sum(
                (2 - part) * sum(each.flops for each in products)
                for products, part, is_asked in zip(passes, parts, phases, strict=True)
                if is_asked
            )
            least = min(least, full_rate_s(flops, work, device) / devices)
        return least


def _least_phases(folded: Folded, cluster: Cluster, devices: int) -> dict[str, _LeastSeconds]:
    """A lower bound on the seconds of each op in one copy of its region, by key."""
    found: dict[str, _LeastSeconds] = {}
    fused = joined(folded)
    for op in folded.ops:
        own = fused.get(op.results[0]) if op.results else None
        work = work_alone(op, folded.types, folded.flowing, folded.program.rules, cluster, own)
        if work is not None:
            rule = find_rule(op, folded.types, folded.program.rules)
            if op.kind == "scaled_dot_product_attention":
                query, _, value = (folded.types[name].shape for name in op.operands[:3])
                work = replace(work, width=(query[-1] + value[-1]) / 2)
            if op.kind == "linear_cross_entropy":
                hidden, weight = (folded.types[name].shape for name in op.operands[:2])
                found[op.key] = _least_loss(work, hidden[0] * weight[0], cluster.device, devices)
            else:
                if rule is not None and rule.launched_for:
                    work = replace(work, kernels=(work.kernels[0] / devices, work.kernels[1] / devices))
                slots = [slot for slot, name in enumerate(op.operands) if name in folded.flowing]
                found[op.key] = _least_seconds(work, _products(work, slots, rule), cluster.device, devices)
    return found


def _products(work: Work, slots: Sequence[int], rule: Rule | None) -> _Products:
    """The products of an op whose gradients are those of the operands in these `slots`."""
    forward = [Product(work.forward, work.elements, None)] if work.forward else []
    gradients = zip(work.backward, work.gradients, slots, strict=True) if work.backward else ()
    backward = [Product(flops, elements, slot) for flops, elements, slot in gradients if flops]
    if rule is None or not forward:
        return _Products(forward, backward, None)
    return _Products(forward, backward, kinds_of(rule, rule.divided), tuple(rule.divided.values()))


def _least_loss(work: Work, logits: int, device: Device, devices: int) -> _LeastSeconds:
    """Those of a linear layer with its loss, of so many `logits`: its gradients are computed in either pass."""
    forward = Product(work.forward, logits, None)
    alone = _least_seconds(replace(work, backward=()), _Products([forward], [], None), device, devices)
    gradients = zip(work.backward, work.gradients, strict=True)
    either = (Product(flops, elements, None) for flops, elements in gradients if flops)
    return alone._replace(either_s=sum(least_products([each], None, work, device, devices) for each in either))


def _least_seconds(work: Work, products: _Products, device: Device, devices: int) -> _LeastSeconds:
    """A lower bound on the seconds of an op, forward and backward, on the busiest of so many devices; `work` is that of
    one alone."""
    launched = [kernels * device.launch for kernels in work.kernels]
    forward_s, backward_s, both_s = (
        products.least(phases, work, device, devices) for phases in ((True, False), (False, True), (True, True))
    )
    forward_s = launched[0] + max((work.reads + work.writes) / devices / device.stream, forward_s)
    backward_s = launched[1] + max(work.back / devices / device.stream, backward_s)
    return _LeastSeconds(forward_s, backward_s, max(0.0, sum(launched) + both_s - forward_s - backward_s))
