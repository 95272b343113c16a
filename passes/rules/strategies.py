"""From a rule to strategies: one choice per mesh axis, where they go together."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from passes.ir.choices import Strategy
from passes.ir.layout import I, Layout, Letter, R, fits
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType, has_linear_gradients
from passes.rules.rule import Choice, Rule, parse_choice, passing, replicated, split

Digit = tuple[str, int]


@dataclass(frozen=True)
class Subject:
    """An op with what its strategies depend on: its rule, the types of its tensors, which of them a gradient flows
    through, and which operands are parameters. `copies` says that it is a view that must copy."""

    op: Op
    rule: Rule | None
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    flowing_operands: tuple[bool, ...]
    flowing_results: tuple[bool, ...]
    parameters: frozenset[int]
    copies: bool = False

    @property
    def flows(self) -> bool:
        """Whether any gradient flows through the op."""
        return any(self.flowing_results)


def subject(
    op: Op,
    rule: Rule | None,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    parameters: Set[str],
    strided: Set[str],
) -> Subject:
    """The subject for `op`; `types`, `flowing`, `parameters` and `strided` tensors are by name."""
    return Subject(
        op,
        rule,
        tuple(types[name] for name in op.operands),
        tuple(types[name] for name in op.results),
        tuple(name in flowing for name in op.operands),
        tuple(name in flowing for name in op.results),
        frozenset(slot for slot, name in enumerate(op.operands) if name in parameters),
        op.kind == "reshape" and op.operands[0] in strided,
    )


# What an axis may do with an op: "I", "R", the name of what passes, or a factor to split; None for anything.
Offer = Sequence[Set[str] | None]


def op_strategies(
    subject: Subject, digits: Mapping[int, Sequence[Digit]], mesh: Mesh, offer: Offer | None = None
) -> list[Strategy]:
    """Every strategy of an op whose splits divide; `digits` are by size of axis the factors to split and where. Where
    there is an `offer`, each axis does one of the things that it names.

    An op without a rule is computed whole on every rank. Of strategies that differ only in letters of tensors without
    a gradient one is kept: there R and I are the same.
    """
    letters = ((I, R) if has_linear_gradients(subject.op) else (I,)) if subject.flows else (R,)
    plain = [replicated(len(subject.operands), len(subject.results), letter) for letter in letters]
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for choices in _combinations(subject, plain, digits, mesh, offer or (None,) * len(mesh.sizes), ()):
        strategy = combine(subject, choices)
        if _valid(subject, strategy, mesh):
            found.setdefault((strategy.operands, strategy.results), strategy)
    return list(found.values())


def combine(subject: Subject, choices: Sequence[Choice]) -> Strategy:
    """The strategy that makes `choices`, one per axis."""
    operands = tuple(
        tuple(_plain(choice.operands[slot], flows) for choice in choices)
        for slot, flows in enumerate(subject.flowing_operands)
    )
    results = tuple(
        tuple(_plain(choice.results[index], flows) for choice in choices)
        for index, flows in enumerate(subject.flowing_results)
    )
    return Strategy(tuple(choice.name for choice in choices), operands, results)


def named_choices(subject: Subject, methods: Sequence[str], mesh: Mesh) -> tuple[Choice, ...] | None:
    """The choices that `methods` name, one per axis; None if the op has none of that name."""
    choices = []
    for axis, name in enumerate(methods):
        choice = parse_choice(name, subject.rule, len(subject.operands), len(subject.results), mesh.sizes[axis])
        if choice is None:
            return None
        choices.append(choice)
    return tuple(choices)


def _plain(letter: Letter, flows: bool) -> Letter:
    return R if letter == I and not flows else letter


def _valid(subject: Subject, strategy: Strategy, mesh: Mesh) -> bool:
    tensors = [*zip(subject.operands, strategy.operands, strict=True)]
    tensors += zip(subject.results, strategy.results, strict=True)
    return all(fits(type.shape, layout, mesh) for type, layout in tensors)


def _combinations(
    subject: Subject,
    plain: Sequence[Choice],
    digits: Mapping[int, Sequence[Digit]],
    mesh: Mesh,
    offer: Offer,
    chosen: tuple[tuple[Choice, Digit | None], ...],
) -> Iterator[tuple[Choice, ...]]:
    """All ways to choose on the axes that follow those of `chosen` (with the digit that each of them began from).

    Axes that split a factor from the same place on take its digits in mesh order.
    """
    axis = len(chosen)
    if axis == len(mesh.sizes):
        yield tuple(choice for choice, _ in chosen)
        return
    offered = offer[axis]
    rule, size = subject.rule, mesh.sizes[axis]
    whole = [(choice, None) for choice in plain]
    if rule is not None and size != 1:
        linear = [
            index for index, together in enumerate(rule.linear) if not together - rule.added <= subject.parameters
        ]
        whole += [(passing(rule, index), None) for index in linear]
    for choice, digit in whole:
        if offered is None or choice.name in offered:
            yield from _combinations(subject, plain, digits, mesh, offer, (*chosen, (choice, digit)))
    if rule is None or size == 1:
        return
    for factor, major in digits.get(size, ()):
        if (rule.factors[factor].ordered and major != 1) or not (offered is None or factor in offered):
            continue
        taken = prod(mesh.sizes[other] for other, (_, begun) in enumerate(chosen) if begun == (factor, major))
        candidate = split(rule, factor, major * taken, size)
        if candidate is not None:
            yield from _combinations(subject, plain, digits, mesh, offer, (*chosen, (candidate, (factor, major))))
