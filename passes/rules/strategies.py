"""Strategies of an op from its rule: the choices on one mesh axis, of which `split` derives the placement of every
tensor, in all compatible combinations.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import contains

from passes.ir.arguments import Argument, integer
from passes.ir.choices import Strategy
from passes.ir.layout import I, Layout, P, Placement, R, S, fits, local_shape, parse_placement, split_ways
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType, has_linear_gradients
from passes.ir.rule import Dims, Role, Rule, parts_of
from passes.rules.following import share_factors
from passes.rules.local_forms import form_that_runs


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
    placements: list[Placement] = []
    for slot, dims in enumerate((*rule.operands, *rule.results)):
        placement = _placement_of_any(dims, method.factors, major, ways)
        is_result = slot >= len(rule.operands)
        if placement is None or (placement == _LACKS and is_result and role is Role.FREE):
            return None
        if placement == _LACKS and is_result:
            placement = I if role is Role.INSIDE else P
        elif placement == _LACKS:
            placement = P if role is Role.SUM and slot in rule.added else R
        placements.append(placement)
    written, count = name if major == 1 else f"{name}@{major}", len(rule.operands)
    return Choice(written, tuple(placements[:count]), tuple(placements[count:]), method.factors, major, method.form)


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


def stripes(rule: Rule, ranks: int) -> Iterator[tuple[str, int]]:
    """The splits of an op in stripes over so many ranks, of one axis or of several, as method and major."""
    for name, method in rule.joint.items():
        size = rule.factors[method.factors[0]].size
        if method.in_stripes and size % ranks == 0:
            yield name, size // ranks


def is_uneven(rule: Rule, methods: Iterable[str]) -> bool:
    """Whether stripes would even out the work of ranks under these methods: they split a factor of a method in
    stripes, in order."""
    return any(_may_be_in_stripes(rule, name) for name in methods if "@" not in name)


def axes_for_stripes(rule: Rule, methods: Sequence[str]) -> tuple[int, ...]:
    """The axes on which an op with these methods splits a factor of a method in stripes, in whatever order."""
    return tuple(axis for axis, name in enumerate(methods) if _may_be_in_stripes(rule, name.partition("@")[0]))


def _may_be_in_stripes(rule: Rule, name: str) -> bool:
    """Whether the method called `name` splits a factor of a method in stripes."""
    factors = {factor for method in rule.joint.values() if method.in_stripes for factor in method.factors}
    method = rule.method(name)
    return method is not None and not factors.isdisjoint(method.factors)


def starts(rule: Rule) -> Iterator[tuple[str, int]]:
    """The initial splits of an op, as method and major: the first digit of every part of a factor that can be split."""
    parts = (
        part for part in parts_of(*rule.operands, *rule.results) if rule.factors[part.factor].role is not Role.WHOLE
    )
    yield from dict.fromkeys((part.factor, part.start) for part in parts)
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


# A method, and the major of its split: the number of parts of its factors before it.
Digit = tuple[str, int]
# The choices of an op on all axes.
Choices = tuple[Choice, ...]


@dataclass(frozen=True)
class OpContext:
    """An op and the context that its strategies depend on: its rule, the types of its tensors, which of them a gradient
    flows through, and which operands are parameters. `copies` says that it is a view that must copy."""

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


def op_context(
    op: Op,
    rule: Rule | None,
    types: Mapping[str, TensorType],
    flowing: Set[str],
    parameters: Set[str],
    copied: Set[str],
) -> OpContext:
    """The context of `op`; `types`, and the tensors that are `flowing`, `parameters` and `copied`, are by name."""
    return OpContext(
        op,
        rule,
        tuple(types[name] for name in op.operands),
        tuple(types[name] for name in op.results),
        tuple(name in flowing for name in op.operands),
        tuple(name in flowing for name in op.results),
        frozenset(slot for slot, name in enumerate(op.operands) if name in parameters),
        op.results[0] in copied,
    )


# The allowed methods of an op on an axis: "I", "R", the name of a passed sum, a factor to split, or that and where its
# digits begin ("rows@4"); None for all.
AllowedMethods = Sequence[Set[str] | None]


def placement_token(placement: Placement) -> str:
    """The name of a placement among allowed methods: a split by its dim alone."""
    return f"S({placement.dim})" if placement.kind == "S" else placement.kind


def method_token(method: str, is_op: bool) -> str:
    """The name of the method of a strategy on one axis, among allowed methods: of a split op without its major, and the
    placement for all others."""
    return method.partition("@")[0] if is_op else placement_token(parse_placement(method))


def op_strategies(
    context: OpContext, digits: Mapping[int, Sequence[Digit]], mesh: Mesh, allowed: AllowedMethods | None = None
) -> dict[Strategy, Choices]:
    """Every strategy of an op whose splits divide, with its choices; `digits` are the factors and majors to split, by
    size of axis. `allowed` restricts each axis to its allowed methods.

    An op without a rule is replicated. Of strategies that differ only in placements of tensors without a gradient,
    where R and I are the same, one is returned; those with other local forms are others.
    """
    combinations = _combinations(context, digits, mesh, allowed or (None,) * len(mesh.sizes))
    rows = [tuple(zip(*(option.placements for option in options), strict=True)) for options in combinations]
    fitting = [
        {layout for layout in {row[number] for row in rows} if fits(type.shape, layout, mesh)}
        for number, type in enumerate((*context.operands, *context.results))
    ]
    found: dict[tuple[tuple[Layout, ...], tuple[str, ...]], Choices] = {}
    for row, options in zip(rows, combinations, strict=True):
        key = row, tuple(option.choice.form for option in options)
        if key not in found and all(map(contains, fitting, row)):
            found[key] = tuple(option.choice for option in options)
    count = len(context.operands)
    return {
        Strategy(tuple(choice.name for choice in choices), row[:count], row[count:]): choices
        for (row, _), choices in found.items()
    }


def combine(context: OpContext, choices: Sequence[Choice]) -> Strategy:
    """The strategy that makes `choices`, one per axis."""
    layouts = tuple(zip(*(_option(context, choice).placements for choice in choices), strict=True))
    count = len(context.operands)
    return Strategy(tuple(choice.name for choice in choices), layouts[:count], layouts[count:])


def named_choices(context: OpContext, methods: Sequence[str], mesh: Mesh) -> Choices | None:
    """The choices called `methods`, one per axis; None if the op has no method of such a name, or if none of its local
    forms does what all do."""
    counts = len(context.operands), len(context.results)
    named = [parse_choice(name, context.rule, *counts, ways) for name, ways in zip(methods, mesh.sizes, strict=True)]
    choices = tuple(choice for choice in named if choice is not None)
    runs = form_that_runs(choice.form for choice in choices) is not None
    return choices if runs and len(choices) == len(named) else None


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of one axis: the choice, and the placements of all tensors, operands first."""

    choice: Choice
    placements: tuple[Placement, ...]


