"""Plans as data: saved, loaded, refused, printed."""

import dataclasses
import json
from pathlib import Path

import pytest

from passes.ir.errors import ExpressionError, InfeasibleError, PlanMismatchError
from passes.ir.plan import (
    FORMAT_VERSION,
    Block,
    Expressions,
    InputPlan,
    ParameterPlan,
    Plan,
    PrecisionPlan,
    ProgramPlan,
    Row,
    StagePlan,
)
from passes.ir.plan_text import bytes_text, layout_text, seconds_text
from passes.ir.work import IdleAxes, Work

SPLIT = {"dp": "S(0)", "tp": "R"}


def example() -> Plan:
    """A plan with something in every field."""
    rows = (
        Row(
            "op", "layers.*/linear", "dp d0, tp out", ("dp S(0), tp R", "dp R, tp S(0)"), ("dp S(0), tp S(1)",), "f[4]"
        ),
        Row("change", "layers.*/linear", "all_reduce tp", ("dp S(0), tp P",), ("dp S(0), tp I",), "f[4]", True),
    )
    stage = StagePlan(
        {"x": ("S(0)", "R"), "layers.*/linear": ("d0", "out")},
        (("head/linear", 0),),
        {"layers.*": "selective"},
        (Block("layers.*", 3, rows, 1.2e-3, 2**29, "layers.*", "selective"),),
        {"parameters": 2**30, "activations": 0.5},
        "optimizer step",
    )
    program = ProgramPlan(
        (stage,),
        "none",
        2,
        False,
        True,
        {"forward compute": 1.5e-3},
        0.0,
        0.0,
        5e-3,
        work=Work(samples=4, tokens=24, flops=3e6, peak_s=1.2e-3, devices=4),
        idle=IdleAxes(("tp",), 2, (2, 6), 3, 1e-3),
    )
    parameters = {
        f"layers.{number}.weight": ParameterPlan((8, 4), "float32", {"dp": "S(1)", "tp": "S(0)"}, True)
        for number in range(3)
    }
    parameters["head.weight"] = ParameterPlan((8, 4), "float32", {"dp": "R", "tp": "R"}, False)
    return Plan(
        model="Model",
        fingerprint="abc",
        objective="train",
        mesh={"dp": 2, "tp": 2},
        cluster="cpu",
        memory_limit=1e9,
        optimizer="adamw",
        precision=PrecisionPlan("bfloat16", None, "float32"),
        inputs={"x": InputPlan((4, 8), "float32", SPLIT)},
        constants={"flag": "True"},
        parameters=parameters,
        programs={"train": program},
        whole_ops=("odd/op",),
        constraints={"head.weight": {"stored": {"dp": "R"}}},
    )


def test_json_gives_back_the_same_plan() -> None:
    """A written plan is read as an equal plan, tuples and nested parts included."""
    assert Plan.from_json(example().to_json()) == example()


def test_saved_plans_load(tmp_path: Path) -> None:
    """The same through a file; whole numbers where floats stand are floats again."""
    path = tmp_path / "plan.json"
    example().save(path)
    loaded = Plan.load(path)
    assert loaded == example()
    assert isinstance(loaded.programs["train"].memory["parameters"], float)


def test_equal_plans_give_equal_text() -> None:
    """Plans can be compared as files."""
    assert example().to_json() == example().to_json()
    other = dataclasses.replace(example(), optimizer="sgd")
    assert other.to_json() != example().to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "this is no plan: not JSON"),
        ("[]", "it has no format_version"),
        ('{"model": "x"}', "it has no format_version"),
        ('{"format_version": 99}', f"format version 99, this autopar reads {FORMAT_VERSION}: plan again"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    """Anything that is no plan of this version is refused, saying why."""
    with pytest.raises(PlanMismatchError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model",), 3),
        (("memory_limit",), "much"),
        (("inputs", "x", "shape"), [4, "8"]),
        (("inputs", "x", "layout"), ["S(0)"]),
        (("programs", "train", "stages"), [3]),
        (("precision", "compute"), 16),
    ],
    ids=lambda item: ".".join(item) if isinstance(item, tuple) else "",
)
def test_damaged_plans_are_refused(path: tuple[str, ...], value: object) -> None:
    """A value of the wrong kind is refused by the place that it stands in."""
    data = json.loads(example().to_json())
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(PlanMismatchError, match="the plan is damaged") as caught:
        Plan.from_json(json.dumps(data))
    assert path[-1] in str(caught.value)


