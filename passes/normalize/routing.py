"""Rows that are sorted by group: the program without the sort.

Experts compute on rows that are sorted by expert: ids are sorted, rows are gathered in that order, multiplied in a
grouped product, put through ops that treat every row alike, and put back into the order in which they came. A sort
needs all rows, so none of this could be split over the batch. But the order is not part of what is computed: each row
meets the weights of its own expert. In the program that is written here rows stay where they are, and
`autopar::routed_mm` is the product of each row with the matrix of its group; it sorts the rows that it is given.

A tensor is *sorted* by the order of a sort if it is `value[order]` for a tensor `value` of the program without the
sort. Indexing with the order makes such a tensor, ops that treat every row alike keep it so, and indexing with the
inverse of the order ends it. Where anything else reads a sorted tensor, the sort stays.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from passes.ir.arguments import Ref, references, rename
from passes.ir.program import Op, Program, draws, without_unused
from passes.ir.rule import Role, Rule
from passes.normalize.rewriter import Rewriter
from passes.normalize.views import expanded, reshaped
from passes.rules import find_rule


@dataclass(frozen=True)
class _Sorted:
    """A tensor that is `value[order]`; without a value it is `order // repeats`. `is_key` says that it holds what was
    sorted."""

    order: str
    value: Ref | None = None
    repeats: int = 1
    is_key: bool = False


@dataclass(frozen=True)
class _Inverse:
    """The inverse of an order."""

    order: str


@dataclass(frozen=True)
class _Counts:
    """The number of occurrences of each of the keys 0, 1, … among the sorted ones; their running sum if `is_ends`."""

    order: str
    groups: int
    is_ends: bool = False


_Known = _Sorted | _Inverse | _Counts

# Products of rows that are sorted by group, with the matrices and the ends of the groups.
_PRODUCTS = ("_grouped_mm", "grouped_mm_fallback")


def without_sorting(program: Program) -> Program:
    """The program with rows that are sorted for grouped products left in the order in which they come."""
    if not any(op.kind in _PRODUCTS for op in program.ops):
        return program
    kept: set[str] = set()
    while True:
        unsorting = _Unsorting(program, kept)
        found = without_unused(unsorting.run())
        left = {op.results[1] for op in found.ops if op.kind == "sort"} & unsorting.keys.keys()
        if not left:
            return found if unsorting.keys else program
        kept |= left


class _Unsorting(Rewriter):
    """Copies a program, and writes the values of its sorted tensors besides; what nothing reads then is removed later.

    The sorts with orders in `kept` stay. `keys` are what the others sort, by order; `known` are the tensors that depend
    on an order.
    """

    def __init__(self, program: Program, kept: Set[str]) -> None:
        super().__init__(program)
        self.kept = kept
        self.keys: dict[str, Ref] = {}
        self.known: dict[str, _Known] = {}

    def run(self) -> Program:
        """The program with both."""
        for original in self.program.ops:
            op = self.current(original)
            self.ops.append(op)
            if op.kind == "sort":
                self._sort(op)
            elif any(name in self.known for name in op.operands):
                found = self._follow(op)
                if isinstance(found, Ref):
                    self.replaced[op.results[0]] = found
                elif found is not None and len(op.results) == 1:
                    self.known[op.results[0]] = found
        return self.finish()

    def _sort(self, op: Op) -> None:
        key, (_, order) = op.arguments["self"], op.results
        if order in self.kept or not isinstance(key, Ref) or op.arguments["descending"]:
            return
        if len(self.type(key).shape) == 1 and key.name not in self.known:
            self.keys[order] = key
            self.known |= {op.results[0]: _Sorted(order, key, is_key=True), order: _Sorted(order)}

    def _follow(self, op: Op) -> _Known | Ref | None:
        """A description of the result of `op`, or the value that replaces it; None where `op` needs its operands
        unchanged."""
        if op.kind == "index":
            return self._indexed(op)
        if op.kind == "index_put":
            return self._inverse(op)
        if op.kind in ("histc", "cumsum"):
            return self._counts(op)
        if op.kind in _PRODUCTS:
            return self._product(op)
        given = self.known.get(op.operands[0])
        if op.kind == "floor_divide" and isinstance(given, _Sorted) and given == _Sorted(given.order):
            divisor = op.arguments["other"]
            return replace(given, repeats=divisor) if isinstance(divisor, int) and divisor > 0 else None
        return self._row_by_row(op)

    def _indexed(self, op: Op) -> _Known | Ref | None:
        """Rows that are gathered in the order, or put back; or rows of a table, one for each sorted row."""
        source, indices = op.arguments["self"], op.arguments["indices"]
        if not isinstance(source, Ref) or not isinstance(indices, tuple) or len(indices) != 1:
            return None
        own, (index,) = self.known.get(source.name), indices
        by = self.known.get(index.name) if isinstance(index, Ref) else None
        if isinstance(own, _Sorted) and isinstance(by, _Inverse) and own.order == by.order:
            return own.value
        if own is not None or not isinstance(by, _Sorted):
            return None
        shape, count = self.type(source).shape, self.type(self.keys[by.order]).shape[0]
        if by.value is not None:
            value = self.write(op, op.target, self.types[op.results[0]], source, (by.value,))
        elif not shape or shape[0] * by.repeats != count:
            return None
        elif by.repeats == 1:
            value = source
        else:
            apart = reshaped(self, op, source, (shape[0], 1, *shape[1:]))
            repeated = expanded(self, op, apart, (shape[0], by.repeats, *shape[1:]))
            value = reshaped(self, op, repeated, (count, *shape[1:]))
        return _Sorted(by.order, value)

    def _inverse(self, op: Op) -> _Known | None:
        """The inverse of an order: its numbers, each put where the order has it."""
        indices, values = op.arguments["indices"], op.arguments["values"]
        read = set(references(values))
        made = next((other for other in reversed(self.ops) if not read.isdisjoint(other.results)), None)
        if not isinstance(indices, tuple) or len(indices) != 1 or made is None or made.kind != "arange":
            return None
        (index,) = indices
        by = self.known.get(index.name) if isinstance(index, Ref) else None
        if not isinstance(by, _Sorted) or by != _Sorted(by.order):
            return None
        shape = self.type(self.keys[by.order]).shape
        numbers = made.arguments.get("start") in (None, 0) and made.arguments.get("step") in (None, 1)
        is_whole = self.types[op.results[0]].shape == shape == (made.arguments["end"],)
        return _Inverse(by.order) if numbers and is_whole else None

    def _counts(self, op: Op) -> _Known | None:
        """Numbers of rows of each group, and where the rows of each end."""
        given, arguments = self.known.get(op.operands[0]), op.arguments
        if op.kind == "cumsum":
            return replace(given, is_ends=True) if isinstance(given, _Counts) and not given.is_ends else None
        bins = arguments["bins"]
        if not isinstance(given, _Sorted) or not given.is_key or not isinstance(bins, int):
            return None
        return _Counts(given.order, bins) if (arguments["min"], arguments["max"]) == (0, bins - 1) else None

    def _product(self, op: Op) -> _Known | None:
        """A grouped product of sorted rows."""
        rows, weight, *others = op.operands
        if len(others) != 1 or weight in self.known or op.arguments.get("out_dtype") is not None:
            return None
        given, by = self.known.get(rows), self.known.get(others[0])
        if not isinstance(given, _Sorted) or given.value is None or not isinstance(by, _Counts) or not by.is_ends:
            return None
        if given.order != by.order or by.groups != self.types[weight].shape[0]:
            return None
        type = self.types[op.results[0]]
        operands = given.value, Ref(weight), self.keys[by.order]
        value = self.write(op, "autopar.routed_mm.default", type, *operands, product=op.target)
        return _Sorted(by.order, value)

    def _row_by_row(self, op: Op) -> _Known | None:
        """An op that treats every row alike: on rows in another order it gives its result in that order."""
        known = [self.known.get(name) for name in op.operands]
        of = [item for item in known if isinstance(item, _Sorted)]
        if len(of) != len([item for item in known if item is not None]) or len({item.order for item in of}) != 1:
            return None
        slots = [slot for slot, item in enumerate(known) if item is not None]
        rule = find_rule(op, self.types, self.program.rules)
        if rule is None or any(item.value is None for item in of) or draws(op) or not _is_row_by_row(rule, slots):
            return None
        values = {
            name: item.value
            for name, item in zip(op.operands, known, strict=True)
            if isinstance(item, _Sorted) and item.value is not None
        }
        name = self.fresh(f"%{op.kind}_n")
        self.types[name] = self.types[op.results[0]]
        arguments = {key: rename(value, lambda old: values.get(old, Ref(old))) for key, value in op.arguments.items()}
        self.ops.append(replace(op, arguments=arguments, results=(name,)))
        return _Sorted(of[0].order, Ref(name), is_key=op.kind == "to" and of[0].is_key)


def _is_row_by_row(rule: Rule, slots: list[int]) -> bool:
    """Whether the first dim of the operands `slots` and of the result has digits of a free factor that no other has, so
    that each row is computed in the same way from its own operands."""
    if len(rule.results) != 1 or not rule.results[0]:
        return False
    first = rule.results[0][0]
    if len(first) != 1:
        return False
    (rows,) = first
    factor = rule.factors[rows.factor]
    if factor.role is not Role.FREE or factor.ordered or rows.factor in rule.forms or rows.start != 1:
        return False
    others = [dims for slot, dims in enumerate(rule.operands) if slot not in slots]
    same = [rule.operands[slot] for slot in slots]
    apart = [parts for dims in others for parts in dims]
    apart += [parts for dims in (*same, rule.results[0]) for parts in dims[1:]]
    return all(dims and dims[0] == first for dims in same) and not any(
        part.factor == rows.factor and part.start < rows.size for parts in apart for part in parts
    )
