"""Walk the statements of a pipeline stage and add up their costs: the step time that the plan predicts."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.fusion import joined
from passes.cost.price import cover, op_seconds, update_seconds
from passes.cost.step import BlockSeconds, Phases, Seconds, compose, phases
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Cover
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded, Region
from passes.ir.layout import Layout, local_shape
from passes.ir.lowered import Body, Compute, Loop, Redistribution, Stage
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.rules import find_rule
from passes.rules.strategies import Choice, OpContext, named_choices, op_context


@dataclass(frozen=True)
class Optimizer:
    """The number of tensors that an optimizer keeps per parameter, and their dtype (None: the parameter's)."""

    states: int
    dtype: torch.dtype | None = None


def walk(stage: Stage, folded: Folded, cluster: Cluster, optimizer: Optimizer, configuration: Configuration) -> Seconds:
    """Seconds of one step in which `stage`, lowered from `folded`, runs each micro-batch."""
    return stage_seconds(stage, Prices(folded, cluster, configuration.mesh), optimizer, configuration)[0]


def stage_seconds(
    stage: Stage, prices: "Prices", optimizer: Optimizer, configuration: Configuration
) -> tuple[Seconds, Phases]:
    """Seconds of one step in which `stage` runs each micro-batch: by category, and by the phase of the step that it
    spends them in."""
    parts = stage_parts(stage, prices)
    once = _once(stage, prices.costs.cluster, optimizer, configuration)
    return compose(parts, configuration, *once), phases(parts, configuration, *once)


def _once(stage: Stage, cluster: Cluster, optimizer: Optimizer, configuration: Configuration) -> tuple[float, float]:
    """Seconds of a step for loading the inputs, and for the optimizer."""
    mesh = configuration.mesh

    def size(type: TensorType, layout: Layout, dtype: torch.dtype | None = None) -> float:
        """Bytes of this rank's part of a tensor, in another dtype if one is given."""
        return prod(local_shape(type.shape, layout, mesh)) * (dtype or type.dtype).itemsize

    loaded = (size(item.type, stage.inputs[item.name]) for item in stage.program.inputs)
    updated = (size(item.type, stage.parameters[item.name], optimizer.dtype) for item in stage.program.updated)
    inputs = sum((bytes / cluster.host for bytes in loaded), 0.0)
    update = sum((update_seconds(bytes, optimizer.states, cluster) for bytes in updated), 0.0)
    return configuration.micro_batches * inputs, update


def block_seconds(stage: Stage, folded: Folded, cluster: Cluster, configuration: Configuration) -> list[float]:
    """Seconds of a step in each part of `stage_parts`; with those for inputs and the optimizer they make the step."""
    parts = stage_parts(stage, Prices(folded, cluster, configuration.mesh))
    return [compose([part], configuration, 0.0, 0.0).total for part in parts]


class Prices:
    """Seconds of the ops and the overlap budgets of the regions of stages that are lowered from `folded` for one mesh.
    Each is computed once, for all stages that have the same op with the same strategy, or the same region."""

    def __init__(self, folded: Folded, cluster: Cluster, mesh: Mesh) -> None:
        self.folded, self.costs, self.fused = folded, StepCosts(cluster, mesh), joined(folded)
        # The keys are identities, so the objects are kept with what was computed of them.
        self._ops: dict[Hashable, tuple[Compute, BlockSeconds]] = {}
        self._covers: dict[Hashable, tuple[Region, Cover]] = {}

    def of_op(self, statement: Compute, body: Body, repeated: bool) -> BlockSeconds:
        """Seconds of an op, whose forward pass is run twice if it is `repeated`."""
        key = id(statement.whole), id(statement.strategy), statement.copies, statement.deferred, repeated
        if key not in self._ops:
            self._ops[key] = statement, _compute(statement, body, self, float(repeated))
        return self._ops[key][1]

    def cover(self, region: Region, count: int) -> Cover:
        """The overlap budget of `count` copies of a region."""
        key = id(region), count
        if key not in self._covers:
            folded, cluster, devices = self.folded, self.costs.cluster, self.costs.mesh.size
            rules = folded.program.rules
            found = cover(region.ops, folded.types, folded.flowing, rules, cluster, devices, count, self.fused)
            self._covers[key] = region, found
        return self._covers[key][1]


def stage_parts(stage: Stage, prices: Prices) -> tuple[BlockSeconds, ...]:
    """Seconds of the parts of a stage: each region, and the code before, between and after them."""
    parts, outside = [], BlockSeconds()
    for statement, seconds in zip(stage.body.statements, statement_seconds(stage, prices), strict=True):
        if isinstance(statement, Loop):
            parts += [outside, seconds]
            outside = BlockSeconds()
        else:
            outside += seconds
    return (*parts, outside)


def statement_seconds(stage: Stage, prices: Prices) -> list[BlockSeconds]:
    """Seconds of each statement of a stage; those of a loop are of all copies together."""
    together = _copies_together(stage)
    return [
        replace(_loop(statement, prices), count=together.get(number, len(statement.copies)))
        if isinstance(statement, Loop)
        else _statement(statement, stage.body, prices, "none")
        for number, statement in enumerate(stage.body.statements)
    ]


def _copies_together(stage: Stage) -> dict[int, int]:
    """For each loop over copies that have a level of recompute of their own, by its number among the statements, the
    number of copies of the region that run one after the other, with those of its other loops."""
    counts: dict[str, int] = {}
    loops = [
        (number, item) for number, item in enumerate(stage.body.statements) if isinstance(item, Loop) and item.title
    ]
    for _, loop in loops:
        counts[loop.region.name] = counts.get(loop.region.name, 0) + len(loop.copies)
    return {number: counts[loop.region.name] for number, loop in loops}


def _statement(statement: Compute | Redistribution, body: Body, prices: Prices, recompute: str) -> BlockSeconds:
    if isinstance(statement, Redistribution):
        return _redistribution(statement, prices.costs, recompute)
    return prices.of_op(statement, body, recompute == "full" or statement.recomputed)


def _compute(statement: Compute, body: Body, prices: Prices, repeated: float) -> BlockSeconds:
    op, folded, costs = statement.whole, prices.folded, prices.costs
    types = {name: body.types[name] for name in (*op.operands, *op.results)}
    flows = {name for name in types if name.partition("~")[0] in folded.flowing}
    rule = find_rule(op, types, folded.program.rules)
    context = replace(op_context(op, rule, types, flows, set(), set()), copies=statement.copies)
    choices = named_choices(context, statement.strategy.methods, costs.mesh)
    assert choices is not None
    own = prices.fused.get(op.results[0].partition("~")[0]) if op.results else None
    found = op_seconds(context, choices, statement.strategy, costs.cluster, costs.mesh, own)
    weight = found.backward * _weight_share(context, choices, statement, costs) if statement.deferred else 0.0
    return BlockSeconds(
        forward_compute=found.forward,
        backward_compute=found.backward,
        forward_communication=found.forward_communication,
        backward_communication=found.backward_communication + repeated * found.forward_communication,
        recompute=repeated * found.forward,
        weight=weight,
    )


def _weight_share(context: OpContext, choices: Sequence[Choice], statement: Compute, costs: StepCosts) -> float:
    """The part of the backward seconds of a product that go into the gradient of its weight, as each of its products
    takes alone."""
    is_weight = [name == statement.deferred[0] for name in statement.op.operands]
    weight, other = (
        op_seconds(
            replace(context, flowing_operands=tuple(map(own.__eq__, is_weight))),
            choices,
            statement.strategy,
            costs.cluster,
            costs.mesh,
        ).backward
        for own in (True, False)
    )
    return weight / (weight + other)


def _redistribution(statement: Redistribution, costs: StepCosts, recompute: str) -> BlockSeconds:
    size, gradient_size, joint = statement.type.dtype.itemsize, statement.gradient_itemsize, statement.exchanged
    steps = statement.steps[len(joint) :]
    forward, backward = costs.total(steps, size, statement.sharing), 0.0
    if statement.gradient:
        backward = costs.total([step.backward for step in steps], gradient_size, statement.sharing)
    if statement.parameter and not statement.inline:
        exchange = costs.joint_total(joint, size)
        if statement.gradient:
            backward += costs.joint_total([step.backward for step in joint], gradient_size)
        # A copy that is recomputed gathers its parameters a second time.
        is_regathered = recompute == "full" or statement.regathered
        return BlockSeconds(
            exchange=exchange, gather=forward, regather=forward if is_regathered else 0.0, reduce=backward
        )
    repeated = forward * (statement.regathered + (recompute == "full"))
    return BlockSeconds(forward_communication=forward, backward_communication=backward + repeated)


def _loop(loop: Loop, prices: Prices) -> BlockSeconds:
    count, recompute = len(loop.copies), loop.recompute
    ideal = prices.cover(loop.region, count)
    total = BlockSeconds(count, cover=ideal.forward, cover_backward=ideal.again(recompute))
    for statement in loop.body.statements:
        assert not isinstance(statement, Loop)
        total += _statement(statement, loop.body, prices, recompute) * count
    for change in loop.between:
        if change is not None:
            total += _redistribution(change, prices.costs, "none") * (count - 1)
    if total.weight:
        # The backward pass has less computation to hide traffic with.
        left = 1 - total.weight / (total.backward_compute + total.recompute)
        total = replace(total, cover_backward=left * total.cover_backward)
    return total
