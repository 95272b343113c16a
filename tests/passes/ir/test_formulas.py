"""Formulas as text: what is written is read again, and nothing else is."""

import pytest
import sympy

from passes.ir.formulas import formula_at, read_formula, write_formula

A, B = sympy.Symbol("a"), sympy.Symbol("b")
FORMULAS = [
    sympy.Integer(3),
    A * B / 2 + sympy.Rational(1, 3) * A - B**2,
    1.25e-9 * A / B + 7.0 / (A * B),
    sympy.Max(A, 2.5 * B, 7.0, evaluate=False) + sympy.Min(A, B + 1, evaluate=False),
    sympy.Max(A - B, sympy.Max(1, B, evaluate=False) / 3, evaluate=False),
    sympy.floor(A / 4) + sympy.ceiling(B / 3) - 1,
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_come_back(formula: sympy.Expr) -> None:
    """As expressions of the same value, and as numbers."""
    text = write_formula(formula)
    for sizes in ({"a": 5, "b": 2}, {"a": 2, "b": 7}):
        expected = float(formula.subs(sizes))
        assert float(read_formula(text).subs(sizes)) == pytest.approx(expected, rel=1e-12)
        assert formula_at(text, sizes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a +",
        "__import__('os')",
        "a.b",
        "a[0]",
        "'text'",
        "True",
        "open(a)",
        "Max(a, key=b)",
        "a if b else 1",
        "a < b",
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    """Text is read, never run."""
    with pytest.raises(ValueError, match="is no formula"):
        read_formula(text)
    with pytest.raises(ValueError, match="is no formula"):
        formula_at(text, {"a": 1, "b": 2})


def test_sizes_must_be_given() -> None:
    """All that a formula depends on."""
    with pytest.raises(ValueError, match="depends on b too"):
        formula_at("a + b", {"a": 1})
