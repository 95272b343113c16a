"""Sizes that are expressions: numbers as sympy writes them, and as Python does."""

from collections.abc import Mapping

import sympy


def as_number(expression: object) -> object:
    """An expression without symbols as a Python number; one with symbols is returned unchanged.

    Raises ValueError for a fraction, which no size can be.
    """
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return expression
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        raise ValueError(f"{expression} is no whole number")
    return float(expression)


def is_expression(value: object) -> bool:
    """Whether a value is one of sympy."""
    return isinstance(value, sympy.Basic)


def substituted(expression: object, sizes: Mapping[str, int]) -> object:
    """An expression with the symbols called as in `sizes` replaced by those sizes.

    Raises ValueError for a fraction, which no size can be.
    """
    if not isinstance(expression, sympy.Basic):
        return expression
    numbers = {symbol: sympy.Integer(sizes[symbol.name]) for symbol in expression.free_symbols if symbol.name in sizes}
    return as_number(expression.xreplace(numbers))
