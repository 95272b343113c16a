"""Which stages fit, asked of a simulator that counts its calls."""

import pytest

from passes.lower.stages import Position
from passes.search.stage_memory import StageMemory

LAYERS = 24
LOOP = 3
# An op, layers in two pieces each, and a head.
POSITIONS = (
    Position("embedding", 0, 1),
    *(Position(f"layer {copy}", 1, LOOP, copy, inside) for copy in range(LAYERS) for inside in (range(4), range(4, 9))),
    Position("head", LOOP, LOOP + 1),
)


def peak(first: int, last: int, in_flight: int) -> float:
    """The larger of two moments of a stage."""
    own = POSITIONS[first:last]
    pieces = sum(item.copy is not None for item in own)
    held = 5.0 * pieces + 40.0 * (first == 0) + 60.0 * (last == len(POSITIONS))
    return held + max(in_flight * pieces * 1.5 + 7.0, 30.0 * (pieces > 0) + in_flight)


@pytest.mark.parametrize("limit", [60.0, 200.0, 390.0])
def test_answers_are_those_of_the_simulator(limit):
    """Every stage fits as the simulator says, though it is asked about few of them."""
    memory = StageMemory(POSITIONS, peak)
    stages = [
        (first, last, in_flight)
        for first in range(0, len(POSITIONS), 3)
        for last in range(first + 1, len(POSITIONS) + 1, 2)
        for in_flight in (1, 2, 4, 8)
    ]
    for stage in stages:
        assert (memory.excess(*stage, limit) <= 0) == (peak(*stage) <= limit)
    assert memory.asked < len(stages) / 4


def test_excess_is_at_most_the_simulators():
    """What does not fit is missing at least so much."""
    memory = StageMemory(POSITIONS, peak)
    for last in range(3, 40, 2):
        for in_flight in (8, 1, 4):
            stage = 1, last, in_flight
            assert memory.excess(*stage, 150.0) <= peak(*stage) - 150.0 or peak(*stage) <= 150.0
