"""Nodes of ops: the cost and memory of each of their strategies."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial

from passes.cost.cluster import Cluster, Device
from passes.cost.fusion import Fused
from passes.cost.price import OpPrices, OpSeconds, workspace
from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.ir.program import Saved
from passes.rules.cheap import Cheap, is_cheap
from passes.rules.strategies import Choices, OpContext
from passes.strategies.analysis import Analysis, Placed, Sizes, is_viewing


def is_negligible(context: OpContext, depends: Set[str], device: Device) -> bool:
    """Whether an op on positions or masks takes no longer than a kernel launch when it is not split, so that splitting
    gains nothing. `depends` are the tensors that depend on the batch or on a parameter."""
    if context.flows or any(name in depends for name in context.op.operands):
        return False
    touched = sum(type.bytes for type in (*context.operands, *context.results))
    return touched / device.bandwidth <= device.launch


@dataclass(frozen=True)
class OpCosts:
    """Costs of one run of an op under each of its `strategies`: `seconds`, bytes of `results`, of the `copies` that
    autograd saves, and of the workspace of the backward pass (`transient`). They depend on the `context`, the `saved`
    tensors, and those that are `fused`."""

    context: OpContext
    saved: Sequence[Saved]
    fused: Fused | None
    strategies: Mapping[Strategy, Choices]
    seconds: Sequence[OpSeconds]
    results: Sequence[float]
    copies: Sequence[float]
    transient: Sequence[float]

    def are_of(self, analysis: Analysis, placed: Placed) -> bool:
        """Whether these are the costs of `placed` too, an op that does the same in an equal layer."""
        context = replace(self.context, op=placed.op)
        return (context, self.saved, self.fused) == _basis(analysis, placed)


def op_costs(
    analysis: Analysis, placed: Placed, strategies: Mapping[Strategy, Choices], sizes: Sizes, cluster: Cluster
) -> OpCosts:
    """The costs of an op with the given `strategies` and their choices on every axis."""
    op = placed.op
    context, saved, fused = _basis(analysis, placed)
    prices = OpPrices(context, cluster, sizes.mesh, fused)
    needs = [
        workspace(context, choices, strategy, sizes.mesh, cluster.device.type)
        for strategy, choices in strategies.items()
    ]
    copied = [item.index for item in saved if item.copy]
    copies = [sizes.total(op.operands, strategy.operands, copied) for strategy in strategies]
    return OpCosts(
        context,
        saved,
        fused,
        strategies,
        [prices.seconds(choices, strategy) for strategy, choices in strategies.items()],
        [sizes.total(op.results, strategy.results) for strategy in strategies],
        [size + kept for size, (kept, _) in zip(copies, needs, strict=True)],
        [backward for _, backward in needs],
    )


def _basis(analysis: Analysis, placed: Placed) -> tuple[OpContext, Sequence[Saved], Fused | None]:
    """All that the costs of an op depend on: its context, its saved tensors, and those that are fused."""
    key = placed.op.key
    return analysis.contexts[key], analysis.saved[key], analysis.fused.get(placed.op.results[0])


def op_node(analysis: Analysis, placed: Placed, costs: OpCosts) -> Node:
    """The node of an op with these costs."""
    op, count = placed.op, placed.count
    forms = [tuple(choice.form for choice in choices) for choices in costs.strategies.values()]
    return Node(
        op.key,
        "op",
        op.results[0],
        count,
        placed.block,
        tuple(costs.strategies),
        tuple(count * sum(each) for each in costs.seconds),
        tuple(StrategyBytes(transient=backward) for backward in costs.transient),
        any(item.result for item in costs.saved),
        tuple(count * size for size in costs.results),
        tuple(count * size for size in costs.copies),
        tuple(count * (each.forward + each.forward_communication) for each in costs.seconds),
        _light(analysis, placed, forms),
        analysis.cheap[op.key] is not Cheap.NEVER,
        op.key in analysis.second,
        is_viewing(placed, analysis.strided),
    )


def _light(analysis: Analysis, placed: Placed, forms: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
    """Whether selective recompute recomputes an op, for each of its strategies, by the local forms that it runs."""
    op = placed.op
    if analysis.cheap[op.key] is Cheap.NEVER:
        return (False,) * len(forms)
    is_light = cache(partial(is_cheap, op, placed.rule, analysis.contexts[op.key].copies))
    return tuple(is_light(each) for each in forms)
