"""Modules that tests on ranks import are imported once for all ranks."""

from autopar.testing import preload

preload(
    "pytest",
    "spmd_types",
    "tests.architectures",
    "tests.autopar.comparing",
    "tests.autopar.fuzzing",
    "tests.models",
    "tests.passes.planning",
)
