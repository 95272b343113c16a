"""Records of plans: planned twice they are the same, and what is changed in one of them is found."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import same_plans
from tests.models import llama, tokens

NAME = "a small llama"


def small_case() -> Any:
    """A tiny llama on two devices, in two micro-batches."""
    return same_plans.Case(NAME, llama, tokens, {"dp": 2}, {"cluster": "ideal", "micro_batches": 2})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a small program, in a file."""
    path = tmp_path_factory.mktemp("records") / "old.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_plans, "CASES", (small_case(),))
        same_plans.record(str(path), ["small"])
    return path


def compared(old: Path, changed: Mapping[str, Any], folder: Path, renames: Mapping[str, str] | None = None) -> int:
    """The exit status of comparing a file with a changed record."""
    new, words = folder / "new.json", folder / "renames.json"
    new.write_text(json.dumps(changed))
    words.write_text(json.dumps(renames or {}))
    return same_plans.main(["compare", str(old), str(new), "--renames", str(words)])


def test_planned_again_it_is_the_same(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(same_plans, "CASES", (small_case(),))
    again = tmp_path / "again.json"
    assert same_plans.main(["record", str(again)]) == 0
    assert same_plans.main(["compare", str(recorded), str(again)]) == 0
    assert "0 of 1 programs differ" in capsys.readouterr().out
    found = json.loads(again.read_text())[NAME]
    # The program, and that of the number of labels in all micro-batches.
    assert set(found["programs"]) == {"train", "train totals"}
    assert len(found["sources"]) == 2
    assert all("class LlamaForCausalLM" in source for source in found["sources"].values())
    assert found["programs"]["train"]["numbers"]["memory"]["parameters"] > 0


def test_a_changed_decision_is_found(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = json.loads(recorded.read_text())
    decisions = changed[NAME]["programs"]["train"]["decisions"]
    (node, *_) = decisions
    (before,) = decisions[node]
    decisions[node] = ["elsewhere"]
    assert compared(recorded, changed, tmp_path) == 1
    assert f"programs / train / decisions / {node}[0]: {before!r} -> 'elsewhere'" in capsys.readouterr().out
    del decisions[node]
    assert compared(recorded, changed, tmp_path) == 1
    assert f"{node}: {[before]!r} -> 'nothing'" in capsys.readouterr().out


def test_a_changed_number_is_found(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = json.loads(recorded.read_text())
    seconds = original[NAME]["programs"]["train"]["numbers"]["seconds"]["forward compute"]
    for factor, status in ((1 + 1e-12, 0), (1 + 1e-8, 1), (2, 1)):
        changed = copy.deepcopy(original)
        changed[NAME]["programs"]["train"]["numbers"]["seconds"]["forward compute"] = seconds * factor
        assert compared(recorded, changed, tmp_path) == status
    assert f"seconds / forward compute: {seconds!r} -> {2 * seconds!r} (+1.00e+00)" in capsys.readouterr().out
    # What planning took is no part of a plan.
    original[NAME]["cost"]["seconds"] *= 2
    assert compared(recorded, original, tmp_path) == 0


def test_renamed_words_are_the_same(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renames = {"local": "local_part", "train totals": "batch sums", "recompute": "again", "lm_head": "head"}
    changed = same_plans.renamed(json.loads(recorded.read_text()), renames)
    assert compared(recorded, changed, tmp_path) == 1
    assert "-" in capsys.readouterr().out
    assert compared(recorded, changed, tmp_path, renames) == 0


def test_only_whole_words_are_renamed() -> None:
    renames = {"local": "part", "local.view": "shard.view", "a": "b", "b": "a"}
    text = "local(x), from_local, local.view, a b"
    assert same_plans.renamed({"a": [text]}, renames) == {"b": ["part(x), from_local, shard.view, b a"]}


def test_changed_source_is_shown(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = json.loads(recorded.read_text())
    sources = changed[NAME]["sources"]
    sources["train"] = sources["train"].replace("return", "yield", 1)
    assert compared(recorded, changed, tmp_path) == 1
    out = capsys.readouterr().out
    assert "-        return" in out
    assert "+        yield" in out


def test_programs_in_common_are_compared(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(recorded.read_text())
    assert compared(recorded, {**found, "another": found[NAME]}, tmp_path) == 0
    assert compared(recorded, {"another": found[NAME]}, tmp_path) == 1
    assert "no program in common" in capsys.readouterr().out
