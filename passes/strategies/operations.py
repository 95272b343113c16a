"""Nodes of ops: the cost and memory of each of their strategies."""

from collections.abc import Mapping, Sequence, Set
from functools import cache, partial

from passes.cost.cluster import Cluster, Device
from passes.cost.price import OpPrices
from passes.cost.workspace import workspace
from passes.ir.choices import Node, Strategy, StrategyBytes
from passes.rules.cheap import Cheap, is_cheap
from passes.rules.strategies import Choices, OpContext
from passes.strategies.analysis import Analysis
from passes.strategies.places import Placed
from passes.strategies.saved import is_viewing
from passes.strategies.sizes import Sizes


def is_negligible(context: OpContext, depends: Set[str], device: Device) -> bool:
    """Whether an op on positions or masks takes no longer than a kernel launch when it is not split, so that splitting
    gains nothing. `depends` are the tensors that depend on the batch or on a parameter."""
    if context.flows or any(name in depends for name in context.op.operands):
        return False
    touched = sum(type.bytes for type in (*context.operands, *context.results))
    return touched / device.bandwidth <= device.launch


def op_node(
    analysis: Analysis, placed: Placed, strategies: Mapping[Strategy, Choices], sizes: Sizes, cluster: Cluster
) -> Node:
    """The node of an op with the given `strategies` and their choices on every axis."""
    op, count = placed.op, placed.count
    context, saved = analysis.contexts[op.key], analysis.saved[op.key]
    prices = OpPrices(context, cluster, sizes.mesh, analysis.fused.get(op.results[0]))
    seconds = [prices.seconds(choices, strategy) for strategy, choices in strategies.items()]
    forms = [tuple(choice.form for choice in choices) for choices in strategies.values()]
    results = [sizes.total(op.results, strategy.results) for strategy in strategies]
    needs = [
        workspace(context, choices, strategy, sizes.mesh, cluster.device.type)
        for strategy, choices in strategies.items()
    ]
    copied = [item.index for item in saved if item.copy]
    copies = [sizes.total(op.operands, strategy.operands, copied) for strategy in strategies]
    return Node(
        op.key,
        "op",
        op.results[0],
        count,
        placed.block,
        tuple(strategies),
        tuple(count * sum(each) for each in seconds),
        tuple(StrategyBytes(transient=backward) for _, backward in needs),
        any(item.result for item in saved),
        tuple(count * size for size in results),
        tuple(count * (size + kept) for size, (kept, _) in zip(copies, needs, strict=True)),
        tuple(count * (each.forward + each.forward_communication) for each in seconds),
        _light(analysis, placed, forms),
        analysis.cheap[op.key] is not Cheap.NEVER,
        is_viewing(placed, analysis.strided),
    )


def _light(analysis: Analysis, placed: Placed, forms: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
    """Whether selective recompute recomputes an op, for each of its strategies, by the local forms that it runs."""
    op = placed.op
    if analysis.cheap[op.key] is Cheap.NEVER:
        return (False,) * len(forms)
    is_light = cache(partial(is_cheap, op, placed.rule, analysis.contexts[op.key].copies))
    return tuple(is_light(each) for each in forms)
