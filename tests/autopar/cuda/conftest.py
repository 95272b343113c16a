"""Tests in this folder need a CUDA device, and are skipped where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder "cuda", and skip them on a machine without a device."""
    here = Path(__file__).parent
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    for item in items:
        if here in item.path.parents:
            item.add_marker("cuda")
            item.add_marker(skip)
