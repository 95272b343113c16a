"""The seconds that the solver minimizes are those that a plan prints and those of the statements that run."""

import logging

import pytest

import autopar
from benchmarks.plan_cases import CASES, H100, Case, llama, tiny_llama, tokens, values
from passes.search import Found, search

# Tiny sizes: on links that cost most of the step, in micro-batches, with units that are gathered again.
TINY = (
    Case("tiny", tiny_llama, values(8), {"dp": 2, "tp": 2}, {"cluster": "cpu"}),
    Case("tiny on dp", tiny_llama, values(16), {"dp": 16}, {"cluster": "h100"}),
    Case("tiny, micro-batches", tiny_llama, values(16), {"dp": 4}, {"cluster": "h100", "micro_batches": 4}),
    Case("tiny, recompute", tiny_llama, values(16), {"dp": 4, "tp": 2}, {"cluster": "h100", "recompute": "full"}),
    Case("8B widths", llama(2), tokens(64, 1024), {"dp": 64}, H100),
    Case("8B widths, short of memory", llama(4), tokens(8, 4096), {"dp": 8}, {"cluster": "h100", "memory_limit": 26e9}),
)


def _is_planned(case: Case) -> bool:
    """Whether a case ends with a plan for training."""
    return not case.ranks and case.options.get("objective") != "infer" and case.name != "llama too large"


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in TINY),
        *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in CASES if _is_planned(case)),
    ],
)
def test_what_is_minimized_is_printed_and_walked(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The objective of the choice, the walk over its statements and the plan's step agree to 1e-6."""
    found: list[Found] = []

    def noted(*args: object) -> Found:
        found.append(search(*args))
        return found[-1]

    monkeypatch.setattr("autopar.planner.search", noted)
    caplog.set_level(logging.ERROR, logger="autopar")
    plan = autopar.plan(case.model(), case.mesh, case.inputs(), **case.options)
    objective, walked = found[0].solution.seconds, found[0].seconds.total
    assert walked == pytest.approx(objective, rel=1e-6)
    assert plan.programs["train"].step_s == pytest.approx(objective, rel=1e-6)
