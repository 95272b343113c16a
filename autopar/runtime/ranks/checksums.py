"""Checksums of tensors, computed on their device and read later, so that the host does not wait for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that are summed at a time: the temporary tensors take 8 bytes for each.
_CHUNK = 1 << 20
# Odd constants of the splitmix64 generator, as signed numbers.
_GOLDEN = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """A number for the values of `tensor` and the places that they have: int64, without dims, on the tensor's device.

    Every element is mixed with its place and all are added up, modulo 2^64; so values that change places change it.
    """
    values = _as_integers(tensor.detach()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), _CHUNK):
        part = values[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        mixed = places.mul_(_GOLDEN).add_(part)
        mixed.bitwise_xor_(mixed >> 31).mul_(_MIX)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of `tensor` as integers."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    if tensor.dtype.is_floating_point:
        return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return tensor


class Checksums:
    """Checksums of several tensors that are being copied to the CPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # From a GPU, torch copies to pinned memory without waiting.
        self._sums = [checksum(tensor).to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[int]:
        """The checksums in the order of the tensors; waits for the copies."""
        if self._event is not None:
            self._event.synchronize()
        return [int(item) for item in self._sums]
