"""Tensors of queries by keys whose entries depend on the distance alone, known without making them: triangles of equal
entries, and what elementwise ops make of these."""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ir.arguments import integer
from passes.ir.program import Op
from passes.normalize.rewriter import Rewriter, concrete, constant

_EQUAL = ("full", "ones", "zeros")
_TRIANGLES = ("tril", "triu")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGIC = ("logical_not", "bitwise_not", "logical_and", "logical_or", "__and__", "__or__", "bitwise_and", "bitwise_or")
_ELEMENTWISE = frozenset((*_COMPARISONS, *_LOGIC, "to", "where", "add", "sub", "rsub", "mul", "neg"))


@dataclass(frozen=True)
class Diagonals:
    """Entries by the distance of the key from the query, negative before it: `values[n]` up to the distance `ends[n]`,
    and the last value beyond."""

    ends: tuple[int, ...]
    values: Tensor

    def at(self, ends: tuple[int, ...]) -> Tensor:
        """The values between these `ends`, which its own are among."""
        return self.values[[bisect_left(self.ends, end) for end in ends] + [len(self.ends)]]

    def span(self, flags: Tensor) -> tuple[int | None, int | None] | None:
        """The first and the last distance where `flags` of the values are true, None where there is no first or last;
        None where these do not follow each other."""
        places = flags.nonzero().flatten().tolist()
        if not places or places != list(range(places[0], places[-1] + 1)):
            return None
        first, last = places[0], places[-1]
        return self.ends[first - 1] + 1 if first else None, self.ends[last] if last < len(self.ends) else None


def by_distance(rewriter: Rewriter, name: str) -> Diagonals | None:
    """The entries of a tensor, the same in all its matrices; None where they are not known to depend on the distance
    alone."""
    if rewriter.types[name].size == 1:
        value = constant(rewriter, name)
        return None if value is None else Diagonals((), value.reshape(1))
    op, shape = rewriter.maker(name), rewriter.types[name].shape
    if op is None or len(shape) < 2:
        return None
    if op.kind in _EQUAL:
        given = {key: concrete(value, {}) for key, value in op.arguments.items()}
        return Diagonals((), op.overload(**{**given, "size": [1], "device": torch.device("cpu")}))
    if op.kind in _TRIANGLES:
        return _triangle(rewriter, op)
    if op.kind in ("expand", "reshape") and rewriter.types[op.operands[0]].shape[-2:] == shape[-2:]:
        return by_distance(rewriter, op.operands[0])
    return _elementwise(rewriter, op) if op.kind in _ELEMENTWISE else None


def _triangle(rewriter: Rewriter, op: Op) -> Diagonals | None:
    """A triangle: entries beyond, or before, a distance are zero."""
    found = by_distance(rewriter, op.operands[0])
    if found is None:
        return None
    last = integer(op.arguments["diagonal"]) - (op.kind == "triu")
    ends = tuple(sorted({*found.ends, last}))
    beyond = torch.tensor([end > last for end in ends] + [True])
    return Diagonals(ends, found.at(ends).masked_fill(beyond if op.kind == "tril" else ~beyond, 0))


def _elementwise(rewriter: Rewriter, op: Op) -> Diagonals | None:
    """The op on one entry for each range of distances."""
    found: dict[str, Diagonals] = {}
    for name in op.operands:
        operand = by_distance(rewriter, name)
        shapes = [rewriter.types[each].shape[-2:] for each in (name, op.results[0])]
        if operand is None or (operand.ends and shapes[0] != shapes[1]):
            return None
        found[name] = operand
    if not found:
        return None
    ends = tuple(sorted({end for each in found.values() for end in each.ends}))
    values = {name: each.at(ends) for name, each in found.items()}
    return Diagonals(ends, op.overload(**{key: concrete(value, values) for key, value in op.arguments.items()}))
