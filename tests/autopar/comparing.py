"""Hold a model on gloo ranks against itself on one device."""

from collections.abc import Container, Iterable, Mapping

import pytest
from torch import nn

from autopar.testing import Comparison, compare

MESHES = {
    "2": {"dp": 2},
    "4": {"tp": 4},
    "2x2": {"dp": 2, "tp": 2},
    "2x2x2": {"dp": 2, "cp": 2, "tp": 2},
    "2x2x2x2": {"pod": 2, "dp": 2, "cp": 2, "tp": 2},
}
TOLERANCE = 1e-9


def marked(names: Iterable[object], fast: Container[object]) -> list[object]:
    """Parameters of a test, of which only some are fast: the others are tested at night."""
    every = ((name, name if isinstance(name, tuple) else (name,)) for name in names)
    return [pytest.param(*values, marks=[] if name in fast else pytest.mark.slow) for name, values in every]


def exact(model: nn.Module, mesh: str, inputs: Mapping[str, object], **options: object) -> Comparison:
    """Compare and hold against the tolerance; the cluster has free links, so that all that can be split is."""
    comparison = compare(model, MESHES[mesh], inputs, **{"cluster": "ideal", **options})
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
    return comparison
