"""Random models in random pipeline stages compute what they do on one device."""

from contextlib import nullcontext
from unittest import mock

import pytest

from autopar.testing import run_ranks
from passes.cost.schedules import SCHEDULES
from tests.autopar.comparing import marked
from tests.autopar.staged import MESHES, STEPS, TOLERANCE, Outcome, make_staged, run_seeds

# Seeds by number of ranks that run every time, and those that run every night, so many in one job. In that of three
# ranks a stage hands on a tensor without a gradient to the next one, on the same rank.
FAST = {2: range(200, 202), 3: range(1059, 1060), 4: range(202, 203)}
NIGHTLY, TOGETHER = range(1000, 1100), 20
# Where flags that follow from features are counted, samples see each other, which is refused.
_LEAST_RUN = 0.8


def _failures(ranks: int, outcomes: list[dict[int, Outcome]]) -> list[str]:
    """Errors, each with the first model that has it."""
    failed = [
        f"seed {seed}, rank {rank}, cuts {outcome.cuts}: {outcome.worst[0]} is off by {outcome.worst[1]:.1e}"
        for rank, own in enumerate(outcomes)
        for seed, outcome in own.items()
        if not outcome.worst[1] <= TOLERANCE
    ]
    first = next((seed for own in outcomes for seed, item in own.items() if not item.worst[1] <= TOLERANCE), None)
    return failed if first is None else [str(make_staged(first, ranks)), *failed]


def _run(ranks: int, seeds: range) -> None:
    outcomes = run_ranks(run_seeds, ranks, list(seeds), timeout=60.0 * len(seeds))
    failed = _failures(ranks, outcomes)
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    refused = [outcome.refused for outcome in outcomes[0].values() if outcome.refused]
    assert len(refused) <= (1 - _LEAST_RUN) * len(seeds) + 1, refused


@pytest.mark.long
@pytest.mark.parametrize("ranks", marked(FAST, {2}))
def test_random_models_in_stages(ranks: int) -> None:
    """Loss, outputs, gradients over two steps and an evaluation."""
    _run(ranks, FAST[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("start", range(NIGHTLY.start, NIGHTLY.stop, TOGETHER))
def test_many_random_models_in_stages(ranks: int, start: int) -> None:
    """The same for many."""
    _run(ranks, range(start, start + TOGETHER))


def test_all_steps_are_drawn() -> None:
    """Every step of the table, schedule and mesh is among few models."""
    drawn = [make_staged(seed, ranks) for ranks in MESHES for seed in range(16)]
    assert set().union(*(item.steps for item in drawn)) == set(STEPS)
    assert {item.schedule for item in drawn} == set(SCHEDULES)
    assert {tuple(item.sizes.items()) for item in drawn} == {
        tuple(sizes.items()) for every in MESHES.values() for sizes in every
    }


def _without_sums(seed: int) -> Outcome:
    """A seed where gradients of shared parameters are left as each rank has them."""
    with mock.patch("autopar.runtime.pipeline.shared.SharedParameters.summed", return_value=nullcontext()):
        return run_seeds([seed])[seed]


@pytest.mark.slow
def test_what_is_wrong_is_found() -> None:
    """Where shared parameters are not added up, some model that shares some is off."""
    tied = [seed for seed in range(100) if ".weight = " in make_staged(seed, 2).source]
    assert any(outcome.worst[1] > TOLERANCE for seed in tied[:8] for outcome in run_ranks(_without_sums, 2, seed))
