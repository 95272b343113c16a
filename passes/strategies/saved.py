"""Saved tensors of ops, and the tensors that recompute needs instead."""

from collections.abc import Collection, Mapping, Sequence

from passes.ir.program import Folded
from passes.ir.rule import Saved
from passes.rules.cheap import Cheap, is_view, with_viewed
from passes.rules.strategies import OpContext
from passes.rules.strides import must_copy
from passes.strategies.places import Placed


def saved_tensors(context: OpContext) -> list[Saved]:
    """The saved tensors of an op; of one without a rule all operands and results, to be safe."""
    if not context.flows:
        return []
    if context.rule is None:
        every = [Saved(slot) for slot in range(len(context.operands))]
        return [*every, Saved(0, result=True)]
    return [
        item
        for item in context.rule.saved
        if not item.needed_by or any(context.flowing_operands[slot] for slot in item.needed_by)
    ]


def passed_on(folded: Folded, placed: Sequence[Placed], strided: Collection[str]) -> set[str]:
    """The results of copies of regions, and the tensors that they view: were these not saved, the last copy would be
    recomputed from the first. Reshapes copy tensors that are `strided`."""
    given = {carry.next for region in folded.regions for carry in region.carries}
    given |= {export.value for region in folded.regions for export in region.exports}
    views = (
        (item.op.results, item.op.operands)
        for item in reversed(placed)
        if item.region and is_view(item.rule, must_copy(item.op, strided))
    )
    return with_viewed(given, views)


def uses_viewed(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], strided: Collection[str]
) -> set[tuple[str, int]]:
    """Uses (op, operand) by views whose result is saved, which keep the viewed tensor alive. Reshapes copy tensors that
    are `strided`."""
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
    """Whether an op returns a view of its only operand."""
    return len(item.op.operands) == 1 and is_view(item.rule, must_copy(item.op, strided))


def recompute_inputs(
    placed: Sequence[Placed], saved: Mapping[str, Sequence[Saved]], cheap: Mapping[str, Cheap]
) -> set[tuple[str, int]]:
    """Uses (op, operand) of tensors that the backward pass of a region, whose ops are `placed`, needs to recompute its
    cheap ops. For a view it is the viewed tensor.

    `saved` are the saved tensors of each op, `cheap` says whether it is recomputed.
    """
    found: set[tuple[str, int]] = set()
    views = {item.op.results[0] for item in placed if is_view(item.rule, False)}
    # Recomputed tensors, and views of them, are not needed before.
    passed = views | {item.op.results[0] for item in placed if cheap[item.op.key] is Cheap.ALWAYS}
    wanted: set[str] = set()
    for item in reversed(placed):
        op, kept = item.op, saved[item.op.key]
        may_run = cheap[op.key] is not Cheap.NEVER
        recomputes = may_run and any(each.result or each.copy for each in kept)
        if recomputes or ((may_run or op.results[0] in views) and not wanted.isdisjoint(op.results)):
            wanted.update(op.operands)
            found.update((op.key, slot) for slot, name in enumerate(op.operands) if name not in passed)
        wanted.update(op.operands[each.index] for each in kept if not each.result)
    return found
