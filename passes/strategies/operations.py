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


def is_negligible(about: OpContext, depends: Set[str], device: Device) -> bool:
    """Whether an op on positions or masks takes no longer than a kernel launch when it is not split, so that splitting
    gains nothing. `depends` are the tensors that depend on the batch or on a parameter."""
    if about.flows or any(name in depends for name in about.op.operands):
        return False
    touched = sum(type.bytes for type in (*about.operands, *about.results))
    return touched / device.bandwidth <= device.launch


def op_node(
    known: Analysis, placed: Placed, strategies: Mapping[Strategy, Choices], sizes: Sizes, cluster: Cluster
) -> Node:
    """The node of an op with the given `strategies` and their choices on every axis."""
    op, count = placed.op, placed.count
    about, saved = known.subjects[op.key], known.saved[op.key]
    prices = OpPrices(about, cluster, sizes.mesh, known.fused.get(op.results[0]))
    seconds = [prices.seconds(choices, strategy) for strategy, choices in strategies.items()]
    bodies = [_bodies(placed, choices) for choices in strategies.values()]
    results = [sizes.total(op.results, strategy.results) for strategy in strategies]
    needs = [
        _workspace(about, strategy, each, size, sizes)
        for strategy, each, size in zip(strategies, bodies, results, strict=True)
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
        tuple(count * (forward + backward) for forward, backward in seconds),
        tuple(StrategyBytes(transient=backward) for _, backward in needs),
        any(item.result for item in saved),
        tuple(count * size for size in results),
        tuple(count * (size + kept) for size, (kept, _) in zip(copies, needs, strict=True)),
        tuple(count * forward for forward, _ in seconds),
        _light(known, placed, bodies),
        known.cheap[op.key] is not Cheap.NEVER,
        is_viewing(placed, known.strided),
    )


def _bodies(placed: Placed, choices: Choices) -> tuple[str, ...]:
    """The local forms of these choices, by axis."""
    return tuple(choice.form for choice in choices)


def _workspace(
    about: OpContext, strategy: Strategy, bodies: Sequence[str], result: float, sizes: Sizes
) -> tuple[float, float]:
    """Bytes that an op saves, and temporary bytes of its backward pass, besides its operands and its `result` bytes."""
    if not about.flows:
        return 0.0, 0.0
    pairs = zip(about.op.operands, strategy.operands, strict=True)
    operands = [sizes.bytes(name, layout) for name, layout in pairs]
    return workspace(about.op, bodies, operands, about.flowing_operands, result)


def _light(known: Analysis, placed: Placed, bodies: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
    """Whether selective recompute recomputes an op, for each of its strategies, by the local forms that it runs."""
    op = placed.op
    if known.cheap[op.key] is Cheap.NEVER:
        return (False,) * len(bodies)
    is_light = cache(partial(is_cheap, op, placed.rule, known.subjects[op.key].copies))
    return tuple(is_light(each) for each in bodies)
