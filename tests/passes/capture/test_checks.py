"""Checks: which parts of which statements only raise, and what lets them pass."""

import contextlib
import sys
from collections.abc import Callable, Sequence

import pytest

from passes.capture.values import passing_value


class Value:
    """Something whose truth is asked for: it gives `truths` one after the other, and notes in `asked` what would let
    the check pass that asks."""

    def __init__(self, truths: Sequence[bool]) -> None:
        self.truths = list(truths)
        self.asked: list[bool | None] = []

    def __bool__(self) -> bool:
        self.asked.append(passing_value(sys._getframe(1)))
        return self.truths.pop(0)

    def __lt__(self, other: int) -> "Value":
        return self

    def all(self) -> "Value":
        """Itself."""
        return self


def answers(function: Callable[[Value], object], *truths: bool) -> list[bool | None]:
    """The answers that would let the check in `function` pass, one for each time that it asks."""
    value = Value(truths)
    with contextlib.suppress(ValueError):
        function(value)
    return value.asked


def raises_if(x: Value) -> None:
    """The plainest check."""
    if x:
        raise ValueError("no")


def raises_if_not(x: Value) -> None:
    """Its opposite."""
    if not x < 3:
        message = "no"
        raise ValueError(message)


def raises_unless(x: Value) -> object:
    """A check whose error stands in the other branch."""
    if x.all():
        return x
    else:  # noqa: RET505
        raise ValueError("no")


def raises_if_either(x: Value) -> None:
    """A check of several parts, over several lines."""
    if (
        x < 3
        or not x.all()
        or (x < 4 and not (x < 5 or x))
    ):  # fmt: skip
        raise ValueError("no")


def raises_by_hand(x: Value) -> None:
    """A check by a truth that is taken by hand."""
    if bool(x):
        raise ValueError("no")


def raises_within(x: Value) -> None:
    """A check that is chained."""
    if x < 3 < len("four"):
        raise ValueError("no")


def raises_in_a_loop(x: Value) -> None:
    """A check in statements around it, with others behind it."""
    for _ in range(2):
        with contextlib.nullcontext():
            if x.all() and not x:
                raise ValueError("no")
            if x:
                continue


@pytest.mark.parametrize(
    ("function", "truths", "expected"),
    [
        (raises_if, [True], [False]),
        (raises_if_not, [False], [True]),
        (raises_unless, [False], [True]),
        (raises_if_either, [False, True, True, False, False], [False, True, False, True, True]),
        (raises_by_hand, [True], [False]),
        (raises_within, [True], [False]),
        (raises_in_a_loop, [True, True, True, False, False], [False, True, None, False, None]),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_parts_of_checks(function: Callable[[Value], object], truths: Sequence[bool], expected: Sequence[bool]) -> None:
    """The answer for each part, whatever the parts before it were worth."""
    assert answers(function, *truths) == expected


def branches(x: Value) -> int:
    """No error in sight."""
    if x:
        return 1
    return 2


def may_return(x: Value, flag: bool = True) -> None:
    """An error, but not surely."""
    if x:
        if flag:
            return
        raise ValueError("no")


def catches(x: Value) -> int:
    """The error is a way to go."""
    try:
        if x:
            raise ValueError("no")
    except ValueError:
        return 1
    return 2


def assigns(x: Value) -> None:
    """More than a look."""
    if y := x:
        raise ValueError(y)


def compares_inside(x: Value) -> None:
    """The value is only a part of what is tested."""
    if [1, 2][bool(x)] == 2:
        raise ValueError("no")


def repeats(x: Value) -> None:
    """No check."""
    while x:
        raise ValueError("no")


def chooses(x: Value) -> int:
    """No statement."""
    return 1 if x else 2


@pytest.mark.parametrize(
    "function",
    [branches, may_return, catches, assigns, compares_inside, repeats, chooses],
    ids=lambda function: function.__name__,
)
def test_what_is_no_check(function: Callable[[Value], object]) -> None:
    """There is no answer."""
    assert answers(function, True) == [None]


def test_code_without_source_has_no_checks() -> None:
    """Nothing is known of it."""
    scope: dict[str, Callable[[Value], object]] = {}
    exec("def function(x):\n    if x:\n        raise ValueError", scope)
    assert answers(scope["function"], True) == [None]
