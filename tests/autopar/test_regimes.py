"""What may be chosen beside layouts."""

from dataclasses import replace

import pytest
import torch

from autopar.build import tracing
from autopar.options import Options
from autopar.regimes import free_regime, limited_regimes, micro_batch_counts, regime_text
from autopar.request import Request, make_request
from passes.capture import capture
from passes.ir.program import Folded, Program
from passes.ir.regime import Regime
from passes.normalize import normalize
from passes.regions import fold
from tests.models import llama, tokens


@pytest.fixture(scope="module")
def asked() -> tuple[Request, Program, Folded]:
    """A request for a tiny llama and a batch of eight, with its program, folded."""
    torch.manual_seed(0)
    model = llama()
    request = make_request(model, {"dp": 2}, tokens(batch=8), Options(cluster="ideal"))
    program = normalize(capture(model, request.inputs, tracing(model, request, "train")))
    return request, program, fold(program)


def test_micro_batches_divide_the_batch(asked: tuple[Request, Program, Folded]) -> None:
    """All numbers that divide it, fewest first; the one that is asked for; and one where nothing is trained."""
    request, program, _ = asked
    assert list(micro_batch_counts(request, program)) == [1, 2, 4, 8]
    assert list(micro_batch_counts(replace(request, micro_batches=4), program)) == [4]
    assert list(micro_batch_counts(replace(request, objective="infer"), program)) == [1]


def test_regimes_of_one_micro_batch_are_levels_of_recompute(asked: tuple[Request, Program, Folded]) -> None:
    """One batch in one piece has nothing to gather or reduce once."""
    request, _, folded = asked
    regimes = list(limited_regimes(request, 1, folded))
    assert [list(regime.recompute.values()) for regime in regimes] == [["full"], ["selective"], ["none"]]
    assert not any(regime.gather_once or regime.reduce_once for regime in regimes)


def test_regimes_of_micro_batches_are_stages_of_zero_too(asked: tuple[Request, Program, Folded]) -> None:
    """Every level of recompute with ZeRO-3, 2 and 1; no two are the same."""
    request, _, folded = asked
    regimes = list(limited_regimes(request, 4, folded))
    assert [(regime.gather_once, regime.reduce_once) for regime in regimes[:3]] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert len({regime.key for regime in regimes}) == len(regimes) == 9


def test_what_is_asked_for_is_computed_again_without_limits_too(asked: tuple[Request, Program, Folded]) -> None:
    """Without limits nothing is computed again but what the request says."""
    request, _, folded = asked
    (name,) = free_regime(request, 2, folded).recompute
    assert free_regime(request, 2, folded) == Regime(2, {name: "none"}, True, True)
    full = replace(request, recompute={"*": "full"})
    assert free_regime(full, 1, folded) == Regime(1, {name: "full"})


def test_regimes_for_people() -> None:
    """What differs from the plain one is said."""
    assert regime_text(Regime()) == ""
    assert regime_text(Regime(4, {"a.*": "full", "b.*": "none"})) == "4 micro-batches, full recompute of a.*"
