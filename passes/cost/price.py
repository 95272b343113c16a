"""The cost of an op under a strategy. Both the planner's arrays and the walk over a lowered program use it."""

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple

from passes.cost.cluster import Cluster
from passes.cost.compute import Work, compute_seconds
from passes.cost.forms import Attention, attention_work, form_contexts, local_attention, shares
from passes.cost.fusion import Fused
from passes.cost.hardware import ALIGNMENT
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Cover, Strategy
from passes.ir.figures import least
from passes.ir.layout import Layout, R
from passes.ir.mesh import Mesh
from passes.ir.program import Op, Rules, TensorType
from passes.rules import find_rule
from passes.rules.cheap import is_cheap, second_products
from passes.rules.strategies import Choice, OpContext, op_context, replicated


class OpSeconds(NamedTuple):
    """Seconds of an op: of its computation, and of the collectives inside its local form that it does not hide."""

    forward: float
    backward: float
    forward_communication: float = 0.0
    backward_communication: float = 0.0


class Parts(NamedTuple):
    """The part of an op on the busiest rank: its `shares` of the multiplications forward and backward, the number of
    parts that each operand and result is split into, whether rows of these are `unaligned` in a product, and the local
    `attention`."""

    shares: tuple[float, float]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    unaligned: bool
    attention: Attention | None


class OpPrices:
    """Costs of one op, under any number of strategies. Strategies that give a rank the same parts share a cost.

    `fused` are the tensors of the op that stay in registers when it is compiled together with its neighbours (see
    `passes.cost.fusion`); None if it is not.
    """

    def __init__(self, context: OpContext, cluster: Cluster, mesh: Mesh, fused: Fused | None = None) -> None:
        self.context = context
        self.cluster = cluster
        self.mesh = mesh
        self.fused = fused
        self.is_free = context.rule is not None and not context.rule.moves and not context.copies
        self.computed: dict[Parts, tuple[float, float]] = {}

    @cached_property
    def steps(self) -> StepCosts:
        """Costs of the steps inside local forms."""
        return StepCosts(self.cluster, self.mesh)

    def seconds(self, choices: Sequence[Choice], strategy: Strategy) -> OpSeconds:
        """Seconds on the busiest rank."""
        inside = self._inside(choices, strategy)
        if self.is_free:
            return OpSeconds(0.0, 0.0, *inside)
        parts = self.parts(choices, strategy)
        if parts not in self.computed:
            self.computed[parts] = compute_seconds(self.work(parts), self.cluster.device)
        return OpSeconds(*self.computed[parts], *inside)

    def _inside(self, choices: Sequence[Choice], strategy: Strategy) -> tuple[float, float]:
        """Exposed seconds of the collectives inside local forms, forward and backward."""
        forward = backward = 0.0
        device = self.cluster.device
        for form, about in form_contexts(self.context, choices, strategy, self.mesh, device.type):
            if form.communicates:
                exposed, itemsize = 1 - form.overlap * device.overlaps, form.itemsize(about)
                forward += exposed * self.steps.total(form.steps(about), itemsize)
                if self.context.flows:
                    backward += exposed * self.steps.total(form.backward_steps(about), itemsize)
        return forward, backward

    def parts(self, choices: Sequence[Choice], strategy: Strategy) -> Parts:
        """The part of the op on the busiest rank."""
        context, sizes = self.context, self.mesh.sizes
        multiplies = context.rule is not None and context.rule.multiplications
        return Parts(
            shares(context.rule, choices, sizes),
            tuple(_ways(layout, sizes) for layout in strategy.operands),
            tuple(_ways(layout, sizes) for layout in strategy.results),
            bool(multiplies) and context.op.kind in _PRODUCTS and _unaligned(context, strategy, sizes),
            local_attention(context, choices, strategy, self.mesh, self.cluster.device.type),
        )

    def work(self, parts: Parts) -> Work:
        """The bytes that a rank with these parts reads and writes, and its multiplications."""
        context, fused, rule = self.context, self.fused, self.context.rule
        elements = [type.size // ways for type, ways in zip(context.operands, parts.operands, strict=True)]
        made = [type.size // ways for type, ways in zip(context.results, parts.results, strict=True)]
        reads: list[float] = [
            count * type.dtype.itemsize for count, type in zip(elements, context.operands, strict=True)
        ]
        writes: list[float] = [count * type.dtype.itemsize for count, type in zip(made, context.results, strict=True)]
        flowing = [slot for slot, flows in enumerate(context.flowing_operands) if flows] if context.flows else []
        gradients = sum(reads[slot] for slot in flowing)
        kernels = 1, len(flowing)
        if context.op.kind in _LOOKUPS and reads:
            reads[0] = least((reads[0], sum(writes)))
        if fused is not None:
            for slot in fused.operands:
                gradients -= reads[slot] if slot in flowing else 0
                reads[slot] = 0
            for index in fused.results:
                writes[index] = 0
            kernels = (1, 1 if flowing else 0) if fused.starts else (0, 0)
        read, written = sum(reads), sum(writes)
        back = written + gradients + _saved(context, reads, writes, fused) if flowing else 0
        if fused is None and rule is not None and flowing:
            written += sum(reads[item.index] for item in rule.saved if item.copy)
        dtype = (context.results or context.operands)[0].dtype
        if rule is None or not rule.multiplications:
            return Work(dtype, read, written, back, kernels)
        forward, back_share = (rule.multiplications * share for share in parts.shares)
        backward = [back_share * rule.backward[slot] if slot < len(rule.backward) else 0.0 for slot in flowing]
        counts = [elements[slot] for slot in flowing]
        batched = all(len(type.shape) > 2 for type in context.operands[:2])
        work = Work(
            dtype, read, written, back, kernels, forward, backward, sum(made), counts, 0.0, parts.unaligned, batched
        )
        return work if parts.attention is None else attention_work(work, parts.attention)


def op_seconds(
    context: OpContext,
    choices: Sequence[Choice],
    strategy: Strategy,
    cluster: Cluster,
    mesh: Mesh,
    fused: Fused | None = None,
) -> OpSeconds:
    """The cost of one strategy, by `OpPrices`."""
    return OpPrices(context, cluster, mesh, fused).seconds(choices, strategy)


def _saved(context: OpContext, reads: Sequence[float], writes: Sequence[float], fused: Fused | None) -> float:
    """Bytes of saved tensors that the backward pass reads; all operands and results for an op without a rule."""
    if fused is not None:
        return sum(reads[slot] for slot in fused.recompute_operands) + sum(
            writes[index] for index in fused.recompute_results
        )
    if context.rule is None:
        return sum(reads) + sum(writes)
    return sum(
        writes[item.index] if item.result else reads[item.index]
        for item in context.rule.saved
        if not item.needed_by or any(context.flowing_operands[slot] for slot in item.needed_by)
    )


_ONE = Mesh(("one",), (1,))
# Products of matrices as stored; convolutions copy their operands to the layout that they need.
_PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm"})
# Ops that read no more of their first operand than they write.
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})


