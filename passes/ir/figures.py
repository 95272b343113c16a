"""Figures: numbers that carry the formula they were computed from.

A size of an input or a mesh axis that is a `Figure` behaves like its number, and every result computed from it is a
figure too: a number and its formula. So the code that computes costs also derives their formulas. Python's own `max`,
`min` and `float` drop the formula, so such code calls `largest`, `least` and `as_float` instead.

Comparisons compare the numbers only. A formula is valid wherever all comparisons have the same outcome.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce, total_ordering
from typing import cast

import numpy as np
import sympy
from numpy.typing import NDArray

Number = int | float


@total_ordering
class Figure:
    """A number and its formula. Its sizes are positive."""

    __slots__ = ("expression", "value")

    def __init__(self, value: Number, expression: sympy.Expr) -> None:
        self.value = value
        self.expression = expression

    def __add__(self, other: object) -> "Figure":
        return Figure(self.value + _value(other), self.expression + formula(other))

    __radd__ = __add__

    def __sub__(self, other: object) -> "Figure":
        return Figure(self.value - _value(other), self.expression - formula(other))

    def __rsub__(self, other: object) -> "Figure":
        return Figure(_value(other) - self.value, formula(other) - self.expression)

    def __mul__(self, other: object) -> "Figure":
        return Figure(self.value * _value(other), self.expression * formula(other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> "Figure":
        return Figure(self.value / _value(other), self.expression / formula(other))

    def __rtruediv__(self, other: object) -> "Figure":
        return Figure(_value(other) / self.value, formula(other) / self.expression)

    def __floordiv__(self, other: object) -> "Figure":
        return _quotient(self, other)

    def __rfloordiv__(self, other: object) -> "Figure":
        return _quotient(other, self)

    def __mod__(self, other: object) -> Number:
        return self.value % _value(other)

    def __rmod__(self, other: object) -> Number:
        return _value(other) % self.value

    def __pow__(self, power: int) -> "Figure":
        return Figure(self.value**power, self.expression**power)

    def __neg__(self) -> "Figure":
        return Figure(-self.value, -self.expression)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Figure) else other)

    def __lt__(self, other: object) -> bool:
        return self.value < _value(other)

    def __hash__(self) -> int:
        # Differs from the number's hash, so that a cache does not return the entry of a plain number for a figure.
        return hash((self.value, self.expression))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"Figure({self.value}, {self.expression})"


def size_of(number: int, expression: sympy.Expr) -> int:
    """An integer size that carries its formula."""
    return cast(int, Figure(number, expression))


def formula(number: object) -> sympy.Expr:
    """The formula of a figure; of a plain number the number."""
    if isinstance(number, Figure):
        return number.expression
    return sympy.sympify(int(number) if isinstance(number, bool) else number)


def largest(*numbers: Number) -> Number:
    """`max`, whose formula is a maximum."""
    return _extreme(numbers, max(numbers), sympy.Max, 1)


def largest_sum(weights: NDArray[np.float64], numbers: Sequence[Number]) -> Number:
    """The largest of several sums of `numbers`, each times a weight that is not negative: `weights[sum, number]`. Its
    formula is the maximum of the sums that are not dominated for all sizes."""
    found = float((weights @ np.array([float(_value(number)) for number in numbers])).max())
    if not any(isinstance(number, Figure) for number in numbers):
        return found
    terms: dict[sympy.Expr, int] = {}
    expanded = [sympy.expand(formula(number)).as_coefficients_dict() for number in numbers]
    for term in (term for each in expanded for term in each):
        terms.setdefault(term, len(terms))
    factors = np.zeros((len(numbers), len(terms)))
    for row, each in zip(factors, expanded, strict=True):
        for term, factor in each.items():
            row[terms[term]] += float(factor)
    positive = np.array([_is_product(term) for term in terms], dtype=bool)
    sums = [_sum(row, terms) for row in _undominated(weights @ factors, positive)]
    # Left as it is: sympy would compare all that stands in it.
    expression = sums[0] if len(sums) == 1 else sympy.Max(*sums, evaluate=False)
    return cast(float, Figure(found, expression))


def _undominated(rows: NDArray[np.float64], positive: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """The rows than which no other is at least as large in every column that is of something `positive`, and the same
    in the others."""
    kept: list[NDArray[np.float64]] = []
    for row in sorted(np.unique(rows, axis=0), key=np.sum, reverse=True):
        if not any(np.where(positive, other >= row, other == row).all() for other in kept):
            kept.append(row)
    return kept


def _sum(factors: Iterable[float], terms: Iterable[sympy.Expr]) -> sympy.Expr:
    pairs = zip(map(float, factors), terms, strict=True)
    whole = ((int(factor) if factor.is_integer() else factor, term) for factor, term in pairs if factor)
    return sympy.Add(*(factor * term for factor, term in whole))


def least(numbers: Iterable[Number]) -> Number:
    """`min`, whose formula is a minimum."""
    given = tuple(numbers)
    return _extreme(given, min(given), sympy.Min, -1)


def least_of(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """`least` of each column; arrays of figures have objects as elements."""
    if all(row.dtype != object for row in rows):
        return reduce(np.minimum, rows)
    return np.array([least(column) for column in zip(*rows, strict=True)])


def as_float(number: Number) -> float:
    """`float` that preserves a figure."""
    return number if isinstance(number, Figure) else float(number)


def _extreme(numbers: Sequence[Number], found: Number, written: type[sympy.Max] | type[sympy.Min], sign: int) -> Number:
    if not any(isinstance(number, Figure) for number in numbers):
        return found
    kept: list[sympy.Expr] = []
    for expression in _flat(map(formula, numbers), written):
        if any(_is_above(other, expression, sign) for other in kept):
            continue
        kept = [other for other in kept if not _is_above(expression, other, sign)]
        kept.append(expression)
    # Left as it is: sympy would compare all that stands in it.
    expression = kept[0] if len(kept) == 1 else written(*kept, evaluate=False)
    return cast(float, Figure(_value(found), expression))


def _flat(expressions: Iterable[sympy.Expr], written: type[sympy.Expr]) -> list[sympy.Expr]:
    """Distinct expressions, with nested maxima flattened."""
    found = [item for one in expressions for item in (one.args if isinstance(one, written) else (one,))]
    return list(dict.fromkeys(found))


def _is_above(one: sympy.Expr, other: sympy.Expr, sign: int) -> bool:
    """Whether one formula is never below the other (with a sign of -1: never above), for all sizes above zero: where
    both are sums of products of sizes."""
    more, less = (_terms(one), _terms(other)) if sign > 0 else (_terms(other), _terms(one))
    if more is None or less is None:
        return False
    return all(more.get(term, 0) - less.get(term, 0) >= 0 for term in {*more, *less})


@lru_cache(maxsize=4096)
def _terms(expression: sympy.Expr) -> Mapping[sympy.Expr, float] | None:
    """Coefficients by product of powers of sizes; None if the expression is no sum of such products."""
    terms = sympy.expand(expression).as_coefficients_dict()
    if not all(map(_is_product, terms)):
        return None
    return {term: float(factor) for term, factor in terms.items()}


def _is_product(term: sympy.Expr) -> bool:
    """Whether a term is a product of powers of sizes, which are above zero."""
    return term == 1 or all(factor.as_base_exp()[0].is_Symbol for factor in sympy.Mul.make_args(term))


def _quotient(one: object, other: object) -> Figure:
    """The quotient by a number of parts: its formula is the exact quotient, which holds where the division is exact."""
    above, below = _value(one), _value(other)
    exact = formula(one) / formula(other)
    return Figure(above // below, exact if above % below == 0 else sympy.floor(exact))


def _value(number: object) -> Number:
    return number.value if isinstance(number, Figure) else cast(Number, number)
