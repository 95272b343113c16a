"""Operators, and the arguments of their calls: numbers, texts, and references to tensors, by the names of a schema."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from passes._torch import OpOverload, schema_of


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a tensor: an input, a parameter, a buffer or constant by its name, or a result as "%name"."""

    name: str

    def __str__(self) -> str:
        return self.name


Argument = (
    None
    | bool
    | int
    | float
    | complex
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | Ref
    | tuple["Argument", ...]
)


@cache
def find_overload(target: str) -> OpOverload:
    """The operator called `target`, such as "aten.linear.default"."""
    namespace, name, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload)
    return found


def references(argument: Argument) -> Iterator[str]:
    """The names that an argument refers to, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def integer(argument: Argument) -> int:
    """An argument that is an integer."""
    assert isinstance(argument, int)
    return argument


def listed(argument: Argument) -> tuple[Argument, ...]:
    """An argument that is a list."""
    assert isinstance(argument, tuple)
    return argument


def rename(argument: Argument, names: Callable[[str], Argument]) -> Argument:
    """`argument` with its references replaced."""
    if isinstance(argument, Ref):
        return names(argument.name)
    if isinstance(argument, tuple):
        return tuple(rename(item, names) for item in argument)
    return argument


def freeze(value: object) -> Argument:
    """A value of an operator's schema as an argument: lists become tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value  # type: ignore[return-value]


def bound_arguments(overload: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Argument]:
    """The arguments of a call by the names of the schema, in its order, defaults included."""
    return {
        item.name: freeze(args[place] if place < len(args) else kwargs.get(item.name, item.default_value))
        for place, item in enumerate(schema_of(overload).arguments)
    }


def format_argument(argument: Argument) -> str:
    """An argument as text."""
    if isinstance(argument, tuple):
        return "[" + ", ".join(format_argument(item) for item in argument) + "]"
    if isinstance(argument, float):
        return repr(argument)
    return str(argument)
