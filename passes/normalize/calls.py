"""Several calls of the same layers, one layer after the other.

A model that runs its layers on two inputs, such as the chosen and the rejected answers of a preference loss, calls them
all for the first input, and then all for the second. Here the calls of each layer stand next to each other, so that
layers repeat, each with its parameters to itself: they fold, and what is gathered for one call serves the others. Where
a call depends on later layers of the call before, as in models that run their layers in rounds, the order stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.ir.entries import Segment, entry_segments
from passes.ir.grouping import grouped
from passes.ir.program import Op, Program


def with_calls_side_by_side(program: Program) -> Program:
    """The same ops in another order: all calls of an entry of a module list next to each other, as far as what they
    read allows it."""
    return replace(program, ops=tuple(_ordered(program.ops, 0)))


def _ordered(ops: Sequence[Op], depth: int) -> list[Op]:
    """Order ops whose module paths agree in their first `depth` parts."""
    segments = entry_segments(ops, 0, len(ops), depth)
    if all(segment.owner is None for segment in segments):
        return list(ops)
    places = _Order(ops, segments).run()
    moved = [ops[place] for place in places]
    found: list[Op] = []
    for segment in entry_segments(moved, 0, len(moved), depth):
        inner = moved[segment.start : segment.stop]
        found += inner if segment.owner is None else _ordered(inner, segment.depth)
    return found


class _Order:
    """The order of ops, whose entries of module lists are `segments`, while it is made."""

    def __init__(self, ops: Sequence[Op], segments: Sequence[Segment]) -> None:
        self.ops = ops
        self.segments = segments
        self.calls = grouped((segment.path, segment) for segment in segments if segment.owner is not None)
        self.producer = {name: place for place, op in enumerate(ops) for name in op.results}
        # The entry of each op that is called more than once.
        self.repeated: Mapping[int, str] = {
            place: path
            for path, calls in self.calls.items()
            if len(calls) > 1
            for segment in calls
            for place in range(segment.start, segment.stop)
        }
        self.places: dict[int, None] = {}

    def run(self) -> Sequence[int]:
        """The places of the ops in their new order."""
        for segment in self.segments:
            calls = self.calls.get(segment.path, [segment])
            if segment is calls[0] and len(calls) > 1 and (before := self._before(segment.path, calls)) is not None:
                self._add(sorted(before))
                for call in calls:
                    self._add(range(call.start, call.stop))
            self._add(range(segment.start, segment.stop))
        return list(self.places)

    def _add(self, places: Sequence[int]) -> None:
        self.places.update(dict.fromkeys(places))

    def _before(self, path: str, calls: Sequence[Segment]) -> set[int] | None:
        """The ops that go before all `calls` of the entry `path`; None where one of them depends on an entry that comes
        later, or on one of the calls."""
        found: set[int] = set()
        wanted = [place for call in calls for place in range(call.start, call.stop)]
        while wanted:
            place = wanted.pop()
            for name in self.ops[place].operands:
                other = self.producer.get(name)
                if other is None or other in self.places or other in found:
                    continue
                if other not in self.repeated:
                    found.add(other)
                    wanted.append(other)
                elif self.repeated[other] != path or place in found:
                    return None
        return found
