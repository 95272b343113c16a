"""Levels of recompute as text."""

import pytest

from passes.ir.levels import RECOMPUTE, Level, is_mixed, level_of, of_all, of_runs, over, pure, read_level


@pytest.mark.parametrize("text", [*RECOMPUTE, "full:3", "full:3, selective", "full:3, ops", "full:3-7, selective"])
def test_levels_are_read_as_they_are_written(text: str) -> None:
    """Both ways."""
    assert str(level_of(text)) == text
    assert level_of(text).is_mixed is (":" in text)


@pytest.mark.parametrize("text", ["", "all", "full:", "full:0", "full:-1", "ops:2", "full:2, full", "full:5-3", "3"])
def test_other_texts_are_none(text: str) -> None:
    """They say no level."""
    assert read_level(text) is None


def test_spaces_do_not_matter() -> None:
    """Nor does a level of the others that is "none"."""
    assert read_level(" full:3 ,ops ") == read_level("full:3,ops") == Level("ops", 3)
    assert str(level_of("full:3, none")) == "full:3"


def test_runs_are_levels_of_copies_one_after_the_other() -> None:
    """The first copies, those that are undecided, and the others; and back."""
    assert level_of("full:2, ops").runs(5) == (("full", 2), ("ops", 3))
    assert level_of("full:2-4, ops").runs(6) == (("full", 2), ("", 2), ("ops", 2))
    assert level_of("full:7").runs(5) == level_of("full").runs(5) == (("full", 5),)
    assert level_of("selective").runs(3) == (("selective", 3),)
    for text in (*RECOMPUTE, "full:2", "full:4, selective"):
        assert of_runs(level_of(text).runs(5)) == over(text, 5) == text
    assert over("full:5, ops", 5) == "full"


def test_levels_of_several_stages() -> None:
    """The tensors that one of them keeps for recompute: the highest level of copies that are not recomputed fully."""
    stages = [{"a": "full", "b": "full"}, {"a": "full:2, selective"}, {"a": "none"}]
    assert of_all(stages) == {"a": "selective", "b": "full"}


def test_levels_of_first_and_last_copies() -> None:
    """Of regions whose copies have one level both are the same."""
    levels = {"a": "full:2, ops", "b": "selective"}
    assert pure(levels, full=True) == {"a": "full", "b": "selective"}
    assert pure(levels, full=False) == {"a": "ops", "b": "selective"}
    assert is_mixed(levels)
    assert not is_mixed(pure(levels, full=True))
