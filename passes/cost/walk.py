"""Walk a lowered program and add up what it costs: the step time that the plan predicts."""

from collections.abc import Set
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.communication import redistribution_seconds
from passes.cost.price import op_seconds, update_seconds
from passes.ir.choices import Strategy
from passes.ir.layout import R, local_shape
from passes.ir.lowered import Body, Change, Compute, Loop, Lowered
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Region
from passes.rules import find_rule
from passes.rules.rule import replicated
from passes.rules.strategies import named_choices, subject


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step, by what they are spent on."""

    forward_compute: float = 0.0
    backward_compute: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    inputs: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        compute = self.forward_compute + self.backward_compute
        communication = self.forward_communication + self.backward_communication
        return compute + communication + self.inputs + self.optimizer

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, name) * times for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Optimizer:
    """How many tensors of its size an optimizer keeps per parameter, and in which dtype (None: the parameter's)."""

    states: int
    dtype: torch.dtype | None = None


def walk(lowered: Lowered, flowing: Set[str], cluster: Cluster, mesh: Mesh, optimizer: Optimizer) -> Seconds:
    """Seconds of one step; `flowing` are the values that a gradient flows through."""
    total = _body(lowered.body, flowing, cluster, mesh)
    for item in lowered.program.inputs:
        size = prod(local_shape(item.type.shape, lowered.inputs[item.name], mesh)) * item.type.dtype.itemsize
        total += Seconds(inputs=size / cluster.host)
    read = {name for op in lowered.program.ops for name in op.operands}
    for parameter in lowered.program.parameters:
        if parameter.trainable and parameter.name in read:
            shape = local_shape(parameter.type.shape, lowered.parameters[parameter.name], mesh)
            itemsize = (optimizer.dtype or parameter.type.dtype).itemsize
            total += Seconds(optimizer=update_seconds(prod(shape) * itemsize, optimizer.states, cluster))
    return total


def seconds_on_one(folded: Folded, cluster: Cluster) -> float:
    """Seconds of computation, forward and backward, that one device would take for all of a step."""
    one = Mesh(("one",), (1,))
    total = 0.0
    for item in folded.items:
        ops, count = (item.ops, item.count) if isinstance(item, Region) else ((item,), 1)
        for op in ops:
            about = subject(op, find_rule(op, folded.types), folded.types, folded.flowing, set(), set())
            choice = replicated(len(op.operands), len(op.results), R)
            strategy = Strategy((choice.name,), ((R,),) * len(op.operands), ((R,),) * len(op.results))
            total += count * sum(op_seconds(about, (choice,), strategy, cluster, one))
    return total


def _body(body: Body, flowing: Set[str], cluster: Cluster, mesh: Mesh) -> Seconds:
    total = Seconds()
    for statement in body.statements:
        if isinstance(statement, Compute):
            total += _compute(statement, body, flowing, cluster, mesh)
        elif isinstance(statement, Change):
            total += _change(statement, cluster, mesh)
        else:
            total += _loop(statement, flowing, cluster, mesh)
    return total


def _compute(statement: Compute, body: Body, flowing: Set[str], cluster: Cluster, mesh: Mesh) -> Seconds:
    op = statement.whole
    types = {name: body.types[name] for name in (*op.operands, *op.results)}
    flows = {name for name in types if name.partition("~")[0] in flowing}
    rule = find_rule(op, types)
    about = replace(subject(op, rule, types, flows, set(), set()), copies=statement.copies)
    choices = named_choices(about, statement.strategy.methods, mesh)
    assert choices is not None
    forward, backward = op_seconds(about, choices, statement.strategy, cluster, mesh)
    return Seconds(forward_compute=forward, backward_compute=backward)


def _change(statement: Change, cluster: Cluster, mesh: Mesh) -> Seconds:
    size, gradient_size = statement.type.dtype.itemsize, statement.gradient_itemsize
    forward, backward = redistribution_seconds(statement.steps, size, gradient_size, statement.gradient, cluster, mesh)
    return Seconds(
        forward_communication=forward, backward_communication=backward + (forward if statement.again else 0.0)
    )


def _loop(loop: Loop, flowing: Set[str], cluster: Cluster, mesh: Mesh) -> Seconds:
    total = _body(loop.body, flowing, cluster, mesh) * loop.region.count
    for change in loop.between:
        if change is not None:
            total += _change(change, cluster, mesh) * (loop.region.count - 1)
    return total
