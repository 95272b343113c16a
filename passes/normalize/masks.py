"""Masks of attention, read as bands, rows and documents in place of flags of queries by keys.

A mask is a conjunction. Each of its terms compares a tensor of queries, [..., queries, 1], with one of keys, [..., 1,
keys], or has one row of flags for all queries. A comparison of places bounds how far before and after its place a query
attends to keys: causal attention, and windows. That of other numbers for equality says that both are in one document;
models compare numbers that count restarts of positions, and positions within a document as if these were places.
Other masks of the same value for all batches are known by this value, and all others stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch

from passes.ir.arguments import Argument, Ref
from passes.ir.bands import Band
from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType
from passes.normalize.diagonals import by_distance
from passes.normalize.rewriter import KEEP, Rewriter, constant
from passes.normalize.views import reshaped
from passes.ops import ATTENTION

# Larger masks are not computed here.
_LARGEST = 2**28


_EVERYWHERE = Band()


@dataclass(frozen=True)
class _Order:
    """Positions of queries and keys are compared: `tensor` has them for both. A query attends to the keys of which they
    are in this band around its own."""

    tensor: str
    band: Band
    batch: Shape


@dataclass(frozen=True)
class Meaning:
    """The keys that a mask shows: those in `band`, of all of `rows`, of the same document, where `documents` are pairs
    of numbers of queries and keys, and in `orders`."""

    band: Band = _EVERYWHERE
    rows: tuple[str, ...] = ()
    documents: tuple[tuple[str, str], ...] = ()
    orders: tuple[_Order, ...] = ()


def attention(rewriter: Rewriter, op: Op) -> Argument:
    """An op with a mask of queries by keys: the same with `is_causal`, a window, a row of flags, and documents.

    Masks of numbers that are added are known by zeros and by the least number of their dtype, which softmax makes
    exactly zero.
    """
    mask = op.arguments["attn_mask"]
    if not isinstance(mask, Ref) or op.arguments["is_causal"]:
        return KEEP
    queries, keys = (rewriter.type(op.arguments[name]).shape[-2] for name in ("query", "key"))
    if rewriter.type(mask).shape[-2:] != (queries, keys) or queries == 1:
        return KEEP
    if mask.name not in rewriter.meanings:
        rewriter.meanings[mask.name] = Reader(rewriter, queries, keys).meaning(mask.name)
    meaning = rewriter.meanings[mask.name]
    return with_meaning(rewriter, op, meaning) if isinstance(meaning, Meaning) else KEEP


def with_meaning(rewriter: Rewriter, op: Op, meaning: Meaning) -> Argument:
    """An op of attention that shows what a mask does; KEEP where it cannot."""
    band, result = meaning.band, rewriter.types[op.results[0]]
    queries, keys = (rewriter.type(op.arguments[name]).shape[-2] for name in ("query", "key"))
    causal = band.after == 0
    if queries != keys and not band.is_full:
        return KEEP
    known = arguments_of(rewriter, op, meaning, len(rewriter.type(op.arguments["query"]).shape))
    if band.before is None and not meaning.documents and not (causal and meaning.rows):
        return rewriter.write(op, op.target, result, **{**op.arguments, **known})
    query = rewriter.type(op.arguments["query"]).shape
    if len(query) != 4 or op.arguments["dropout_p"]:
        return KEEP
    given = ungrouped(rewriter, *(op.arguments[name] for name in ("key", "value")))
    return rewriter.write(op, ATTENTION, result, **{**op.arguments, **known, **given})


def arguments_of(rewriter: Rewriter, op: Op, meaning: Meaning, rank: int = 4) -> dict[str, Argument]:
    """The arguments of attention for the meaning of a mask of scores with `rank` dims; those that say nothing are left
    out but for `attn_mask` and `is_causal`."""
    band, rows = meaning.band, [whole(rewriter, op, name, rank) for name in meaning.rows]
    known: dict[str, Argument] = {"attn_mask": _row(rewriter, op, rows), "is_causal": band.after == 0}
    if band.before is not None:
        known["window"] = band.before, band.after
    if meaning.documents:
        ((own, other),) = meaning.documents
        known["query_documents"], known["key_documents"] = (whole(rewriter, op, each, rank) for each in (own, other))
    return known


def _row(rewriter: Rewriter, op: Op, rows: Sequence[Ref]) -> Argument:
    """The conjunction of `rows`."""

    def both(one: Ref, other: Ref) -> Ref:
        shapes = rewriter.type(one).shape, rewriter.type(other).shape
        shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        return rewriter.write(op, "aten.__and__.Tensor", TensorType(shape, torch.bool), one, other)

    return reduce(both, rows) if rows else None


def whole(rewriter: Rewriter, op: Op, name: str, rank: int = 4) -> Ref:
    """A tensor with as many dims as scores have."""
    shape = rewriter.types[name].shape
    return reshaped(rewriter, op, Ref(name), (1,) * (rank - len(shape)) + shape)


def ungrouped(rewriter: Rewriter, key: Argument, value: Argument) -> Mapping[str, Argument]:
    """Keys and values without their repetition for each query head of a group, where both are repeated."""
    found: dict[str, Argument] = {}
    for name, source in (("key", key), ("value", value)):
        assert isinstance(source, Ref)
        chain = [rewriter.maker(source.name)]
        for _ in range(2):
            last_made = chain[-1]
            given = last_made is not None and last_made.operands
            chain.append(rewriter.maker(given[0]) if given else None)
        if [made.kind if made else "" for made in chain] != ["reshape", "expand", "reshape"]:
            return {}
        first, last = chain[-1], rewriter.types[source.name].shape
        assert first is not None
        own = rewriter.types[first.operands[0]].shape
        batch, heads, *rest = own if len(own) == 4 else (0, 1)
        repeated = [rewriter.types[made.results[0]].shape for made in chain[1:] if made]
        if repeated != [(batch, heads, last[1] // heads, *rest), (batch, heads, 1, *rest)]:
            return {}
        found[name] = Ref(first.operands[0])
    return {**found, "enable_gqa": True}


class Reader:
    """Reads masks of `queries` by `keys` from the ops that make them."""

    def __init__(self, rewriter: Rewriter, queries: int, keys: int) -> None:
        self.rewriter = rewriter
        self.queries, self.keys = queries, keys

    def meaning(self, *names: str) -> Meaning | None:
        """The meaning of all of these masks; None if it is not known."""
        found: Meaning | None = Meaning()
        for name in names:
            found = _both(found, self._terms(name))
        if found is None:
            return None
        band = found.band
        for order in found.orders:
            if not any(self._count_restarts(own, other, order) for own, other in found.documents):
                return None
            band = _narrower(band, order.band)
        sides = (0 if side is None else side for side in (band.before, band.after))
        if len(found.documents) > 1 or min(sides) < 0 or (band.before is not None and band.after is None):
            return None
        if band.before is None and band.after:
            return None
        return replace(found, band=band, orders=())

    def sees_itself(self, meaning: Meaning) -> bool:
        """Whether each query is in the document of the key at its place."""
        pairs = meaning.documents
        return not pairs or (self.queries == self.keys and all(self._same_rows(own, other) for own, other in pairs))

    def _same_rows(self, one: str, other: str) -> bool:
        """Whether two tensors, of queries and of keys, have the same numbers in order."""
        (first, added), (second, more) = self._origin(one), self._origin(other)
        if added != more or self._shape(one)[:-2] != self._shape(other)[:-2]:
            return False
        if first == second:
            return True
        own, others = self._maker(first), self._maker(second)
        if own is None or others is None or own.target != others.target:
            return False
        pairs = zip(own.arguments.values(), others.arguments.values(), strict=True)
        return all(
            self._same_rows(left.name, right.name)
            if isinstance(left, Ref) and isinstance(right, Ref)
            else left == right
            for left, right in pairs
        )

    def _shape(self, name: str) -> Shape:
        return self.rewriter.types[name].shape

    def _maker(self, name: str) -> Op | None:
        return self.rewriter.maker(name)

    def _terms(self, name: str) -> Meaning | None:
        """The meaning of a tensor that is, or broadcasts to, flags of queries by keys."""
        op, shape = self._maker(name), self._shape(name)
        if self.rewriter.types[name].dtype == torch.bool and op is not None:
            if op.kind in _CONJUNCTIONS and len(op.operands) == 2:
                if any(self.rewriter.types[operand].dtype != torch.bool for operand in op.operands):
                    return None
                return _both(*(self._terms(operand) for operand in op.operands))
            if op.kind in ("expand", "reshape") and _leading(self._shape(op.operands[0])) == _leading(shape):
                return self._terms(op.operands[0])
            if op.kind == "expand" and len(self._shape(op.operands[0])) == len(shape):
                return self._terms(op.operands[0])
        if prod(shape[-2:]) == self.queries * self.keys and len(shape) > 1:
            compared = self._compared(op) if op is not None else None
            return self._by_value(name) if compared is None else compared
        values = constant(self.rewriter, name)
        if values is not None and values.dtype == torch.bool and bool(values.all()):
            return Meaning()
        is_row = shape[-1:] == (self.keys,) and (len(shape) == 1 or shape[-2] == 1)
        return Meaning(rows=(name,)) if is_row and self.rewriter.types[name].dtype == torch.bool else None

    def _by_value(self, name: str) -> Meaning | None:
        """The meaning of a mask that is the same for every batch."""
        known = by_distance(self.rewriter, name)
        if known is not None:
            flags = _seen(known.values)
            span = None if flags is None else known.span(flags)
            return None if span is None else Meaning(self._band(*span))
        if prod(self._shape(name)) > _LARGEST:
            return None
        values = constant(self.rewriter, name)
        allowed = None if values is None else _seen(values)
        if allowed is None:
            return None
        if bool(allowed.all()):
            return Meaning()
        # Flags of places before and after are true up to the last of the first query, and from the first of the last.
        one = allowed.reshape(-1, self.queries, self.keys)[0]
        after = int(one[0].sum()) - 1
        before = self.queries - 1 - int(one[-1].long().argmax())
        band = torch.ones(self.queries, self.keys, dtype=torch.bool).tril(after).triu(-before)
        if after < 0 or before < 0 or not bool((allowed == band).all()):
            return None
        return Meaning(Band(None if before >= self.queries - 1 else before, after))

    def _band(self, first: int | None, last: int | None) -> Band:
        """The keys from the `first` to the `last` distance from a query; None, or further than any key: all."""
        before = None if first is None or -first >= self.queries - 1 else -first
        return Band(before, None if last is None or last >= self.keys - 1 else last)

    def _compared(self, op: Op) -> Meaning | None:
        """A comparison of queries with keys, or of the distance between them with a number."""
        left, right = op.arguments.get("self"), op.arguments.get("other")
        if op.kind not in _COMPARISONS or not isinstance(left, Ref):
            return None
        if not isinstance(right, Ref):
            return self._distance(op.kind, left.name, right)
        own, other, kind = left.name, right.name, op.kind
        if self._is_of_keys(own):
            own, other, kind = other, own, _MIRRORED[kind]
        if not self._is_of_queries(own) or not self._is_of_keys(other):
            return None
        if kind == "eq":
            return self._same(own, other)
        apart = self._apart(own, other)
        if apart is not None:
            return Meaning(_SIDES[kind](apart))
        (base, more), (same, less) = self._origin(own), self._origin(other)
        batch = self._shape(own)[:-2]
        if base != same or self._shape(other)[:-2] != batch:
            return None
        return Meaning(orders=(_Order(base, _SIDES[kind](more - less), batch),))

    def _is_of_queries(self, name: str) -> bool:
        return self._shape(name)[-2:] == (self.queries, 1)

    def _is_of_keys(self, name: str) -> bool:
        shape = self._shape(name)
        return shape[-1:] == (self.keys,) and (len(shape) == 1 or shape[-2] == 1)

    def _same(self, own: str, other: str) -> Meaning | None:
        """Documents of queries and keys, where there may be several."""
        if self.rewriter.types[own].dtype not in _WHOLE or self.rewriter.types[other].dtype not in _WHOLE:
            return None
        values = [constant(self.rewriter, name) for name in (own, other)]
        numbers = {int(side) for value in values if value is not None for side in (value.min(), value.max())}
        if len(numbers) == 1 and all(value is not None for value in values):
            return Meaning()
        return Meaning(documents=((own, other),))

    def _distance(self, kind: str, name: str, number: Argument) -> Meaning | None:
        """A comparison of the distance from keys to queries, or of its absolute value, with a number."""
        op = self._maker(name)
        absolute = op is not None and op.kind == "abs"
        if op is not None and absolute:
            op = self._maker(op.operands[0])
        if op is None or op.kind != "sub" or len(op.operands) != 2 or op.arguments["alpha"] != 1:
            return None
        own, other = op.operands
        turned = self._is_of_keys(own)
        own, other = (other, own) if turned else (own, other)
        if type(number) is not int or not self._is_of_queries(own) or not self._is_of_keys(other):
            return None
        apart = self._apart(own, other)
        if apart is None or kind == "eq":
            return None
        # query - key + apart, compared with the number
        if absolute:
            most = number - (kind == "lt")
            return Meaning(Band(most - apart, most + apart)) if kind in ("lt", "le") else None
        if turned:
            kind, number = _MIRRORED[kind], -number
        return Meaning(_SIDES[kind](apart - number))

    def _has_rows_of(self, op: Op) -> bool:
        """Whether an op repeats the rows of its operand, or gives it other dims around them."""
        if op.kind not in ("expand", "reshape"):
            return False
        before, after = self._shape(op.operands[0])[::-1], self._shape(op.results[0])[::-1]
        return _leading(before)[:1] == _leading(after)[:1] and (op.kind == "reshape" or before[:1] == after[:1])

    def _apart(self, own: str, other: str) -> int | None:
        """The number of the first query minus that of the first key, where both are constant and count up by one."""
        firsts = []
        for name, size in ((own, self.queries), (other, self.keys)):
            values = constant(self.rewriter, name)
            if values is None or values.dtype not in _WHOLE:
                return None
            first = int(values.flatten()[0])
            if not bool((values.reshape(-1, size) == torch.arange(first, first + size)).all()):
                return None
            firsts.append(first)
        return firsts[0] - firsts[1]

    def _origin(self, name: str) -> tuple[str, int]:
        """The tensor that has the rows of another one, maybe once for all samples, and the number that was added."""
        added = 0
        while (op := self._maker(name)) is not None:
            number = op.arguments.get("other")
            if op.kind in ("add", "sub") and type(number) is int and op.arguments["alpha"] == 1:
                added += number if op.kind == "add" else -number
            elif not self._has_rows_of(op):
                break
            name = op.operands[0]
        return name, added

    def _count_restarts(self, own: str, other: str, order: _Order) -> bool:
        """Whether documents of queries and keys, which are the same ones, begin wherever a position is not the one
        before plus one: then the distance of positions in a document is that of places."""
        base, added = self._origin(own)
        op = self._maker(base)
        if op is None or op.kind != "cumsum" or added or self._origin(other) != (base, 0):
            return False
        if not self._shape(own)[:-2] == self._shape(other)[:-2] == order.batch:
            return False
        rank = len(self._shape(op.results[0]))
        unequal = self._maker(op.operands[0])
        if op.arguments["dim"] not in (-1, rank - 1) or unequal is None or unequal.kind != "ne":
            return False
        steps = self._maker(unequal.operands[0])
        if unequal.arguments["other"] != 1 or steps is None:
            return False
        return self._steps_of(steps, rank) == (order.tensor, 0)

    def _steps_of(self, op: Op, rank: int) -> tuple[str, int] | None:
        """The origin of the numbers of which `op` gives each minus the one before, along the last dim; None where it
        does not. It may be decomposed."""
        given, last = op.arguments, (-1, rank - 1)
        if op.kind == "diff":
            is_last = given["n"] == 1 and given["dim"] in last and given["append"] is None
            return self._origin(op.operands[0]) if is_last else None
        if op.kind != "sub" or len(op.operands) != 2 or given["alpha"] != 1:
            return None
        own, before = op.operands
        part = self._maker(before)
        if part is None or part.kind != "slice" or part.arguments["start"] != 0 or part.arguments["dim"] not in last:
            return None
        joined = self._maker(part.operands[0])
        if joined is None or joined.kind != "cat" or joined.arguments["dim"] not in last:
            return None
        is_shifted = joined.operands[1:] == (own,) and self._shape(joined.operands[0])[-1] == 1
        return self._origin(own) if is_shifted else None


_WHOLE = (torch.int32, torch.int64)
_CONJUNCTIONS = ("__and__", "bitwise_and", "logical_and", "mul")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq")
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
# The band in which query + apart compares so with key.
_SIDES = {
    "ge": lambda apart: Band(None, apart),
    "gt": lambda apart: Band(None, apart - 1),
    "le": lambda apart: Band(-apart, None),
    "lt": lambda apart: Band(-apart - 1, None),
}


def _leading(shape: Shape) -> Shape:
    """`shape` without the dims of size 1 that it begins with."""
    start = next((dim for dim, size in enumerate(shape) if size != 1), len(shape))
    return shape[start:]


def _narrower(one: Band, other: Band) -> Band:
    """The keys that are in both bands."""

    def least(*sides: int | None) -> int | None:
        return min((side for side in sides if side is not None), default=None)

    return Band(least(one.before, other.before), least(one.after, other.after))


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Flags of the keys that a mask shows, of flags or of numbers that are added; None where it does anything else."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return None
    seen = mask == 0
    return seen if bool((mask[~seen] <= torch.finfo(mask.dtype).min).all()) else None


def _both(one: Meaning | None, other: Meaning | None) -> Meaning | None:
    if one is None or other is None:
        return None
    documents = tuple(dict.fromkeys((*one.documents, *other.documents)))
    rows = tuple(dict.fromkeys((*one.rows, *other.rows)))
    return Meaning(_narrower(one.band, other.band), rows, documents, (*one.orders, *other.orders))
