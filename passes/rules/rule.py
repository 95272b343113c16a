"""What a sharding rule is, and the strategies that follow from it.

A rule names the factors of an op, as in einsum: `linear` is "b s k, n k -> b s n". Each dim of each operand and result
is a list of parts, most significant first; a part is a whole factor or a range of its digits. What a factor is split
into follows from that: see `split`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from passes.ir.layout import I, Letter, P, R, S
from passes.ir.program import Op, TensorType


class Role(Enum):
    """What may be done with a factor."""

    FREE = "free"  # results carry it
    SUM = "sum"  # summed over: results without it are pending sums
    INSIDE = "inside"  # reduced inside the op's local form: results without it are the same on every rank
    WHOLE = "whole"  # not to be split


@dataclass(frozen=True, slots=True)
class Factor:
    """A named index of an op and its extent.

    `ordered` says that ranks must have it in their order, one piece each, because the local form looks to the ranks
    before and after. `reach` is how many elements of the operand it needs of the neighbours on both sides, and `least`
    how much of the factor every rank must have for that.
    """

    size: int
    role: Role = Role.FREE
    ordered: bool = False
    reach: tuple[int, int] = (0, 0)
    least: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A dim, or a part of one: the digits of `factor` from `start` (exclusive product of those before) of `size`."""

    factor: str
    size: int
    start: int = 1


Dims = tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward pass: operand or result `index`.

    `needed_by` are the operands one of which must have a gradient; empty means any. `copy` says that what is kept is
    a new tensor of the same size, not that one.
    """

    index: int
    result: bool = False
    needed_by: tuple[int, ...] = ()
    copy: bool = False


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one op.

    - `operands`, `results`: the parts of every dim of every tensor, operands in the order of `Op.operands`.
    - `added`: operands that are added to a sum; they are pending sums where it is split (the bias of `linear`).
    - `linear`: sets of operands in which the op is exactly linear together, so that pending sums pass through.
    - `bodies`: for a factor, the local form that runs on a shard when the op itself would not be right.
    - `multiplications`: of the forward pass on one device, a multiply-add counted as two.
    - `backward`: for each operand, the multiplications of its gradient relative to those of the forward pass.
    - `saved`: what autograd keeps.
    - `moves`: whether it touches memory at all (a view does not).
    """

    factors: Mapping[str, Factor]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    bodies: Mapping[str, str] = field(default_factory=dict)
    multiplications: float = 0.0
    backward: tuple[float, ...] = ()
    saved: tuple[Saved, ...] = ()
    moves: bool = True


RuleFunction = Callable[[Op, Mapping[str, TensorType]], Rule | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one op does on one axis: the letters of its tensors, and the factor that is split, if any."""

    name: str
    operands: tuple[Letter, ...]
    results: tuple[Letter, ...]
    factor: str = ""
    major: int = 1


def replicated(operands: int, results: int, letter: Letter) -> Choice:
    """The choice to compute the same on every rank: every tensor has `letter`, R or I."""
    return Choice(letter.kind, (letter,) * operands, (letter,) * results)


def passing(rule: Rule, index: int) -> Choice:
    """The choice to pass pending sums through the set `rule.linear[index]` of operands."""
    together = rule.linear[index]
    letters = tuple(P if slot in together else R for slot in range(len(rule.operands)))
    name = "P(" + ", ".join(str(slot) for slot in sorted(together)) + ")"
    return Choice(name, letters, (P,) * len(rule.results))


def split(rule: Rule, factor: str, major: int, ways: int) -> Choice | None:
    """The choice to split `factor` into `ways` after its `major` first parts; None where a tensor cannot be split so.

    What carries the factor is split. Operands without it are used by every rank differently (R), or are pending sums
    where they are added to a sum over it; results without it are pending sums, or equal where the local form says so.
    """
    role = rule.factors[factor].role
    if role is Role.WHOLE or rule.factors[factor].size // (major * ways) < rule.factors[factor].least:
        return None
    operands: list[Letter] = []
    for slot, dims in enumerate(rule.operands):
        letter = _letter(dims, factor, major, ways)
        if letter is None:
            return None
        missing = P if role is Role.SUM and slot in rule.added else R
        operands.append(missing if letter == _LACKS else letter)
    results: list[Letter] = []
    for dims in rule.results:
        letter = _letter(dims, factor, major, ways)
        if letter is None:
            return None
        results.append((I if role is Role.INSIDE else P) if letter == _LACKS else letter)
        if letter == _LACKS and role is Role.FREE:
            return None
    name = factor if major == 1 else f"{factor}@{major}"
    return Choice(name, tuple(operands), tuple(results), factor, major)


_LACKS = Letter("-")


def _letter(dims: Dims, factor: str, major: int, ways: int) -> Letter | None:
    """How a tensor lies when a digit of `factor` is split; None if the digit does not lie within one part of it."""
    carries = False
    for dim, parts in enumerate(dims):
        before = 1
        for part in parts:
            if part.factor == factor:
                carries = True
                if major % part.start == 0 and part.size % (major // part.start * ways) == 0:
                    return S(dim, before * (major // part.start))
            before *= part.size
    return None if carries else _LACKS


def digit(dims: Dims, letter: Letter, ways: int) -> tuple[str, int] | None:
    """The factor and major that a split of a tensor with `dims` comes from; None if it crosses parts."""
    before = 1
    if letter.dim >= len(dims):
        return None
    for part in dims[letter.dim]:
        if letter.major % before == 0 and part.size % (letter.major // before * ways) == 0:
            return part.factor, part.start * (letter.major // before)
        before *= part.size
    return None


def starts(rule: Rule) -> Iterator[tuple[str, int]]:
    """Where splits naturally begin: the first digit of every part of a factor that may be split."""
    seen = set()
    for dims in (*rule.operands, *rule.results):
        for parts in dims:
            for part in parts:
                place = (part.factor, part.start)
                if place not in seen and rule.factors[part.factor].role is not Role.WHOLE:
                    seen.add(place)
                    yield place


def parse_choice(name: str, rule: Rule | None, operands: int, results: int, ways: int) -> Choice | None:
    """The choice that `name` stands for: "R", "I", "P(0, 1)", a factor, or a factor and where its split begins."""
    if name in ("R", "I"):
        return replicated(operands, results, Letter(name))
    if rule is None:
        return None
    for index in range(len(rule.linear)):
        choice = passing(rule, index)
        if choice.name == name:
            return choice
    factor, _, major = name.partition("@")
    if factor not in rule.factors or not (major or "1").isdigit():
        return None
    return split(rule, factor, int(major or "1"), ways)
