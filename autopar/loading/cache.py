"""Generated source on disk, in a folder that only its owner can read and write.

The files are for people, tracebacks and debuggers: what runs is compiled from memory, never read from a file.

The folder is `$AUTOPAR_CACHE/source`, or else `autopar/source` in the user's cache (`$XDG_CACHE_HOME`, `~/.cache`).
Where it cannot be used, a new private folder for temporary files takes its place, with a warning.
"""

import contextlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from passes.ir.errors import CacheError
from passes.ir.log import logger

# Files that nobody has asked for in so many days make room, once there are so many.
_OLD_S = 30 * 24 * 3600.0
_MANY = 2000


def write_source(name: str, source: str) -> Path:
    """Write generated source to the file called `name` in the cache, if it is not there yet; returns its path.

    Ranks of one node may write the same file at once. Raises CacheError where no folder can be written.
    """
    try:
        return _written(cache_folder() / "source", name, source)
    except (OSError, RuntimeError, CacheError) as error:
        # The whole message of an OSError may have a random name in it.
        reason = str(getattr(error, "strerror", None) or error)
    try:
        _warn(reason)
        return _written(_temporary_folder(), name, source)
    except OSError as error:
        raise CacheError(
            f"generated source cannot be written, neither to the cache nor to a temporary folder ({error}): make room, "
            "or set AUTOPAR_CACHE to a folder on another disk"
        ) from error


def cache_folder() -> Path:
    """The folder of autopar in the user's cache. Raises RuntimeError for a user without a home."""
    given = os.environ.get("AUTOPAR_CACHE")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The standard ignores what is not absolute.
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "autopar"


@cache
def _warn(reason: str) -> None:
    """Log once per process why the cache is not used."""
    logger.warning(
        "generated source goes to the temporary folder %s, because the cache cannot be used: %s",
        _temporary_folder(),
        reason,
    )


@cache
def _temporary_folder() -> Path:
    """A new folder that only this user can read and write, one per process."""
    return Path(tempfile.mkdtemp(prefix="autopar-"))


def _written(folder: Path, name: str, source: str) -> Path:
    """The file called `name` in `folder`, with `source` in it. Raises OSError or CacheError."""
    with _opened(folder) as descriptor:
        content = source.encode()
        if _content(descriptor, name) == content:
            # Lately used: it does not make room.
            os.utime(name, dir_fd=descriptor, follow_symlinks=False)
        else:
            _replace(descriptor, name, content)
            _make_room(descriptor)
    return folder / name


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, which is created where it is not there: whatever its path leads to later, files are
    read and written in the folder that was checked.

    Raises CacheError for a link, and for a folder of another user or that others can read or write.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink():
        raise CacheError(f"{folder} is a link, which may lead anywhere: remove it, or set AUTOPAR_CACHE")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise CacheError(f"{folder} belongs to user {found.st_uid}: remove it, or set AUTOPAR_CACHE")
        if stat.S_IMODE(found.st_mode) & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise CacheError(f"others can read or write {folder} (mode {mode:o}): chmod 700 it, or set AUTOPAR_CACHE")
        yield descriptor
    finally:
        os.close(descriptor)


def _content(folder: int, name: str) -> bytes | None:
    """The content of a regular file in `folder`; None where there is none, or something else under its name."""
    try:
        # Without waiting for a writer, should it be a pipe.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _replace(folder: int, name: str, content: bytes) -> None:
    """Replace `name` in `folder` by a new file; of a link, the link is replaced, not its target."""
    scratch = f".{name[-100:]}.{secrets.token_hex(8)}"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise


def _make_room(folder: int) -> None:
    """Remove old files, where there are many."""
    names = os.listdir(folder)
    if len(names) <= _MANY:
        return
    oldest = time.time() - _OLD_S
    for name in names:
        # Another rank may have removed it.
        with contextlib.suppress(OSError):
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < oldest:
                os.unlink(name, dir_fd=folder)
