"""specialize: a program for many sizes and the sizes of one call in, the program for these sizes out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import cast

from passes.ir.arguments import Argument
from passes.ir.errors import InputError
from passes.ir.layout import Shape
from passes.ir.program import Op, Program, Symbolic, TensorType
from passes.ir.sizes import is_expression, substituted


def specialize(symbolic: Symbolic, shapes: Mapping[str, Shape]) -> Program:
    """The program for inputs of `shapes`, by argument.

    Raises InputError for sizes that the program was not traced for.
    """
    sizes = _sizes(symbolic, shapes)

    @cache
    def number(expression: object) -> object:
        try:
            return substituted(expression, sizes)
        except ValueError:
            raise InputError(
                f"{_given(shapes)} do not fit the model: its size {expression} is no whole number"
            ) from None

    for condition in symbolic.conditions:
        if number(condition) is not True:
            raise InputError(f"{_given(shapes)} do not fit the trace of the model, which holds where {condition}")
    return _with_numbers(symbolic.program, number)


def _sizes(symbolic: Symbolic, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The value of each symbol."""
    sizes: dict[str, int] = {}
    for item in symbolic.program.inputs:
        for size, given in zip(item.type.shape, shapes[item.argument], strict=True):
            if str(size) in symbolic.ranges:
                sizes.setdefault(str(size), given)
    for name, (least, most) in symbolic.ranges.items():
        if name not in sizes:
            raise InputError(f"{_given(shapes)} do not say what {name} is, which the trace of the model needs")
        if sizes[name] < least or (most is not None and sizes[name] > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise InputError(f"{_where(name)} has size {sizes[name]}, but the model was traced for {allowed} there")
    for item in symbolic.program.inputs:
        for dim, (size, given) in enumerate(zip(item.type.shape, shapes[item.argument], strict=True)):
            wanted = substituted(size, sizes)
            if wanted != given:
                same = "" if isinstance(size, int) else f", which is {size}"
                where = _where(f"{item.argument}.{dim}")
                raise InputError(f"{where} has size {given}, but the model was traced for {wanted} there{same}")
    return sizes


def _where(symbol: str) -> str:
    name, _, dim = symbol.rpartition(".")
    return f"dim {dim} of {name}"


def _given(shapes: Mapping[str, Shape]) -> str:
    return "the sizes " + ", ".join(f"{name}{list(shape)}" for name, shape in shapes.items())


def _with_numbers(program: Program, number: Callable[[object], object]) -> Program:
    """`program` with all expressions replaced by numbers."""

    def argument(value: Argument) -> Argument:
        if isinstance(value, tuple):
            return tuple(argument(item) for item in value)
        return cast(Argument, number(value)) if is_expression(value) else value

    def typed(type: TensorType) -> TensorType:
        shape = tuple(cast(int, number(size)) if is_expression(size) else size for size in type.shape)
        return replace(type, shape=shape)

    def op(given: Op) -> Op:
        return replace(given, arguments={name: argument(value) for name, value in given.arguments.items()})

    return replace(
        program,
        inputs=tuple(replace(item, type=typed(item.type)) for item in program.inputs),
        ops=tuple(op(item) for item in program.ops),
        outputs=tuple(argument(value) for value in program.outputs),
        types={name: typed(type) for name, type in program.types.items()},
    )
