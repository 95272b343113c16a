"""Stages that fit, found with a simulator that counts its calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from passes.cost.schedules import Held
from passes.lower.positions import Position
from passes.search.pipelines.memory import StageMemory

LAYERS = 24
LOOP = 3
# An op, layers in two pieces each, and a head.
POSITIONS = (
    Position("embedding", 0, 1),
    *(Position(f"layer {copy}", 1, LOOP, copy, inside) for copy in range(LAYERS) for inside in (range(4), range(4, 9))),
    Position("head", LOOP, LOOP + 1),
)


@dataclass(frozen=True)
class Peaks:
    """The larger of two moments of a stage, each with all counts that it may have."""

    first: int
    last: int

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes."""
        own = POSITIONS[self.first : self.last]
        pieces = sum(item.copy is not None for item in own)
        stored = 5.0 * pieces + 40.0 * (self.first == 0) + 60.0 * (self.last == len(POSITIONS))
        counts = [item.saved + 0.5 * item.left for item in held]
        return stored + max(max(count * pieces * 1.5 + 7.0, 30.0 * (pieces > 0) + count) for count in counts)


@dataclass(frozen=True)
class Bent:
    """Bytes that grow ever faster with the positions of a stage."""

    first: int
    last: int

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes."""
        return float((self.last - self.first) ** 3)


@dataclass(frozen=True)
class Ragged:
    """A byte for each position of a stage, and a few more where it begins within a layer."""

    first: int
    last: int

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes."""
        return self.last - self.first + 9.0 * (POSITIONS[self.first].inside.start > 0)


def peak(first: int, last: int, held: Sequence[Held]) -> float:
    """The most bytes of a stage."""
    return Peaks(first, last).bytes_with(held)


def plain(*counts: int) -> list[tuple[Held, ...]]:
    """So many micro-batches with saved tensors alone."""
    return [(Held(count),) for count in counts]


# Some where gradients of weights are left, with more than one count.
APART = [(Held(2, 1), Held(1, 4)), (Held(4), Held(3, 3)), (Held(2, 2),)]


@pytest.mark.parametrize("limit", [60.0, 200.0, 390.0])
def test_answers_are_those_of_the_simulator(limit):
    """Every stage fits as the simulator says, though it is asked about few of them."""
    memory = StageMemory(POSITIONS, Peaks)
    stages = [
        (first, last, held)
        for first in range(0, len(POSITIONS), 3)
        for last in range(first + 1, len(POSITIONS) + 1, 2)
        for held in (*plain(1, 2, 4, 8), *APART)
    ]
    for stage in stages:
        assert (memory.excess(*stage, limit) <= 0) == (peak(*stage) <= limit)
    assert memory.asked < len(stages) / 8


def test_excess_is_at_most_the_simulators():
    """A stage that does not fit is missing at least the bytes that the error says."""
    memory = StageMemory(POSITIONS, Peaks)
    for last in range(3, 40, 2):
        for held in (*plain(8, 1, 4), *APART):
            stage = 1, last, held
            assert memory.excess(*stage, 150.0) <= peak(*stage) - 150.0 or peak(*stage) <= 150.0


def test_near_bytes_are_those_of_a_line():
    """The bytes of stages that are linear in their pieces of layers are found from three stages, whatever piece they
    begin with."""
    memory = StageMemory(POSITIONS, Peaks)
    held = plain(4)[0]
    known = [(1, 9), (2, 11), (3, 13)]
    for first, last in known:
        assert memory.near_bytes(first, last, held) == peak(first, last, held)
    for first in range(1, 20):
        for last in range(first + 8, len(POSITIONS) - 1, 3):
            assert memory.near_bytes(first, last, held) == pytest.approx(peak(first, last, held))
    assert memory.asked == len(known)


def test_near_bytes_stay_within_bounds():
    """Bytes that are not linear are no less than those of a stage within it, and no more than those of one that holds
    it."""
    memory = StageMemory(POSITIONS, Bent)
    held = plain(1)[0]
    known = {(first, last): memory.near_bytes(first, last, held) for first, last in ((1, 9), (2, 11), (1, 31), (1, 41))}
    asked = memory.asked
    for last in range(11, 31, 2):
        assert known[1, 9] <= memory.near_bytes(1, last, held) <= known[1, 31]
    assert memory.asked == asked


def test_stages_that_begin_within_a_layer_are_others():
    """A stage that begins in the middle of a layer is not taken for one that begins with it, with as many pieces."""
    memory = StageMemory(POSITIONS, Ragged)
    held = plain(1)[0]
    assert [memory.excess(first, first + 8, held, 0.0) for first in (1, 2, 3, 4)] == [8.0, 17.0, 8.0, 17.0]
    assert memory.asked == 2


CROSSING, MESSAGES = 3.0, 1


@dataclass(frozen=True)
class Sent:
    """Bytes of `Peaks`, with those of messages at the ends of a stage within the program."""

    first: int
    last: int

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes."""
        ends = (self.first > 0) * max(each.saved for each in held) + (self.last < len(POSITIONS)) * (MESSAGES + 1)
        return peak(self.first, self.last, held) + CROSSING * ends


def test_all_stages_fit_where_the_program_does():
    """With the bytes that stages hold of each other. Nothing is simulated once the program was."""
    for held in (*plain(1, 4), *APART):
        whole = Sent(0, len(POSITIONS)).bytes_with(held) + CROSSING * (max(each.saved for each in held) + MESSAGES + 2)
        memory = StageMemory(POSITIONS, Sent, CROSSING, MESSAGES)
        for first in range(0, len(POSITIONS), 3):
            for last in range(first + 1, len(POSITIONS) + 1, 2):
                found = memory.excess(first, last, held, whole), memory.near_excess(first, last, held, whole)
                assert 0.0 >= max(found) >= min(found) >= Sent(first, last).bytes_with(held) - whole
        assert memory.asked < 20
        assert memory.all_fit([held], whole)
        assert not memory.all_fit([held], whole - 1.0)


def test_a_program_that_is_too_large_is_not_simulated():
    """Not where no stage is as small a part of the limit as of the program; nor where nobody says what crosses."""
    held = plain(4)[0]
    memory = StageMemory(POSITIONS, Sent, CROSSING, MESSAGES)
    limit = 2 * max(Sent(first, first + 6).bytes_with(held) for first in (0, 6, len(POSITIONS) - 6))
    for first in (0, 6, len(POSITIONS) - 6):
        assert memory.excess(first, first + 6, held, limit) <= 0
    assert memory.asked == 3
    alone = StageMemory(POSITIONS, Sent)
    assert alone.excess(1, 7, held, 1e9) <= 0
    assert (alone.asked, alone.all_fit([held], 1e9)) == (1, False)