def _option(context: OpContext, choice: Choice) -> _Option:
    flowing = (*context.flowing_operands, *context.flowing_results)
    pairs = zip((*choice.operands, *choice.results), flowing, strict=True)
    return _Option(choice, tuple(R if placement == I and not flows else placement for placement, flows in pairs))


def _combinations(
    context: OpContext, digits: Mapping[int, Sequence[Digit]], mesh: Mesh, allowed: AllowedMethods
) -> list[tuple[_Option, ...]]:
    """All combinations of one option per axis.

    Axes that split a factor at the same major take its digits in mesh order, whatever their methods. Axes whose local
    forms no form does together are not combined: an op runs one.
    """
    rule = context.rule

    @cache
    def follows(name: str, other: str) -> bool:
        return share_factors(rule, name, other)

    @cache
    def split_further(begun: Digit, taken: int, ways: int) -> _Option | None:
        name, major = begun
        choice = None if rule is None else split(rule, name, major * taken, ways)
        return None if choice is None else _option(context, choice)

    # Combinations of options on the axes so far, with the digits that their splits begin from and the axes' sizes.
    found: list[tuple[tuple[_Option, ...], tuple[tuple[Digit, int], ...]]] = [((), ())]
    for size, names in zip(mesh.sizes, allowed, strict=True):
        whole = [_option(context, choice) for choice in _unsplit(context, size) if _is_allowed(names, choice.name)]
        begins = [] if rule is None or size == 1 else _begins(rule, digits.get(size, ()), names)
        longer = []
        for chosen, splits in found:
            longer += [((*chosen, option), splits) for option in whole]
            for begun in begins:
                taken = prod(other for (name, major), other in splits if major == begun[1] and follows(name, begun[0]))
                further = split_further(begun, taken, size)
                if further is not None and _may_run(further.choice.form, chosen):
                    longer.append(((*chosen, further), (*splits, (begun, size))))
        found = longer
    return [chosen for chosen, _ in found]


