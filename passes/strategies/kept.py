"""What autograd keeps for ops, and what has to be there where it is made again instead."""

from collections.abc import Collection, Mapping, Sequence

from passes.ir.program import Folded
from passes.ir.rule import Saved
from passes.rules.cheap import Cheap, is_view, with_viewed
from passes.rules.strategies import OpContext
from passes.strategies.places import Placed


def kept_by(about: OpContext) -> list[Saved]:
    """What autograd keeps for an op; of one without a rule everything, to be safe."""
    if not about.flows:
        return []
    if about.rule is None:
        every = [Saved(slot) for slot in range(len(about.operands))]
        return [*every, Saved(0, result=True)]
    return [
        item
        for item in about.rule.saved
        if not item.needed_by or any(about.flowing_operands[slot] for slot in item.needed_by)
    ]


def handed_on(folded: Folded, placed: Sequence[Placed], strided: Collection[str]) -> set[str]:
    """What copies of regions give, and what that is a view of: were it not kept, the last copy would be made from the
    first. Tensors that are `strided` are copied where they take another shape."""
    given = {carry.next for region in folded.regions for carry in region.carries}
    given |= {export.value for region in folded.regions for export in region.exports}
    views = (
        (item.op.results, item.op.operands)
        for item in reversed(placed)
        if item.region and is_view(item.rule, item.op.kind == "reshape" and item.op.operands[0] in strided)
    )
    return with_viewed(given, views)


def uses_viewed(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], strided: Collection[str]
) -> set[tuple[str, int]]:
    """Uses (op, operand) by views of which the result is kept: then it is what they view that stays. Tensors that are
    `strided` are copied where they take another shape."""
    found: set[tuple[str, int]] = set()
    kept: set[str] = set()
    for item in reversed(placed):
        op = item.op
        kept.update(op.operands[each.index] for each in saved[op.key] if not each.result and not each.copy)
        if is_viewing(item, strided) and not kept.isdisjoint(op.results):
            kept.add(op.operands[0])
            found.add((op.key, 0))
    return found


def is_viewing(item: Placed, strided: Collection[str]) -> bool:
    """Whether an op gives a view of its first operand, the only one that it has."""
    op = item.op
    copies = op.kind == "reshape" and op.operands[:1] and op.operands[0] in strided
    return len(op.operands) == 1 and is_view(item.rule, bool(copies))


def uses_remade(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], cheap: Mapping[str, Cheap]
) -> set[tuple[str, int]]:
    """Uses (op, operand) of what has to be there when the backward pass of a region, whose ops are `placed`, makes
    again what is cheap. Of a view it is what is viewed.

    `saved` is what autograd keeps for each op, `cheap` whether it runs again.
    """
    found: set[tuple[str, int]] = set()
    views = {item.op.results[0] for item in placed if is_view(item.rule, False)}
    # What is made again, or is of what is, need not be there before.
    passed = views | {item.op.results[0] for item in placed if cheap[item.op.key] is Cheap.ALWAYS}
    wanted: set[str] = set()
    for item in reversed(placed):
        op, kept = item.op, saved[item.op.key]
        may_run = cheap[op.key] is not Cheap.NEVER
        again = may_run and any(each.result or each.copy for each in kept)
        if again or ((may_run or op.results[0] in views) and not wanted.isdisjoint(op.results)):
            wanted.update(op.operands)
            found.update((op.key, slot) for slot, name in enumerate(op.operands) if name not in passed)
        wanted.update(op.operands[each.index] for each in kept if not each.result)
    return found
