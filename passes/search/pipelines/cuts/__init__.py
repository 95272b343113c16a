"""Cuts of a program into the stages of a pipeline with the shortest step, by branch and bound.

The value of cuts is the simulator's. It is the longest path through the actions, so that every path bounds it
(`pieces`), and a dynamic program gives the least that a path, or a mean of paths, takes over all cuts (`table`), and
which intervals no better cuts have: those go. So a path that stays on one rank, busy all the time, limits how long each
stage may be; where intervals of the lengths that are left do not make up the program, the best cuts are proven. Sets of
cuts in which some are left are divided, the one with the lowest bound first.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from passes.cost.schedules import StageSeconds, Timeline, held_together, simulate
from passes.ir.arrays import Integers
from passes.search.pipelines.cuts.continuous import ROUNDS, LeastStep, least_step, simple_least_step
from passes.search.pipelines.cuts.fitting import Fitting
from passes.search.pipelines.cuts.means import best_mean
from passes.search.pipelines.cuts.pieces import Boundary, Fits, Path, Pieces, Pipeline, Position, pieces_of
from passes.search.pipelines.cuts.table import Sweep, Table, all_cuts

__all__ = [
    "ROUNDS",
    "Boundary",
    "Cuts",
    "Fits",
    "LeastStep",
    "NotBetterError",
    "Path",
    "Pipeline",
    "Position",
    "best_cuts",
    "least_step",
    "simple_least_step",
]

# Cuts are proven best when no others take less by more than this, relative to them.
_PROVEN = 1e-9
# Effort is counted in actions that are simulated. So many entries of a table count as one, and each step of a sweep.
_ENTRIES, _STEP, _PROGRAM = 400, 50, 2
_EFFORT = 3_000_000
# Shares of the effort after which the first local search, the first bound and its bisection end.
_IMPROVED, _RAISED, _BISECTED = 0.3, 0.6, 0.8
# Rounds of raising the bound: on all cuts, and on a part of them. Steps of bisecting a bound.
_FIRST_ROUNDS, _ROUNDS, _BISECTIONS = 60, 3, 8
# How much longer stages are made to find the paths that limit them.
_LONGER = (3.0, 1.1, 1.02)
# Paths whose costs exclude intervals of a part of all cuts, and those that are kept in all.
_PATHS, _KEPT = 4, 400


@dataclass(frozen=True)
class Cuts:
    """The cuts of a program: the first position of each stage but the first, and the pipeline's timeline.

    No cuts that fit take less than `bound_s` seconds. `complete`: they are proven to be the best, within 1e-9 of the
    step.
    """

    starts: tuple[int, ...]
    timeline: Timeline
    bound_s: float
    complete: bool


class NotBetterError(Exception):
    """Nothing takes less time than what is known already."""


class _Search:
    """The search for the best cuts: the incumbent `best`, which takes `step_s`, and the paths found so far. Before
    there is one, `step_s` are the seconds that cuts must take less than."""

    def __init__(self, pieces: Pieces, pipeline: Pipeline, fitting: Fitting, effort: int, below_s: float) -> None:
        self.pieces, self.pipeline, self.fitting, self.effort = pieces, pipeline, fitting, effort
        self.all = all_cuts(pieces, pipeline.stages)
        self.best: Integers | None = None
        self.step_s = below_s
        self.spent = 0.0
        self.paths: dict[bytes, Path] = {}
        self.values: dict[bytes, tuple[float, Path]] = {}

    @property
    def limit(self) -> float:
        """Upper bound of the step of better cuts (seconds)."""
        return self.step_s * (1 - _PROVEN)

    @property
    def exhausted(self) -> bool:
        return self.spent >= self.effort

    def sweep(self, table: Table, path: Path, *, back: bool = True) -> Sweep:
        """A sweep over a table, whose effort is counted."""
        self.spent += (1 + back) * (table.size / _ENTRIES + _STEP * len(table.allowed))
        return table.swept(self.pieces, path, back=back)

    def value(self, cuts: Integers) -> tuple[float, Path]:
        """The step of cuts and a longest path, which is kept."""
        key = cuts.tobytes()
        if key not in self.values:
            self.spent += self.pipeline.size
            step_s, path = self.pipeline.longest(*self.pieces.stages(cuts))
            self.values[key] = step_s, path
            self.keep(path)
        return self.values[key]

    def keep(self, path: Path) -> None:
        if len(self.paths) < _KEPT:
            self.paths[path.tobytes()] = path

    def consider(self, cuts: Integers) -> bool:
        """Take cuts as the incumbent if they are better. False where they do not fit, which the table learns."""
        refused = self.fitting.refused(cuts)
        for stage, first, last in refused:
            self.all = self.all.without(stage, first, last)
        if refused:
            return False
        self.take(cuts)
        return True

    def take(self, cuts: Integers) -> None:
        """Take cuts that fit as the incumbent if they are better."""
        step_s, _ = self.value(cuts)
        if step_s < self.step_s:
            self.best, self.step_s = cuts, step_s

    def fitting_best(self, table: Table, path: Path) -> tuple[Table, Sweep, Integers | None]:
        """The sweep of a path over a table, and the best cuts for it, which fit or are no better than the incumbent;
        None where there are none. The table is returned without what was found not to fit."""
        while True:
            sweep = self.sweep(table, path)
            if sweep.bound == np.inf:
                return table, sweep, None
            cuts = table.best(sweep)
            # Asking whether cuts fit takes longer than simulating them.
            if self.value(cuts)[0] >= self.limit:
                return table, sweep, cuts
            refused = self.fitting.refused(cuts)
            if not refused:
                self.take(cuts)
                return table, sweep, cuts
            for stage, first, last in refused:
                table, self.all = table.without(stage, first, last), self.all.without(stage, first, last)


def _start(search: _Search) -> bool:
    """Make balanced cuts that fit, improved, the incumbent. False where nothing fits."""
    while (cuts := search.all.balanced(search.pieces)) is not None:
        if search.consider(cuts):
            _improve(search, cuts, _IMPROVED)
            return True
    return False


def _busy_paths(search: _Search) -> list[Path]:
    """For each rank, longest paths where its stages take much longer than others (these paths come first), and a little
    longer: a path then goes round by other ranks while its own would wait."""
    pipeline, pieces = search.pipeline, search.pieces
    mean = np.repeat(pieces.sums[:, -1:] / pipeline.stages, pipeline.stages, axis=1)
    sends = pieces.sends[:, pieces.may_cut].mean(axis=1, keepdims=True) if pieces.may_cut.any() else np.zeros((2, 1))
    found = []
    for longer in _LONGER:
        for rank in range(pipeline.ranks):
            own = np.array(pipeline.stage_ranks) == rank
            search.spent += pipeline.size
            seconds = mean * np.where(own, longer, 1.0)
            found.append(pipeline.longest(seconds, np.repeat(sends, pipeline.stages, axis=1))[1])
    for path in found:
        search.keep(path)
    return list({path.tobytes(): path for path in found}.values())


@dataclass(frozen=True)
class _Part:
    """A part of all cuts: starts from `low` to `high`, and a mean of paths by which they take `bound` or more."""

    bound: float
    low: tuple[int, ...]
    high: tuple[int, ...]
    path: Path


def _raised(search: _Search, table: Table, path: Path, rounds: int) -> tuple[Table, float, Path, Integers | None]:
    """A table without what cannot be better, and a bound on it that is raised by adding to the mean of paths that of
    the cuts which it makes best (fictitious play: both sides answer the mean of what the other did). Returns the table,
    the bound, the mean that gives it, and its best cuts (None where none are left)."""
    bound, best_path, best_cuts = -np.inf, path, None
    for number in range(rounds):
        table, sweep, cuts = search.fitting_best(table, path)
        if cuts is None:
            return table, np.inf, path, None
        if sweep.bound > bound:
            bound, best_path, best_cuts = sweep.bound, path, cuts
        table = table.below(sweep, search.limit)
        if table.empty:
            return table, np.inf, path, None
        step_s, longest = search.value(cuts)
        if sweep.bound >= step_s * (1 - _PROVEN) or search.exhausted:
            break
        path = path + (longest - path) / (number + 2)
    return table, bound, best_path, best_cuts


def _first_raised(search: _Search, busy: Sequence[Path]) -> tuple[float, Path]:
    """A bound on all cuts, and a mean of paths that gives it.

    It begins with the mean of the ranks' busiest paths. Then it is the best mean against all cuts that were the best
    for others, halfway back to the mean with the highest bound so far: the steps would be too large at first."""
    path, seen = np.mean(np.array(busy[: search.pipeline.ranks]), axis=0), list[Integers]()
    best_path, bound = path, -np.inf
    for _ in range(_FIRST_ROUNDS):
        sweep = search.sweep(search.all, path, back=False)
        if sweep.bound > bound:
            bound, best_path = sweep.bound, path
        if bound >= search.limit or search.spent >= _RAISED * search.effort:
            break
        seen.append(search.all.best(sweep))
        if search.value(seen[-1])[0] < search.limit:
            search.consider(seen[-1])
        paths = np.array(list(search.paths.values()))
        lengths = np.einsum("cks,pks->pc", search.pieces.features(np.array(seen)), paths, optimize=True)
        search.spent += _PROGRAM * lengths.size
        weights = best_mean(lengths)
        if weights is None or float((weights @ lengths).min()) <= bound * (1 + _PROVEN):
            break
        path = (np.einsum("p,pks->ks", weights, paths) + best_path) / 2
    return bound, best_path


def _without_longer(search: _Search, table: Table, paths: Sequence[Path], limit: float) -> Table:
    """A table without the intervals of which one of the paths shows that all their cuts take `limit` or more."""
    size = -1
    while size != (size := sum(int(each.sum()) for each in table.allowed)):
        for path in paths:
            table = table.below(search.sweep(table, path), limit)
            if table.empty or search.exhausted:
                return table
    return table


def _bisected(search: _Search, paths: Sequence[Path], bound: float) -> float:
    """A bound on all cuts, higher than `bound` where the paths together show that nothing takes less. Cuts that they
    leave are considered."""
    low, high = bound, search.step_s
    for _ in range(_BISECTIONS):
        if high - low <= _PROVEN * high or search.spent >= _BISECTED * search.effort:
            break
        middle = (low + high) / 2
        left = _without_longer(search, search.all, paths, middle)
        cuts = None if left.empty else search.fitting_best(left, paths[0])[2]
        if cuts is None:
            low = middle
        else:
            high = min(middle, search.step_s)
            _improve(search, cuts, _BISECTED)
    return low


def _moves(search: _Search, cuts: Integers) -> Integers:
    """Cuts of which a run of neighbouring starts is moved by one position: shape [moves, stages + 1]."""
    stages = len(cuts) - 1
    first, last = np.triu_indices(stages - 1)
    inside = (np.arange(stages - 1) >= first[:, None]) & (np.arange(stages - 1) <= last[:, None])
    steps = np.concatenate([inside, -inside.astype(np.int64)])
    moved = np.repeat(cuts[None, :], len(steps), axis=0)
    moved[:, 1:-1] += steps
    kept = (np.diff(moved, axis=1) > 0).all(axis=1) & search.pieces.may_cut[moved[:, 1:-1]].all(axis=1)
    return moved[kept]


def _improve(search: _Search, cuts: Integers, share: float) -> None:
    """Local search from `cuts`: the move that is best by the paths found so far is simulated, which finds one more path
    where it is not as good as that, until none looks better, or that share of the effort is spent."""
    if not search.consider(cuts):
        return
    step_s = search.value(cuts)[0]
    refused = set[bytes]()
    while search.spent < share * search.effort:
        moved = _moves(search, cuts)
        paths = np.array(list(search.paths.values()))[-_KEPT:]
        features = search.pieces.features(moved)
        search.spent += features.size * len(paths) / _ENTRIES / 10
        looks = np.einsum("mks,pks->pm", features, paths, optimize=True).max(axis=0, initial=-np.inf)
        order = [each for each in np.argsort(looks, kind="stable").tolist() if moved[each].tobytes() not in refused]
        if not order or looks[order[0]] >= step_s * (1 - _PROVEN):
            return
        chosen = moved[order[0]]
        if not search.consider(chosen):
            refused.add(chosen.tobytes())
            continue
        value = search.value(chosen)[0]
        if value < step_s * (1 - _PROVEN):
            cuts, step_s = chosen, value
        else:
            refused.add(chosen.tobytes())


def _divided(part: _Part, table: Table, cuts: Integers) -> list[_Part]:
    """Two parts of a part, by the widest range of a start."""
    widths = np.array(table.high) - np.array(table.low)
    stage = int(np.argmax(widths))
    middle = min(max(int(cuts[stage]), table.low[stage]), table.high[stage] - 1)
    below = (*table.high[:stage], middle, *table.high[stage + 1 :])
    above = (*table.low[:stage], middle + 1, *table.low[stage + 1 :])
    return [_Part(part.bound, table.low, below, part.path), _Part(part.bound, above, table.high, part.path)]


def _refined(search: _Search, part: _Part) -> list[_Part]:
    """The parts that are left of a part."""
    table = search.all.within(part.low, part.high).shrunk()
    if table.empty:
        return []
    table, bound, path, cuts = _raised(search, table, part.path, _ROUNDS)
    if cuts is None or bound >= search.limit:
        return []
    paths = list(search.paths.values())
    costs = np.einsum("ks,pks->p", search.pieces.features(cuts), np.array(paths))
    longest = [paths[each] for each in np.argsort(-costs, kind="stable")[:_PATHS].tolist()]
    table = _without_longer(search, table, [path, *longest], search.limit)
    if table.empty:
        return []
    bound = max(bound, part.bound)
    if table.single:
        search.consider(np.array(table.low))
        return []
    return _divided(_Part(bound, table.low, table.high, path), table, cuts)


def _branch_and_bound(search: _Search, bound: float, path: Path) -> float:
    """Improve the incumbent until it is the best or effort runs out; returns a lower bound on all cuts."""
    order = count()
    parts = [(bound, next(order), _Part(bound, search.all.low, search.all.high, path))]
    while parts and parts[0][0] < search.limit and not search.exhausted:
        _, _, part = heapq.heappop(parts)
        for each in _refined(search, part):
            heapq.heappush(parts, (each.bound, next(order), each))
    return min(parts[0][0], search.step_s) if parts else search.step_s


def _result(search: _Search, bound: float) -> Cuts:
    """The incumbent, with a bound on all cuts. Raises NotBetterError where there is none."""
    if search.best is None:
        raise NotBetterError
    best = search.best
    seconds, sends = search.pieces.stages(best)
    forward, gradient = sends[:, 1:].tolist()
    stages = [StageSeconds(*each) for each in seconds.T.tolist()]
    timeline = simulate(search.pipeline.actions, search.pipeline.stage_ranks, stages, forward, gradient)
    bound = min(bound, timeline.step_s)
    return Cuts(tuple(best[1:-1].tolist()), timeline, bound, bound >= timeline.step_s * (1 - _PROVEN))


def best_cuts(
    positions: Sequence[Position],
    boundaries: Sequence[Boundary | None],
    schedule: str,
    ranks: int,
    stages: int,
    micro_batches: int,
    fits: Fits,
    effort: int = _EFFORT,
    below_s: float = float("inf"),
) -> Cuts | None:
    """The cuts of a program into the stages of a pipeline with the shortest step; None where nothing fits.

    Args:
        positions: the pieces that cannot be cut, in order. A stage has one or more.
        boundaries: `boundaries[i]` is the place before position i, None where a cut is not allowed; that of index 0
            is not read.
        schedule, ranks, stages, micro_batches: the pipeline (`passes.cost.schedules`).
        fits: whether positions `first` to `last` (exclusive) fit as stage `stage` with the micro-batches that it
            holds tensors of. Where an interval fits, so does every interval within it as the same stage. It may be
            slow.
        effort: how many actions may be simulated, or other work of the same kind done, before the best cuts so far
            are returned. About a second a million.
        below_s: cuts that take so many seconds or more are of no interest.

    Raises PipelineError where the schedule does not suit the sizes, NotBetterError where some cuts fit, and none that
    were found take less than `below_s`.
    """
    pipeline = Pipeline(schedule, ranks, stages, micro_batches)
    if len(positions) < stages:
        return None
    pieces = pieces_of(positions, boundaries)
    fitting = Fitting(fits, held_together(pipeline.actions, [1.0] * stages), pieces)
    search = _Search(pieces, pipeline, fitting, effort, below_s)
    busy = _busy_paths(search)
    if not _start(search):
        return None
    bound, path = _first_raised(search, busy)
    search.all = _without_longer(search, search.all, [path, *busy], search.limit)
    if search.all.single:
        search.consider(np.array(search.all.low))
    if search.all.empty or search.all.single:
        return _result(search, search.step_s)
    bound = _bisected(search, [path, *busy], bound)
    return _result(search, _branch_and_bound(search, bound, path))
