"""Walk a lowered program and add up its costs: the step time that the plan predicts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.communication import joint_seconds, redistribution_seconds
from passes.cost.fusion import Fused, joined
from passes.cost.price import cover, op_seconds, seconds_alone, update_seconds
from passes.cost.step import BlockSeconds, Seconds, compose
from passes.ir.configuration import Configuration
from passes.ir.layout import local_shape
from passes.ir.lowered import Body, Compute, Loop, Lowered, Redistribution
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Region
from passes.rules import find_rule
from passes.rules.strategies import named_choices, subject


@dataclass(frozen=True)
class Optimizer:
    """The number of tensors that an optimizer keeps per parameter, and their dtype (None: the parameter's)."""

    states: int
    dtype: torch.dtype | None = None


def walk(
    lowered: Lowered, folded: Folded, cluster: Cluster, optimizer: Optimizer, configuration: Configuration
) -> Seconds:
    """Seconds of one step of which `lowered` is a micro-batch, lowered from `folded`."""
    inputs = update = 0.0
    mesh = configuration.mesh
    for item in lowered.program.inputs:
        size = prod(local_shape(item.type.shape, lowered.inputs[item.name], mesh)) * item.type.dtype.itemsize
        inputs += size / cluster.host
    read = {name for op in lowered.program.ops for name in op.operands}
    for parameter in lowered.program.parameters:
        if parameter.trainable and parameter.name in read:
            shape = local_shape(parameter.type.shape, lowered.parameters[parameter.name], mesh)
            itemsize = (optimizer.dtype or parameter.type.dtype).itemsize
            update += update_seconds(prod(shape) * itemsize, optimizer.states, cluster)
    parts = lowered_parts(lowered, folded, cluster, mesh)
    return compose(parts, configuration, configuration.micro_batches * inputs, update)


def lowered_parts(lowered: Lowered, folded: Folded, cluster: Cluster, mesh: Mesh) -> tuple[BlockSeconds, ...]:
    """Seconds of the parts of a lowered program: each region, and the code before, between and after them."""
    parts = []
    outside, fused = BlockSeconds(), joined(folded)
    for statement in lowered.body.statements:
        if isinstance(statement, Loop):
            parts += [outside, _loop(statement, folded, cluster, mesh, fused)]
            outside = BlockSeconds()
        else:
            outside += _statement(statement, lowered.body, folded, cluster, mesh, "none", fused)
    return (*parts, outside)


def seconds_on_one(folded: Folded, cluster: Cluster) -> float:
    """Seconds of computation of a whole step on one device, forward and backward."""
    total, fused = 0.0, joined(folded)
    for item in folded.items:
        ops, count = (item.ops, item.count) if isinstance(item, Region) else ((item,), 1)
        for op in ops:
            own = fused.get(op.results[0]) if op.results else None
            total += count * sum(seconds_alone(op, folded.types, folded.flowing, folded.program.rules, cluster, own))
    return total


def _statement(
    statement: Compute | Redistribution,
    body: Body,
    folded: Folded,
    cluster: Cluster,
    mesh: Mesh,
    recompute: str,
    fused: Mapping[str, Fused],
) -> BlockSeconds:
    if isinstance(statement, Redistribution):
        return _change(statement, cluster, mesh, recompute)
    op = statement.whole
    types = {name: body.types[name] for name in (*op.operands, *op.results)}
    flows = {name for name in types if name.partition("~")[0] in folded.flowing}
    rule = find_rule(op, types, folded.program.rules)
    about = replace(subject(op, rule, types, flows, set(), set()), copies=statement.copies)
    choices = named_choices(about, statement.strategy.methods, mesh)
    assert choices is not None
    own = fused.get(op.results[0].partition("~")[0]) if op.results else None
    forward, backward = op_seconds(about, choices, statement.strategy, cluster, mesh, own)
    again = forward if recompute == "full" or (recompute == "selective" and statement.recomputed) else 0.0
    return BlockSeconds(forward_compute=forward, backward_compute=backward, recompute=again)


def _change(statement: Redistribution, cluster: Cluster, mesh: Mesh, recompute: str) -> BlockSeconds:
    size, gradient_size, joint = statement.type.dtype.itemsize, statement.gradient_itemsize, statement.exchanged
    forward, backward = redistribution_seconds(
        statement.steps[len(joint) :], size, gradient_size, statement.gradient, cluster, mesh, statement.joined
    )
    if statement.parameter and not statement.inline:
        exchange = sum(joint_seconds(step, size, cluster, mesh) for step in joint)
        if statement.gradient:
            backward += sum(joint_seconds(step.backward, gradient_size, cluster, mesh) for step in joint)
        # A copy that runs again gathers its parameters again.
        is_again = recompute == "full" or statement.regathered
        return BlockSeconds(
            exchange=exchange, gather=forward, gather_again=forward if is_again else 0.0, reduce=backward
        )
    again = forward * (statement.regathered + (recompute == "full"))
    return BlockSeconds(forward_communication=forward, backward_communication=backward + again)


def _loop(loop: Loop, folded: Folded, cluster: Cluster, mesh: Mesh, fused: Mapping[str, Fused]) -> BlockSeconds:
    count, recompute = loop.region.count, loop.recompute
    ideal = cover(loop.region.ops, folded.types, folded.flowing, folded.program.rules, cluster, mesh.size, count, fused)
    total = BlockSeconds(count, cover=ideal.forward, cover_again=ideal.again(recompute))
    for statement in loop.body.statements:
        assert not isinstance(statement, Loop)
        total += _statement(statement, loop.body, folded, cluster, mesh, recompute, fused) * count
    for change in loop.between:
        if change is not None:
            total += _change(change, cluster, mesh, "none") * (count - 1)
    return total
