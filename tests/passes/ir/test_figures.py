"""Figures: what is computed from sizes keeps both the number and its formula."""

from math import prod

import numpy as np
import pytest
import sympy

from passes.ir.figures import Figure, as_float, formula, largest, largest_sum, least, size_of

A, B = sympy.Symbol("a"), sympy.Symbol("b")
SIX, FOUR = size_of(6, A), size_of(4, B)


@pytest.mark.parametrize(
    ("found", "number", "expression"),
    [
        (2 * SIX + 1, 13, 2 * A + 1),
        (1 + SIX - FOUR, 3, A - B + 1),
        (10 - SIX, 4, 10 - A),
        (0.5 * SIX, 3.0, 0.5 * A),
        (SIX / FOUR, 1.5, A / B),
        (3.0 / FOUR, 0.75, 3 / B),
        (SIX // 2, 3, A / 2),
        (SIX // FOUR, 1, sympy.floor(A / B)),
        (12 // FOUR, 3, 12 / B),
        (SIX**2, 36, A**2),
        (-SIX, -6, -A),
        (True * SIX, 6, A),
        (prod((2, SIX, FOUR)), 48, 2 * A * B),
        (sum([0.5, SIX, 1]), 7.5, A + 1.5),
    ],
)
def test_arithmetic_keeps_number_and_formula(found: object, number: float, expression: sympy.Expr) -> None:
    """On both sides of plain numbers, and in the sums and products of Python."""
    assert isinstance(found, Figure)
    assert found.value == number
    assert sympy.simplify(found.expression - expression) == 0


def test_figures_compare_as_their_numbers() -> None:
    """Code takes the branches of the numbers; remainders are numbers, and so are figures where one is needed."""
    assert SIX == 6 != FOUR
    assert 4 < SIX <= 6
    assert SIX % FOUR == 2
    assert list(range(FOUR)) == [0, 1, 2, 3]
    assert int(SIX) == 6
    assert str(SIX) == "6"


def test_caches_tell_figures_from_numbers() -> None:
    """A cached result for a number is not found for an equal figure, or for another formula."""
    assert {6: "number"}.get(SIX) is None
    assert {SIX: "a"}.get(size_of(6, B)) is None
    assert {SIX: "a"}.get(size_of(6, A)) == "a"


def test_the_largest_of_figures_is_a_maximum() -> None:
    """Of what others are never below nothing is left; maxima of maxima are one."""
    assert largest(1.0, 3.0, 2.0) == 3.0
    assert not isinstance(largest(1, 2), Figure)
    assert formula(largest(SIX, FOUR)) == sympy.Max(A, B, evaluate=False)
    assert largest(SIX, FOUR) == 6
    assert formula(largest(SIX, 2 * SIX + 1)) == 2 * A + 1
    assert formula(largest(0.0, SIX / FOUR)) == A / B
    nested = largest(largest(SIX, FOUR), largest(FOUR, SIX * FOUR), SIX)
    assert set(formula(nested).args) == {A, B, A * B}


def test_what_may_be_below_stays() -> None:
    """A difference is not taken for more than nothing, nor what stands in a rounding or a sum's quotient."""
    assert len(formula(largest(0.0, SIX - FOUR)).args) == 2
    assert len(formula(largest(SIX / (SIX + 1), FOUR)).args) == 2


def test_the_largest_of_sums_keeps_those_that_may_be_largest() -> None:
    """For all sizes, a sum goes only where another has as much of everything; of a difference nothing is known."""
    weights = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    found = largest_sum(weights, [SIX, 3 * FOUR, 2.0])
    assert found == 14
    assert formula(found) == sympy.Max(3 * B + 2, A + 2, evaluate=False)
    assert len(formula(largest_sum(np.array([[1.0, 1.0], [1.0, 0.0]]), [SIX, SIX / (SIX - FOUR)])).args) == 2
    assert formula(largest_sum(np.eye(2), [SIX, 2 * SIX])) == 2 * A


def test_the_largest_of_sums_of_numbers_is_a_number() -> None:
    """No formula where there is nothing to remember."""
    found = largest_sum(np.array([[1.0, 2.0], [0.5, 3.0]]), [2, 4.0])
    assert found == 13.0
    assert not isinstance(found, Figure)


def test_the_least_of_figures_is_a_minimum() -> None:
    """As with maxima."""
    assert least([3, 2]) == 2
    assert formula(least([SIX, FOUR])) == sympy.Min(A, B, evaluate=False)
    assert formula(least(iter([SIX + 1, SIX, 3 * SIX]))) == A


def test_floats_of_figures_stay_figures() -> None:
    """Plain numbers become floats."""
    assert as_float(SIX) is SIX
    assert isinstance(as_float(3), float)
