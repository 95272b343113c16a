"""A lower bound on the step time on a number of devices, whatever the mesh, the layouts and the configuration.

Every op is split evenly over all devices, and nothing is communicated. On a mesh of n devices the busiest rank has at
least 1/n of an op's multiplications, and 1/n of each of its operands and results; a step of several micro-batches
repeats the smaller kernels, and recompute adds to them. Parameters and inputs are split as well.

This holds for pipelines, too. Of n devices in p stages' ranks, n/p share each op: m micro-batches take m times the
seconds of one on n/p devices, of which the busiest rank has 1/p. For m >= p that is m/p >= 1 times as many kernels, and
the same bytes and multiplications with results that are no larger; for m < p one micro-batch passes all stages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import torch

from passes.cost.cluster import Cluster
from passes.cost.compute import Work, product_seconds
from passes.cost.fusion import joined
from passes.cost.hardware import Device
from passes.cost.price import update_seconds, work_alone
from passes.cost.walk import Optimizer
from passes.ir.folded import Folded
from passes.rules import find_rule


@dataclass(frozen=True)
class LeastWork:
    """Lower bounds on the seconds of one pass of a program on the busiest of so many devices: of all ops forward and
    backward, both of the longest op, and of each op in one copy of its region forward."""

    forward_s: float
    backward_s: float
    longest_s: float
    ops_s: Mapping[str, float]


def least_work(folded: Folded, cluster: Cluster, devices: int) -> LeastWork:
    """Lower bounds on the work of one pass of `folded` on so many devices."""
    by_op = _least_phases(folded, cluster, devices)
    runs = [(count, by_op[op.key]) for op, count in folded.runs if op.key in by_op]
    return LeastWork(
        sum(count * least.forward_s for count, least in runs),
        sum(count * least.backward_s for count, least in runs),
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
    """Lower bounds on the seconds of an op, forward, backward, and in either pass."""

    forward_s: float
    backward_s: float
    either_s: float = 0.0


def _least_phases(folded: Folded, cluster: Cluster, devices: int) -> dict[str, _LeastSeconds]:
    """A lower bound on the seconds of each op in one copy of its region, by key."""
    found: dict[str, _LeastSeconds] = {}
    fused = joined(folded)
    for op in folded.ops:
        own = fused.get(op.results[0]) if op.results else None
        work = work_alone(op, folded.types, folded.flowing, folded.program.rules, cluster, own)
        if work is not None:
            if op.kind == "scaled_dot_product_attention":
                query, _, value = (folded.types[name].shape for name in op.operands[:3])
                work = replace(work, width=(query[-1] + value[-1]) / 2)
            if op.kind == "linear_cross_entropy":
                hidden, weight = (folded.types[name].shape for name in op.operands[:2])
                found[op.key] = _least_loss(work, hidden[0] * weight[0], cluster.device, devices)
            else:
                rule = find_rule(op, folded.types, folded.program.rules)
                if rule is not None and rule.launched_for:
                    work = replace(work, kernels=(work.kernels[0] / devices, work.kernels[1] / devices))
                found[op.key] = _least_seconds(work, cluster.device, devices)
    return found


def _least_loss(work: Work, logits: int, device: Device, devices: int) -> _LeastSeconds:
    """Those of a linear layer with its loss, of so many `logits`: its gradients are computed in either pass."""
    alone = _least_seconds(replace(work, elements=logits, backward=(), gradients=()), device, devices)
    gradients = zip(work.backward, work.gradients, strict=True)
    either = sum(_multiplying(flops, elements, work, device, devices) for flops, elements in gradients if flops)
    return alone._replace(either_s=either)


def _least_seconds(work: Work, device: Device, devices: int) -> _LeastSeconds:
    """A lower bound on the seconds of an op, forward and backward, on the busiest of so many devices; `work` is that of
    one alone."""
    backward = zip(work.backward, work.gradients, strict=True)
    forward = [(work.forward, work.elements)]

    def least(touched: float, products: Iterable[tuple[float, float]], kernels: float) -> float:
        multiplied = sum(_multiplying(*product, work, device, devices) for product in products)
        return kernels * device.launch + max(touched / devices / device.stream, multiplied)

    return _LeastSeconds(
        least(work.reads + work.writes, forward, work.kernels[0]), least(work.back, backward, work.kernels[1])
    )


def _multiplying(flops: float, elements: float, work: Work, device: Device, devices: int) -> float:
    if not flops:
        return 0.0
    if work.width:
        # Either a fused kernel, whose heads are at most as wide, or products in single precision.
        single = work.dtype if work.dtype.itemsize >= torch.float32.itemsize else torch.float32
        fused = (1 + device.softmax / work.width) / (device.attention * device.peak(work.dtype))
        return flops / devices * min(fused, 1 / device.rate(single))
    # Seconds of a product are convex in the elements of its result, of which a rank has from 1/devices to all.
    best = sqrt(flops / devices * device.fill / (2 * device.depth)) if device.depth else elements
    held = min(max(best, elements / devices), elements)
    return product_seconds(flops / devices, held, work.dtype, device, work.unaligned, work.batched)
