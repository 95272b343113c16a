"""The search near to a choice, and the arrays that it holds meanwhile."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from passes.capture import capture
from passes.clock import Clock
from passes.cost.cluster import CLUSTERS
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decisions
from passes.ir.errors import InfeasibleError
from passes.ir.mesh import Mesh
from passes.normalize import normalize
from passes.search import refinement
from passes.search.best_first import ByStage, Unlimited, close, explore
from passes.search.configurations import any_number, is_undecided, limited_configurations
from passes.search.progress import Progress
from passes.search.refinement import Near, _climb, best_choice
from passes.search.subproblems import MOST_EFFORT, Choice, Memo, MicroBatchPrograms, Subproblem, Subproblems
from passes.solve import solve
from passes.solve.limits import Effort
from tests.models import llama, tokens

# Four devices, two in a node: shapes differ in what they cost.
NODES = replace(CLUSTERS["h100"], name="pairs", node_size=2)


def _asked(mesh: int | dict[str, int], limit: float, layers: int = 2, **options: object) -> Subproblems:
    """The subproblems of a tiny llama within a limit of memory (bytes)."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=layers)
    request = make_request(mesh, Options(cluster=NODES, micro_batches=1, **options))  # type: ignore[arg-type]
    info = read_model(model, tokens(batch=8), request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    space = replace(request.space(info.casts(request.precision), Decisions()), memory_limit=limit)
    return Subproblems(MicroBatchPrograms(program, space, Clock()), space, Clock(), limit)


@pytest.mark.long
def test_the_bound_without_limit_holds_for_every_configuration() -> None:
    """No choice near to another one is faster than its configuration was bounded before it was begun, and what is found
    from the bounds is as good as what is found one by one."""
    subproblems = _asked({"dp": 2}, 4e5)
    best = best_choice(subproblems, Progress()).best
    assert best is not None
    before = dict(subproblems.memo.bounds)
    near = subproblems.refined(best, best.solution.configuration, (0,))
    every = tuple(limited_configurations(subproblems.space, near.mesh, 1, near.program.folded))
    nodes, _ = Unlimited(0.0, lambda: near, every).expand(subproblems, Progress())
    least, seconds = dict[Hashable, float](), list[float]()
    for node in nodes:
        assert isinstance(node, ByStage)
        least.update((each.key, node.bound) for each in node.configurations)
    assert least.keys() == {each.key for each in every}
    for configuration in every:
        with suppress(InfeasibleError):
            limits = subproblems.limits(configuration)
            seconds.append(solve(near.problem, subproblems.space.cluster, limits, configuration).seconds)
            assert least[configuration.key] <= seconds[-1] * (1 + 1e-9)
    assert len(seconds) > 0
    found = close(subproblems, explore([Unlimited(0.0, lambda: near, every)], subproblems, Progress()))
    assert found.cutoff == pytest.approx(min(seconds), rel=1e-6)
    # Bounds on these few choices hold for no others.
    assert subproblems.memo.bounds == before


def test_what_is_open_is_closed_before_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the open nodes have more pairs of strategies than are held at once, they are closed briefly before anything
    else is made; and all before the largest change."""
    held, briefly = refinement._MOST_OPEN, (refinement.BRIEFLY, refinement.BRIEFLY)
    subproblem = cast("Subproblem", SimpleNamespace(pairs=0.6 * held))
    solution = Solution((), frozenset(), 1.0, 1.0, Configuration(Mesh(("dp",), (2,))))
    closed = list[tuple[int, tuple[float, ...]]]()

    def opening(_: object, __: object, progress: Progress) -> Progress:
        assert len(progress.open) < 2
        return replace(progress, open=(*progress.open, subproblem))

    def closing(_: object, progress: Progress, *given: float) -> Progress:
        closed.append((len(progress.open), given))
        return replace(progress, open=())

    def near(count: int) -> Callable[..., Iterator[Near]]:
        return lambda *_: (Near(lambda: subproblem, (), (axis,)) for axis in range(count))

    monkeypatch.setattr(refinement, "explore", opening)
    monkeypatch.setattr(refinement, "close", closing)
    monkeypatch.setattr(refinement, "_CHANGES", (near(5), near(1)))
    progress = _climb(_that_spent(Effort()), Progress(Choice(subproblem, solution)), set())
    assert closed == [(2, briefly), (2, briefly), (1, ())]
    assert len(progress.open) == 1


class _Spending(SimpleNamespace):
    """Subproblems of which the effort alone is known."""

    is_spent = Subproblems.is_spent


def _that_spent(effort: Effort) -> Subproblems:
    return cast("Subproblems", _Spending(memo=Memo(effort=effort)))


def test_the_more_effort_was_spent_the_more_a_choice_must_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance of what is looked at grows with the effort, until nothing more is looked at."""
    effort, tolerances = Effort(), list[float]()
    subproblem = cast("Subproblem", SimpleNamespace(pairs=0))
    solution = Solution((), frozenset(), 1.0, 1.0, Configuration(Mesh(("dp",), (2,))))

    def exploring(_: object, __: object, progress: Progress) -> Progress:
        tolerances.append(progress.tolerance)
        effort.spent += 0.7 * refinement._THOROUGHLY
        return progress

    monkeypatch.setattr(refinement, "explore", exploring)
    every = (lambda *_: (Near(lambda: subproblem, (), (axis,)) for axis in range(100)),)
    monkeypatch.setattr(refinement, "_CHANGES", every)
    _climb(_that_spent(effort), Progress(Choice(subproblem, solution)), set())
    helps = refinement._HELPS
    assert tolerances == [helps * each for each in (0, 0, 1, 2, 2, 3, 4, 4, 5, 6)]
    assert effort.spent == pytest.approx(MOST_EFFORT)


@pytest.mark.long
@pytest.mark.parametrize(
    "tolerance", [0.01, *(pytest.param(tolerance, marks=pytest.mark.slow) for tolerance in (0.0, 0.1))]
)
def test_what_the_tolerance_leaves_out_is_in_the_bound(tolerance: float) -> None:
    """With a tolerance the best choice is at most so much slower than without, and its bound says so."""
    subproblems = _asked({"dp": 2}, 8e5)
    best = best_choice(subproblems, Progress()).best
    assert best is not None
    slow = best_choice(subproblems.over(replace(subproblems.space, memory_limit=4e5)), Progress()).best
    assert slow is not None
    assert best.seconds < slow.seconds * (1 - 1e-3), "more memory helps"
    own = _asked({"dp": 2}, 8e5)
    found = best_choice(own, Progress(slow, tolerance=tolerance)).best
    assert found is not None
    assert found.solution.bound <= best.seconds * (1 + 1e-6)
    assert found.solution.bound >= found.seconds * (1 - tolerance) * (1 - 1e-5)
    assert found.seconds * (1 - tolerance) <= best.seconds * (1 + 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "tp": 2}, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ({"dp": 2}, 4))]
)
def test_a_search_whose_effort_is_spent_bounds_what_it_leaves_out(mesh: int | dict[str, int]) -> None:
    """A search ends at the first choice that fits where the effort is spent, and no choice of a whole search is faster
    than its bound."""
    whole, ended = _asked(mesh, 4e5), _asked(mesh, 4e5)
    ended.memo.effort.spent = MOST_EFFORT
    best, found = best_choice(whole, Progress()).best, best_choice(ended, Progress()).best
    assert best is not None
    assert found is not None
    assert found.solution.bound <= best.seconds * (1 + 1e-6)
    assert best.seconds <= found.seconds
    assert ended.memo.effort.spent - MOST_EFFORT < whole.memo.effort.spent


