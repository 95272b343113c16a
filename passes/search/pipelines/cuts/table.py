"""A dynamic program over cuts: the least that a linear cost takes, and intervals that no cheap cuts have."""

from dataclasses import dataclass

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.search.pipelines.cuts.pieces import Path, Pieces


@dataclass(frozen=True)
class Sweep:
    """The least costs of a linear cost. `reached[s][i]` is the least of the stages below s where s starts at the i-th
    place of its range, less what is counted of stage s up to there; `left[s][j]` the least of stages s and up where
    stage s + 1 starts at its j-th place, less likewise: their sum is the least of all cuts with that stage s."""

    reached: tuple[Floats, ...]
    left: tuple[Floats, ...]
    bound: float


@dataclass(frozen=True)
class Table:
    """Sets of cuts: start s (of stage s; 0 at 0, and the end after the last) is one of `low[s]` to `high[s]`, and
    stage s is an interval (i, j) with `allowed[s][i - low[s], j - low[s + 1]]`."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    allowed: tuple[Flags, ...]

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(each.size for each in self.allowed)

    @property
    def empty(self) -> bool:
        """Whether there are no cuts."""
        return any(not each.any() for each in self.allowed)

    @property
    def single(self) -> bool:
        """Whether there is one choice of each start."""
        return self.low == self.high

    def _costs(self, pieces: Pieces, path: Path) -> tuple[list[Floats], list[Floats]]:
        """For each stage: what the path takes up to the end of it, by the next start, and what it takes before its own
        start, by that, which is to be taken off."""
        upto = path[:3].T @ pieces.sums
        off = path[3:].T @ pieces.sends - upto
        ranges = [slice(low, high + 1) for low, high in zip(self.low, self.high, strict=True)]
        stages = range(len(self.allowed))
        return [upto[each, ranges[each + 1]] for each in stages], [off[each, ranges[each]] for each in stages]

    def swept(self, pieces: Pieces, path: Path, *, back: bool = True) -> Sweep:
        """The least costs of `path` over all cuts of this table; without `left` where they are not swept back."""
        ends, starts = self._costs(pieces, path)
        value, reached = np.zeros(1), []
        for allowed, end, start in zip(self.allowed, ends, starts, strict=True):
            reached.append(value + start)
            value = np.where(allowed, reached[-1][:, None], np.inf).min(axis=0, initial=np.inf) + end
        bound = float(value.min(initial=np.inf))
        if not back:
            return Sweep(tuple(reached), (), bound)
        value, left = np.zeros(1), []
        for allowed, end, start in zip(self.allowed[::-1], ends[::-1], starts[::-1], strict=True):
            left.append(value + end)
            value = np.where(allowed, left[-1][None, :], np.inf).min(axis=1, initial=np.inf) + start
        return Sweep(tuple(reached), tuple(left[::-1]), bound)

    def balanced(self, pieces: Pieces) -> "Integers | None":
        """Cuts with the least sum over stages of squared seconds; None where there are none."""
        upto = pieces.sums.sum(axis=0)
        value, choices = np.zeros(1), []
        for stage, allowed in enumerate(self.allowed):
            starts, ends = (slice(self.low[each], self.high[each] + 1) for each in (stage, stage + 1))
            seconds = upto[None, ends] - upto[starts, None] + pieces.sends[:, starts].sum(axis=0)[:, None]
            costs = np.where(allowed, value[:, None] + seconds**2, np.inf)
            choices.append(costs.argmin(axis=0))
            value = costs.min(axis=0)
        if value[0] == np.inf:
            return None
        places = [0]
        for choice in choices[::-1]:
            places.append(int(choice[places[-1]]))
        return np.array([low + place for low, place in zip(self.low, places[::-1], strict=True)])

    def best(self, sweep: Sweep) -> Integers:
        """Cuts with the least cost of a sweep over this table (0 and the end included)."""
        place, cuts = 0, [self.high[-1]]
        for stage in range(len(self.allowed) - 1, -1, -1):
            column = np.where(self.allowed[stage][:, place], sweep.reached[stage], np.inf)
            place = int(np.argmin(column))
            cuts.append(self.low[stage] + place)
        return np.array(cuts[::-1])

    def below(self, sweep: Sweep, limit: float) -> "Table":
        """This table without the intervals that no cuts of less than `limit` have, by a sweep over it."""
        kept = [
            allowed & (reached[:, None] + left[None, :] < limit)
            for allowed, reached, left in zip(self.allowed, sweep.reached, sweep.left, strict=True)
        ]
        return Table(self.low, self.high, tuple(kept)).shrunk()

    def shrunk(self) -> "Table":
        """This table with the ranges of starts that its intervals have."""
        if self.empty:
            return self
        low, high = list(self.low), list(self.high)
        for stage in range(1, len(self.allowed)):
            used = np.flatnonzero(self.allowed[stage - 1].any(axis=0) & self.allowed[stage].any(axis=1))
            if len(used) == 0:
                return Table(self.low, self.high, tuple(np.zeros_like(each) for each in self.allowed))
            low[stage], high[stage] = self.low[stage] + int(used[0]), self.low[stage] + int(used[-1])
        return self.within(low, high)

    def within(self, low: "list[int] | tuple[int, ...]", high: "list[int] | tuple[int, ...]") -> "Table":
        """This table where each start is in another range; it keeps what both ranges have."""
        low = tuple(max(pair) for pair in zip(low, self.low, strict=True))
        high = tuple(min(pair) for pair in zip(high, self.high, strict=True))
        ranges = [
            slice(first - offset, max(first, last + 1) - offset)
            for first, last, offset in zip(low, high, self.low, strict=True)
        ]
        allowed = tuple(each[ranges[stage], ranges[stage + 1]] for stage, each in enumerate(self.allowed))
        return Table(low, high, allowed)

    def without(self, stage: int, first: int, last: int) -> "Table":
        """This table without the intervals of a stage that hold positions `first` to `last` (exclusive)."""
        allowed = self.allowed[stage].copy()
        allowed[: max(0, first - self.low[stage] + 1), max(0, last - self.low[stage + 1]) :] = False
        return Table(self.low, self.high, (*self.allowed[:stage], allowed, *self.allowed[stage + 1 :]))


def all_cuts(pieces: Pieces, stages: int) -> Table:
    """All cuts into so many stages, each with a position or more."""
    count = pieces.count
    low = (*range(stages), count)
    high = (0, *(count - stages + stage for stage in range(1, stages + 1)))
    allowed = []
    for stage in range(stages):
        first, last = (np.arange(low[each], high[each] + 1) for each in (stage, stage + 1))
        inner = (pieces.may_cut[first] | (stage == 0))[:, None] & (pieces.may_cut[last] | (stage == stages - 1))[
            None, :
        ]
        allowed.append((first[:, None] < last[None, :]) & inner)
    return Table(low, high, tuple(allowed))
