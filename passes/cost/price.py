"""What an op costs under a strategy. The planner's arrays and the walk over a lowered program both ask here."""

from collections.abc import Sequence
from math import prod

from passes.cost.cluster import Cluster
from passes.cost.communication import step_seconds
from passes.cost.compute import Work, compute_seconds
from passes.ir.choices import Strategy
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.rules.bodies import BODIES, Body, Inside
from passes.rules.rule import Choice, Role, Rule
from passes.rules.strategies import Subject


def op_seconds(
    subject: Subject, choices: Sequence[Choice], strategy: Strategy, cluster: Cluster, mesh: Mesh
) -> tuple[float, float]:
    """Seconds that the busiest rank computes, forward and backward, collectives inside local forms included."""
    rule = subject.rule
    reads = [
        prod(local_shape(type.shape, layout, mesh)) * type.dtype.itemsize
        for type, layout in zip(subject.operands, strategy.operands, strict=True)
    ]
    writes = sum(
        prod(local_shape(type.shape, layout, mesh)) * type.dtype.itemsize
        for type, layout in zip(subject.results, strategy.results, strict=True)
    )
    share = 1.0
    inside = 0.0
    plain = Body()
    for axis, choice in enumerate(choices):
        if not choice.factor or rule is None:
            continue
        body = BODIES[rule.bodies[choice.factor]] if choice.factor in rule.bodies else plain
        share *= body.share(mesh.sizes[axis])
        about = _inside(subject, rule, axis, choice, strategy, mesh)
        itemsize = subject.operands[0].dtype.itemsize
        inside += sum(step_seconds(step, itemsize, cluster, mesh) for step in body.inside(about))
    gradients = [size for size, flows in zip(reads, subject.flowing_operands, strict=True) if flows and subject.flows]
    dtype = (subject.results or subject.operands)[0].dtype
    multiplications = rule.multiplications * share if rule else 0.0
    factors = zip(rule.backward if rule else (), subject.flowing_operands, strict=False)
    backward = multiplications * sum(factor for factor, flows in factors if flows)
    moves = rule is None or rule.moves or subject.copies
    work = Work(multiplications, backward, reads, writes, gradients, dtype, moves)
    forward, backward = compute_seconds(work, cluster.device)
    return forward + inside, backward


def _inside(subject: Subject, rule: Rule, axis: int, choice: Choice, strategy: Strategy, mesh: Mesh) -> Inside:
    shapes = tuple(
        local_shape(type.shape, layout, mesh) for type, layout in zip(subject.operands, strategy.operands, strict=True)
    )
    rows = tuple(
        size
        for size, parts in zip(shapes[0], rule.operands[0], strict=True)
        if not any(rule.factors[part.factor].role is Role.INSIDE for part in parts)
    )
    dim, reach = strategy.operands[0][axis].dim, rule.factors[choice.factor].reach
    return Inside(axis, mesh.sizes[axis], shapes, rows, dim, reach)


def update_seconds(size: float, states: int, cluster: Cluster) -> float:
    """Seconds for the optimizer to update `size` bytes of parameters: it reads their gradients, and reads and writes
    them and `states` tensors of the same size."""
    return size * (3 + 2 * states) / cluster.device.bandwidth


def runs_again(rule: Rule | None, recompute: str) -> bool:
    """Whether an op with this rule runs again in the backward pass of a region: with "selective" those without
    multiplications do, as their results are cheap to make and large to keep."""
    if recompute == "selective":
        return rule is not None and rule.multiplications == 0
    return recompute == "full"
