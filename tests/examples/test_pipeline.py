"""A model is trained in two stages with the losses of one device."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from autopar.testing import run_ranks
from examples import pipeline
from examples.pipeline import TOLERANCE


def _on_ranks() -> tuple[float, float]:
    return pipeline.train(init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")), steps=2)


@pytest.mark.slow
def test_stages_train_as_one_device() -> None:
    """Losses are equal; together the ranks hold each parameter once, and no rank all of them."""
    results = run_ranks(_on_ranks, 2)
    assert max(worst for worst, _ in results) <= TOLERANCE
    parts = [part for _, part in results]
    assert abs(sum(parts) - 1) < 1e-9
    assert max(parts) < 0.7