def _ways(layout: Layout, sizes: Sequence[int]) -> int:
    """The number of parts that a tensor is split into."""
    ways = 1
    for placement, size in zip(layout, sizes, strict=True):
        if placement.kind == "S":
            ways *= size
    return ways


def _unaligned(context: OpContext, strategy: Strategy, sizes: Sequence[int]) -> bool:
    """Whether rows of the operands or the result of a product do not begin at multiples of 16 bytes on a rank."""
    for types, layouts in ((context.operands, strategy.operands), (context.results, strategy.results)):
        for type, layout in zip(types, layouts, strict=True):
            last = len(type.shape) - 1
            row = type.shape[-1] * type.dtype.itemsize if last > 0 else 0
            for placement, size in zip(layout, sizes, strict=True):
                if placement.kind == "S" and placement.dim == last:
                    row = row // size
            if row % ALIGNMENT:
                return True
    return False


def seconds_alone(
    op: Op,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    rules: Rules,
    cluster: Cluster,
    fused: Fused | None = None,
) -> tuple[float, float]:
    """Seconds that one device takes for a whole op, forward and backward."""
    prices, choice, strategy = _alone(op, types, flowing, rules, cluster, fused)
    return prices.seconds((choice,), strategy)[:2]


def work_alone(
    op: Op,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    rules: Rules,
    cluster: Cluster,
    fused: Fused | None = None,
) -> Work | None:
    """The work of a whole op on one device, attention without its kernel; None if it costs nothing."""
    prices, choice, strategy = _alone(op, types, flowing, rules, cluster, fused)
    if prices.is_free:
        return None
    return prices.work(prices.parts((choice,), strategy)._replace(attention=None))


def _alone(
    op: Op,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    rules: Rules,
    cluster: Cluster,
    fused: Fused | None,
) -> tuple[OpPrices, Choice, Strategy]:
    context = op_context(op, find_rule(op, types, rules), types, flowing, set(), set())
    choice = replicated(len(op.operands), len(op.results), R)
    strategy = Strategy((choice.name,), ((R,),) * len(op.operands), ((R,),) * len(op.results))
    return OpPrices(context, cluster, _ONE, fused), choice, strategy


def cover(
    ops: Sequence[Op],
    types: Mapping[str, TensorType],
    flowing: Set[str],
    rules: Rules,
    cluster: Cluster,
    devices: int,
    count: int,
    fused: Mapping[str, Fused],
) -> Cover:
    """The overlap budget of `count` copies of a region of `ops`: the computation of one of all devices, without
    redundant computation, that collectives can overlap; zero on a device where collectives do not overlap computation.
    `fused` are the ops that are fused with others, by their first result."""
    if not cluster.device.overlaps:
        return Cover()
    forward = backward = light = second = 0.0
    rule = {op.key: find_rule(op, types, rules) for op in ops}
    products = second_products((op, rule[op.key]) for op in ops)
    for op in ops:
        own, back = seconds_alone(op, types, flowing, rules, cluster, fused.get(op.results[0]) if op.results else None)
        forward, backward = forward + own, backward + back
        light += own if is_cheap(op, rule[op.key], False, ()) else 0.0
        second += own if op.key in products else 0.0
    part = count / devices
    return Cover(part * forward, part * backward, part * light, part * (light + second))


def update_seconds(size: float, states: int, cluster: Cluster) -> float:
    """Seconds for the optimizer to update `size` bytes of parameters: it reads their gradients, and reads and writes
    the parameters and `states` tensors of the same size."""
    return size * (3 + 2 * states) / cluster.device.stream
