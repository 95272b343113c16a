"""Bytes of the engine's groups."""

import torch

from passes.cost.groups import GroupBytes, group_bytes
from passes.ir.layout import S
from passes.ir.lowered import Group
from passes.ir.program import TensorType
from tests.passes.helpers import mesh_of


def test_bytes_of_a_group() -> None:
    """Whole on the axes of the engine, a part on the others; reduced in another dtype than computed in."""
    mesh = mesh_of(dp=4, tp=2)
    types = {
        "weight": TensorType((16, 8), torch.bfloat16),
        "bias": TensorType((8,), torch.bfloat16),
    }
    stored = {"weight": (S(0), S(1)), "bias": (S(0), S(0, 4))}
    group = Group({"weight": 0, "bias": 0}, (0,), (), True, True, (torch.bfloat16, torch.float32))
    count = 16 * 8 // 2 + 8 // 2
    assert group_bytes(group, types, stored, mesh) == GroupBytes(2 * count, 2 * count, 4 * count)
    both = Group({"bias": 0}, (0, 1), (), True, True, (None, None))
    assert group_bytes(both, types, stored, mesh) == GroupBytes(16, 16, 16)
