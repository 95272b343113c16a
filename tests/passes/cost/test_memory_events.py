"""Memory events of a statement in fewer: the same peaks, and the same storages afterwards."""

import random

import pytest

from passes.cost.liveness import Event
from passes.cost.liveness.graph import ACTIVATIONS, TRANSIENT, Ledger, Storage, compacted, play

BORDERS = ("keep", "taken", "give")


def _random_events(generator: random.Random) -> list[Event]:
    """Allocations and frees of what is allocated, with other events between."""
    events: list[Event] = []
    live: list[int] = []
    for number in range(generator.randrange(2, 30)):
        draw = generator.random()
        if draw < 0.15:
            events.append(Event(generator.choice(BORDERS), 0))
        elif draw < 0.55 or not live:
            live.append(number)
            events.append(Event("allocate", number, generator.randrange(1, 2000)))
        else:
            events.append(Event("free", live.pop(generator.randrange(len(live)))))
    return events


@pytest.mark.parametrize("unit", [1, 512])
def test_peaks_and_what_stays_are_the_same(unit: int) -> None:
    shorter = 0
    for seed in range(300):
        events = _random_events(random.Random(seed))
        fewer = compacted(events, unit)
        shorter += len(fewer) < len(events)
        assert [event for event in fewer if event.what in BORDERS] == [
            event for event in events if event.what in BORDERS
        ]
        found = []
        for each in (events, fewer):
            ledger = Ledger(unit)
            held = Storage(ledger, 700, ACTIVATIONS)
            own: dict[int, Storage] = {}
            play(each, own, ledger, TRANSIENT)
            peak = ledger.take_peak()
            found.append((peak.peak, peak.bytes_by_kind, {at: item.bytes for at, item in own.items()}, ledger.total))
            del held
        assert found[0] == found[1], (seed, events, fewer)
    assert shorter > 100


def test_runs_in_fewer_events() -> None:
    """Two at a time is the most; what stays is allocated afterwards; a border is kept."""
    allocate, free = "allocate", "free"
    keep = Event("keep", 0)
    events = [Event(allocate, 0, 10), Event(allocate, 1, 20), Event(free, 0), Event(allocate, 2, 5), keep]
    assert compacted(events, 1) == (
        Event("moment", 0, 30),
        Event(allocate, 1, 20),
        Event(allocate, 2, 5),
        keep,
    )
    assert compacted([Event(allocate, 0, 10), keep, Event(free, 0)], 1) == (
        Event(allocate, 0, 10),
        keep,
        Event(free, 0),
    )
