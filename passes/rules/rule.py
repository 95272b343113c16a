"""The strategies that follow from a sharding rule: `split` derives the letters of every tensor from the factor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from passes.ir.layout import I, Letter, P, R, S
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Role, Rule

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
