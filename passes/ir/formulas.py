"""Formulas as text, in plans: written by sympy, and read back by a reader that knows nothing but arithmetic."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import sympy

T = TypeVar("T")


@dataclass(frozen=True)
class _Algebra(Generic[T]):
    """What a formula is read as: what numbers, names and functions are there."""

    number: Callable[[int | float], T]
    name: Callable[[str], T]
    functions: Mapping[str, Callable[..., T]]


_OPERATORS: Mapping[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}

# Maxima are left as they stand: sympy would compare all that is in them.
_SYMBOLIC: _Algebra[sympy.Expr] = _Algebra(
    sympy.sympify,
    sympy.Symbol,
    {
        "Max": lambda *values: sympy.Max(*values, evaluate=False),
        "Min": lambda *values: sympy.Min(*values, evaluate=False),
        "floor": sympy.floor,
        "ceiling": sympy.ceiling,
    },
)
_NUMERIC: Mapping[str, Callable[..., float]] = {"Max": max, "Min": min, "floor": math.floor, "ceiling": math.ceil}


def write_formula(formula: sympy.Expr) -> str:
    """A formula as text, its numbers in full."""
    return str(sympy.sstr(formula, full_prec=False))


def read_formula(text: str) -> sympy.Expr:
    """The formula that `write_formula` wrote: numbers, names, + - * / **, and maxima, minima and roundings of them.

    Raises ValueError for anything else; nothing of the text is run.
    """
    return _read(_parsed(text), _SYMBOLIC)


def formula_at(text: str, sizes: Mapping[str, int]) -> float:
    """The number that a formula gives for sizes by name.

    Raises ValueError for what is no formula, or depends on a size that is not given.
    """

    def size(name: str) -> float:
        if name not in sizes:
            raise ValueError(f"the formula depends on {name} too")
        return sizes[name]

    return _read(_parsed(text), _Algebra(lambda number: number, size, _NUMERIC))


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError(f"{text[:80]!r} is no formula") from None


def _read(node: ast.expr, algebra: _Algebra[T]) -> T:
    def read(part: ast.expr) -> T:
        return _read(part, algebra)

    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return algebra.number(value)
        case ast.Name(id=name):
            return algebra.name(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return cast(T, operator.mul(-1, read(operand)))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return cast(T, _OPERATORS[type(kind)](read(left), read(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in algebra.functions:
            return algebra.functions[name](*map(read, arguments))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no formula")
