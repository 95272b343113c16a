"""Cuts into stages against brute force, against an integer program, and against samples."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from passes.cost.schedules import (
    SCHEDULES,
    Held,
    StageSeconds,
    held_together,
    rank_of_stage,
    schedule_actions,
    simulate,
    step_bound,
)
from passes.search.pipelines.cuts import Boundary, NotBetterError, Position, best_cuts
from passes.solve.integer_program import MixedIntegerModel

PER_RANK = {name: kind.least for name, kind in SCHEDULES.items()}
Program = tuple[list[Position], list[Boundary | None]]


def _program(chance: random.Random, count: int, alike: bool) -> Program:
    """Positions with unequal seconds (few different ones where `alike`), and boundaries of which some are forbidden."""

    def number() -> float:
        return chance.choice((1.0, 2.0, 5.0)) if alike else chance.uniform(0.1, 4.0)

    positions = [Position(StageSeconds(number(), number(), number())) for _ in range(count)]
    boundaries = [Boundary(chance.choice((0.0, 0.4, 2.0)), chance.choice((0.0, 0.3))) for _ in range(count)]
    return positions, [each if chance.random() < 0.85 else None for each in boundaries]


def _stages(positions: list[Position], starts: tuple[int, ...]) -> list[StageSeconds]:
    ends = (0, *starts, len(positions))
    groups = [[each.seconds for each in positions[a:b]] for a, b in pairwise(ends)]
    return [
        StageSeconds(sum(s.forward for s in each), sum(s.backward for s in each), sum(s.weight for s in each))
        for each in groups
    ]


def _step_s(program: Program, schedule: str, ranks: int, micro_batches: int, starts: tuple[int, ...]) -> float:
    positions, boundaries = program
    stages = len(starts) + 1
    crossed = [boundaries[start] for start in starts]
    sends = [each.send_s for each in crossed], [each.gradient_send_s for each in crossed]
    actions = schedule_actions(schedule, ranks, stages, micro_batches)
    return simulate(actions, rank_of_stage(schedule, ranks, stages), _stages(positions, starts), *sends).step_s


def most_of(held: Sequence[Held]) -> float:
    """The most micro-batches at a time, of which those whose weights are left count half."""
    return max(each.saved + each.left / 2 for each in held)


class _Limit:
    """A limit on what is held: each position holds some bytes for each micro-batch, of which half are left after its
    backward pass, and some in any case."""

    def __init__(self, chance: random.Random, count: int, most: float) -> None:
        self.held = [chance.choice((1.0, 2.0)) for _ in range(count)]
        self.kept = [chance.choice((0.0, 3.0)) for _ in range(count)]
        self.most, self.asked = most, list[tuple[int, int, int, tuple[Held, ...]]]()

    def __call__(self, first: int, last: int, stage: int, held: Sequence[Held]) -> bool:
        self.asked.append((first, last, stage, tuple(held)))
        flying = most_of(held)
        return sum(self.held[first:last]) * flying + sum(self.kept[first:last]) <= self.most


def _all(program: Program, stages: int) -> list[tuple[int, ...]]:
    places = [place for place in range(1, len(program[0])) if program[1][place] is not None]
    return list(combinations(places, stages - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cuts_are_the_best_of_all(schedule: str) -> None:
    chance = random.Random(schedule)
    nothing, limited = 0, 0
    for number in range(15):
        ranks = chance.choice((2, 3)) if PER_RANK[schedule] == 1 else 2
        stages = ranks * PER_RANK[schedule]
        micro_batches = ranks * chance.choice((2, 3))
        count = chance.choice((stages, stages + 2, stages + 4, stages + 5))
        program = _program(chance, count, number % 2 == 0)
        counts = held_together(schedule_actions(schedule, ranks, stages, micro_batches), [1.0] * stages)
        share = 2.0 * count * most_of(counts[0]) / stages
        fits = _Limit(chance, count, chance.choice((1e9, share, 1.3 * share, 1.6 * share)) if number else 0.5)
        found = best_cuts(*program, schedule, ranks, stages, micro_batches, fits)
        choices = _all(program, stages)
        fitting = [
            starts
            for starts in choices
            if all(
                fits(first, last, stage, counts[stage])
                for stage, (first, last) in enumerate(zip((0, *starts), (*starts, count), strict=True))
            )
        ]
        if not fitting:
            assert found is None
            nothing += 1
            continue
        best = min(_step_s(program, schedule, ranks, micro_batches, starts) for starts in fitting)
        limited += len(fitting) < len(choices)
        assert found is not None
        assert found.complete
        assert found.starts in fitting
        assert found.timeline.step_s == pytest.approx(best, rel=1e-9)
        assert found.timeline.step_s == pytest.approx(
            _step_s(program, schedule, ranks, micro_batches, found.starts), rel=1e-12
        )
        assert best * (1 - 2e-9) <= found.bound_s <= found.timeline.step_s
    # Programs that the limit excludes, and of which it excludes a part.
    assert nothing > 0
    assert limited > 0


class _Intervals(MixedIntegerModel):
    """The integer program of cuts without limits: `columns[s, i, j]` is 1 where stage s holds positions i to j."""

    def __init__(self, program: Program, stages: int) -> None:
        super().__init__()
        self.columns_of = dict[tuple[int, int, int], int]()
        count = len(program[0])
        inner = [place for place in range(1, count) if program[1][place] is not None]
        for stage in range(stages):
            firsts, lasts = inner if stage else [0], inner if stage < stages - 1 else [count]
            keys = [(stage, first, last) for first in firsts for last in lasts if first < last]
            crossed = [program[1][first] if first else None for _, first, _ in keys]
            costs = np.array([each.send_s + each.gradient_send_s if each else 0.0 for each in crossed])
            self.columns_of |= zip(keys, self.add_columns(costs, integer=True).tolist(), strict=True)
        self.add_row({number: 1.0 for key, number in self.columns_of.items() if key[0] == 0}, 1.0, 1.0)
        for stage, place in ((stage, place) for stage in range(1, stages) for place in inner):
            ends = {number: 1.0 for key, number in self.columns_of.items() if key[::2] == (stage - 1, place)}
            begins = {number: -1.0 for key, number in self.columns_of.items() if key[:2] == (stage, place)}
            self.add_row(ends | begins, 0.0, 0.0)

    def add_row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        numbers = np.array(list(terms), dtype=np.int64)
        self.add_rows(1, np.zeros_like(numbers), numbers, np.array(list(terms.values())), lower, upper)

    def add_longest(self, cost: float, upto: np.ndarray, stages: int, times: float, before: float) -> None:
        """Add a column with a cost, at least `times` what each stage takes and `before` what those before it take, by
        the seconds `upto` each position."""
        longest = int(self.add_columns(np.array([cost]))[0])
        for stage in range(stages):
            own = {
                number: -times * (upto[last] - upto[first]) - before * upto[first]
                for (other, first, last), number in self.columns_of.items()
                if other == stage
            }
            self.add_row({longest: 1.0} | own, 0.0, np.inf)

    def least(self) -> float:
        parameters = mathopt.SolveParameters(relative_gap_tolerance=1e-9)
        result = mathopt.solve(self.built(), mathopt.SolverType.HIGHS, params=parameters)
        assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return result.objective_value()


@pytest.mark.parametrize("number", range(10))
def test_larger_programs_against_an_integer_program_and_samples(number: int) -> None:
    chance = random.Random(number)
    ranks, count = chance.choice((4, 5)), chance.choice((20, 26))
    micro_batches, schedule = 4 * ranks, ("gpipe", "1f1b")[number % 2]
    program = _program(chance, count, number % 3 == 0)
    found = best_cuts(*program, schedule, ranks, ranks, micro_batches, lambda *_: True)
    assert found is not None
    assert found.complete
    seconds = [(each.seconds.forward, each.seconds.backward + each.seconds.weight) for each in program[0]]
    forward, backward = np.concatenate([np.zeros((1, 2)), np.cumsum(seconds, axis=0)]).T
    model = _Intervals(program, ranks)
    if schedule == "gpipe":
        # A line of machines with equal jobs, there and back: one job's way, and the slowest machine for all others.
        model.add_longest(micro_batches - 1, forward, ranks, 1.0, 0.0)
        model.add_longest(micro_batches - 1, backward, ranks, 1.0, 0.0)
        assert found.timeline.step_s == pytest.approx(model.least() + forward[-1] + backward[-1], rel=1e-8)
    else:
        # `step_bound`, and all sends of one micro-batch before the first backward pass or after it are left out.
        model.add_longest(1.0, forward + backward, ranks, micro_batches, 1.0)
        model.costs[:ranks] = [np.zeros_like(each) for each in model.costs[:ranks]]
        least = model.least()
        assert least <= step_bound(schedule, ranks, _stages(program[0], found.starts), micro_batches) * (1 + 1e-8)
        assert least <= found.timeline.step_s * (1 + 1e-8)
    places = [place for place in range(1, count) if program[1][place] is not None]
    for _ in range(30):
        starts = tuple(sorted(chance.sample(places, ranks - 1)))
        step_s = _step_s(program, schedule, ranks, micro_batches, starts)
        assert step_s >= found.timeline.step_s * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_many_equal_layers_are_proven_without_much_effort(schedule: str) -> None:
    layer, head = StageSeconds(1.0, 1.0, 1.0), StageSeconds(2.0, 2.0, 2.0)
    positions = [Position(each) for each in (StageSeconds(0.1, 0.1), *[layer] * 126, head)]
    boundaries = [None, *[Boundary(0.3, 0.3)] * 127]
    found = best_cuts(positions, boundaries, schedule, 16, 16, 64, lambda *_: True, effort=1_000_000)
    assert found is not None
    assert found.complete
    # The head takes as long as two layers.
    assert found.starts == (9, *range(17, 128, 8))


def test_where_effort_ends_the_bound_is_below_all_cuts() -> None:
    chance = random.Random(0)
    program = _program(chance, 40, False)
    known = best_cuts(*program, "zbv", 3, 6, 9, lambda *_: True, effort=500_000)
    assert known is not None
    for effort in (1, 2_000, 20_000, 100_000):
        found = best_cuts(*program, "zbv", 3, 6, 9, lambda *_: True, effort=effort)
        assert found is not None
        assert found.bound_s <= known.timeline.step_s * (1 + 1e-9)
        assert found.timeline.step_s >= known.bound_s * (1 - 1e-9)
        assert not found.complete or found.timeline.step_s <= known.timeline.step_s * (1 + 1e-9)


def test_what_fits_is_asked_seldom_and_once() -> None:
    chance = random.Random(3)
    program = _program(chance, 60, True)
    fits = _Limit(chance, 60, 88.0)
    found = best_cuts(*program, "1f1b", 6, 6, 24, fits)
    assert found is not None
    assert found.complete
    assert len(set(fits.asked)) == len(fits.asked) < 250
    # Without the limit other cuts are better.
    free = best_cuts(*program, "1f1b", 6, 6, 24, lambda *_: True)
    assert free is not None
    assert free.timeline.step_s < found.timeline.step_s


def test_cuts_are_better_than_what_is_known() -> None:
    """With a step to beat the best cuts are found if they beat it; else that is an error, and not that none fit."""
    program = _program(random.Random(1), 30, False)
    best = best_cuts(*program, "1f1b", 4, 4, 12, lambda *_: True)
    assert best is not None
    step_s = best.timeline.step_s
    found = best_cuts(*program, "1f1b", 4, 4, 12, lambda *_: True, below_s=1.01 * step_s)
    assert found is not None
    assert found.timeline.step_s == pytest.approx(step_s)
    with pytest.raises(NotBetterError):
        best_cuts(*program, "1f1b", 4, 4, 12, lambda *_: True, below_s=step_s)
    assert best_cuts(*program, "1f1b", 4, 4, 12, lambda *_: False, below_s=step_s) is None


def test_fewer_positions_than_stages_do_not_fit() -> None:
    positions = [Position(StageSeconds(1.0, 1.0))] * 3
    assert best_cuts(positions, [Boundary(0.0, 0.0)] * 3, "1f1b", 4, 4, 4, lambda *_: True) is None


def test_boundaries_are_as_many_as_positions() -> None:
    with pytest.raises(ValueError, match="3 positions have as many boundaries before them, but 2 came"):
        best_cuts([Position(StageSeconds(1.0, 1.0))] * 3, [None] * 2, "1f1b", 2, 2, 4, lambda *_: True)


def test_one_stage_is_not_cut() -> None:
    found = best_cuts([Position(StageSeconds(1.0, 1.0))] * 3, [None] * 3, "gpipe", 1, 1, 4, lambda *_: True)
    assert found is not None
    assert (found.starts, found.timeline.step_s, found.complete) == ((), 24.0, True)
