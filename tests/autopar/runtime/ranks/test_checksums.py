"""Checksums see values, places and bits, and are summed piece by piece."""

from unittest import mock

import pytest
import torch

from autopar.runtime.ranks import values
from autopar.runtime.ranks.values import Checksums, checksum

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_counts(dtype: torch.dtype) -> None:
    """Tensors that differ in one element, or in the places of two, have different checksums."""
    base = torch.zeros(2, 3).to(dtype)
    seen = {int(checksum(base))}
    for place in range(6):
        other = torch.zeros(6)
        other[place] = 1
        seen.add(int(checksum(other.reshape(2, 3).to(dtype))))
    assert len(seen) == 7
    assert int(checksum(base.clone())) in seen


def test_rows_that_change_places() -> None:
    """Also such as have the same sum, and parts of other tensors that are not contiguous."""
    rows = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 4, 3]])
    orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    assert len({int(checksum(rows[order])) for order in orders}) == 6
    assert int(checksum(rows[:, ::2])) == int(checksum(rows[:, ::2].contiguous()))
    assert int(checksum(rows.t())) != int(checksum(rows.reshape(4, 3)))
    assert int(checksum(torch.empty(0, 4))) == 0


def test_in_pieces() -> None:
    """Large tensors are summed in pieces, which changes nothing."""
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = int(checksum(tensor))
    with mock.patch.object(values, "_CHUNK", 64):
        assert int(checksum(tensor)) == whole
    assert Checksums([tensor, tensor[:500]]).read() == [whole, int(checksum(tensor[:500]))]
