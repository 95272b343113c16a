"""Several searches of one space, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from passes.clock import Clock
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.mesh import Mesh
from passes.search import choosing
from passes.search.choosing import _searched, searched
from passes.search.progress import Progress
from passes.search.space import Space
from passes.search.subproblems import MOST_EFFORT, Choice, MicroBatchPrograms, Subproblem, Subproblems


@dataclass(frozen=True)
class _Space:
    """The parts of a space that decide whether it is searched again with recompute of some copies."""

    some_copies: bool = True
    divides_copies: bool = False
    recompute: Mapping[str, str] | None = None


def _choice(seconds: float) -> Choice:
    """A choice of which its configuration and its seconds alone are known."""
    configuration = Configuration(Mesh(("dp",), (2,)), recompute={"layers.*": "full"})
    return Choice(cast("Subproblem", None), Solution((), frozenset(), seconds, seconds, configuration))


@pytest.mark.parametrize(("ends_early", "bound_s"), [(False, 0.95), (True, 0.9)])
def test_a_search_that_ends_early_keeps_the_bound_before(
    monkeypatch: pytest.MonkeyPatch, ends_early: bool, bound_s: float
) -> None:
    """A wider search covers the first one, and with it its bound, unless its effort is spent."""
    choice = _choice(1.0)
    space = cast("Space", _Space())
    subproblems = Subproblems(cast("MicroBatchPrograms", None), space, Clock(), 1.0)
    bounds, efforts = iter((0.9, 0.95)), iter((0.0, MOST_EFFORT if ends_early else 0.0))

    def searching(own: Subproblems, _: Progress) -> tuple[Subproblems, Progress]:
        own.memo.effort.spent += next(efforts)
        return own, Progress(choice, closed_bound=next(bounds))

    monkeypatch.setattr(choosing, "_searched", searching)
    monkeypatch.setattr(choosing, "same_layouts", lambda _, progress: progress)
    _, progress = searched(subproblems)
    assert progress.closed_bound == bound_s


@pytest.mark.parametrize("in_stripes_s", [0.9, 1.1])
def test_an_earlier_uneven_choice_is_tried_in_stripes(monkeypatch: pytest.MonkeyPatch, in_stripes_s: float) -> None:
    """All is searched with stripes if the uneven choice is faster in stripes than the best one. Otherwise the best one
    is kept, and nothing more is searched."""
    best, uneven = _choice(1.0), _choice(1.2)
    found = Progress(best, closed_bound=0.95, uneven=uneven)
    space = cast("Space", SimpleNamespace(in_stripes=False))
    own, offered = (Subproblems(cast("MicroBatchPrograms", None), space, Clock(), 1.0) for _ in range(2))
    searched_in: list[Subproblems] = []

    def striped(subproblems: Subproblems, choice: Choice, progress: Progress) -> Progress:
        assert subproblems is offered
        assert choice is uneven
        return progress if progress.cutoff <= in_stripes_s else Progress(_choice(in_stripes_s))

    def all_choices(subproblems: Subproblems, progress: Progress) -> Progress:
        searched_in.append(subproblems)
        return progress

    monkeypatch.setattr(choosing, "has_uneven_work", lambda choice: choice is uneven)
    monkeypatch.setattr(choosing, "first_choice", lambda own, progress: progress if own is offered else found)
    monkeypatch.setattr(choosing, "all_choices", all_choices)
    monkeypatch.setattr(choosing, "offering", lambda _: offered)
    monkeypatch.setattr(choosing, "in_stripes", striped)
    monkeypatch.setattr(choosing, "together", lambda own, _, progress: (own, progress))
    subproblems, progress = _searched(own, Progress())
    assert progress.cutoff == min(1.0, in_stripes_s)
    assert subproblems is (offered if in_stripes_s < 1.0 else own)
    assert searched_in == ([own, offered] if in_stripes_s < 1.0 else [own])
