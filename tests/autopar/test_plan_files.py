"""Saved plans: whatever is damaged in one, loading or replaying it gives a valid plan or one sentence."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import PlanMismatchError, Precision

MESH = {"dp": 2, "tp": 2}


class Block(nn.Module):
    """A layer that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 8]."""
        return x + self.linear(x).relu()


class Small(nn.Module):
    """Two equal layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """x: [batch, 8]."""
        for block in self.blocks:
            x = block(x)
        return scale * x.pow(2).mean()


def planned(**options: object) -> autopar.Plan:
    """A plan of `Small`."""
    return autopar.plan(Small(), MESH, {"x": torch.zeros(4, 8), "scale": 2.0}, **{"cluster": "ideal", **options})


@pytest.fixture(scope="module")
def saved() -> autopar.Plan:
    """A plan with something in every field."""
    return planned(
        memory_limit=1e9,
        optimizer="sgd",
        precision=torch.bfloat16,
        constraints={"blocks.*.linear.weight": {"stored": {"dp": "S(0)"}}},
        recompute="full",
        micro_batches=2,
        symbolic=True,
    )


# --- what a plan brings -----------------------------------------------------------------------------------------------


def test_a_plan_brings_its_options(saved: autopar.Plan) -> None:
    """Replayed without a word, or with the same words, it is the plan that it was."""
    assert planned(plan=saved, cluster=None) == saved
    again = planned(
        plan=saved,
        objective="train",
        memory_limit=1e9,
        optimizer="sgd",
        precision=Precision(compute=torch.bfloat16, reduce=torch.float32),
        constraints={"blocks.*.linear.weight": {"stored": {"dp": "S(0)"}}},
        recompute={"blocks.*": "full"},
        micro_batches=2,
        symbolic=True,
        compiled=False,
        discover=False,
    )
    assert again == saved


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "infer"},
        {"cluster": "h100"},
        {"memory_limit": 2e9},
        {"optimizer": "adamw"},
        {"precision": torch.float16},
        {"precision": Precision()},
        {"constraints": {}},
        {"micro_batches": 4},
        {"recompute": "none"},
        {"symbolic": False},
        {"compiled": True},
        {"discover": True},
    ],
    ids=str,
)
def test_what_contradicts_a_plan_is_refused(saved: autopar.Plan, options: Mapping[str, object]) -> None:
    """By the name of the argument, with both values."""
    with pytest.raises(PlanMismatchError, match=next(iter(options))) as caught:
        planned(plan=saved, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 3.0), ("x", torch.zeros(8, 8)), ("x", torch.zeros(4, 8).double())]
)
def test_other_inputs_are_refused(saved: autopar.Plan, name: str, value: object) -> None:
    """Values that are constants of the plan count as well as shapes and dtypes."""
    inputs = {"x": torch.zeros(4, 8), "scale": 2.0, name: value}
    with pytest.raises(
        PlanMismatchError, match=r"the plan was made (for the inputs|with scale = 2.0, but here it is 3.0)"
    ):
        autopar.plan(Small(), MESH, inputs, plan=saved)


# --- damaged files ----------------------------------------------------------------------------------------------------

# What stands in place of a value, by the type of the value: wrong types, and what means nothing.
_OTHERS: Mapping[type, tuple[object, ...]] = {
    str: ("", "d1", "S(9)", "S(0, 3)", "S(0)", "I", "float32", 3, None, []),
    int: (-1, 0, 3, 10**30, "2", None, 1.5),
    float: (-1.0, float("nan"), 10**400, "1", None),
    bool: (True, False, 1, "yes"),
    list: ([], {}, None, ["R"], [["S(0)", "R"]], "R"),
    dict: ({}, [], None, {"d1": "R"}, {"x": {}}),
    type(None): ("float16", 1, {}),
}


def damages(data: object) -> Iterator[tuple[str, Any]]:
    """Copies of `data` with one damage each, and where it is: a value left out, or another one in its place."""

    def places(value: object, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], object]]:
        yield path, value
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield from places(inner, (*path, key))

    for path, value in places(data, ()):
        if not path:
            continue
        for other in ("left out", *_OTHERS[type(value)]):
            made = copy.deepcopy(data)
            holder: Any = made
            for key in path[:-1]:
                holder = holder[key]
            if other == "left out":
                del holder[path[-1]]
            else:
                holder[path[-1]] = other
            yield f"{'.'.join(map(str, path))}: {other!r}", made


