"""Formulas in plans as text: written by sympy, read by a parser that accepts arithmetic only."""

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
    """The algebra in which a formula is evaluated: its numbers, names and functions."""

    number: Callable[[int | float], T]
    name: Callable[[str], T]
    functions: Mapping[str, Callable[..., T]]


_OPERATORS: Mapping[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

# Bounds the cost of reading text from any source; formulas of tiny models take a thirtieth of this.
_MOST_CHARACTERS = 200_000
_MOST_NODES = 100_000
_DEEPEST = 300
_MOST_BITS = 512
_LARGEST_EXPONENT = 16

# Maxima are not evaluated: sympy would compare all of their arguments.
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

    Raises ValueError for any other text, and for text that is too long, too deep or has too large numbers. The text is
    never executed.
    """
    return _value(text, _SYMBOLIC)


def formula_at(text: str, sizes: Mapping[str, int]) -> float:
    """The number that a formula gives for sizes by name.

    Raises ValueError for text that is no formula, and for a formula that depends on a missing size.
    """

    def size(name: str) -> float:
        if name not in sizes:
            raise ValueError(f"the formula depends on {name} too")
        return sizes[name]

    return _value(text, _Algebra(lambda number: number, size, _NUMERIC))


def _value(text: str, algebra: _Algebra[T]) -> T:
    try:
        return _read(_parsed(text), algebra)
    except (ArithmeticError, RecursionError, TypeError):
        # It divides by zero, is beyond all floats, or calls a function with other arguments than it has.
        raise ValueError(f"{text[:80]!r} is no formula with a value") from None


def _parsed(text: str) -> ast.expr:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"{text[:80]!r} is no formula: it has {len(text)} characters, at most {_MOST_CHARACTERS} are read"
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError(f"{text[:80]!r} is no formula") from None
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > _MOST_NODES or depth > _DEEPEST:
            raise ValueError(f"{text[:80]!r} is no formula: it has too many parts, or they are nested too deep")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return tree


def _read(node: ast.expr, algebra: _Algebra[T]) -> T:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return _bounded(algebra.number(value))
        case ast.Name(id=name):
            return algebra.name(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return cast(T, operator.mul(-1, _read(operand, algebra)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(cast(T, operator.pow(_read(left, algebra), _exponent(right))))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            operands = _read(left, algebra), _read(right, algebra)
            if isinstance(kind, ast.Div) and operands[1] == 0:
                raise ZeroDivisionError
            return _bounded(cast(T, _OPERATORS[type(kind)](*operands)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in algebra.functions:
            return algebra.functions[name](*[_read(argument, algebra) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no formula")


def _exponent(node: ast.expr) -> int:
    """An exponent: a small whole number, as sympy writes powers and divisions."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is not int or value > _LARGEST_EXPONENT:
        raise ValueError(
            f"{ast.unparse(node)[:80]!r} is no formula for an exponent: whole numbers to {_LARGEST_EXPONENT} are"
        )
    return sign * value


def _bounded(value: T) -> T:
    """`value`. Raises ValueError if it is infinite or has too many digits."""
    parts = (value.p, value.q) if isinstance(value, sympy.Rational) else (value,)
    if any(isinstance(part, int) and part.bit_length() > _MOST_BITS for part in parts):
        raise ValueError("it is no formula: a number in it has too many digits")
    infinite = not math.isfinite(value) if isinstance(value, float) else getattr(value, "is_finite", None) is False
    if infinite or value is sympy.nan:
        raise ValueError("it is no formula: a number in it is infinite")
    return value
