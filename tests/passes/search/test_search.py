"""The search against a memory simulator that counts more than the solver, and the bounds that it remembers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from passes.capture import capture
from passes.clock import Clock
from passes.cost.liveness import MemoryPeak, PartPeak, StepPeaks
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decisions
from passes.ir.errors import InfeasibleError
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.normalize import normalize
from passes.search import Space, choose, search
from passes.search.best_first import Unbounded, explore
from passes.search.progress import Progress
from passes.search.refinement import best_choice
from passes.search.subproblems import MicroBatchPrograms, Subproblems
from tests.models import llama, tokens


@pytest.fixture(scope="module")
def asked() -> tuple[Space, Program]:
    """The space of a tiny llama on two devices, whose step is one micro-batch, with its program."""
    torch.manual_seed(0)
    model = llama()
    request = make_request({"dp": 2}, Options(cluster="ideal", recompute="none", micro_batches=1))
    info = read_model(model, tokens(batch=8), request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    return request.space(info.casts(request.precision), Decisions()), program


class Simulator:
    """Says that the first plans exceed a limit by so many bytes, and notes their code."""

    def __init__(self, limit: float, exceeding: int, bytes: int = 1) -> None:
        self.limit, self.exceeding, self.bytes, self.seen = limit, exceeding, bytes, list[str]()

    def __call__(self, lowered: object, *_: object) -> tuple[StepPeaks, ...]:
        self.seen.append(str(lowered))
        peak = self.limit + self.bytes if len(self.seen) <= self.exceeding else 1
        return (StepPeaks((PartPeak(MemoryPeak({"activations": int(peak)}, "here", {}), {}, 0),)),)


def test_a_plan_that_does_not_fit_is_not_tried_again(asked: tuple[Space, Program]) -> None:
    """A plan that exceeds the limit by one byte is followed by another one, and the gap counts all plans."""
    space, program = asked
    limit = 1e6
    simulator = Simulator(limit, 2)
    found = search(program, replace(space, memory_limit=limit), simulator, Clock())
    first = search(program, replace(space, memory_limit=limit), Simulator(limit, 0), Clock())
    assert len(set(simulator.seen)) == len(simulator.seen) == 3
    assert found.seconds.total > first.seconds.total
    assert found.gap >= (found.solution.seconds - first.solution.seconds) / found.seconds.total - 1e-9


def test_the_search_says_that_a_plan_may_exist(asked: tuple[Space, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error after the last attempt says that a plan may exist, and names what was tried."""
    space, program = asked
    monkeypatch.setattr("passes.search._ATTEMPTS", 3)
    with pytest.raises(InfeasibleError, match="though one may exist: of 3 tried the last exceeds it"):
        search(program, replace(space, memory_limit=1e6), Simulator(1e6, 1000), Clock())


def test_bounds_on_few_choices_are_not_remembered(asked: tuple[Space, Program]) -> None:
    """On a refined mesh nodes keep their choices of the coarser one, so its bound holds for nothing else."""
    space, program = asked
    subproblems = Subproblems(MicroBatchPrograms(program, space, Clock()), space, Clock(), space.memory_limit)
    _, parent = choose(subproblems)
    before = dict(subproblems.memo.bounds)
    finer = Unbounded(0.0, partial(subproblems.refined, parent, Configuration(Mesh(("a", "b"), (2, 1))), (None, None)))
    whole = Unbounded(0.0, partial(subproblems.limited, parent.subproblem, parent.subproblem.configuration))
    explore([finer], subproblems, Progress())
    assert subproblems.memo.bounds == before
    explore([whole], subproblems, Progress())
    assert parent.subproblem.configuration.key in subproblems.memo.bounds


@pytest.mark.long
def test_the_next_choice_is_taken_where_it_is_near(
    asked: tuple[Space, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that takes little more than the one before ends the search; where it takes more, all are searched again.
    The gap is the one to the bound of the first search either way."""
    space, program = asked
    space = replace(space, memory_limit=1e6)
    searches: list[Progress] = []

    def counted(subproblems: Subproblems, progress: Progress) -> Progress:
        searches.append(progress)
        return best_choice(subproblems, progress)

    monkeypatch.setattr("passes.search.best_choice", counted)
    first = search(program, space, Simulator(1e6, 0), Clock())
    before, bound = len(searches), first.solution.bound
    much = 30_000
    distance = search(program, space, Simulator(1e6, 1, much), Clock()).solution.seconds / bound - 1
    assert distance > 0
    for near, again in ((distance * 1.001, 0), (distance * 0.999, 1)):
        monkeypatch.setattr("passes.search._NEAR", near)
        searches.clear()
        found = search(program, space, Simulator(1e6, 1, much), Clock())
        assert len(searches) == before + again
        assert found.solution.seconds == pytest.approx(bound * (1 + distance), rel=1e-9)
        assert found.gap == pytest.approx((found.solution.seconds - bound) / found.seconds.total, rel=1e-6)


def test_other_levels_lend_what_they_set_aside(asked: tuple[Space, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other levels of recompute have as many bytes set aside as a level that was refused. One that fits is solved again
    with its own number of bytes."""
    space, program = asked
    space = replace(space, memory_limit=7e5, recompute=None)
    found = search(program, space, Simulator(7e5, 1, 200_000), Clock())
    first = search(program, space, Simulator(7e5, 0), Clock())
    monkeypatch.setattr("passes.search._with_less_reserve", lambda _, __, found, *___: found)
    lent = search(program, space, Simulator(7e5, 1, 200_000), Clock())
    assert first.seconds.total <= found.seconds.total < lent.seconds.total


def test_what_is_set_aside_for_one_level_refuses_no_other(asked: tuple[Space, Program]) -> None:
    """Each level of recompute has all of the memory until it is simulated, where nothing fits with as many bytes set
    aside for all levels."""
    space, program = asked
    space = replace(space, memory_limit=7e5, recompute=None)
    found = search(program, space, Simulator(7e5, 1, 500_000), Clock())
    first = search(program, space, Simulator(7e5, 0), Clock())
    assert found.configuration.recompute != first.configuration.recompute
