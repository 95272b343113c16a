"""Random memory limits: whatever is planned keeps to its limit, and what is refused could not."""

import random
from functools import cache

import pytest
from torch import nn

import autopar
from autopar import InfeasibleError, Plan
from tests.models import MODELS, tokens

# Limits for every model: 200 in all, of which some are fast.
BUDGETS = 40
_FAST = {("gpt2", 0), ("gpt2", 4), ("llama", 0)}
_MESHES = ({"dp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})


@cache
def _model(name: str) -> nn.Module:
    return MODELS[name]()


def _planned(name: str, mesh: dict[str, int], limit: float) -> Plan:
    return autopar.plan(_model(name), mesh, tokens(batch=8), cluster="ideal", memory_limit=limit)


def _memory(plan: Plan) -> float:
    return sum(plan.programs["train"].memory.values())


@cache
def _plenty(name: str, number: int) -> float:
    """What the plan takes that memory does not limit."""
    return _memory(_planned(name, _MESHES[number], 1e15))


def _cases() -> list[object]:
    every = [(name, seed) for seed in range(BUDGETS) for name in MODELS]
    return [case if case in _FAST else pytest.param(*case, marks=pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("name", "seed"), _cases())
def test_no_limit_is_exceeded(name: str, seed: int) -> None:
    """Between nothing fits and all does; where nothing does, the error says how much is missing at least, and the
    limit that it names is below what any plan takes."""
    choose = random.Random(f"{name} {seed}")
    number = choose.randrange(len(_MESHES))
    plenty = _plenty(name, number)
    limit = plenty * choose.uniform(0.1, 1.1)
    plan: Plan | None
    missing = 0.0
    try:
        plan = _planned(name, _MESHES[number], limit)
    except InfeasibleError as error:
        plan, missing = None, error.missing
    if plan is None:
        assert 0 < missing < plenty
        return
    assert _memory(plan) <= limit
    assert plan.memory_limit == limit
    assert limit < plenty or plan.programs["train"].micro_batches == 1
