"""The cost of an op under a strategy. Both the planner's arrays and the walk over a lowered program use it."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from passes.cost.cluster import Cluster
from passes.cost.communication import step_seconds
from passes.cost.compute import Work, compute_seconds
from passes.cost.fusion import Fused
from passes.cost.hardware import ALIGNMENT
from passes.ir.choices import Cover, Strategy
from passes.ir.figures import least
from passes.ir.layout import Layout, R, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Role, Rule, Rules
from passes.rules import find_rule
from passes.rules.cheap import is_cheap
from passes.rules.local_forms import LOCAL_FORMS, FormContext, LocalForm
from passes.rules.rule import Choice, replicated
from passes.rules.strategies import OpContext, subject


class Parts(NamedTuple):
    """The part of an op on the busiest rank: its `share` of the multiplications, the number of parts that each operand
    and result is split into, and whether rows of these are `unaligned` in a product."""

    share: float
    operands: tuple[int, ...]
    results: tuple[int, ...]
    unaligned: bool


class OpPrices:
    """Costs of one op, under any number of strategies. Strategies that give a rank the same parts share a cost.

    `fused` are the tensors of the op that stay in registers when it is compiled together with its neighbours (see
    `passes.cost.fusion`); None if it is not.
    """

    def __init__(self, subject: OpContext, cluster: Cluster, mesh: Mesh, fused: Fused | None = None) -> None:
        self.subject = subject
        self.cluster = cluster
        self.mesh = mesh
        self.fused = fused
        self.is_free = subject.rule is not None and not subject.rule.moves and not subject.copies
        self.computed: dict[Parts, tuple[float, float]] = {}

    def seconds(self, choices: Sequence[Choice], strategy: Strategy) -> tuple[float, float]:
        """Seconds of computation on the busiest rank, forward and backward, including collectives inside local
        forms."""
        share, inside_forward, inside_backward = 1.0, 0.0, 0.0
        rule = self.subject.rule
        for axis, choice in enumerate(choices):
            if not choice.factors or rule is None:
                continue
            form = LOCAL_FORMS[choice.form] if choice.form else _PLAIN
            share *= form.share(self.mesh.sizes[axis])
            if form.communicates:
                forward, back = self._inside(rule, form, axis, choice, strategy)
                inside_forward, inside_backward = inside_forward + forward, inside_backward + back
        if self.is_free:
            return inside_forward, inside_backward
        parts = self._parts(share, strategy)
        if parts not in self.computed:
            self.computed[parts] = compute_seconds(self._work(parts), self.cluster.device)
        forward, back = self.computed[parts]
        return forward + inside_forward, back + inside_backward

    def _inside(
        self, rule: Rule, form: LocalForm, axis: int, choice: Choice, strategy: Strategy
    ) -> tuple[float, float]:
        """Exposed seconds of the collectives inside a local form, forward and backward."""
        context = _context(self.subject, rule, axis, choice, strategy, self.mesh)
        itemsize, exposed = self.subject.operands[0].dtype.itemsize, 1 - form.overlap

        def seconds(steps: Iterable[RedistributionStep]) -> float:
            return exposed * sum(step_seconds(step, itemsize, self.cluster, self.mesh) for step in steps)

        return seconds(form.forward(context)), seconds(form.backward(context)) if self.subject.flows else 0.0

    def _parts(self, share: float, strategy: Strategy) -> Parts:
        subject, sizes = self.subject, self.mesh.sizes
        multiplies = subject.rule is not None and subject.rule.multiplications
        return Parts(
            share,
            tuple(_ways(layout, sizes) for layout in strategy.operands),
            tuple(_ways(layout, sizes) for layout in strategy.results),
            bool(multiplies) and subject.op.kind in _PRODUCTS and _unaligned(subject, strategy, sizes),
        )

    def _work(self, parts: Parts) -> Work:
        """The bytes that a rank with these parts reads and writes, and its multiplications."""
        subject, fused, rule = self.subject, self.fused, self.subject.rule
        elements = [type.size // ways for type, ways in zip(subject.operands, parts.operands, strict=True)]
        made = [type.size // ways for type, ways in zip(subject.results, parts.results, strict=True)]
        reads: list[float] = [
            count * type.dtype.itemsize for count, type in zip(elements, subject.operands, strict=True)
        ]
        writes: list[float] = [count * type.dtype.itemsize for count, type in zip(made, subject.results, strict=True)]
        flowing = [slot for slot, flows in enumerate(subject.flowing_operands) if flows] if subject.flows else []
        gradients = sum(reads[slot] for slot in flowing)
        kernels = 1, len(flowing)
        if subject.op.kind in _LOOKUPS and reads:
            reads[0] = least((reads[0], sum(writes)))
        if fused is not None:
            for slot in fused.operands:
                gradients -= reads[slot] if slot in flowing else 0
                reads[slot] = 0
            for index in fused.results:
                writes[index] = 0
            kernels = (1, 1 if flowing else 0) if fused.starts else (0, 0)
        read, written = sum(reads), sum(writes)
        back = written + gradients + _saved(subject, reads, writes, fused) if flowing else 0
        if fused is None and rule is not None and flowing:
            written += sum(reads[item.index] for item in rule.saved if item.copy)
        dtype = (subject.results or subject.operands)[0].dtype
        if rule is None or not rule.multiplications:
            return Work(dtype, read, written, back, kernels)
        multiplications = rule.multiplications * parts.share
        factors = rule.backward
        backward = [multiplications * factors[slot] if slot < len(factors) else 0.0 for slot in flowing]
        width = subject.results[0].shape[-1] if subject.op.kind in _ATTENTION else 0
        counts = [elements[slot] for slot in flowing]
        batched = all(len(type.shape) > 2 for type in subject.operands[:2])
        return Work(
            dtype, read, written, back, kernels, multiplications, backward, sum(made), counts, width,
            parts.unaligned, batched,
        )  # fmt: skip


def op_seconds(
    subject: OpContext,
    choices: Sequence[Choice],
    strategy: Strategy,
    cluster: Cluster,
    mesh: Mesh,
    fused: Fused | None = None,
) -> tuple[float, float]:
    """The cost of one strategy, by `OpPrices`."""
    return OpPrices(subject, cluster, mesh, fused).seconds(choices, strategy)


def _saved(subject: OpContext, reads: Sequence[float], writes: Sequence[float], fused: Fused | None) -> float:
    """Bytes of saved tensors that the backward pass reads; all operands and results for an op without a rule."""
    if fused is not None:
        return sum(reads[slot] for slot in fused.read_again) + sum(writes[index] for index in fused.read_back)
    if subject.rule is None:
        return sum(reads) + sum(writes)
    return sum(
        writes[item.index] if item.result else reads[item.index]
        for item in subject.rule.saved
        if not item.needed_by or any(subject.flowing_operands[slot] for slot in item.needed_by)
    )


_PLAIN = LocalForm()
_ONE = Mesh(("one",), (1,))
_ATTENTION = frozenset({"scaled_dot_product_attention"})
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


def _unaligned(subject: OpContext, strategy: Strategy, sizes: Sequence[int]) -> bool:
    """Whether rows of the operands or the result of a product do not begin at multiples of 16 bytes on a rank."""
    for types, layouts in ((subject.operands, strategy.operands), (subject.results, strategy.results)):
        for type, layout in zip(types, layouts, strict=True):
            last = len(type.shape) - 1
            row = type.shape[-1] * type.dtype.itemsize if last > 0 else 0
            for placement, size in zip(layout, sizes, strict=True):
                if placement.kind == "S" and placement.dim == last:
                    row = row // size
            if row % ALIGNMENT:
                return True
    return False


def _context(subject: OpContext, rule: Rule, axis: int, choice: Choice, strategy: Strategy, mesh: Mesh) -> FormContext:
    """The context of a local form on one axis."""
    shapes = tuple(
        local_shape(type.shape, layout, mesh) for type, layout in zip(subject.operands, strategy.operands, strict=True)
    )
    rows = tuple(
        size
        for size, parts in zip(shapes[0], rule.operands[0], strict=True)
        if not any(rule.factors[part.factor].role is Role.INSIDE for part in parts)
    )
    dim, reach = strategy.operands[0][axis].dim, rule.factors[choice.factors[0]].reach
    return FormContext(axis, mesh.sizes[axis], shapes, rows, dim, reach)


def seconds_alone(
    op: Op,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    rules: Rules,
    cluster: Cluster,
    fused: Fused | None = None,
) -> tuple[float, float]:
    """Seconds that one device takes for a whole op, forward and backward."""
    about = subject(op, find_rule(op, types, rules), types, flowing, set(), set())
    choice = replicated(len(op.operands), len(op.results), R)
    strategy = Strategy((choice.name,), ((R,),) * len(op.operands), ((R,),) * len(op.results))
    return op_seconds(about, (choice,), strategy, cluster, _ONE, fused)


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
    forward = backward = light = 0.0
    for op in ops:
        own, back = seconds_alone(op, types, flowing, rules, cluster, fused.get(op.results[0]) if op.results else None)
        forward, backward = forward + own, backward + back
        light += own if is_cheap(op, find_rule(op, types, rules), False, ()) else 0.0
    part = count / devices
    return Cover(part * forward, part * backward, part * light)


def update_seconds(size: float, states: int, cluster: Cluster) -> float:
    """Seconds for the optimizer to update `size` bytes of parameters: it reads their gradients, and reads and writes
    the parameters and `states` tensors of the same size."""
    return size * (3 + 2 * states) / cluster.device.stream
