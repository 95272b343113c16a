"""Constraints of the user on a plan, and the ops, operands and parameters of a program that they apply to."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from passes.ir.layout import WHOLE, I, Placement, R
from passes.ir.program import Op


@dataclass(frozen=True)
class Constraint:
    """One constraint: on `axis`, the `what` of everything that matches `pattern` has `placement`, or its method is
    `method`.

    `method` is the layout as the user wrote it, if it is one; "whole" is met by both R and I.
    """

    pattern: str
    what: str
    axis: int
    placement: Placement | None
    method: str

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.what} {self.method}"

    def is_met(self, placement: Placement, flows: bool) -> bool:
        """Whether a tensor with `placement` meets the constraint; without a gradient (`flows`) R and I are the same."""
        if self.method == WHOLE:
            return placement in (R, I)
        return placement == (R if self.placement == I and not flows else self.placement)


# The place that a constraint applies to: ("stored" | "used", parameter), ("in", op, slot), ("out", op, result),
# ("method", op), or ("method within", op) for the ops of a module, which take it if they can; an op is given by its
# first result.
ConstraintTarget = tuple[str, ...]


@dataclass(frozen=True)
class PlacedConstraints:
    """All constraints by the place that they apply to, and by axis."""

    placed: Mapping[ConstraintTarget, Mapping[int, Constraint]]

    def at(self, *place: str) -> Mapping[int, Constraint]:
        """The constraints at one place, by axis."""
        return self.placed.get(place, {})

    def axes(self, *places: ConstraintTarget) -> set[int]:
        """The axes on which there is a constraint at any of these places."""
        return {axis for place in places for axis in self.at(*place)}

    def places(self, op: Op) -> list[ConstraintTarget]:
        """The places of an op that constraints can apply to."""
        return [
            *((what, op.results[0]) for what in ("method", "method within")),
            *(("in", op.results[0], str(slot)) for slot in range(len(op.operands))),
            *(("out", op.results[0], str(index)) for index in range(len(op.results))),
            *((what, name) for name in op.operands for what in ("stored", "used")),
        ]

    def label(self, op: Op) -> Hashable:
        """A key that is equal for ops with the same constraints, whichever patterns these were given by."""
        return tuple(
            (number, tuple(sorted((axis, demand.method) for axis, demand in self.placed[place].items())))
            for number, place in enumerate(self.places(op))
            if place in self.placed
        )
