"""Which pipelines the search for the best one tries."""

from types import SimpleNamespace
from typing import cast

import pytest

from passes.cost.cluster import GIB
from passes.cost.pipeline import ScheduledStep
from passes.cost.step import Phases, Seconds
from passes.search.found import Found
from passes.search.pipelines.bounds import PipelineBounds
from passes.search.pipelines.search import _Candidate, _lacking, _Search, _with_less_bubble
from passes.search.space import PipelineChoices, Space
from passes.search.subproblems import Subproblems


@pytest.mark.parametrize(
    ("stages_s", "waits"),
    [
        # Two micro-batches and a step of 4 s: both ranks are busy, both wait, or only the one with less to do.
        ((2.0, 2.0), False),
        ((1.5, 1.5), True),
        ((2.0, 1.0), True),
    ],
)
def test_zero_bubble_schedules_are_tried_where_any_rank_waits(stages_s: tuple[float, float], waits: bool) -> None:
    """They are tried if the ranks wait on average, though the busiest one does not."""
    subproblems = SimpleNamespace(
        programs=SimpleNamespace(program=SimpleNamespace(compiled=False)), space=SimpleNamespace(trains=True)
    )
    bounds = SimpleNamespace(step_s=lambda *_: 1.0)
    best = _Candidate(
        cast("Subproblems", subproblems), PipelineChoices("pp", 2), 2, cast("PipelineBounds", bounds), pipelines=()
    )
    phases = tuple(Phases(forward=own / 3, backward=own / 3, weight=own / 3) for own in stages_s)
    busiest = 2 * max(stages_s)
    step = ScheduledStep(Seconds(forward_compute=busiest, bubble=4.0 - busiest), phases, ())
    found = cast("Found", SimpleNamespace(step=step, seconds=step.seconds))
    search = _Search(lambda *_: (), 4.0)
    assert bool(list(_with_less_bubble(search, best, found))) == waits


def test_a_refusal_says_what_is_missing_or_that_the_effort_was_spent() -> None:
    """No error says that nothing is missing."""
    space = cast("Space", SimpleNamespace(memory_limit=4 * GIB))
    lacking, spent = _lacking(3 * GIB, space, 2, 2), _lacking(0.0, space, 2, 2)
    assert "these lack 3 GiB together" in str(lacking)
    assert lacking.missing == 1.5 * GIB
    assert "with the effort allowed no pipeline over 2 ranks was found that fits" in str(spent)
