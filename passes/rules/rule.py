"""The choices of one op on one axis that follow from its rule: `split` derives the placement of every tensor."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.ir.layout import I, P, Placement, R, S
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Role, Rule

RuleFunction = Callable[[Op, Mapping[str, TensorType]], Rule | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one op on one axis: the placements of its tensors; if the op is split, also the factors, the
    number of parts ahead of the split (`major`, as the `split_factor` of DTensor's `_StridedShard`), and the local
    form."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factors: tuple[str, ...] = ()
    major: int = 1
    form: str = ""


def replicated(operands: int, results: int, placement: Placement) -> Choice:
    """The choice to compute the same on every rank: every tensor has `placement`, R or I."""
    return Choice(placement.kind, (placement,) * operands, (placement,) * results)


def passing(rule: Rule, index: int) -> Choice:
    """The choice to pass pending sums through the set `rule.linear[index]` of operands."""
    together = rule.linear[index]
    placements = tuple(P if slot in together else R for slot in range(len(rule.operands)))
    name = "P(" + ", ".join(str(slot) for slot in sorted(together)) + ")"
    return Choice(name, placements, (P,) * len(rule.results))


def split(rule: Rule, name: str, major: int, ways: int) -> Choice | None:
    """The choice of the method `name`, whose factors are split into `ways` after their `major` first parts; None if a
    tensor cannot be split that way.

    Tensors that carry a factor are split. Operands without one are used by every rank differently (R), or are pending
    sums where they are added to a sum over it; results without one are pending sums, or equal where the local form
    makes them so.
    """
    method = rule.method(name)
    if method is None:
        return None
    factors = [rule.factors[factor] for factor in method.factors]
    role = method.role or factors[0].role
    if role is Role.WHOLE or any(factor.size // (major * ways) < factor.least for factor in factors):
        return None
    operands: list[Placement] = []
    for slot, dims in enumerate(rule.operands):
        placement = _placement_of_any(dims, method.factors, major, ways)
        if placement is None:
            return None
        missing = P if role is Role.SUM and slot in rule.added else R
        operands.append(missing if placement == _LACKS else placement)
    results: list[Placement] = []
    for dims in rule.results:
        placement = _placement_of_any(dims, method.factors, major, ways)
        if placement is None:
            return None
        results.append((I if role is Role.INSIDE else P) if placement == _LACKS else placement)
        if placement == _LACKS and role is Role.FREE:
            return None
    written = name if major == 1 else f"{name}@{major}"
    return Choice(written, tuple(operands), tuple(results), method.factors, major, method.form)


def on_part(rule: Rule, factors: Collection[str], ways: int) -> Rule:
    """The rule of the op on one of `ways` parts of `factors`, where every part of a dim is a whole factor.

    Discovered rules are of this form. They hold for the sizes of a call, so those of a part must follow from them.
    """

    def dims(whole: Dims) -> Dims:
        return tuple(
            tuple(replace(part, size=part.size // ways) if part.factor in factors else part for part in parts)
            for parts in whole
        )

    sizes = {name: item.size // ways if name in factors else item.size for name, item in rule.factors.items()}
    return replace(
        rule,
        factors={name: replace(item, size=sizes[name]) for name, item in rule.factors.items()},
        operands=tuple(map(dims, rule.operands)),
        results=tuple(map(dims, rule.results)),
    )


_LACKS = Placement("-")


def _placement(dims: Dims, factor: str, major: int, ways: int) -> Placement | None:
    """The placement of a tensor when a digit of `factor` is split; None if the digit spans several parts of a dim."""
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


def _placement_of_any(dims: Dims, factors: Sequence[str], major: int, ways: int) -> Placement | None:
    """The placement of a tensor that may carry one of `factors`; None where it carries two, or is not split so."""
    placements = [placement for factor in factors if (placement := _placement(dims, factor, major, ways)) != _LACKS]
    return placements[0] if len(placements) == 1 else (None if placements else _LACKS)


def digit(dims: Dims, placement: Placement, ways: int) -> tuple[str, int] | None:
    """The factor and major that a split of a tensor with `dims` corresponds to; None if it spans several parts."""
    before = 1
    if placement.dim >= len(dims):
        return None
    for part in dims[placement.dim]:
        if placement.major % before == 0 and part.size % (placement.major // before * ways) == 0:
            return part.factor, part.start * (placement.major // before)
        before *= part.size
    return None


def starts(rule: Rule) -> Iterator[tuple[str, int]]:
    """The initial splits of an op, as method and major: the first digit of every part of a factor that can be split."""
    seen = set()
    for dims in (*rule.operands, *rule.results):
        for parts in dims:
            for part in parts:
                place = (part.factor, part.start)
                if place not in seen and rule.factors[part.factor].role is not Role.WHOLE:
                    seen.add(place)
                    yield place
    yield from ((name, 1) for name in rule.joint)


def parse_choice(name: str, rule: Rule | None, operands: int, results: int, ways: int) -> Choice | None:
    """The choice that `name` stands for: "R", "I", "P(0, 1)", a method, or a method and where its split begins."""
    if name in ("R", "I"):
        return replicated(operands, results, Placement(name))
    if rule is None:
        return None
    for index in range(len(rule.linear)):
        choice = passing(rule, index)
        if choice.name == name:
            return choice
    method, _, major = name.partition("@")
    return split(rule, method, int(major or "1"), ways) if (major or "1").isdigit() else None