def _may_run(form: str, chosen: Iterable[_Option]) -> bool:
    """Whether an op whose other axes have the options `chosen` may run a local form: it runs one for all."""
    return not form or form_that_runs((form, *(option.choice.form for option in chosen))) is not None


def _begins(rule: Rule, digits: Iterable[Digit], allowed: Set[str] | None) -> list[Digit]:
    """The allowed ones among the digits; an ordered factor is split from its front only."""
    return [
        (name, major)
        for name, major in digits
        if (major == 1 or not _is_ordered(rule, name)) and _is_allowed(allowed, name, major)
    ]


def _is_allowed(allowed: Set[str] | None, name: str, major: int = 1) -> bool:
    """Whether a method whose digits begin at `major` is among the allowed ones."""
    return allowed is None or name in allowed or f"{name}@{major}" in allowed


def _is_ordered(rule: Rule, name: str) -> bool:
    """Whether a factor of a method is ordered."""
    method = rule.method(name)
    return method is not None and any(rule.factors[factor].ordered for factor in method.factors)


def _unsplit(context: OpContext, size: int) -> list[Choice]:
    """The options of an axis of `size` without a split: replicate, or pass pending sums."""
    placements = ((I, R) if has_linear_gradients(context.op) else (I,)) if context.flows else (R,)
    found = [replicated(len(context.operands), len(context.results), placement) for placement in placements]
    rule = context.rule
    if rule is not None and size != 1:
        linear = (index for index, some in enumerate(rule.linear) if not some - rule.added <= context.parameters)
        found += [passing(rule, index) for index in linear]
    return found


# The arguments that are the shape of the result (-1 and literals need no care).
_SHAPES = {"reshape": "shape", "expand": "size"}
# The arguments that are a number of groups, of which each rank has a part.
_GROUPS = {
    "group_norm": "num_groups",
    "padded_conv1d": "groups",
    **{f"conv{kind}{rank}d": "groups" for kind in ("", "_transpose") for rank in (1, 2, 3)},
}
# The arguments of a slice, which takes whole units; of each a rank has an equal part.
_BOUNDS = ("start", "end")


def local_arguments(
    op: Op,
    arguments: Mapping[str, Argument],
    strategy: Strategy,
    choices: Sequence[Choice],
    types: Mapping[str, TensorType],
    mesh: Mesh,
) -> dict[str, Argument]:
    """`arguments` of `op` with local sizes under `strategy`, which makes `choices`; `types` are the global ones."""
    local = dict(arguments)
    if op.kind in _SHAPES:
        local[_SHAPES[op.kind]] = local_shape(types[op.results[0]].shape, strategy.results[0], mesh)
    ways = 1
    divided: tuple[str, ...] = ()
    if op.kind in _GROUPS:
        ways = prod(size for size, choice in zip(mesh.sizes, choices, strict=True) if "groups" in choice.factors)
        divided = (_GROUPS[op.kind],)
    elif op.kind == "slice":
        rank = len(types[op.operands[0]].shape)
        ways = split_ways(strategy.operands[0], integer(arguments["dim"]) % rank, mesh)
        divided = _BOUNDS
    return local | {name: integer(local[name]) // ways for name in divided}
