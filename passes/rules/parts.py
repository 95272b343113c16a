"""Helpers with which the families write their dims."""

from collections.abc import Iterable, Mapping
from math import prod

from passes.ir.layout import Shape
from passes.ir.program import Argument, Op, Ref, TensorType
from passes.ir.rule import Dims, Factor, Part, Role


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
    for dims in tensors:
        for parts in dims:
            for part in parts:
                size = max(part.start * part.size, found[part.factor].size if part.factor in found else 1)
                found[part.factor] = Factor(size, roles.get(part.factor, Role.FREE))
    return found


def shapes(names: Iterable[str], types: Mapping[str, TensorType]) -> list[Shape]:
    """The shapes of the tensors called `names`."""
    return [types[name].shape for name in names]


def dim_argument(value: Argument, rank: int) -> int:
    """A dim given as an argument, counted from the front."""
    assert isinstance(value, int)
    return value % max(rank, 1)


def dims_argument(value: Argument, rank: int) -> tuple[int, ...]:
    """Dims given as an argument, counted from the front; None means all of them."""
    if value is None or value == ():
        return tuple(range(rank))
    if isinstance(value, int):
        return (value % max(rank, 1),)
    assert isinstance(value, tuple)
    return tuple(dim_argument(item, rank) for item in value)


def unit_parts(size: int, unit: int, whole: str, name: str) -> tuple[Part, ...]:
    """A dim of `size` as whole units: an unsplittable count of them, then the unit itself."""
    return (*one(whole, size // unit), *one(name, unit))


def is_tensor(op: Op, argument: str) -> bool:
    """Whether `argument` of `op` is a tensor."""
    return isinstance(op.arguments.get(argument), Ref)


def per_dim(value: Argument, count: int) -> tuple[int, ...]:
    """An argument with one number per spatial dim, or one for all."""
    if isinstance(value, int):
        return (value,) * count
    assert isinstance(value, tuple)
    numbers = tuple(item for item in value if isinstance(item, int))
    return numbers * count if len(numbers) == 1 else numbers


def without(dims: Dims, places: Iterable[int], name: str = "whole") -> tuple[Dims, dict[str, Role]]:
    """`dims` with those at `places` not to be split, and the roles that say so."""
    changed, roles = list(dims), dict[str, Role]()
    for place in places:
        changed[place] = one(f"{name}{place}", prod(part.size for part in dims[place]))
        roles[f"{name}{place}"] = Role.WHOLE
    return tuple(changed), roles
