"""Seconds of one micro-batch, block by block, read from a lowered program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from benchmarks.replay.eager import Beyond, beyond, sums
from benchmarks.replay.graphs import CONTEXT, Forced
from passes.cost.cluster import Cluster
from passes.cost.compute import Work, product_seconds
from passes.cost.fusion import Fused, fusion
from passes.cost.price import OpPrices
from passes.cost.step_costs import StepCosts
from passes.ir.layout import local_shape
from passes.ir.lowered import Body, Compute, Loop, Redistribution
from passes.rules import written_rule
from passes.rules.strategies import named_choices, op_context


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a block on one rank, one copy of it, for one micro-batch.

    Forward seconds are told apart by what may be computed again: products with weights, the attention core, and all
    else. `weights` is the part of `backward` that makes the gradients of the parameters of products. `parameters` are
    the elements that one rank holds when they are gathered over the data axis, `tensors` how many matrices they are in.
    """

    products: float = 0.0
    core: float = 0.0
    rest: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    send_forward: float = 0.0
    send_backward: float = 0.0
    parameters: float = 0.0
    tensors: int = 1

    @property
    def forward(self) -> float:
        """Seconds of computation in the forward pass."""
        return self.products + self.core + self.rest

    def __add__(self, other: "LayerSeconds") -> "LayerSeconds":
        return LayerSeconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Parts:
    """The blocks of a model: what stands before the layers, one layer, and what stands after them."""

    before: LayerSeconds
    layer: LayerSeconds
    after: LayerSeconds


def parts_of(forced: Forced, cluster: Cluster, compiled: bool) -> Parts:
    """Price every statement of `forced` on `cluster`; with `compiled` chains of cheap ops are fused."""
    fused = _fusion(forced) if compiled else {}
    statements = forced.stage.body.statements
    loop = next(number for number, item in enumerate(statements) if isinstance(item, Loop))
    region = statements[loop]
    assert isinstance(region, Loop)
    layer = _body(region.body, forced, cluster, fused)
    for change in region.between:
        if change is not None:
            layer += _change(change, forced, cluster)
    body = forced.stage.body
    before = _body(replace(body, statements=statements[:loop]), forced, cluster, fused)
    after = _body(replace(body, statements=statements[loop + 1 :]), forced, cluster, fused)
    own, rest = parameter_elements(forced)
    return Parts(
        replace(before, parameters=rest / 2, tensors=1),
        replace(layer, parameters=own, tensors=_matrices(forced)),
        replace(after, parameters=rest / 2, tensors=1),
    )


@cache
def _fusion(forced: Forced) -> Mapping[str, Fused]:
    return fusion(forced.folded)


@cache
def _matrices(forced: Forced) -> int:
    """The number of weight matrices of a layer."""
    region = forced.folded.regions[0]
    shapes = {item.name: item.type.shape for item in forced.stage.program.parameters}
    return sum(len(shapes[names[0]]) > 1 for names in region.owned.values() if names[0] in shapes)


@cache
def parameter_elements(forced: Forced) -> tuple[float, float]:
    """Elements of the parameters on one rank: of one layer, and of all that is outside the layers."""
    region = forced.folded.regions[0]
    owned = {name for names in region.owned.values() for name in names}
    inside = outside = 0.0
    for item in forced.stage.program.parameters:
        size = prod(local_shape(item.type.shape, forced.stage.parameters[item.name], forced.mesh))
        if item.name in owned:
            inside += size
        else:
            outside += size
    return inside / region.count, outside


def _body(body: Body, forced: Forced, cluster: Cluster, fused: Mapping[str, Fused]) -> LayerSeconds:
    total = LayerSeconds() if fused else _beyond(sums(body, forced), cluster)
    for statement in body.statements:
        if isinstance(statement, Compute):
            total += _compute(statement, body, forced, cluster, fused)
            if not fused:
                total += _beyond(beyond(statement, body, forced), cluster)
        elif isinstance(statement, Redistribution):
            total += _change(statement, forced, cluster)
    return total


def _beyond(found: Beyond, cluster: Cluster) -> LayerSeconds:
    device = cluster.device
    backward = found.backward / device.stream + found.kernels * device.launch
    return LayerSeconds(rest=found.forward / device.stream, backward=backward)


def _compute(
    statement: Compute, body: Body, forced: Forced, cluster: Cluster, fused: Mapping[str, Fused]
) -> LayerSeconds:
    op = statement.whole
    types = {name: body.types[name] for name in (*op.operands, *op.results)}
    flows = {name for name in types if name.partition("~")[0] in forced.folded.flowing}
    rule = written_rule(op, types)
    context = replace(op_context(op, rule, types, flows, set(), set()), copies=statement.copies)
    choices = named_choices(context, statement.strategy.methods, forced.mesh)
    assert choices is not None
    joined = fused.get(op.results[0].partition("~")[0])
    prices = OpPrices(context, cluster, forced.mesh, joined)
    found = prices.seconds(choices, statement.strategy)
    forward, backward = found.forward + found.forward_communication, found.backward + found.backward_communication
    kind = "products" if op.kind in ("linear", "addmm") else "core" if _is_core(statement) else "rest"
    weights = _weights(prices.work(prices.parts(choices, statement.strategy)), op.operands, prices, forced)
    return replace(LayerSeconds(backward=backward, weights=weights), **{kind: forward})


def _weights(work: Work, operands: Sequence[str], prices: OpPrices, forced: Forced) -> float:
    """Seconds of the products that make the gradients of an op's parameters."""
    if not work.backward:
        return 0.0
    slots = [slot for slot, flows in enumerate(prices.context.flowing_operands) if flows]
    return sum(
        product_seconds(flops, elements, work.dtype, prices.cluster.device, work.unaligned, work.batched)
        for slot, flops, elements in zip(slots, work.backward, work.gradients, strict=True)
        if flops and operands[slot].partition("~")[0] in _owned(forced)
    )


@cache
def _owned(forced: Forced) -> frozenset[str]:
    """The names of all parameters: those outside of regions, and those of a region's copies as its ops read them."""
    inside = {name for region in forced.folded.regions for name in region.owned}
    return frozenset(inside | {item.name for item in forced.stage.program.parameters})


_CORE = ("scaled_dot_product_attention", "matmul", "softmax", "dropout", "mul", "add", "where", "to", "div")


def _is_core(statement: Compute) -> bool:
    """Whether the op is of the attention core: it stands in the attention module itself and makes or reads scores."""
    op = statement.whole
    if op.kind == "scaled_dot_product_attention":
        return True
    return op.kind in _CORE and op.module.endswith((".attn", ".self_attn"))


def _change(statement: Redistribution, forced: Forced, cluster: Cluster) -> LayerSeconds:
    size, gradient = statement.type.dtype.itemsize, statement.gradient_itemsize
    # What the copies of a parameter exchange over the context axis is counted with the data axis.
    context = forced.mesh.index(CONTEXT)
    steps = tuple(step for step in statement.steps if not (statement.parameter and step.span == context))
    costs = StepCosts(cluster, forced.mesh)
    forward = costs.total(steps, size)
    backward = costs.total([step.backward for step in steps], gradient) if statement.gradient else 0.0
    return LayerSeconds(send_forward=forward, send_backward=backward + (forward if statement.regathered else 0.0))