def test_missing_fields_are_refused() -> None:
    """A plan that lacks a field is refused by its name."""
    data = json.loads(example().to_json())
    del data["inputs"]["x"]["dtype"]
    with pytest.raises(PlanMismatchError, match="dtype"):
        Plan.from_json(json.dumps(data))


def test_the_table_shows_what_was_decided() -> None:
    """The text names mesh, inputs, cost, every statement and every kind of parameter."""
    text = example().table()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "Model: dp 2 x tp 2 on cpu (4 devices)"
    assert "input x: float32[4, 8], dp S(0), tp R" in lines
    assert "constant flag: True" in lines
    assert "train: predicted step 1.5 ms, optimal" in lines
    assert "2 micro-batches; parameters gathered for each, gradients reduced once" in lines
    assert "4,000 tokens/s per device, MFU 20.0% (without recompute, causal attention counted half)" in lines
    assert "idle: tp 2 splits little of the computation; 2 of 4 devices would compute as fast" in lines
    assert "a batch of 2 or 6 could be split over it, one of 4 cannot" in lines
    assert "take 3 devices: a step takes 1 ms there, and 1.5 ms here" in lines
    assert "layers.* x 3, recompute selective: 1.2 ms, 512 MiB at the peak" in lines
    assert "inputs and optimizer step: 0 us, 512 MiB at the peak" in lines
    assert "layers.*/linear dp d0, tp out dp S(0), tp R | dp R, tp S(0) -> dp S(0), tp S(1) f[4]" in lines
    assert "~ layers.*/linear all_reduce tp, regathered in backward dp S(0), tp P -> dp S(0), tp I f[4]" in lines
    assert "layers.*.weight x 3 float32[8, 4] stored dp S(1), tp S(0)" in lines
    assert "head.weight float32[8, 4] stored R frozen" in lines
    assert lines[-1].endswith("for want of a sharding rule: odd/op")


def test_a_printed_plan_fits_120_columns() -> None:
    """Rows show layouts of results, under names without their region; long cells are shortened, long lines wrapped."""
    lines = [" ".join(line.split()) for line in str(example()).splitlines()]
    assert "/linear dp d0, tp out -> dp S(0), tp S(1) f[4]" in lines
    assert "~ /linear all_reduce tp, regathered in backward -> dp S(0), tp I f[4]" in lines
    plan = example()
    (stage,) = plan.programs["train"].stages
    row = dataclasses.replace(stage.blocks[0].rows[0], name="layers.*." + "long." * 30 + "end/linear")
    stage = dataclasses.replace(stage, blocks=(dataclasses.replace(stage.blocks[0], rows=(row,)),))
    program = dataclasses.replace(plan.programs["train"], stages=(stage,), whole_batch="word " * 40)
    plan = dataclasses.replace(plan, programs={"train": program}, whole_ops=("odd/op",) * 30)
    text = str(plan)
    assert max(map(len, text.splitlines())) == 120
    assert "end/linear" in text
    assert "…" in text
    assert text.count("odd/op") == 30
    assert max(map(len, plan.table().splitlines())) > 200


def test_coverage_counts_what_is_split() -> None:
    """Ops of all copies, those that are split, those without a rule, and what is left of one device's computation."""
    coverage = example().coverage
    assert (coverage.ops, coverage.split, coverage.without_rule) == (3, 3, ("odd/op",))
    assert coverage.compute_share == pytest.approx(0.3)
    assert str(coverage) == "3 of 3 ops split, 30.0% of one device's computation on each; without a rule: odd/op"
    assert "computation 30.0% of what one device would compute" in str(example())


@pytest.mark.parametrize(
    ("methods", "split"), [(("R", "R"), 0), (("I", "R"), 0), (("R", "P(0, 1)"), 3), (("d0", "R"), 3)]
)
def test_coverage_comes_from_decisions(methods: tuple[str, str], split: int) -> None:
    """The text of a row is for people."""
    plan = example()
    (stage,) = plan.programs["train"].stages
    stage = dataclasses.replace(stage, decisions={**stage.decisions, "layers.*/linear": methods})
    program = dataclasses.replace(plan.programs["train"], stages=(stage,))
    assert dataclasses.replace(plan, programs={"train": program}).coverage.split == split


def test_models_without_tokens_have_samples() -> None:
    """The head has samples/s in place of tokens/s."""
    program = example().programs["train"]
    program = dataclasses.replace(program, work=dataclasses.replace(program.work, tokens=0))
    assert program.tokens_per_second_per_device == 0
    assert program.samples_per_second_per_device == pytest.approx(4 / (1.5e-3 * 4))
    assert "667 samples/s per device" in str(dataclasses.replace(example(), programs={"train": program}))


