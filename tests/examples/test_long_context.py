"""A sequence that does not fit one device is trained on four, with the losses of one device."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from autopar.testing import run_ranks
from examples import long_context
from examples.long_context import MIB, TOLERANCE


def _on_ranks() -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    return long_context.train(mesh, steps=2, length=2048, limit_bytes=24 * MIB)


@pytest.mark.slow
def test_one_device_is_refused_and_four_train() -> None:
    """The refusal names what would fit; the losses are equal."""
    refused, worst = run_ranks(_on_ranks, 4)[0]
    assert "no plan fits the memory limit" in refused
    assert "it would fit on" in refused
    assert worst <= TOLERANCE
