"""Several calls of the same layers, one layer after the other.

A model that runs its layers on two inputs, such as the chosen and the rejected answers of a preference loss, calls them
all for the first input, and then all for the second. Here the calls of each layer stand next to each other, so that
layers repeat, each with its parameters to itself: they fold, and what is gathered for one call serves the others. Where
a call depends on the call before, as in models that run their layers in rounds or over time, the order stays; such
rounds fold as they are. Statistics that each call updates, such as those of batch norms, do not count.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from passes.ir.entries import Segment, entry_segments
from passes.ir.grouping import grouped
from passes.ir.program import Op, Program


def with_calls_side_by_side(program: Program) -> Program:
    """The same ops in another order: all calls of an entry of a module list next to each other, as far as what they
    read allows it."""
    buffers = frozenset(item.name for item in program.buffers)
    return replace(program, ops=tuple(_ordered(program.ops, 0, buffers)))


def _ordered(ops: Sequence[Op], depth: int, buffers: Set[str]) -> list[Op]:
    """Order ops whose module paths agree in their first `depth` parts."""
    segments = entry_segments(ops, 0, len(ops), depth)
    if all(segment.owner is None for segment in segments):
        return list(ops)
    places = _Order(ops, segments, buffers).run()
    moved = [ops[place] for place in places]
    found: list[Op] = []
    for segment in entry_segments(moved, 0, len(moved), depth):
        inner = moved[segment.start : segment.stop]
        found += inner if segment.owner is None else _ordered(inner, segment.depth, buffers)
    return found


class _Order:
    """The order of ops, whose entries of module lists are `segments`, while it is made."""

    def __init__(self, ops: Sequence[Op], segments: Sequence[Segment], buffers: Set[str]) -> None:
        self.ops = ops
        self.segments = segments
        self.buffers = buffers
        self.calls = grouped((segment.path, segment) for segment in segments if segment.owner is not None)
        self.producer = {name: place for place, op in enumerate(ops) for name in op.results}
        # The ops of entries that are called more than once.
        self.repeated = frozenset(
            place
            for calls in self.calls.values()
            if len(calls) > 1
            for segment in calls
            for place in range(segment.start, segment.stop)
        )
        self.places: dict[int, None] = {}

    def run(self) -> Sequence[int]:
        """The places of the ops in their new order."""
        for segment in self.segments:
            calls = self.calls.get(segment.path, [segment])
            if segment is calls[0] and len(calls) > 1 and (before := self._before(calls)) is not None:
                self._add(sorted(before))
                for call in calls:
                    self._add(range(call.start, call.stop))
            self._add(range(segment.start, segment.stop))
        return list(self.places)

    def _add(self, places: Sequence[int]) -> None:
        self.places.update(dict.fromkeys(places))

    def _before(self, calls: Sequence[Segment]) -> set[int] | None:
        """The ops that go before all `calls` of an entry; None where these, or a call, depend on an entry that comes
        later or on another call."""
        found: set[int] = set()
        wanted = [place for call in calls for place in range(call.start, call.stop)]
        call_of = {place: call for call in calls for place in range(call.start, call.stop)}
        while wanted:
            place = wanted.pop()
            for slot, name in enumerate(self.ops[place].operands):
                other = self.producer.get(name)
                if other is None or other in self.places or other in found:
                    continue
                if other not in self.repeated:
                    found.add(other)
                    wanted.append(other)
                elif not self._is_free(calls[0], call_of.get(other), call_of.get(place), place, slot):
                    return None
        return found

    def _is_free(self, first: Segment, source: Segment | None, call: Segment | None, place: int, slot: int) -> bool:
        """Whether the operand in `slot` of the op at `place` in a `call`, computed by the call `source`, is the call's
        own, or takes the place of a buffer that the same op reads in the `first` call."""
        if source is None or call is None:
            return False
        if source == call:
            return True
        offset = place - call.start
        before = self.ops[first.start + offset] if offset < first.stop - first.start else None
        return (
            before is not None
            and before.target == self.ops[place].target
            and slot < len(before.operands)
            and before.operands[slot] in self.buffers
        )
