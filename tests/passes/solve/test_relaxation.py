"""The linear program for the next multipliers."""

import pytest

from passes.solve.lagrangian import relaxation
from passes.solve.lagrangian.relaxation import Cut, CuttingPlanes, Multipliers

# Seconds, bytes over the limit at three points, and bounds.
CUTS = (
    (0.01177582235, (31200.0, 24608.0, 16928.0), 0.02516255841),
    (0.01193635719, (-22048.0, 24608.0, 16928.0), 13.71991013),
    (0.01188693993, (-5664.0, 24608.0, 16928.0), 13.71989767),
)
PLANES = CuttingPlanes(overlaps=0, unit=1.163609099e-08, highest=16384.0)


def cuts() -> list[Cut]:
    """Cuts of a problem in which nothing fits: two points exceed the limit in all of them."""
    return [
        Cut((number,), frozenset(), seconds, list(over), (), bound, Multipliers(1.0, [], []))
        for number, (seconds, over, bound) in enumerate(CUTS)
    ]


def test_programs_that_one_solver_calls_imprecise_are_solved() -> None:
    """Bytes cost the most where they exceed the limit in all cuts; elsewhere the first and the last cut are equal."""
    multipliers, bound, parts = PLANES.next(cuts())
    most = PLANES.highest * PLANES.unit
    per_byte = (CUTS[2][0] - CUTS[0][0]) / (31200.0 + 5664.0)
    assert multipliers.bytes == pytest.approx([per_byte, most, most])
    assert bound == pytest.approx(CUTS[0][0] + 31200.0 * per_byte + (24608.0 + 16928.0) * most)
    assert parts == pytest.approx([5664 / 36864, 0.0, 31200 / 36864])


def test_the_best_cut_stays_where_no_solver_has_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed that was not shown: the bound is that of the best cut, which is the mixture alone."""
    monkeypatch.setattr(relaxation, "_solved", lambda _: None)
    found = cuts()
    multipliers, bound, parts = PLANES.next(found)
    assert multipliers is found[1].multipliers
    assert bound == found[1].bound
    assert parts == [0.0, 1.0, 0.0]
