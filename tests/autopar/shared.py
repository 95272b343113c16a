"""Plans that take long, made once for all processes of a test run."""

import fcntl
import os
from collections.abc import Callable

import pytest

from autopar import Plan


def shared_plan(folders: pytest.TempPathFactory, name: str, make: Callable[[], Plan]) -> Plan:
    """The plan called `name` of this run of the tests, which every process reads as JSON. The first that asks for it
    makes it; those that ask meanwhile wait."""
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Each worker has a folder of its own in that of the run.
        folder = folder.parent
    path = folder / f"{name}.json"
    with open(folder / f"{name}.lock", "w", encoding="utf-8") as lock:
        # Closing the file lets it go.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make().save(path)
    return Plan.load(path)
