"""Recompute of each pipeline stage: values on gloo ranks, what the planner chooses, plans."""

from pathlib import Path

import pytest
from torch import nn

import autopar
from autopar import InfeasibleError, Pipeline, Plan
from autopar.testing import compare
from passes.ir.configuration import RECOMPUTE
from tests.autopar.comparing import TOLERANCE
from tests.models import gpt2, llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

_SLOW = pytest.mark.slow
_1F1B = Pipeline(schedule="1f1b")


def _model(name: str) -> nn.Module:
    sizes = {"llama": lambda: llama(num_hidden_layers=8), "gpt2": lambda: gpt2(n_layer=8)}
    return sizes[name]()


def _plan(name: str, mesh: dict[str, int], **options: object) -> Plan:
    given = {"cluster": "ideal", "micro_batches": 8, "pipeline": _1F1B, **options}
    model = _model(name)
    # Plans for ranks of CPUs are compared in float64.
    model = model.double() if given["cluster"] == "ideal" else model
    return autopar.plan(model, mesh, tokens(8, 32), **given)  # type: ignore[arg-type]


def _limit(name: str, mesh: dict[str, int], part: float, **options: object) -> float:
    """A memory limit between the least that a level of recompute takes and what none takes."""
    most, *others = (
        sum(_plan(name, mesh, **{**options, "recompute": level}).programs["train"].memory.values())
        for level in RECOMPUTE
    )
    return min(others) + part * (most - min(others))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", {"pp": 2}, {}),
        pytest.param("llama", {"pp": 4}, {}, marks=_SLOW),
        pytest.param("gpt2", {"pp": 4}, {}, marks=_SLOW),
        pytest.param("llama", {"pp": 2, "dp": 2}, {"zero": 3}, marks=_SLOW),
        pytest.param("llama", {"pp": 2, "dp": 2}, {"zero": 2}, marks=_SLOW),
        pytest.param("gpt2", {"pp": 2, "tp": 2}, {}, marks=_SLOW),
        pytest.param("llama", {"pp": 4}, {"pipeline": Pipeline(schedule="zb_h1")}, marks=_SLOW),
    ],
)
def test_equal_to_one_device(name: str, mesh: dict[str, int], options: dict[str, object]) -> None:
    """Stages with different recompute: outputs, loss and every gradient; the plan that ran says that they differ."""
    limit = _limit(name, mesh, 0.6, **options)
    planned = _plan(name, mesh, memory_limit=limit, **options)
    assert len({tuple(stage.recompute.items()) for stage in planned.programs["train"].stages}) > 1
    given = {"cluster": "ideal", "micro_batches": 8, "pipeline": _1F1B, "memory_limit": limit}
    comparison = compare(_model(name), mesh, tokens(8, 32), **{**given, **options})
    assert comparison.worst[1] <= TOLERANCE, str(comparison)


@pytest.mark.parametrize("level", ["full:1", "full:2, selective", "full:3, ops"])
@pytest.mark.slow
def test_numbers_that_are_given_are_those_of_each_stage(level: str) -> None:
    """As they are in Megatron; the plan that has them is replayed, and compared with one device."""
    found = _plan("llama", {"pp": 2}, recompute=level)
    assert [dict(stage.recompute) for stage in found.programs["train"].stages] == [{"model.layers.*": level}] * 2
    comparison = compare(
        _model("llama"), {"pp": 2}, tokens(8, 32), cluster="ideal", micro_batches=8, pipeline=_1F1B, recompute=level
    )
    assert comparison.worst[1] <= TOLERANCE, str(comparison)


@pytest.mark.slow
def test_early_stages_recompute_more(tmp_path: Path) -> None:
    """They hold more micro-batches in flight. The step is no longer than with any level that all stages share, the plan
    says what each has, and it is replayed as it was."""
    mesh = {"pp": 4}
    limit = _limit("llama", mesh, 0.6, cluster="h100")
    plan = _plan("llama", mesh, memory_limit=limit, cluster="h100")
    program = plan.programs["train"]
    assert sum(program.memory.values()) <= limit
    backward = [stage.backward_s for stage in program.stages]
    assert backward[0] > backward[2]
    assert not dict(program.stages[-1].recompute).get("model.layers.*", "none").startswith("full")
    for level in RECOMPUTE:
        try:
            given = _plan("llama", mesh, memory_limit=limit, recompute=level, cluster="h100").programs["train"]
        except InfeasibleError:
            continue
        assert program.step_s <= given.step_s * (1 + 1e-9), level
    levels = [" and ".join(dict.fromkeys(stage.recompute.values())) for stage in program.stages]
    lines = " ".join(str(plan).split())
    assert all(f"in flight, recompute {level}, " in lines for level in levels if level)
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert _plan("llama", mesh, plan=saved, pipeline=None, cluster=None, micro_batches=None) == saved
