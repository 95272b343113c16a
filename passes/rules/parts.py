"""The registry of rule functions by operator, in which each family of operators registers its own, and helpers with
which the families write their dims."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import prod

from passes.ir.arguments import Argument, Ref, integer, listed
from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Factor, Part, Role, Rule, Rules, parts_of

RuleFunction = Callable[[Op, Mapping[str, TensorType]], Rule | None]

_RULES: dict[str, RuleFunction] = {}


def rule_for(*kinds: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for the operators called `kinds` ("linear")."""

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            assert kind not in _RULES, f"{kind} has a rule already"
            _RULES[kind] = function
        return function

    return register


def find_rule(op: Op, types: Mapping[str, TensorType], discovered: Rules) -> Rule | None:
    """The rule of `op`, or None, in which case it is never split. Rules that were `discovered` apply if no rule
    function covers the op; a program has them (`Program.rules`)."""
    rule = written_rule(op, types)
    return discovered.get(signature(op, types)) if rule is None and discovered else rule


def written_rule(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The rule of `op` by the rule functions alone."""
    function = _RULES.get(op.kind)
    return function(op, types) if function else None


def signature(op: Op, types: Mapping[str, TensorType]) -> Hashable:
    """A key that is equal for calls of an operator with the same arguments, with types in place of tensors."""

    def typed(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            return types[argument.name]
        return tuple(map(typed, argument)) if isinstance(argument, tuple) else (type(argument), argument)

    return op.target, tuple((name, typed(value)) for name, value in op.arguments.items())


def registered() -> tuple[str, ...]:
    """The operators that have a rule."""
    return tuple(sorted(_RULES))


def named(shape: Shape, prefix: str = "d", start: int = 0) -> Dims:
    """One factor per dim, numbered from `start`: d0, d1, …; a dim of size 1 has none."""
    return tuple(one(f"{prefix}{dim}", size) for dim, size in enumerate(shape, start))


def one(name: str, size: int) -> tuple[Part, ...]:
    """A dim that is one factor; none where it has size 1."""
    return (Part(name, size),) if size != 1 else ()


def broadcast(shape: Shape, result: Shape, prefix: str = "d") -> Dims:
    """The dims of an operand that broadcasts to `result`, whose dims are d0, d1, …"""
    return named(shape, prefix, len(result) - len(shape))


def factors(*tensors: Dims, roles: Mapping[str, Role] | None = None) -> dict[str, Factor]:
    """The factors that stand in `tensors`; those in `roles` have that role, the others are free."""
    roles = roles or {}
    found: dict[str, Factor] = {}
    for part in parts_of(*tensors):
        size = max(part.start * part.size, found[part.factor].size if part.factor in found else 1)
        found[part.factor] = Factor(size, roles.get(part.factor, Role.FREE))
    return found


def shapes(names: Iterable[str], types: Mapping[str, TensorType]) -> list[Shape]:
    """The shapes of the tensors called `names`."""
    return [types[name].shape for name in names]


def dim_argument(value: Argument, rank: int) -> int:
    """A dim given as an argument, counted from the front."""
    return integer(value) % max(rank, 1)


def dims_argument(value: Argument, rank: int) -> tuple[int, ...]:
    """Dims given as an argument, counted from the front; None means all of them."""
    if value is None or value == ():
        return tuple(range(rank))
    given = (value,) if isinstance(value, int) else listed(value)
    return tuple(dim_argument(item, rank) for item in given)


def unit_parts(size: int, unit: int, whole: str, name: str) -> tuple[Part, ...]:
    """A dim of `size` as whole units: an unsplittable count of them, then the unit itself."""
    return (*one(whole, size // unit), *one(name, unit))


def linear_in(op: Op, types: Mapping[str, TensorType], *together: int) -> tuple[frozenset[int], ...]:
    """The operands `together`, in which an op of floating numbers is linear; none for others."""
    return (frozenset(together),) if types[op.results[0]].dtype.is_floating_point else ()


def is_tensor(op: Op, argument: str) -> bool:
    """Whether `argument` of `op` is a tensor."""
    return isinstance(op.arguments.get(argument), Ref)


def per_dim(value: Argument, count: int) -> tuple[int, ...]:
    """An argument with one number per spatial dim, or one for all."""
    numbers = (value,) if isinstance(value, int) else tuple(map(integer, listed(value)))
    return numbers * count if len(numbers) == 1 else numbers


def without(dims: Dims, places: Iterable[int], name: str = "whole") -> tuple[Dims, dict[str, Role]]:
    """`dims` with those at `places` not to be split, and the roles that say so."""
    changed, roles = list(dims), dict[str, Role]()
    for place in places:
        changed[place] = one(f"{name}{place}", prod(part.size for part in dims[place]))
        roles[f"{name}{place}"] = Role.WHOLE
    return tuple(changed), roles
