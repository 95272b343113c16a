"""Full recompute of some copies of a region: values on gloo ranks, plans, refusals."""

from pathlib import Path

import pytest

import autopar
from autopar import ConstraintError, InputError, Plan, PlanMismatchError
from passes.ir.levels import Level, level_of
from tests.autopar.comparing import exact
from tests.models import MODELS, gpt2, llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

_SLOW = pytest.mark.slow


def _deep(name: str) -> object:
    return gpt2(n_layer=4) if name == "gpt2" else MODELS[name](num_hidden_layers=4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "level", "options"),
    [
        ("llama", "2", "full:2", {"micro_batches": 2, "zero": 3}),
        pytest.param("llama", "2x2", "full:1, selective", {}, marks=_SLOW),
        pytest.param("llama", "2x2", "full:3, ops", {"micro_batches": 2}, marks=_SLOW),
        pytest.param("llama", "2", "full:3", {"micro_batches": 2, "zero": 2}, marks=_SLOW),
        pytest.param("llama", "2", "full:1", {"micro_batches": 4, "zero": 1}, marks=_SLOW),
        pytest.param("gpt2", "2", "full:3", {}, marks=_SLOW),
        pytest.param("gpt2", "2x2", "full:2, selective", {"micro_batches": 2, "zero": 3}, marks=_SLOW),
        pytest.param("gpt2", "4", "full:1, ops", {"micro_batches": 2, "zero": 2}, marks=_SLOW),
        pytest.param("gemma2", "2", "full:1, selective", {}, marks=_SLOW),
    ],
)
def test_equal_to_one_device(name: str, mesh: str, level: str, options: dict[str, object]) -> None:
    """Outputs, loss and every gradient."""
    exact(_deep(name), mesh, tokens(batch=8), recompute=level, **options)  # type: ignore[arg-type]


def _plan(**options: object) -> Plan:
    given: dict[str, object] = {"cluster": "h100", "micro_batches": 1, **options}
    return autopar.plan(llama(num_hidden_layers=6), {"dp": 2}, tokens(batch=8), **given)  # type: ignore[arg-type]


@pytest.mark.long
def test_plans_name_copies_and_are_replayed(tmp_path: Path) -> None:
    """Levels are printed, saved and replayed; evaluation has a program of its own."""
    found = _plan(recompute={"model.layers.*": "full:2, selective"})
    program = found.programs["train"]
    assert dict(program.recompute) == dict(program.stages[0].recompute) == {"model.layers.*": "full:2, selective"}
    assert [(block.name, block.count, block.recompute) for block in program.stages[0].blocks if block.region] == [
        ("model.layers.0-1", 2, "full"),
        ("model.layers.2-5", 4, "selective"),
    ]
    text = str(found)
    assert "model.layers.0-1 x 2, recompute full: " in text
    assert "model.layers.2-5 x 4, recompute selective: " in text
    found.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    again = {"plan": saved, "micro_batches": None, "cluster": None}
    assert _plan(**again) == saved
    assert _plan(**again, recompute="full:2,selective") == saved
    with pytest.raises(PlanMismatchError, match=r"recompute=.*full:3.* is asked for, but the plan was made with"):
        _plan(**again, recompute="full:3, selective")


@pytest.mark.long
def test_seconds_and_bytes_lie_between() -> None:
    """With as many layouts as there are seconds grow by equal parts; memory never grows."""
    steps, sizes = [], []
    for count in (0, 1, 2, 5, 6):
        program = _plan(recompute=f"full:{count}" if count else "none").programs["train"]
        steps.append(program.step_s)
        sizes.append(sum(program.memory.values()))
    for count, step in zip((0, 1, 2, 5, 6), steps, strict=True):
        assert step == pytest.approx(steps[0] + count / 6 * (steps[-1] - steps[0]), rel=1e-9)
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert dict(_plan(recompute="full:6").programs["train"].recompute) == {"model.layers.*": "full"}


def _wide(**options: object) -> Plan:
    """A training step whose saved tensors take most of the memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = llama(**sizes, num_key_value_heads=8, max_position_embeddings=512)
    given: dict[str, object] = {"cluster": "h100", "micro_batches": 1, "outputs": "scalars", **options}
    return autopar.plan(model, {"dp": 2}, tokens(batch=8, length=512), **given)  # type: ignore[arg-type]


@_SLOW
@pytest.mark.parametrize("part", [0.15, 0.4])
def test_the_planner_takes_the_least_number(part: float) -> None:
    """Where full recompute of all copies would be needed, the step is shorter than with any number that is given, and
    the plan fits."""
    most, least = (sum(_wide(recompute=level).programs["train"].memory.values()) for level in ("ops", "full"))
    limit = least + part * (most - least)
    found = _wide(memory_limit=limit).programs["train"]
    assert sum(found.memory.values()) <= limit
    level = level_of(found.recompute["model.layers.*"])
    assert level.is_mixed
    for count in (level.full - 1, level.full, level.full + 1):
        for rest in ("none", "selective", "ops"):
            try:
                given = _wide(memory_limit=limit, recompute=str(Level(rest, count))).programs["train"]
            except (autopar.InfeasibleError, ConstraintError, InputError):
                continue
            assert found.step_s <= given.step_s * (1 + found.gap + 1e-9), (count, rest)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("full:0", "it must be one of none, selective, ops, full, or"),
        ("full:two", "it must be one of"),
        ("selective:2", "it must be one of"),
        ("full:2, full", "it must be one of"),
        ("full:1-3", "it must be one of"),
        (3, "it must be one of"),
    ],
)
def test_levels_that_are_none(level: object, message: str) -> None:
    """They are refused in one sentence, with what can be given."""
    with pytest.raises(InputError, match=message):
        _plan(recompute={"*": level})


def test_more_copies_than_there_are() -> None:
    """The sentence says how many there are."""
    with pytest.raises(ConstraintError, match=r"recompute of 'model.layers.\*' is 'full:7', but it has 6 copies: give"):
        _plan(recompute="full:7")
