"""Formulas as text: what is written is read again, and nothing else is."""

import pytest
import sympy

from passes.ir import formulas
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
    """A formula needs all sizes that it depends on."""
    with pytest.raises(ValueError, match="depends on b too"):
        formula_at("a + b", {"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "a**b",
        "a**17",
        "a**0.5",
        "(((2**16)**16)**16)**16",
        "*".join(["9999999999"] * 200),
        "*".join(["(7777777777/3)"] * 140),
        "9" * 400,
        "9" * 5000,
        "1e400*a",
        "1/0",
        "a/(1 - 1)",
        "Max()",
        "floor(a, b)",
        "(" * 150 + "a" + ")" * 150 + "**a",
        "-" * 100_000 + "a",
        "a" + "+a" * 50_000,
        "a" + "**2" * 1000,
        "Max(" * 150 + "a" + ")" * 151,
        "Max(" + "a, " * 51_000 + "a)",
        "a" * 200_001,
    ],
    ids=lambda text: f"{text[:20]} {len(text)}",
)
def test_what_would_take_too_long_is_refused(text: str) -> None:
    """However little of it there is: the operations that reading takes are counted by the length of the text."""
    counted = _Counted()
    with pytest.raises(ValueError, match="is no formula"), counted:
        read_formula(text)
    with pytest.raises(ValueError, match="is no formula"), counted:
        formula_at(text, {"a": 3, "b": 2})
    assert counted.bits <= 10 * 1024 * max(len(text), 1)


class _Counted:
    """Counts the bits of all whole numbers that formulas are read to."""

    def __init__(self) -> None:
        self.bits = 0
        self._bounded = formulas._bounded

    def __enter__(self) -> None:
        formulas._bounded = self._count

    def __exit__(self, *_: object) -> None:
        formulas._bounded = self._bounded

    def _count(self, value: object) -> object:
        parts = (value.p, value.q) if isinstance(value, sympy.Rational) else (value,)
        self.bits += sum(part.bit_length() for part in parts if isinstance(part, int))
        return self._bounded(value)


def test_long_formulas_of_plans_are_read() -> None:
    """Well above the largest ones that there are."""
    terms = [f"{number}.5*a**2*b/{number + 1}" for number in range(100)]
    text = " + ".join(terms) + " + Max(" + ", ".join(f"{number}*a + {number}*b" for number in range(8)) + ")"
    assert formula_at(text, {"a": 2, "b": 3}) == pytest.approx(
        float(read_formula(text).subs({"a": 2, "b": 3})), rel=1e-12
    )
