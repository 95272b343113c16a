"""Files that are written whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file at `path` in UTF-8; where that fails, an earlier file stays as it was.

    The text goes to a new file in the same folder, which then takes the place of `path`. Where `path` is a link, the
    file that it points to is written. A device or a pipe is written as it is. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    scratch = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    # Created by this call alone, with the permissions that any new file gets.
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
