"""Sharding propagation: from the first digit of every factor to all splits that neighbouring ops can use without a
redistribution."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from passes.ir.grouping import grouped, representatives
from passes.ir.layout import Placement
from passes.ir.program import Op
from passes.ir.rule import Rule
from passes.rules.strategies import Digit, digit, split, starts, stripes

_MOST = 16


def propagate(
    ops: Sequence[tuple[Op, Rule | None]],
    same: Iterable[tuple[str, ...]],
    required: Mapping[str, Iterable[Placement]],
    size: int,
    *,
    stripes_over: Collection[int] = (),
) -> tuple[list[list[Digit]], dict[str, set[Placement]]]:
    """The digits at which each op can be split on an axis of `size`, and the splits of each tensor.

    Propagation starts from the first digit of each factor of every op. A split of one tensor becomes a digit of the ops
    that compute or read it, and so a split of their other tensors, until a fixed point. Tensors in a tuple of `same`
    share their splits; `required` are additional splits to start from, and so are stripes over each of these numbers of
    ranks. An op has at most 16 digits of its factors, and as many of its joint methods.
    """
    alias = representatives(same)
    placements: dict[str, set[Placement]] = {}
    touching = grouped(
        (name, position)
        for position, (op, rule) in enumerate(ops)
        if rule is not None
        for name in {alias.get(name, name) for name in (*op.operands, *op.results)}
    )
    found: list[dict[Digit, None]] = [{} for _ in ops]
    waiting = deque(range(len(ops)))
    queued = set(waiting)

    def add(name: str, placement: Placement) -> None:
        name = alias.get(name, name)
        if placement not in placements.setdefault(name, set()):
            placements[name].add(placement)
            for position in touching.get(name, ()):
                if position not in queued:
                    queued.add(position)
                    waiting.append(position)

    for name, given in required.items():
        for placement in given:
            add(name, placement)
    first = set(range(len(ops)))
    while waiting:
        position = waiting.popleft()
        queued.discard(position)
        op, rule = ops[position]
        if rule is None:
            continue
        tensors = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
        new = _first_digits(rule, stripes_over) if position in first else []
        first.discard(position)
        for name, dims in tensors:
            for placement in sorted(placements.get(alias.get(name, name), ())):
                arrived = digit(dims, placement, size)
                if arrived is not None:
                    new += [(each, arrived[1]) for each in rule.methods_with(arrived[0])]
        for method, major in new:
            alike = sum((name in rule.joint) == (method in rule.joint) for name, _ in found[position])
            if (method, major) in found[position] or alike >= _MOST:
                continue
            choice = split(rule, method, major, size)
            if choice is None:
                continue
            found[position][method, major] = None
            for (name, _), placement in zip(tensors, (*choice.operands, *choice.results), strict=True):
                if placement.kind == "S":
                    add(name, placement)
    names = chain((name for op, _ in ops for name in (*op.operands, *op.results)), alias)
    spread = {name: placements.get(alias.get(name, name), set()) for name in names}
    return [list(digits) for digits in found], spread


def _first_digits(rule: Rule, stripes_over: Collection[int]) -> list[Digit]:
    return [*starts(rule), *(digit for ranks in stripes_over for digit in stripes(rule, ranks))]
