"""Counted effort: the solver is bounded by the numbers that it computes, not by a clock, so that a problem has the same
solution on every machine.

A unit is the work on a million array elements; calling NumPy counts as the work on some. Machines differ in how long a
unit takes, mostly about 3 ms, but not in how many units a problem takes.
"""

from dataclasses import dataclass

_UNIT = 1e6
# An operation on a small array takes as long as one on so many elements.
_CALL = 3000


class OutOfEffortError(Exception):
    """No solution was found with the effort that was allowed."""


@dataclass
class Effort:
    """Effort that was spent on a problem so far, in units."""

    spent: float = 0.0

    def add(self, elements: float, calls: int = 1) -> None:
        """Count operations on so many array elements in all, in so many `calls`."""
        self.spent += (elements + calls * _CALL) / _UNIT
