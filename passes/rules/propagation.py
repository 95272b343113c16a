"""Sharding propagation: from the first digit of every factor to all splits that neighbouring ops can use without a
redistribution."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from passes.ir.layout import Placement
from passes.ir.program import Op, Rule
from passes.rules.strategies import Digit, digit, split, starts

_MOST = 16


def propagate(
    ops: Sequence[tuple[Op, Rule | None]],
    same: Iterable[tuple[str, ...]],
    required: Mapping[str, Iterable[Placement]],
    size: int,
) -> tuple[list[list[Digit]], dict[str, set[Placement]]]:
    """The digits at which each op can be split on an axis of `size`, and the splits of each tensor.

    Propagation starts from the first digit of each factor of every op. A split of one tensor becomes a digit of the ops
    that compute or read it, and so a split of their other tensors, until a fixed point. Tensors in a tuple of `same`
    share their splits; `required` are additional splits to start from. An op has at most 16 digits of its factors, and
    as many of its joint methods.
    """
    alias = _representatives(same)
    placements: dict[str, set[Placement]] = {}
    touching: dict[str, list[int]] = {}
    for position, (op, rule) in enumerate(ops):
        if rule is not None:
            for name in {alias.get(name, name) for name in (*op.operands, *op.results)}:
                touching.setdefault(name, []).append(position)
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
        new: list[Digit] = []
        if position in first:
            first.discard(position)
            new += starts(rule)
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
    spread = {
        name: placements.get(alias.get(name, name), set()) for op, _ in ops for name in (*op.operands, *op.results)
    }
    spread.update({name: placements.get(alias[name], set()) for name in alias})
    return [list(digits) for digits in found], spread


def _representatives(same: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """For every name in `same` the representative of all names that are linked to it."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for names in same:
        for name in names[1:]:
            parent[find(name)] = find(names[0])
    return {name: find(name) for name in parent}