def test_neighbours_keep_the_number_of_copies_once_effort_was_spent() -> None:
    """At first changed layouts have any number of copies that are recomputed fully, later that of the best choice."""
    subproblems = _asked({"dp": 2, "tp": 2}, 4e5, layers=4)
    mesh, program = subproblems.space.mesh, subproblems.programs.given(1)
    own = Configuration(mesh, recompute={"model.layers.*": "full:2"})
    parent = subproblems.subproblem(program, subproblems.problem(mesh, program), own)
    choice = Choice(parent, Solution((), frozenset(), 1.0, 1.0, own))
    some, none = any_number(own, program.folded)
    assert is_undecided(some)
    for spent, expected in ((0.0, (some, none)), (refinement._THOROUGHLY, (own,))):
        subproblems.memo.effort.spent = spent
        assert [near.configurations for near in refinement._on_free_axes(subproblems, choice)] == [expected]


def test_a_small_search_apart_has_an_effort_of_its_own() -> None:
    """It is not spent where the whole is, and counts in the whole."""
    whole = _asked({"dp": 2}, 4e5)
    whole.memo.effort.spent = MOST_EFFORT
    apart = whole.apart()
    assert (whole.is_spent, apart.is_spent) == (True, False)
    apart.memo.effort.add(3e6, 0)
    assert (apart.memo.effort.spent, whole.memo.effort.spent) == (3.0, MOST_EFFORT + 3.0)
    assert apart.memo.bounds is whole.memo.bounds
