"""ZeRO stages that are asked for: layouts and traffic of the plan, gradients on gloo ranks, refusals."""

import pytest

import autopar
from autopar import InputError, Plan, PlanMismatchError
from tests.autopar.comparing import exact
from tests.models import llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")


def _plan(**options: object) -> Plan:
    """The plan of a tiny llama whose batch is split over two devices, where no layer is recomputed."""
    constraints = {"*/*in*": {"method": {"dp": "d0"}}}
    fixed = {"micro_batches": 1, "recompute": "none", "cluster": "h100", "constraints": constraints}
    return autopar.plan(llama(), {"dp": 2}, tokens(batch=8), **{**fixed, **options})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_stages_split_states_and_time_traffic(count: int) -> None:
    """Every stage stores all parameters split; they differ in what is gathered and reduced in each micro-batch."""
    steps = []
    for stage, (gather_once, reduce_once) in {1: (True, count > 1), 2: (True, False), 3: (False, False)}.items():
        plan = _plan(zero=stage, micro_batches=count)
        found = plan.programs["train"]
        assert {item.layout["dp"][0] for item in plan.parameters.values()} == {"S"}
        assert (found.gather_once, found.reduce_once) == (gather_once, reduce_once)
        # Nine parameters of a layer are gathered again by stage 3, though there is memory to keep them.
        assert len(found.stages[0].regathered) == (9 if stage == 3 else 0)
        steps.append(found.step_s)
        assert found.gap <= 1e-6
    assert steps[0] <= steps[1] < steps[2]


def test_parameters_that_do_not_divide_stay_whole() -> None:
    """An axis that divides no dim of a norm leaves it whole, and splits what it divides."""
    split = {"*/*in*": {"method": {"dp": "d0"}}}
    plan = autopar.plan(llama(hidden_size=40), {"dp": 16}, tokens(batch=16), cluster="h100", zero=3, constraints=split)
    layouts = {name: item.layout["dp"] for name, item in plan.parameters.items()}
    assert layouts["model.norm.weight"] == "I"
    assert layouts["model.embed_tokens.weight"] == "S(0)"


def test_constraints_come_first() -> None:
    """A parameter that a constraint stores whole stays whole."""
    constraints = {"*/*in*": {"method": {"dp": "d0"}}, "model.norm.weight": {"stored": {"dp": "I"}}}
    plan = _plan(zero=1, constraints=constraints)
    assert plan.parameters["model.norm.weight"].layout["dp"] == "I"
    assert plan.parameters["lm_head.weight"].layout["dp"].startswith("S")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "count", "level"),
    [
        (3, 1, "none"),
        pytest.param(3, 2, "none", marks=pytest.mark.slow),
        pytest.param(2, 2, "none", marks=pytest.mark.slow),
        pytest.param(1, 2, "none", marks=pytest.mark.slow),
        # The backward pass computes copies again with parameters that are still gathered.
        (1, 1, "full"),
    ],
)
def test_equal_to_one_device(stage: int, count: int, level: str) -> None:
    exact(llama(), "2", tokens(batch=8), zero=stage, micro_batches=count, recompute=level)


def test_stages_that_cannot_be() -> None:
    """Numbers that name no stage, stages without training, and another stage than that of a replayed plan."""
    for stage in (0, 4, True, "3"):
        with pytest.raises(InputError, match=r"zero is .*: it must be 1, 2, 3 or None"):
            _plan(zero=stage)
    with pytest.raises(InputError, match="only training has gradients and optimizer states"):
        autopar.plan(llama(), {"dp": 2}, tokens(), cluster="h100", objective="infer", zero=3)
    made = _plan(zero=3, micro_batches=2)
    assert _plan(plan=made, zero=3, micro_batches=None, recompute=None, constraints=None).programs == made.programs
    with pytest.raises(PlanMismatchError, match=r"zero=1 is asked for, but the plan gathers parameters for each"):
        _plan(plan=made, zero=1, micro_batches=None, recompute=None, constraints=None)
