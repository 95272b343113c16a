"""Periodic comparison of the values of batches between ranks."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from autopar.runtime.ranks.agreement import Agreement
from passes.ir.errors import InputError, RankFailedError
from passes.ir.mesh import Mesh

# Values are compared the first two times, the first time of each kind, and every time whose number this divides.
EVERY = 100
# Elements that are summed at a time: the temporary tensors take 8 bytes for each.
_CHUNK = 1 << 20
# Odd constants of the splitmix64 generator, as signed numbers.
_GOLDEN = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Leaf:
    """This rank's part of a tensor; ranks have other parts on the axes `split_on` of the mesh, and equal ones on all
    others."""

    name: str
    part: Tensor
    split_on: frozenset[int] = frozenset()


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
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


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


class ValueComparison:
    """Compares the parts that ranks should have alike, by checksums that are taken where the tensors are.

    The first comparison of a kind waits for them; later ones are read at the next call, when they are there.
    """

    def __init__(self, agreement: Agreement, mesh: Mesh, what: str, advice: str) -> None:
        """`what` is called, and `advice` is given where all ranks should have the same tensor."""
        self._agreement = agreement
        self._mesh = mesh
        self._coordinates = list(mesh.coordinates())
        self._what = what
        self._advice = advice
        self._pending: Callable[[], object] | None = None
        self._kinds: set[Hashable] = set()

    def compare(self, number: int, kind: Hashable, taken: Callable[[], Sequence[Leaf]]) -> None:
        """Compare the values of an earlier call, and where it is due those of this one, the `number`-th from 1: what
        `taken` returns. It is due in the first call of each `kind`, too.

        Collective over the mesh; all ranks give the same names and kind. Raises InputError on all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()
        new = kind not in self._kinds
        if self._agreement.alone or not (new or number <= 2 or number % EVERY == 0):
            return
        leaves = taken()
        try:
            checksums = Checksums([leaf.part for leaf in leaves])
        except BaseException:
            # It may be out of memory. The other ranks wait for as many numbers, now or in the next call.
            missing = partial(self._agreement.numbers, [0] * (1 + len(leaves)))
            if new:
                missing()
            else:
                self._pending = missing
            raise
        read = partial(self._read, number, leaves, checksums, new)
        if new:
            read()
            # Where values differ, the next call of the kind is compared again.
            self._kinds.add(kind)
        else:
            self._pending = read

    def _read(self, call: int, leaves: Sequence[Leaf], checksums: Checksums, now: bool) -> None:
        found = self._agreement.numbers([1, *checksums.read()])
        if not now and not all(taken for taken, *_ in found):
            # That call has failed.
            return
        for rank, (taken, *_) in enumerate(found):
            if not taken:
                raise RankFailedError(
                    f"rank {rank} of the mesh raised where values of {self._what} {call} of this module are compared"
                )
        every = [sums for _, *sums in found]
        for column, leaf in enumerate(leaves):
            first: dict[tuple[int, ...], int] = {}
            for rank, sums in enumerate(every):
                part = tuple(place for axis, place in enumerate(self._coordinates[rank]) if axis in leaf.split_on)
                other = first.setdefault(part, rank)
                if sums[column] != every[other][column]:
                    self._raise(call, leaf, rank, other)

    def _raise(self, call: int, leaf: Leaf, rank: int, other: int) -> NoReturn:
        said = (
            f"{leaf.name} had other values on rank {rank} of the mesh than on rank {other} in {self._what} {call} of "
            "this module"
        )
        if leaf.split_on:
            split, same = (
                ", ".join(name for axis, name in enumerate(self._mesh.names) if (axis in leaf.split_on) == inside)
                for inside in (True, False)
            )
            raise InputError(
                f"{said}: it is split over {split}, so ranks along {same} must give the same part (a sampler takes "
                "its rank from data_rank() of the same axes)"
            )
        raise InputError(f"{said}: {self._advice}")
