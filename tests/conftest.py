"""Modules that tests on ranks import are imported once for all ranks; a trace that all tests of a module share."""

from collections.abc import Iterator

import pytest

from autopar.testing import preload
from tests.autopar.traces import traced_once

preload(
    "pytest",
    "spmd_types",
    "tests.architectures",
    "tests.autopar.comparing",
    "tests.autopar.fuzzing",
    "tests.models",
    "tests.passes.planning",
)


@pytest.fixture(scope="module")
def one_trace() -> Iterator[None]:
    """In this process, a model that several tests of a module plan is traced once."""
    with traced_once():
        yield
