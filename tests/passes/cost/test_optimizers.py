"""The table of optimizers against torch's own."""

import pytest
import torch

from passes.cost.optimizers import OPTIMIZERS
from tests.autopar.simulated import OPTIMIZERS as IN_TORCH


def test_every_optimizer_of_the_table_is_simulated() -> None:
    """Those that torch has are held against a simulated step in `tests/autopar/test_memory.py`."""
    assert set(IN_TORCH) <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", sorted(IN_TORCH))
def test_states_are_those_of_torch(name: str) -> None:
    """After a step the optimizer holds as many tensors of the parameter's size, and a step count where the table says
    so."""
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    optimizer = IN_TORCH[name]([parameter], foreach=False)
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    tensors = [item for item in optimizer.state[parameter].values() if isinstance(item, torch.Tensor)]
    memory = OPTIMIZERS[name]
    assert sum(item.numel() == parameter.numel() for item in tensors) == memory.states
    assert sum(item.numel() == 1 for item in tensors) == memory.counting