def test_a_gap_is_shown() -> None:
    """A plan that is not proven optimal says by how much it may be off."""
    program = dataclasses.replace(example().programs["train"], gap=0.025)
    text = str(dataclasses.replace(example(), programs={"train": program}))
    assert "at most 2.50% above the optimum" in text


@pytest.mark.parametrize(
    ("gap", "claim"), [(0.0, "the best of those searched"), (0.025, "at most 2.50% above the best of those searched")]
)
def test_nothing_is_claimed_of_what_was_not_searched(gap: float, claim: str) -> None:
    """After an incomplete search the head neither calls a plan optimal nor gives a bound on all plans."""
    program = dataclasses.replace(example().programs["train"], gap=gap, complete=False)
    text = str(dataclasses.replace(example(), programs={"train": program}))
    assert f"1.5 ms, {claim}" in text
    assert "optim" not in text.split("forward compute")[0]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (1.0, "1 s"), (0.0456, "45.6 ms"), (7.89e-4, "789 us"), (0.0, "0 us")]
)
def test_times_have_units(seconds: float, text: str) -> None:
    """Times are shown in the unit that keeps them above one."""
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(3 * 2**30, "3 GiB"), (1.5 * 2**20, "1.5 MiB"), (2048, "2 KiB"), (256, "0.25 KiB")]
)
def test_sizes_have_units(size: float, text: str) -> None:
    """Sizes are shown in binary units."""
    assert bytes_text(size) == text


def test_layouts_that_agree_show_one_placement() -> None:
    """One placement stands for all axes if it needs no dim."""
    assert layout_text({"dp": "I", "tp": "I"}) == "I"
    assert layout_text({"dp": "S(0)", "tp": "S(0)"}) == "dp S(0), tp S(0)"


def with_formulas(memory: str, **sizes: int) -> Plan:
    """The example, whose limit is 1e9 bytes, with a formula for its memory."""
    found = Expressions(memory, "batch / 4", {"batch": 8, "dp": 2, **sizes}, 4)
    return dataclasses.replace(example(), expressions=found)


def test_formulas_are_kept() -> None:
    """They are saved with the plan, and read as expressions."""
    plan = with_formulas("Max(3*batch*sequence/dp, 100.0)", sequence=16)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert loaded.memory_expression().subs({"batch": 10, "sequence": 20, "dp": 3}) == 200
    assert float(loaded.step_time_expression().subs({"batch": 10})) == 2.5


@pytest.mark.parametrize(
    ("memory", "largest"),
    [
        ("100000000.0*batch/dp", 20),
        ("99999999.0*batch/dp", 20),
        ("83333334.0*batch/dp", 20),
        ("83333333.0*batch/dp", 24),
        ("batch + 2", 999999996),
        ("Max(batch**2, 10.0*batch)", 31620),
        ("1000000000.0*batch/(4*dp) + 0*dp + 500000000", 4),
    ],
)
def test_the_largest_batch(memory: str, largest: int) -> None:
    """The largest multiple of the step that is within the limit."""
    assert with_formulas(memory).max_batch() == largest


def test_no_batch_fits() -> None:
    """The error gives the memory that the smallest batch lacks."""
    with pytest.raises(InfeasibleError, match="one of 4 lacks") as caught:
        with_formulas("1000000000.0*batch").max_batch()
    assert caught.value.missing == 3e9


def test_every_batch_fits() -> None:
    """There is no largest batch where memory does not depend on it, or the model does not."""
    with pytest.raises(ExpressionError, match="does not grow with the batch"):
        with_formulas("1.0").max_batch()
    plan = dataclasses.replace(example(), expressions=Expressions("sequence", "1", {"sequence": 4}, 1))
    with pytest.raises(ExpressionError, match="it is one sample"):
        plan.max_batch()


def test_plans_without_formulas_say_how_to_get_them() -> None:
    """They are made where asked."""
    with pytest.raises(ExpressionError, match="symbolic=True"):
        example().memory_expression()


@pytest.mark.parametrize("formula", ["9**9**9", "batch**batch", "import os", "batch/0"])
def test_damaged_formulas_are_told(formula: str) -> None:
    plan = with_formulas(formula)
    for read in (plan.memory_expression, plan.max_batch):
        with pytest.raises(PlanMismatchError, match=r"the plan is damaged: in its formulas, .* is no formula"):
            read()
