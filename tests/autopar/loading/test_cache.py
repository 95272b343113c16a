"""Generated source on disk: for its owner alone, written whole, and never through a link."""

import logging
import multiprocessing
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from autopar.loading import cache, load_source
from autopar.loading.cache import write_source
from passes.ir.errors import CacheError


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache and a temporary folder of the test's own."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    for function in (cache._warn, cache._temporary_folder):
        function.cache_clear()
    yield
    for function in (cache._warn, cache._temporary_folder):
        function.cache_clear()


def test_only_the_owner_reads_and_writes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_source("a.py", "x = 1\n")
    finally:
        os.umask(before)
    assert path == tmp_path / "cache" / "source" / "a.py"
    assert path.read_text() == "x = 1\n"
    modes = [stat.S_IMODE(item.stat().st_mode) for item in (path.parent.parent, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AUTOPAR_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/autopar"),
        ({"XDG_CACHE_HOME": "c"}, "/home/someone/.cache/autopar"),
        ({}, "/home/someone/.cache/autopar"),
    ],
)
def test_the_folder(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOPAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(expected)


def test_a_link_is_replaced_and_its_target_stays() -> None:
    """Under the file's name, and where a file is being written."""
    folder = write_source("a.py", "x = 1\n").parent
    target = folder.parent / "precious"
    target.write_text("keep")
    (folder / "b.py").symlink_to(target)
    path = write_source("b.py", "x = 2\n")
    assert not path.is_symlink()
    assert path.read_text() == "x = 2\n"
    assert target.read_text() == "keep"


def test_other_content_is_replaced_and_what_runs_is_from_memory() -> None:
    path, module = load_source("x = 1\n", "M")
    path.write_text("raise SystemExit\n")
    again, other = load_source("x = 1\n", "M")
    assert (module.x, other.x) == (1, 1)
    assert again == path
    assert path.read_text() == "x = 1\n"


def test_a_pipe_under_the_name_is_not_waited_for() -> None:
    folder = write_source("a.py", "x = 1\n").parent
    os.mkfifo(folder / "b.py")
    assert write_source("b.py", "x = 2\n").read_text() == "x = 2\n"


def test_an_equal_file_is_left_alone() -> None:
    path = write_source("a.py", "x = 1\n")
    number = path.stat().st_ino
    assert write_source("a.py", "x = 1\n").stat().st_ino == number


def _in_temporary(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    assert path.parent.parent == tmp_path / "temporary"
    assert path.read_text() == "x = 1\n"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(path.parent) in message
    assert reason in message


def test_a_folder_that_is_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "source").symlink_to(other)
    with caplog.at_level(logging.WARNING, "autopar"):
        path = write_source("a.py", "x = 1\n")
        write_source("b.py", "x = 1\n")
    _in_temporary(path, tmp_path, caplog, "is a link")
    assert list(other.iterdir()) == []


def test_a_folder_that_others_can_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache" / "source"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    _in_temporary(write_source("a.py", "x = 1\n"), tmp_path, caplog, "mode 777")
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_source("a.py", "x = 1\n")
    # The folder seems to belong to another user, and the temporary one must not.
    real = os.geteuid()
    with mock.patch("os.geteuid", side_effect=[real + 1, real, real]):
        path = write_source("b.py", "x = 1\n")
    _in_temporary(path, tmp_path, caplog, f"belongs to user {real}")


@pytest.mark.parametrize("place", ["/proc/none", "a file"])
def test_a_folder_that_cannot_be_made(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE", place if place.startswith("/") else str(tmp_path / "file" / "cache"))
    _in_temporary(write_source("a.py", "x = 1\n"), tmp_path, caplog, "cannot be used")


def test_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    with pytest.raises(CacheError, match="set AUTOPAR_CACHE to a folder on another disk"):
        write_source("a.py", "x = 1\n")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = write_source("a.py", "x = 1\n").parent
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Files cannot grow further, wherever they are.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(CacheError, match=r"neither to the cache nor to a temporary folder.*AUTOPAR_CACHE"):
            write_source("b.py", "x = 1\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [item.name for item in folder.iterdir()] == ["a.py"]
    assert [item for item in (tmp_path / "temporary").rglob("*") if item.is_file()] == []


def test_processes_write_the_same_file_at_once(tmp_path: Path) -> None:
    source = "x = 1\n" * 5000
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(_written_many_times, [(source,)] * 4)
    assert results == [True] * 4
    assert [item.name for item in (tmp_path / "cache" / "source").iterdir()] == ["a.py"]


def _written_many_times(source: str) -> bool:
    whole = True
    for number in range(50):
        path = write_source("a.py", source if number % 2 else source + "y = 2\n")
        whole &= path.read_text() in (source, source + "y = 2\n")
    return whole


def test_old_files_make_room_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MANY", 2)
    for name in ("a.py", "b.py"):
        os.utime(write_source(name, "x = 1\n"), (0, 0))
    # It is used once more.
    write_source("b.py", "x = 1\n")
    folder = write_source("c.py", "x = 1\n").parent
    assert sorted(item.name for item in folder.iterdir()) == ["b.py", "c.py"]
