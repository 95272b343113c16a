"""Constraints hold, with the right values and gradients: every change of layout, every way to split."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import autopar
from autopar import testing
from autopar.testing import compare_on_mesh, run_ranks
from passes.constrain import Constraints
from passes.ir.redistribution import COLLECTIVES
from tests.autopar.traces import traced_once
from tests.models import MODELS, llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

TOLERANCE = 1e-9

# Every change of the table of redistributions; of splits the first placement stands for dim 0, the second for dim 1.
CHANGES = [
    *(("R", "I"), ("R", "S(0)"), ("R", "P")),
    *(("I", "R"), ("I", "S(1)"), ("I", "P")),
    *(("S(0)", "R"), ("S(1)", "I"), ("S(0)", "S(1)"), ("S(1)", "P")),
    *(("P", "R"), ("P", "I"), ("P", "S(1)")),
]

# What makes a tensor and what reads it.
EDGES = {
    "llama": ("model.layers.*.self_attn.o_proj", "model.layers.[*]/add"),
    "qwen3": ("model.layers.*.self_attn.o_proj", "model.layers.[*]/add"),
    "mistral": ("model.layers.*.self_attn.o_proj", "model.layers.[*]/add"),
    "gemma2": ("model.layers.*.input_layernorm", "model.layers.*.self_attn.[qkv]_proj"),
    "gpt2": ("transformer.h.*.attn.c_proj", "transformer.h.[*]/add"),
}


def _each(model_name: str, sizes: tuple[int, ...], cases: Sequence[Constraints]) -> list[tuple[float, str, str]]:
    """On each rank: the worst error of every case, all of them as text, and its plan."""
    names = ("dp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with traced_once():
        return [_one(model_name, mesh, constraints) for constraints in cases]


def _one(model_name: str, mesh: DeviceMesh, constraints: Constraints) -> tuple[float, str, str]:
    """The same of one case."""
    model = MODELS[model_name](num_hidden_layers=2).double()
    made: list[autopar.DistributedModule] = []

    def parallelized(*args: Any, **given: Any) -> nn.Module:
        made.append(autopar.parallelize(*args, **given))
        return made[0]

    with mock.patch.object(testing, "parallelize", parallelized):
        options = {"cluster": "ideal", "constraints": constraints}
        comparison = compare_on_mesh(model, mesh, tokens(length=8), torch.float64, **options)
    return comparison.worst[1], str(comparison), made[0].plan.to_json()


def _exact(model_name: str, sizes: tuple[int, ...], cases: Mapping[object, Constraints]) -> list[autopar.Plan]:
    """Hold every case against one device; their plans."""
    results = run_ranks(_each, prod(sizes), model_name, sizes, list(cases.values()), timeout=600)
    for name, (error, text, _) in zip(cases, results[0], strict=True):
        assert error <= TOLERANCE, f"{name}: {text}"
    return [autopar.Plan.from_json(plan) for _, _, plan in results[0]]


# One change of each collective.
ONE_OF_EACH = list({COLLECTIVES[before[0], after[0]]: (before, after) for before, after in CHANGES}.values())
ALL_CHANGES = [pytest.param(name, CHANGES, marks=pytest.mark.slow, id=name) for name in MODELS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"), [pytest.param("llama", ONE_OF_EACH, id="one of each collective"), *ALL_CHANGES]
)
def test_every_change_of_layout(name, changes):
    """Each entry of the table of redistributions, forced between two ops of a layer; of each collective one is fast."""
    producer, consumer = EDGES[name]
    cases = {
        (before, after): {producer: {"out": {"tp": before}}, consumer: {"in": {"tp": after}}}
        for before, after in changes
    }
    for (before, after), plan in zip(cases, _exact(name, (2,), cases), strict=True):
        assert _changes(plan, before, after), f"the plan has no change from {before} to {after}"


@pytest.mark.parametrize(("name", "changes"), ALL_CHANGES)
def test_changes_of_adjacent_axes_are_one(name, changes):
    """Each entry of the table on two axes that split a dim one after the other: one collective over both."""
    producer, consumer = EDGES[name]
    cases = {
        (before, after): {producer: {"out": _on_both(before)}, consumer: {"in": _on_both(after)}}
        for before, after in changes
    }
    for (before, after), plan in zip(cases, _exact(name, (2, 2), cases), strict=True):
        rows = [row for block in plan.programs["train"].stages[0].blocks for row in block.rows]
        collective = COLLECTIVES[before[0], after[0]]
        assert any(row.how == f"{collective} dp * tp" for row in rows if row.kind == "change"), (before, after)


class _Two(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x))


@pytest.mark.parametrize(("rows", "how"), [(1 << 8, "all_gather dp, all_gather tp"), (1 << 18, "all_gather dp * tp")])
def test_bytes_decide_how_adjacent_axes_change(rows: int, how: str) -> None:
    """The printed step equals the objective: few bytes are gathered axis by axis, many at once."""
    inputs = {"x": torch.empty(rows, 1024, device="meta")}
    split = {"/relu": {"out": {"dp": "S(0)", "tp": "S(0, 8)"}}, "/tanh": {"in": {"dp": "R", "tp": "R"}}}
    mesh = {"dp": 8, "tp": 8}
    plan = autopar.plan(_Two(), mesh, inputs, objective="infer", cluster="h100", constraints=split)
    program = plan.programs["infer"]
    (change,) = (row for block in program.stages[0].blocks for row in block.rows if row.kind == "change")
    assert change.how == how
    assert program.gap == 0
    assert program.bound_s == pytest.approx(program.step_s, rel=1e-9)


def _on_both(placement: str) -> dict[str, str]:
    return {"dp": placement, "tp": placement.replace(")", ", 2)")}


def _changes(plan: autopar.Plan, before: str, after: str) -> bool:
    """Whether a plan has a change from one placement to another on the only axis."""
    rows = [row for block in plan.programs["train"].stages[0].blocks for row in block.rows if row.kind == "change"]
    return any(_placement(row.before) == before and _placement(row.after) == after for row in rows)


def _placement(layouts: tuple[str, ...]) -> str:
    """The placement of the only layout, which stands without its axis where it is the same on all."""
    return layouts[0].removeprefix("tp ")


def _llama_splits(axis: str) -> dict[str, Constraints]:
    return {
        "batch": {"*.self_attn": {"in": {axis: "S(0)"}}, "*.mlp": {"in": {axis: "S(0)"}}},
        "sequence": {"*norm": {"in": {axis: "S(1)"}, "out": {axis: "S(1)"}}},
        "heads": {"*.self_attn.[qkv]_proj": {"out": {axis: "S(2)"}}, "*.o_proj": {"in": {axis: "S(2)"}}},
        "ffn": {"*.gate_proj": {"out": {axis: "S(2)"}}, "*.down_proj": {"in": {axis: "S(2)"}}},
        "hidden": {"*.up_proj": {"in": {axis: "S(2)"}, "out": {axis: "P"}}},
        "vocabulary": {"model.embed_tokens.weight": {"used": {axis: "S(0)"}}, "lm_head": {"out": {axis: "S(2)"}}},
    }


def _gpt2_splits(axis: str) -> dict[str, Constraints]:
    return {
        "batch": {"*.attn": {"in": {axis: "S(0)"}}, "*.mlp": {"in": {axis: "S(0)"}}},
        "sequence": {"*.ln_[12]": {"in": {axis: "S(1)"}, "out": {axis: "S(1)"}}},
        "heads": {"*.c_attn": {"out": {axis: "S(2, 3)"}}, "*.attn.c_proj": {"in": {axis: "S(2)"}}},
        "ffn": {"*.c_fc": {"out": {axis: "S(2)"}}, "*.mlp.c_proj": {"in": {axis: "S(2)"}}},
        "hidden": {"*.c_fc": {"in": {axis: "S(2)"}}},
        "vocabulary": {"transformer.wte.weight": {"used": {axis: "S(0)"}}, "lm_head": {"out": {axis: "S(2)"}}},
    }


def _splits(name: str, axis: str) -> dict[str, Constraints]:
    return _gpt2_splits(axis) if name == "gpt2" else _llama_splits(axis)


def _together(first: Constraints, second: Constraints) -> Constraints:
    """Both demands."""
    both: dict[str, dict[str, dict[str, str]]] = {}
    for constraints in (first, second):
        for pattern, whats in constraints.items():
            for what, axes in whats.items():
                both.setdefault(pattern, {}).setdefault(what, {}).update(axes)
    return both


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_splits_alone(name):
    """Batch, sequence, heads, ffn, hidden and vocabulary; two at a time are fast."""
    _exact(name, (2,), _splits(name, "tp"))


# Two that share no split: all are tested at night.
FAST_PAIRS = [("batch", "heads"), ("ffn", "vocabulary")]
ALL_PAIRS = list(combinations(_llama_splits("tp"), 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "pairs"),
    [("gpt2", FAST_PAIRS), *(pytest.param(name, ALL_PAIRS, marks=pytest.mark.slow) for name in MODELS)],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} pairs",
)
def test_splits_two_at_a_time(name, pairs):
    """Pairs of splits, the first on one axis and the second on the other: every pair at night."""
    cases = {pair: _together(_splits(name, "dp")[pair[0]], _splits(name, "tp")[pair[1]]) for pair in pairs}
    _exact(name, (2, 2), cases)


# --- what is refused --------------------------------------------------------------------------------------------------


def _plan(constraints: Constraints) -> autopar.Plan:
    return autopar.plan(llama(), {"dp": 2, "tp": 2}, tokens(), cluster="ideal", constraints=constraints)


def test_a_longer_pattern_wins():
    plan = _plan({"*": {"stored": {"tp": "I"}}, "*.q_proj.weight": {"stored": {"tp": "S(0)"}}})
    stored = {name: item.layout["tp"] for name, item in plan.parameters.items()}
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "S(0)"
    assert stored["model.layers.0.self_attn.k_proj.weight"] == "I"


@pytest.mark.parametrize(
    ("constraints", "error", "message"),
    [
        ({"*.no_proj": {"in": {"tp": "R"}}}, autopar.ConstraintError, r"'\*\.no_proj'.*matches no op or module"),
        ({"lm_head.bias": {"stored": {"tp": "R"}}}, autopar.ConstraintError, "'lm_head.bias'.*matches no parameter"),
        (
            {"*.q_proj": {"in": {"tp": "R"}}, "*.q_pro?": {"in": {"tp": "S(1)"}}},
            autopar.ConstraintError,
            r"contradict.*'\*\.q_proj'.*'\*\.q_pro\?'",
        ),
        ({"lm_head": {"in": {"tp": "Q"}}}, autopar.ConstraintError, "'Q'"),
        ({"lm_head": {"inside": {"tp": "R"}}}, autopar.ConstraintError, "'inside'"),
        ({"lm_head": {"in": {"xp": "R"}}}, autopar.MeshError, "'xp'"),
        ({"lm_head": {"method": {"tp": "nonsense"}}}, autopar.ConstraintError, "'lm_head'.*nonsense"),
        ({"@linear": {"in": {"tp": "S(7)"}}}, autopar.ConstraintError, "'@linear'"),
        ({"lm_head.weight": {"stored": {"tp": "S(0, 3)"}}}, autopar.ConstraintError, "'lm_head.weight'"),
        (
            {"lm_head.weight": {"stored": {"tp": "S(0, 4)"}}},
            autopar.ConstraintError,
            r"'lm_head.weight'.* 4 blocks .*torch.distributed.checkpoint .*demand 'used' S\(0, 4\) instead",
        ),
    ],
    ids=["no op", "no parameter", "contradiction", "placement", "what", "axis", "method", "dim", "split", "blocks"],
)
def test_what_cannot_be_done_is_refused(constraints, error, message):
    with pytest.raises(error, match=message):
        _plan(constraints)


def test_a_split_that_does_not_divide_is_refused():
    with pytest.raises(autopar.ConstraintError, match="'@embedding'"):
        autopar.plan(
            llama(),
            {"dp": 2},
            tokens(batch=3),
            cluster="ideal",
            constraints={"@embedding": {"out": {"dp": "S(0)"}}},
        )


def test_placements_of_torch_are_layouts():
    """As the placements that they stand for, in the saved plan, too."""
    text = _plan({"lm_head.weight": {"stored": {"tp": "S(0)", "dp": "whole"}}, "lm_head": {"in": {"tp": "whole"}}})
    placed = {
        "lm_head.weight": {"stored": {"tp": Shard(0), "dp": Replicate()}},
        "lm_head": {"in": {"tp": Replicate()}},
    }
    found = _plan(placed)
    assert found == text
    assert autopar.Plan.from_json(found.to_json()) == found
    assert found.parameters["lm_head.weight"].layout == {"dp": "I", "tp": "S(0)"}


@pytest.mark.parametrize("layout", [Shard(-1), Partial("max"), 0, None], ids=str)
def test_other_values_are_no_layouts(layout):
    with pytest.raises(autopar.ConstraintError, match=r"'lm_head', in, axis 'tp': .* is no layout: write 'R'.*Shard"):
        _plan({"lm_head": {"in": {"tp": layout}}})


def test_a_batch_that_does_not_divide_is_named():
    """By its sizes, and not as a strategy that nothing has."""
    message = r"'@embedding', out S\(0\) on axis 'dp'.*dim 0 of size 3 is not divisible into 2 devices"
    with pytest.raises(autopar.ConstraintError, match=message):
        autopar.plan(
            llama(), {"dp": 2}, tokens(batch=3), cluster="ideal", constraints={"@embedding": {"out": {"dp": Shard(0)}}}
        )
