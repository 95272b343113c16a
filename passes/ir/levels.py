"""Levels of recompute: of all copies of a region, or of some of them.

A level is one of `RECOMPUTE`, which holds for all copies. "full:20" recomputes the first 20 copies of a region fully,
and nothing of the others; "full:20, selective" recomputes these selectively. The first copies are chosen because their
tensors stay longest: when the last copy runs backward, all of them are there still.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from passes.ir.configuration import RECOMPUTE

# The levels of regions by name, as a key.
LevelItems = tuple[tuple[str, str], ...]

_SOME = re.compile(r"full:(\d+)(?:-(\d+))?(?:\s*,\s*(\w+))?")


@dataclass(frozen=True)
class Level:
    """The level of recompute of the copies of a region: `rest`, but "full" of the first `full` ones.

    The level of the next `undecided` ones is one of both: in bounds on several numbers of copies they take the seconds
    of `rest` and the memory of "full".
    """

    rest: str = "none"
    full: int = 0
    undecided: int = 0

    def __str__(self) -> str:
        if not self.full:
            return self.rest
        most = f"-{self.full + self.undecided}" if self.undecided else ""
        return f"full:{self.full}{most}" + (f", {self.rest}" if self.rest != "none" else "")

    @property
    def is_mixed(self) -> bool:
        """Whether copies have different levels."""
        return self.full > 0

    def runs(self, count: int) -> tuple[tuple[str, int], ...]:
        """The levels of `count` copies, and the number of copies that have each, one after the other; "" is the level
        of those that are undecided."""
        full = min(self.full, count)
        undecided = min(self.undecided, count - full)
        runs = (("full", full), ("", undecided), (self.rest, count - full - undecided))
        if self.rest == "full" and not undecided:
            return (("full", count),)
        return tuple((level, copies) for level, copies in runs if copies)


@lru_cache(maxsize=1 << 10)
def read_level(text: str) -> Level | None:
    """The level that a text says; None for a text that says none."""
    if text in RECOMPUTE:
        return Level(text)
    found = _SOME.fullmatch(text.strip())
    if found is None:
        return None
    least, most, rest = found.groups()
    full = int(least)
    if full < 1 or (rest or "none") not in RECOMPUTE[:-1] or int(most or full) < full:
        return None
    return Level(rest or "none", full, int(most or full) - full)


def level_of(text: str) -> Level:
    """The level of a text that is known to say one."""
    found = read_level(text)
    assert found is not None, text
    return found


def of_runs(runs: Sequence[tuple[str, int]]) -> str:
    """The level of copies as text, from the levels of some that follow each other and their numbers: the inverse of
    `Level.runs`."""
    full = sum(copies for level, copies in runs if level == "full")
    others = [level for level, _ in runs if level != "full"]
    return str(Level(others[-1], full)) if others else "full"


def over(text: str, count: int) -> str:
    """The level of `count` copies, as text; equal texts where all copies have equal levels."""
    return of_runs(level_of(text).runs(count))


def of_all(by_stage: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """For each region a level at which at least as much is kept for recompute as in any of some stages: that of the
    copies that are not recomputed fully."""
    found: dict[str, list[str]] = {}
    for levels in by_stage:
        for name, text in levels.items():
            found.setdefault(name, []).append(level_of(text).rest)
    kept = {name: [level for level in own if level != "full"] for name, own in found.items()}
    return {name: max(own, key=RECOMPUTE.index) if own else "full" for name, own in kept.items()}


def level_items(levels: Mapping[str, str]) -> LevelItems:
    """The levels of regions as a key."""
    return tuple(sorted(levels.items()))


def pure(levels: Mapping[str, str], *, full: bool) -> dict[str, str]:
    """The levels of regions of which all copies have that of the first copies (`full`), or that of the last ones."""
    found = {name: level_of(text) for name, text in levels.items()}
    return {name: "full" if full and level.is_mixed else level.rest for name, level in found.items()}


def is_mixed(levels: Mapping[str, str]) -> bool:
    """Whether copies of a region have different levels."""
    return any(level_of(text).is_mixed for text in levels.values())
