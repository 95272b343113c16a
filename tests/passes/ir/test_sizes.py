"""Sizes that are expressions."""

import pytest
import sympy
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, Mod, ToFloat

from passes.ir.sizes import as_number, is_expression, substituted

BATCH, LENGTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("x.0", "x.1"))


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        (BATCH * LENGTH + 1, 31),
        (FloorDiv(LENGTH, BATCH), 3),
        (sympy.Max(BATCH, LENGTH), 10),
        (ToFloat(LENGTH), 10.0),
        (FloatTrueDiv(ToFloat(BATCH), ToFloat(LENGTH)), 0.3),
        (sympy.Eq(Mod(LENGTH, 5), 0), True),
        (sympy.Ge(BATCH, 4), False),
        (sympy.true, True),
        (7, 7),
        (True, True),
        ("mean", "mean"),
    ],
    ids=str,
)
def test_numbers_of_a_call(expression: object, number: object) -> None:
    """A number of Python, of the type that the expression has: a size is no float, a condition no number."""
    found = substituted(expression, {"x.0": 3, "x.1": 10, "y.0": 4})
    assert found == number
    assert type(found) is type(number)


def test_what_is_not_known_stays() -> None:
    assert substituted(BATCH * LENGTH, {"x.0": 3}) == 3 * LENGTH
    assert as_number(BATCH) is BATCH


def test_fractions_are_refused() -> None:
    with pytest.raises(ValueError, match="3/2 is no whole number"):
        substituted(BATCH / 2, {"x.0": 3})
    assert substituted(BATCH / 2, {"x.0": 4}) == 2


def test_what_is_an_expression() -> None:
    assert is_expression(BATCH)
    assert is_expression(sympy.Eq(BATCH, LENGTH))
    assert not is_expression(3)
    assert not is_expression("x.0")