def outline(saved: autopar.Plan) -> Any:
    """The JSON of a plan with a row of each kind: rows are alike."""
    data = json.loads(saved.to_json())
    for program in data["programs"].values():
        for stage in program["stages"]:
            stage["blocks"] = stage["blocks"][:2]
            for block in stage["blocks"]:
                block["rows"] = block["rows"][:2]
    return data


def load(text: str) -> autopar.Plan | None:
    """A plan, or None where it is refused in one sentence."""
    try:
        return autopar.Plan.from_json(text)
    except PlanMismatchError as error:
        refusal = str(error)
    assert "\n" not in refusal
    return None


def outcome(place: str, plan: autopar.Plan) -> str:
    """The outcome of replaying a plan: "refused", or "replayed" where a valid plan comes of it."""
    try:
        found = autopar.plan(Small(), MESH, {"x": torch.zeros(4, 8), "scale": 2.0}, plan=plan)
        assert autopar.Plan.from_json(found.to_json()) == found
        return "replayed"
    except PlanMismatchError as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(f"{place} ends in {type(error).__name__}: {error}") from error
    assert "\n" not in refusal, place
    return "refused"


@pytest.mark.long
def test_damaged_files_are_refused(saved: autopar.Plan) -> None:
    """Every field, left out or of another value: a plan that loads has only values that mean something."""
    refused = loaded = 0
    for _, made in damages(outline(saved)):
        found = load(json.dumps(made))
        refused, loaded = refused + (found is None), loaded + (found is not None)
    assert refused > 2 * loaded > 0


def _replayed(saved: autopar.Plan, every: int) -> dict[str, int]:
    outcomes = {"refused": 0, "replayed": 0}
    for number, (place, made) in enumerate(damages(outline(saved))):
        found = load(json.dumps(made)) if number % every == 0 else None
        if found is not None:
            outcomes[outcome(place, found)] += 1
    return outcomes


@pytest.mark.long
def test_damaged_plans_are_replayed_or_refused(saved: autopar.Plan) -> None:
    """A sample of what loads."""
    assert min(_replayed(saved, 41).values()) > 0


@pytest.mark.slow
def test_all_damaged_plans_are_replayed_or_refused(saved: autopar.Plan) -> None:
    """All plans that load."""
    assert min(_replayed(saved, 1).values()) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is no plan: not JSON"),
        ("[" * 100000, "this is no plan: not JSON"),
        ("[1]", "it has no format_version"),
        ('{"format_version": 1}', "format version 1, this autopar reads"),
        ('{"format_version": 1' + "0" * 5000 + "}", "this is no plan: not JSON"),
    ],
    ids=["empty", "deep", "no object", "old", "a number too long"],
)
def test_files_that_are_no_plans(tmp_path: Path, text: str, message: str) -> None:
    """The sentence names the file."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanMismatchError, match=message) as caught:
        autopar.Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 500


def test_damage_is_named_by_file_and_field(saved: autopar.Plan, tmp_path: Path) -> None:
    """Truncated, not text, a field that is missing, unknown or impossible."""
    path, text = tmp_path / "plan.json", saved.to_json()
    cases: list[tuple[bytes, str]] = [
        (text[: len(text) // 2].encode(), "not JSON"),
        (b"\xff\xfe" + text.encode(), "not UTF-8"),
        (text.replace('"optimizer"', '"optimiser"', 1).encode(), "plan.optimizer is missing"),
        (text.replace('"dp": "S(', '"dp": "d1(', 1).encode(), r"plan\.[a-z]+.*'dp'.*is no layout"),
        (text.replace('"dp": 2', '"dp": -2', 1).encode(), "plan.mesh is"),
    ]
    for damaged, message in cases:
        path.write_bytes(damaged)
        with pytest.raises(PlanMismatchError, match=message) as caught:
            autopar.Plan.load(path)
        assert str(caught.value).startswith(f"{path}: ")
