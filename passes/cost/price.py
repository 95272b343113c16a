"""The cost of an op under a strategy. Both the planner's arrays and the walk over a lowered program use it.

A rank runs a part of the op: local forms, a kernel of attention. The memory that this takes is in `workspace`."""

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from math import prod
from typing import NamedTuple

from passes.cost.attention import Attention, attention_work, local_attention
from passes.cost.cluster import Cluster
from passes.cost.compute import Work, compute_seconds
from passes.cost.forms import forms_of
from passes.cost.fusion import Fused
from passes.cost.hardware import ALIGNMENT
from passes.cost.linear_loss import linear_loss_seconds, local_loss
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Cover, Strategy
from passes.ir.figures import least
from passes.ir.layout import Layout, R
from passes.ir.linear_loss import LinearLoss
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType
from passes.ir.rule import Rule, Rules
from passes.rules import find_rule
from passes.rules.cheap import is_cheap, second_products
from passes.rules.form_context import MoreWork, Split, Traffic
from passes.rules.local_forms import LOCAL_FORMS, LocalForm, form_that_runs
from passes.rules.strategies import Choice, OpContext, op_context, replicated

_PLAIN = LocalForm()


def shares(rule: Rule | None, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float]:
    """The part of the multiplications of an op, forward and backward, that the busiest rank has."""
    forward = backward = 1.0
    if rule is None:
        return forward, backward
    more = more_work(rule, choices, sizes)
    # A form that includes another divides the work by the splits of both.
    runs = form_that_runs(choice.form for choice in choices)
    splits: dict[tuple[str, str], list[Split]] = {}
    for choice, size in zip(choices, sizes, strict=True):
        if choice.factors:
            form = runs if runs and choice.form else ""
            splits.setdefault((form, choice.factors[0]), []).append(Split(size, choice.major))
    for (form, factor), each in splits.items():
        share = (LOCAL_FORMS[form] if form else _PLAIN).share(each, rule.factors[factor])
        parts = rule.divided.get(factor, (1.0, 1.0))
        forward, backward = (
            whole * (1 - part + part * share) for whole, part in zip((forward, backward), parts, strict=True)
        )
    return forward * (1 + more.forward), backward * (1 + more.backward)


def more_work(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> MoreWork:
    """The work of the local form of an op besides a rank's part of the op."""
    runs = form_that_runs(choice.form for choice in choices)
    more = LOCAL_FORMS[runs].more if runs else None
    return more(rule, _ways_by_factor(choices, sizes)) if more else MoreWork()


def _ways_by_factor(choices: Sequence[Choice], sizes: Sequence[int]) -> dict[str, int]:
    """The number of parts that each factor is split into."""
    found: dict[str, int] = {}
    for choice, size in zip(choices, sizes, strict=True):
        found.update((factor, found.get(factor, 1) * size) for factor in choice.factors)
    return found


class OpSeconds(NamedTuple):
    """Seconds of an op: of its computation, and of the collectives inside its local form that it does not hide."""

    forward: float
    backward: float
    forward_communication: float = 0.0
    backward_communication: float = 0.0


class Inside(NamedTuple):
    """Seconds of the collectives inside a local form, forward and backward, and the part of its computation that they
    run beside; seconds of its traffic, forward and backward."""

    forward: float
    backward: float
    overlap: float
    merging: float
    merging_back: float


class Parts(NamedTuple):
    """The part of an op on the busiest rank: its `shares` of the multiplications forward and backward, the number of
    parts that each operand and result is split into, whether rows of these are `unaligned` in a product, the local
    `attention`, or the linear layer with its `loss`, and the kernels of both passes if the rule says how many."""

    shares: tuple[float, float]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    unaligned: bool
    attention: Attention | None
    loss: LinearLoss | None = None
    kernels: tuple[float, float] | None = None


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
            return OpSeconds(0.0, 0.0, inside.forward, inside.backward)
        parts = self.parts(choices, strategy)
        if parts not in self.computed:
            self.computed[parts] = self._computing(parts)
        forward, backward = self.computed[parts]
        part = inside.overlap * self.cluster.device.overlaps
        exposed = max(0.0, inside.forward - part * forward), max(0.0, inside.backward - part * backward)
        return OpSeconds(forward + inside.merging, backward + inside.merging_back, *exposed)

    def _computing(self, parts: Parts) -> tuple[float, float]:
        """Seconds of the computation of these parts, forward and backward."""
        device = self.cluster.device
        if parts.loss is not None:
            return linear_loss_seconds(parts.loss, device)
        return compute_seconds(self.work(parts), device)

    def _inside(self, choices: Sequence[Choice], strategy: Strategy) -> Inside:
        """Seconds of the collectives inside local forms and of their traffic."""
        forward = backward = overlap = 0.0
        traffic = Traffic()
        for form, about in forms_of(self.context, choices, strategy, self.mesh, self.cluster.device.type):
            # The outermost axes come last.
            traffic = form.traffic(about) if form.traffic else traffic
            if form.communicates:
                itemsize = form.itemsize(about)
                there, back = form.shifts(about) if form.shifts else ((), ())
                repeats = form.repeats(about) if form.repeats else 1
                forward += repeats * self.steps.total(form.steps(about), itemsize)
                forward += sum(count * self.steps.shift_seconds(about.span, size) for count, size in there)
                if self.context.flows:
                    backward += self.steps.total(form.backward_steps(about), itemsize)
                    backward += sum(count * self.steps.shift_seconds(about.span, size) for count, size in back)
                overlap = form.overlap(about) if form.overlap else 0.0
        device, flows = self.cluster.device, self.context.flows
        merging = traffic.forward / device.stream + traffic.forward_kernels * device.launch
        merging_back = traffic.backward / device.stream + traffic.backward_kernels * device.launch if flows else 0.0
        return Inside(forward, backward, overlap, merging, merging_back)

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
            local_loss(context, choices, strategy, self.mesh),
            _kernels(context.rule, choices, sizes),
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
        kernels: tuple[float, float] = (1, len(flowing))
        if parts.kernels is not None:
            kernels = parts.kernels[0], parts.kernels[1] if flowing else 0
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
        if rule is not None and reads:
            there, again = (each * elements[0] * context.operands[0].dtype.itemsize for each in rule.passes)
            read, back = read + there, back + again if flowing else back
        if fused is None and rule is not None and flowing:
            written += sum(reads[item.index] for item in rule.saved if item.copy)
        # A loss may be in another dtype than the product that it is computed from.
        dtype = (context.operands or context.results)[0].dtype
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


def _kernels(rule: Rule | None, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float] | None:
    """The kernels that a rank launches in both passes, if the rule says how many the op has."""
    if rule is None or rule.kernels is None:
        return None
    more = more_work(rule, choices, sizes)
    (forward, backward), parts = rule.kernels, _ways_by_factor(choices, sizes).get(rule.launched_for, 1)
    return forward / parts + more.forward_kernels, backward / parts + more.backward_kernels


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
    return prod(size for placement, size in zip(layout, sizes, strict=True) if placement.kind == "S")


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
