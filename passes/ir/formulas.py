"""Formulas as text, in plans: written by sympy, and read back by a reader that knows nothing but arithmetic."""

import ast
from collections.abc import Callable, Mapping

import sympy

_OPERATORS: Mapping[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: lambda left, right: left**right,
}
_FUNCTIONS: Mapping[str, Callable[..., sympy.Expr]] = {
    "Max": lambda *values: sympy.Max(*values, evaluate=False),
    "Min": lambda *values: sympy.Min(*values, evaluate=False),
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
}


def write_formula(formula: sympy.Expr) -> str:
    """A formula as text, its numbers in full."""
    return str(sympy.sstr(formula, full_prec=True))


def read_formula(text: str) -> sympy.Expr:
    """The formula that `write_formula` wrote: numbers, names, + - * / **, and maxima, minima and roundings of them.

    Raises ValueError for anything else; nothing of the text is run.
    """
    try:
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text[:80]!r} is no formula") from None


def _read(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return sympy.sympify(value)
        case ast.Name(id=name):
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_read(left), _read(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_read, arguments))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no formula")


def value_of(formula: sympy.Expr, sizes: Mapping[str, int]) -> float:
    """The number that a formula gives for sizes by name.

    Raises ValueError where it has names that have no size.
    """
    numbers = {symbol: sympy.Integer(sizes[symbol.name]) for symbol in formula.free_symbols if symbol.name in sizes}
    found = formula.xreplace(numbers)
    if found.free_symbols:
        missing = ", ".join(sorted(symbol.name for symbol in found.free_symbols))
        raise ValueError(f"the formula depends on {missing} too")
    return float(found)
