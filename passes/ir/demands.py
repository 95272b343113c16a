"""What a user demands of a plan, and where it holds in a program."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from passes.ir.layout import WHOLE, I, Placement, R
from passes.ir.program import Op


@dataclass(frozen=True)
class Constraint:
    """One demand: on `axis`, `what` of what matches `pattern` is `placement`, or its method is `method`.

    `method` is the layout as it was written where it is one; "whole" is met by both R and I."""

    pattern: str
    what: str
    axis: int
    placement: Placement | None
    method: str

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.what} {self.method}"

    def is_met(self, placement: Placement, flows: bool) -> bool:
        """Whether a tensor with `placement` meets the demand; without a gradient (`flows`) R and I are the same."""
        if self.method == WHOLE:
            return placement in (R, I)
        return placement == (R if self.placement == I and not flows else self.placement)


# Where a demand holds: ("stored" | "used", parameter), ("in", op, slot), ("out", op, result), ("method", op), or
# ("method within", op) for the ops of a module, which follow it if they can; an op is known by its first result.
ConstraintTarget = tuple[str, ...]


@dataclass(frozen=True)
class PlacedConstraints:
    """All demands by where they hold and on which axis."""

    placed: Mapping[ConstraintTarget, Mapping[int, Constraint]]

    def at(self, *place: str) -> Mapping[int, Constraint]:
        """The demands at one place, by axis."""
        return self.placed.get(place, {})

    def axes(self, *places: ConstraintTarget) -> set[int]:
        """The axes on which anything is demanded at these places."""
        return {axis for place in places for axis in self.at(*place)}

    def places(self, op: Op) -> list[ConstraintTarget]:
        """Where something may be demanded of an op."""
        found: list[ConstraintTarget] = [("method", op.results[0]), ("method within", op.results[0])]
        found += [("in", op.results[0], str(slot)) for slot in range(len(op.operands))]
        found += [("out", op.results[0], str(index)) for index in range(len(op.results))]
        for name in op.operands:
            found += [("stored", name), ("used", name)]
        return found

    def label(self, op: Op) -> Hashable:
        """Equal for ops of which the same is demanded."""
        return tuple(
            (number, tuple(sorted((axis, str(demand)) for axis, demand in self.placed[place].items())))
            for number, place in enumerate(self.places(op))
            if place in self.placed
        )
