"""Several searches of one space, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import pytest

from passes.clock import Clock
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.mesh import Mesh
from passes.search import choosing
from passes.search.choosing import searched
from passes.search.progress import Progress
from passes.search.space import Space
from passes.search.subproblems import Choice, MicroBatchPrograms, Subproblem, Subproblems


@dataclass(frozen=True)
class _Space:
    """The parts of a space that decide whether it is searched again with recompute of some copies."""

    some_copies: bool = True
    divides_copies: bool = False
    recompute: Mapping[str, str] | None = None


@pytest.mark.parametrize(("ends_early", "bound_s"), [(False, 0.95), (True, 0.9)])
def test_a_search_that_ends_early_keeps_the_bound_before(
    monkeypatch: pytest.MonkeyPatch, ends_early: bool, bound_s: float
) -> None:
    """A wider search covers the first one, and with it its bound, unless its effort is spent."""
    configuration = Configuration(Mesh(("dp",), (2,)), recompute={"layers.*": "full"})
    choice = Choice(cast("Subproblem", None), Solution((), frozenset(), 1.0, 1.0, configuration))
    space = cast("Space", _Space())
    subproblems = Subproblems(cast("MicroBatchPrograms", None), space, Clock(), 1.0)
    bounds, spent = iter((0.9, 0.95)), iter((False, ends_early))
    monkeypatch.setattr(choosing, "_searched", lambda own, _: (own, Progress(choice, closed_bound=next(bounds))))
    monkeypatch.setattr(choosing, "same_layouts", lambda _, progress: progress)
    monkeypatch.setattr(choosing, "is_spent", lambda _: next(spent))
    _, progress = searched(subproblems)
    assert progress.closed_bound == bound_s
