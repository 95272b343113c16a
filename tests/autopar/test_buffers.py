"""Buffers that a forward pass changes, on ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from autopar.testing import compare
from tests.autopar.comparing import MESHES, TOLERANCE


class _Normed(nn.Module):
    """Layers whose weights are divided by their largest singular value, one of them used twice: each use takes one more
    step of the iteration that finds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = spectral_norm(nn.Linear(8, 8))
        self.second = spectral_norm(nn.Conv1d(8, 4, 3, padding=1), n_power_iterations=2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, 6, 8]."""
        twice = self.first(self.first(x).tanh())
        return {"loss": self.second(twice.transpose(1, 2)).square().sum()}


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2x2", pytest.param("4", marks=pytest.mark.slow)])
def test_spectral_norm(mesh: str) -> None:
    """The vectors of the iteration are those of one device, too."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    comparison = compare(_Normed(), MESHES[mesh], {"x": x}, cluster="ideal")
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
    assert "buffer first.parametrizations.weight.0._u" in comparison.errors
