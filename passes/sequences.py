"""sequences: where a split of the sequence ends, so that plans can say which ops are not split over it.

From the inputs of tokens the split of their second dim is followed from op to op by the sharding rules, without any
redistribution. It ends at an op that needs the dim whole: a recurrence over tokens or chunks that reads one after the
other, or a state that is moved on by one. What follows from it is not split over the sequence either, as far as it does
not meet tokens again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from passes.ir.decisions import Decided
from passes.ir.folded import Folded, Region
from passes.ir.grouping import grouped
from passes.ir.layout import Placement, S
from passes.ir.mesh import Mesh
from passes.ir.program import Op
from passes.ir.rule import Role, Rule
from passes.rules import find_rule
from passes.rules.strategies import digit, split

# What an op does with a dim that it needs whole, by its kind.
_NEEDS: Mapping[str, str] = {
    "select": "takes one place of",
    "slice": "takes some places of",
    "cat": "joins along",
    "pad": "adds places to",
}


@dataclass(frozen=True)
class SequenceEnd:
    """An op that needs `dim`, of `size` places of the sequence, whole."""

    op: Op
    dim: int
    size: int


@dataclass(frozen=True)
class SequenceSplits:
    """The splits of each tensor that follow from a split of the sequence into `ways`, and the ops where they end."""

    placements: Mapping[str, frozenset[Placement]]
    ends: tuple[SequenceEnd, ...]


def sequence_splits(folded: Folded, ways: int) -> SequenceSplits:
    """Follow the split of the sequence of `folded` into `ways`. Of the ends those with floating results are given.

    The sequence is the second dim of inputs of whole numbers with two dims.
    """
    found: dict[str, frozenset[Placement]] = {}
    for given in folded.program.inputs:
        shape = given.type.shape
        if len(shape) == 2 and not given.type.dtype.is_floating_point and shape[1] % ways == 0:
            found[given.name] = frozenset({S(1)})
    ends: list[SequenceEnd] = []
    for item in folded.items:
        if isinstance(item, Region):
            for carry in item.carries:
                found[carry.argument] = found.get(carry.initial, frozenset())
        for op in item.ops if isinstance(item, Region) else (item,):
            rule = find_rule(op, folded.types, folded.program.rules)
            if rule is not None:
                ends += _follow(op, rule, folded, found, ways)
        if isinstance(item, Region):
            for export in item.exports:
                found.update((name, found.get(export.value, frozenset())) for name in export.names if name)
    return SequenceSplits(found, tuple(ends))


def _follow(
    op: Op, rule: Rule, folded: Folded, found: dict[str, frozenset[Placement]], ways: int
) -> Iterator[SequenceEnd]:
    """Note the splits of the results of `op` that follow from those of its operands. Gives an end where none does: the
    first dim that its rule needs whole."""
    arrived = [
        (name, dims, placement)
        for name, dims in zip(op.operands, rule.operands, strict=True)
        for placement in found.get(name, ())
    ]
    goes_on, stops = False, None
    for name, dims, placement in arrived:
        at = digit(dims, placement, ways)
        methods = () if at is None else rule.methods_with(at[0])
        choices = [] if at is None else [split(rule, method, at[1], ways) for method in methods]
        for choice in filter(None, choices):
            goes_on = True
            for result, made in zip(op.results, choice.results, strict=True):
                if made.kind == "S":
                    found[result] = found.get(result, frozenset()) | {made}
        factors = [rule.factors[part.factor] for part in dims[placement.dim]] if placement.dim < len(dims) else []
        if stops is None and any(factor.role is Role.WHOLE for factor in factors):
            stops = SequenceEnd(op, placement.dim, folded.types[name].shape[placement.dim])
    if not goes_on and stops is not None and folded.types[op.results[0]].dtype.is_floating_point:
        yield stops


def unsplit_over_sequence(folded: Folded, decided: Mapping[str, Decided], mesh: Mesh) -> tuple[str, ...]:
    """For each axis of `mesh` that splits the sequence of some ops: a line that names those that need it whole. They
    are computed whole on the axis, or are split over another dim. `decided` has the strategies by the keys of ops."""
    lines = []
    for axis, name in enumerate(mesh.names):
        ways = mesh.sizes[axis]
        if ways == 1:
            continue
        found = sequence_splits(folded, ways)
        if found.ends and _splits(folded, decided, found, axis):
            lines.append(f"{name!r}: {'; '.join(_texts(found.ends))}")
    return tuple(lines)


def _splits(folded: Folded, decided: Mapping[str, Decided], found: SequenceSplits, axis: int) -> bool:
    """Whether some op has a floating result that is split over the sequence on `axis`."""
    return any(
        strategy[axis] in found.placements.get(name, ())
        for op in folded.ops
        for name, strategy in zip(op.results, decided[op.key].strategy.results, strict=True)
        if folded.types[name].dtype.is_floating_point
    )


def _texts(ends: Iterable[SequenceEnd]) -> Iterator[str]:
    """One text for all ops of a kind in one module, and in those that are alike."""
    same = grouped(
        ((f"{re.sub(r'[.]?[0-9]+(?=[./]|$)', '.*', end.op.module)}/{end.op.kind}", end.dim, end.size), end)
        for end in ends
    )
    for (key, dim, size), alike in same.items():
        count = f" ({len(alike)} ops)" if len(alike) > 1 else ""
        yield f"{key}{count} {_NEEDS.get(alike[0].op.kind, 'needs all of')} dim {dim} of size {size}"
