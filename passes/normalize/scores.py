"""Scores of attention that a model writes out: read from the ops between the product of queries and keys and the
softmax.

Every op in between is read by one other, so that nothing else needs the scores.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.ir.arguments import Argument, Ref, listed
from passes.ir.layout import Shape
from passes.ir.program import Op, Program, TensorType
from passes.normalize.masks import Meaning, Reader
from passes.normalize.products import scored
from passes.normalize.rewriter import Rewriter, constant


@dataclass(frozen=True)
class Term:
    """A tensor that is added to scores of the shape `scores`, times a number; where `filled`, only where keys are
    seen."""

    tensor: str
    scores: Shape
    times: float = 1.0
    filled: bool = False


@dataclass(frozen=True)
class Flags:
    """Flags of the keys that queries see, of scores of the shape `scores`. `fills` says what the least number is
    written into: "" adds it to the scores, "bias" writes it into what is added to them, "scores" into these. `least` is
    this number, times what scores are multiplied with later; nan: it is not known. `before` counts the terms that were
    added before."""

    tensor: str
    scores: Shape
    fills: str
    least: float = float("nan")
    before: int = 0


@dataclass(frozen=True)
class Scores:
    """The scores that a softmax reads: query and key of the product, of which `turned` is that of keys by width, and
    what is done to it. `divided` is the last number that it was divided by, which is not in `times` yet; `shifted` says
    that the largest score of a query was taken off."""

    query: str
    key: str
    turned: bool
    shapes: tuple[Shape, ...]
    times: float = 1.0
    divided: float = 1.0
    cap: float | None = None
    terms: tuple[Term, ...] = ()
    flags: tuple[Flags, ...] = ()
    sink: str | None = None
    dtype: torch.dtype | None = None
    shifted: bool = False

    @property
    def scale(self) -> float:
        """The number that the product is multiplied with, before a soft cap."""
        if self.cap is None or self.cap == self.divided:
            return self.times / (1.0 if self.cap is not None else self.divided)
        return self.times / self.divided * self.cap

    @property
    def is_plain(self) -> bool:
        """Whether nothing is hidden yet, nor the scores in another dtype."""
        return not self.flags and self.sink is None and self.dtype is None


class ScoreReader:
    """Reads scores of a program whose ops so far are in `rewriter`."""

    def __init__(self, rewriter: Rewriter, program: Program) -> None:
        self.rewriter = rewriter
        self._leasts: dict[str, float] = {}
        self._hidings: dict[str, tuple[str, Argument] | None] = {}
        self.uses = Counter(name for op in program.ops for name in op.operands)
        self.uses.update(program.returned)

    def softmax(self, name: str) -> tuple[Scores, Op] | None:
        """The scores, and the softmax over their last dim, of which `name` are the weights; None for anything else."""
        sliced = False
        while (op := self._only(name)) is not None:
            shape = self._shape(name)
            if op.kind == "softmax" and op.arguments["dim"] in (-1, len(shape) - 1):
                scores = self.scores(op.operands[0])
                return (scores, op) if scores is not None and (scores.sink is not None) == sliced else None
            before = self._shape(op.operands[0]) if op.operands else ()
            if op.kind == "slice" and not sliced and _drops_last(op, before, shape):
                sliced = True
            elif not (op.kind == "to" or (op.kind == "reshape" and before[-2:] == shape[-2:])):
                return None
            name = op.operands[0]
        return None

    def scores(self, name: str, uses: int = 1) -> Scores | None:
        """The scores of which `name` is the last tensor, which is read so often; None where it is no scores."""
        op = self._only(name, uses)
        if op is None or op.kind not in _STEPS or self._shape(name)[-2:] == ():
            return None
        found = _STEPS[op.kind](self, op)
        shape = self._shape(name)
        return found if found is None or found.shapes[-1] == shape else replace(found, shapes=(*found.shapes, shape))

    def _only(self, name: str, uses: int = 1) -> Op | None:
        return self.rewriter.maker(name) if self.uses[name] == uses else None

    def _shape(self, name: str) -> Shape:
        return self.rewriter.types[name].shape

    def number(self, argument: Argument) -> float | None:
        """An argument that is a number, or a tensor of one."""
        if isinstance(argument, bool) or argument is None:
            return None
        if isinstance(argument, (int, float)):
            return float(argument)
        if not isinstance(argument, Ref) or self.rewriter.type(argument).size != 1:
            return None
        known = self.rewriter.program.constants.get(argument.name)
        value = constant(self.rewriter, argument.name) if known is None else known
        return None if value is None else float(value)

    def is_least(self, argument: Argument, dtype: torch.dtype) -> bool:
        """Whether an argument is a number that hides a score of this dtype: the least of the dtype or of bfloat16, or
        less."""
        number = self.number(argument)
        return number is not None and number <= max(torch.finfo(each).min for each in (dtype, torch.bfloat16))

    def _is_zero(self, argument: Argument) -> bool:
        """Whether an argument is zero, or a tensor of zeros."""
        made = self.rewriter.maker(argument.name) if isinstance(argument, Ref) else None
        if made is not None and made.kind in ("zeros", "zeros_like", "expand"):
            return made.kind != "expand" or self._is_zero(made.arguments["self"])
        return self.number(argument) == 0.0

    # --- steps -------------------------------------------------------------------------------------------------------

    def product(self, op: Op) -> Scores | None:
        """Queries times keys."""
        result, found = self._shape(op.results[0]), scored(self.rewriter, op)
        if found is None or len(result) not in (3, 4) or min(result[-2:]) == 1:
            return None
        query, key, turned = found
        return Scores(query, key, turned, (result,)) if self._shape(query)[:-1] == result[:-1] else None

    def multiplied(self, op: Op) -> Scores | None:
        """Times a number, or divided by it."""
        number = self.number(op.arguments["other"])
        found = self.scores(op.operands[0])
        if found is None or number is None or op.arguments.get("rounding_mode") is not None or number <= 0:
            return None
        times = number if op.kind == "mul" else 1 / number
        # A part of the least number hides scores as well.
        hides = not found.flags or _SMALLEST_PART <= times <= 1
        if not hides or not replace(found, flags=()).is_plain:
            return None
        terms = tuple(replace(term, times=term.times * times) for term in found.terms)
        flags = tuple(replace(each, least=each.least * times) for each in found.flags)
        found = replace(found, flags=flags)
        if found.cap is not None:
            return replace(found, cap=found.cap * times, terms=terms)
        if op.kind == "div":
            return replace(found, times=found.times / found.divided, divided=number, terms=terms)
        return replace(found, times=found.times / found.divided * number, divided=1.0, terms=terms)

    def capped(self, op: Op) -> Scores | None:
        """The hyperbolic tangent, which is then multiplied with the cap."""
        found = self.scores(op.operands[0])
        if found is None or found.cap is not None or found.terms or found.shifted or not found.is_plain:
            return None
        return replace(found, cap=1.0)

    def added(self, op: Op) -> Scores | None:
        """Plus a bias, or a mask of the least number; or minus the largest score of a query, which changes nothing."""
        if op.arguments.get("alpha", 1) != 1 or len(op.operands) != 2:
            return None
        if op.kind == "sub":
            return self._shifted(op)
        for own, other in (op.operands, op.operands[::-1]):
            found = self.scores(own)
            if found is not None and found.sink is None:
                return self.with_terms(found, other, 1.0)
        return None

    def _shifted(self, op: Op) -> Scores | None:
        own, largest = op.operands
        made = self.rewriter.maker(largest)
        if made is not None and made.kind == "detach":
            made = self.rewriter.maker(made.operands[0])
        if made is None or made.kind not in ("max", "amax") or made.operands != (own,) or self.uses[largest] != 1:
            return None
        dims = made.arguments.get("dim")
        dims = dims if isinstance(dims, tuple) else (dims,)
        keeps = made.arguments.get("keepdim") and dims in ((-1,), (len(self._shape(own)) - 1,))
        found = self.scores(own, uses=2) if keeps else None
        if found is None:
            return None
        flags = tuple(replace(each, least=float("nan")) for each in found.flags)
        return replace(found, shifted=True, flags=flags)

    def with_terms(self, found: Scores, name: str, times: float, *, filled: bool = False) -> Scores | None:
        """The scores plus a tensor: its parts, those of which hide keys as flags."""
        op, shape = self.rewriter.maker(name), found.shapes[-1]
        if torch.broadcast_shapes(self._shape(name), shape) != shape:  # type: ignore[no-untyped-call]
            return None
        own = self.rewriter.types[found.query].dtype
        sum_dtype = torch.promote_types(self.rewriter.types[name].dtype, own)
        if found.dtype is None and sum_dtype != own:
            found = replace(found, dtype=sum_dtype)
        hiding = None if op is None else self._hiding(op)
        if hiding is not None:
            flags, rest = hiding
            plain = self._is_zero(rest)
            fills = "" if plain else "bias"
            more = Flags(flags, shape, fills, self._leasts[name], len(found.terms))
            found = replace(found, flags=(*found.flags, more))
            if plain:
                return found
            return self.with_terms(found, rest.name, times, filled=True) if isinstance(rest, Ref) else None
        if op is not None and op.kind == "add" and len(op.operands) == 2 and op.arguments["alpha"] == 1 and not filled:
            first = self.with_terms(found, op.operands[0], times)
            return None if first is None else self.with_terms(first, op.operands[1], times)
        if op is not None and op.kind == "expand" and self._hides(op.operands[0]):
            return self.with_terms(found, op.operands[0], times, filled=filled)
        if self._is_band(name, shape):
            return replace(found, flags=(*found.flags, Flags(name, shape, "")))
        terms = (*found.terms, Term(name, shape, times, filled))
        if found.dtype is not None and all(self.rewriter.types[term.tensor].dtype != found.dtype for term in terms):
            # The terms are added to the scores together, and would be rounded to a narrower dtype.
            return None
        return replace(found, terms=terms)

    def _is_band(self, name: str, scores: Shape) -> bool:
        """Whether a tensor is the least number outside of a band, and zero in it, for all batches."""
        queries, keys = scores[-2:]
        if self._shape(name)[-2:] != (queries, keys) or queries != keys:
            return False
        key = f"{name} {queries} {keys}"
        if key not in self.rewriter.meanings:
            self.rewriter.meanings[key] = Reader(self.rewriter, queries, keys).meaning(name)
        return isinstance(self.rewriter.meanings[key], Meaning)

    def _hides(self, name: str) -> bool:
        op = self.rewriter.maker(name)
        return op is not None and (op.kind in ("where", "masked_fill", "expand", "add"))

    def _hiding(self, op: Op) -> tuple[str, Argument] | None:
        """Of a tensor with the least number where keys are hidden, the flags of those that are seen, and the rest."""
        name = op.results[0]
        if name not in self._hidings:
            self._hidings[name] = self._found_hiding(op)
        return self._hidings[name]

    def _found_hiding(self, op: Op) -> tuple[str, Argument] | None:
        dtype = self.rewriter.types[op.results[0]].dtype
        if not dtype.is_floating_point:
            return None
        if op.kind == "where":
            flag, own, other = (op.arguments[name] for name in ("condition", "self", "other"))
            self._leasts[op.results[0]] = self.number(other if self.is_least(other, dtype) else own) or 0.0
            if isinstance(flag, Ref) and self.is_least(other, dtype):
                return flag.name, own
            if isinstance(flag, Ref) and self.is_least(own, dtype):
                return self.seen(op, flag.name), other
        if op.kind == "masked_fill" and self.is_least(op.arguments["value"], dtype):
            flag = op.arguments["mask"]
            assert isinstance(flag, Ref)
            self._leasts[op.results[0]] = self.number(op.arguments["value"]) or 0.0
            return self.seen(op, flag.name), op.arguments["self"]
        return None

    def filled(self, op: Op) -> Scores | None:
        """Scores that are the least number where keys are hidden."""
        hiding = self._hiding(op)
        if hiding is None or not isinstance(hiding[1], Ref):
            return None
        found = self.scores(hiding[1].name)
        if found is None or found.sink is not None or found.shapes[-1] != self._shape(op.results[0]):
            return None
        more = Flags(hiding[0], found.shapes[-1], "scores", self._leasts[op.results[0]], len(found.terms))
        return replace(found, flags=(*found.flags, more))

    def seen(self, like: Op, hidden: str) -> str:
        """Flags of what `hidden` does not hide."""
        op = self.rewriter.maker(hidden)
        if op is not None and op.kind in ("logical_not", "bitwise_not"):
            shown = op.operands[0]
            if self.rewriter.types[shown].dtype == torch.bool:
                return shown
        masked = self._masked(op) if op is not None else None
        if masked is not None:
            return masked
        if op is not None and op.kind == "expand":
            shown = self.seen(like, op.operands[0])
            return self.rewriter.write(like, op.target, self.rewriter.types[hidden], Ref(shown), *_sizes(op)).name
        if op is not None and op.kind in _OPPOSITE and len(op.operands) == 2:
            target = op.target.replace(op.kind, _OPPOSITE[op.kind])
            return self.rewriter.write(like, target, self.rewriter.types[hidden], **op.arguments).name
        type = TensorType(self._shape(hidden), torch.bool)
        return self.rewriter.write(like, "aten.logical_not.default", type, Ref(hidden)).name

    def _masked(self, op: Op) -> str | None:
        """The flags of keys that are seen, where `op` finds the hidden ones in a mask of zero and the least number."""
        source = self.rewriter.maker(op.operands[0]) if op.operands else None
        hiding = None if source is None else self._hiding(source)
        if hiding is None or not self._is_zero(hiding[1]):
            return None
        below = op.kind in ("lt", "le") and (self.number(op.arguments["other"]) or 0.0) < 0
        is_flag = op.kind == "to" and op.arguments["dtype"] is torch.bool
        unequal = op.kind == "ne" and self.number(op.arguments["other"]) == 0.0
        return hiding[0] if below or is_flag or unequal else None

    def sunk(self, op: Op) -> Scores | None:
        """Scores with the score of a sink behind them."""
        tensors = listed(op.arguments["tensors"])
        rank = len(self._shape(op.results[0]))
        if len(tensors) != 2 or rank != 4 or op.arguments["dim"] not in (-1, rank - 1):
            return None
        own, sink = (item.name for item in tensors if isinstance(item, Ref))
        found = self.scores(own)
        while (made := self.rewriter.maker(sink)) is not None and made.kind == "expand":
            sink = made.operands[0]
        is_sink = len(self._shape(sink)) == 4 and self._shape(sink)[2:] == (1, 1)
        if found is None or not is_sink or found.sink is not None or found.shifted or found.dtype is not None:
            return None
        return replace(found, sink=sink)

    def cast(self, op: Op) -> Scores | None:
        """Scores in a wider dtype."""
        found = self.scores(op.operands[0])
        before, after = (self.rewriter.types[name].dtype for name in (op.operands[0], op.results[0]))
        if found is None or found.dtype is not None or torch.promote_types(before, after) != after:
            return None
        return replace(found, dtype=after)

    def reshaped(self, op: Op) -> Scores | None:
        """Heads and samples in one dim, or in two."""
        found = self.scores(op.operands[0])
        shape = self._shape(op.results[0])
        if found is None or found.sink is not None or found.shapes[-1][-2:] != shape[-2:] or len(shape) not in (3, 4):
            return None
        if len(shape) == 4 and any(len(each) == 4 and each[:2] != shape[:2] for each in found.shapes):
            return None
        # Keys of several query heads would be repeated.
        return found if self._shape(found.key)[:-2] == found.shapes[0][:-2] else None


def _sizes(op: Op) -> tuple[Argument, ...]:
    return (op.arguments["size"],)


def _drops_last(op: Op, before: Shape, after: Shape) -> bool:
    is_last = op.arguments["dim"] in (-1, len(before) - 1) and op.arguments["start"] in (None, 0)
    return is_last and before[:-1] == after[:-1] and after[-1] == before[-1] - 1


_SMALLEST_PART = 1e-4
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
_STEPS: Mapping[str, Callable[[ScoreReader, Op], Scores | None]] = {
    "matmul": ScoreReader.product,
    "bmm": ScoreReader.product,
    "einsum": ScoreReader.product,
    "mul": ScoreReader.multiplied,
    "div": ScoreReader.multiplied,
    "tanh": ScoreReader.capped,
    "add": ScoreReader.added,
    "sub": ScoreReader.added,
    "masked_fill": ScoreReader.filled,
    "where": ScoreReader.filled,
    "cat": ScoreReader.sunk,
    "to": ScoreReader.cast,
    "reshape": ScoreReader.reshaped,
}


def lead_of(shapes: tuple[Shape, ...], last: Shape) -> tuple[int, int]:
    """Samples and heads of scores that had these shapes, of which the last four dims of any say."""
    for shape in (*shapes, last):
        if len(shape) == 4:
            return shape[0], shape[1]
    return prod(shapes[-1][:-2]), 1
