"""Messages between the ranks of a mesh about a call before it runs, over CPU process groups only."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import group_timeout
from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import cpu_group, ranks_of
from passes.ir.errors import AutoparError, InputError, RankFailedError

T = TypeVar("T")

_STAGE = "comparing calls between ranks"

# The numbers of 8 bytes that every rank sends to be compared, whatever it is in: messages must not differ in length.
SENT = 4


@dataclass(frozen=True)
class Raised:
    """The error that a rank raised before it could compare; `expected` says that it is an error of autopar."""

    said: str
    expected: bool

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """The report of an exception."""
        return cls(f"{type(error).__name__}: {error}".rstrip(": "), isinstance(error, AutoparError))

    def raise_here(self, rank: int, where: str) -> NoReturn:
        """Raise on another rank what `rank` of the mesh raised in `where`: InputError, or RankFailedError for what is
        no error of autopar."""
        kind = InputError if self.expected else RankFailedError
        raise kind(f"rank {rank} of the mesh raised in {where}: {self.said}")


class Agreement:
    """The ranks of a mesh, as they compare calls. Every method is collective over the mesh."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        self._order = [members.index(rank) for rank in ranks]

    def same(self, described: bytes) -> bool:
        """Whether all ranks pass the same bytes, compared by a hash of 32 bytes. Every rank gets the same result."""
        every = self.numbers(digest_numbers(described, SENT))
        return all(other == every[0] for other in every)

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, equally many, in the order of the mesh.

        The number of messages grows with the logarithm of the number of ranks (gloo's collectives go around a ring).
        """
        size = dist.get_world_size(self._group)
        # Bruck's algorithm: this rank's numbers, then those of the ranks after it.
        known = torch.tensor([list(own)], dtype=torch.int64)
        with naming_collectives(_STAGE):
            while len(known) < size:
                distance = len(known)
                known = torch.cat([known, self._shifted(known[: size - distance], distance, size)])
        in_group = known.roll(self._rank, 0).tolist()
        return [in_group[place] for place in self._order]

    def gathered(self, item: T) -> list[T]:
        """The items of every rank, in the order of the mesh."""
        boxes: list[T] = [item] * dist.get_world_size(self._group)
        with naming_collectives(_STAGE):
            dist.all_gather_object(boxes, item, group=self._group)
        return [boxes[place] for place in self._order]

    def gathered_from(self, what: str, item: T) -> list[T]:
        """The items of every rank, in the order of the mesh, where all ranks are in `what`.

        Raises InputError on all ranks where one is in something else.
        """
        every = self.gathered((what, item))
        first = every[0][0]
        for rank, (other, _) in enumerate(every):
            if other != first:
                raise InputError(
                    f"rank {rank} of the mesh is in {other}, rank 0 in {first}: all ranks must call alike, in the same "
                    "order"
                )
        return [found for _, found in every]

    def _shifted(self, tensor: Tensor, distance: int, size: int) -> Tensor:
        """The tensor of the rank `distance` after this one; this one's goes to the rank as far before it."""
        received = tensor.clone()
        receiving = dist.irecv(received, group=self._group, group_src=(self._rank + distance) % size)
        sending = dist.isend(tensor.contiguous(), group=self._group, group_dst=(self._rank - distance) % size)
        # Messages between two ranks wait as long as when the group was made, unless they are told otherwise.
        timeout = group_timeout(self._group)
        for work in (sending, receiving):
            if work is not None:
                work.wait() if timeout is None else work.wait(timeout)
        return received


def digest_numbers(described: bytes, count: int) -> tuple[int, ...]:
    """A hash of `described`, as numbers of 8 bytes."""
    digest = hashlib.blake2b(described, digest_size=8 * count).digest()
    return struct.unpack(f"{count}q", digest)


def agreement_of(mesh: DeviceMesh) -> Agreement | None:
    """The agreement of the ranks of `mesh`; None for one rank alone, and for a simulated job, which has one process.

    Collective over the mesh.
    """
    if mesh.size() == 1 or dist.get_backend(mesh.get_group(0)) == "fake":
        return None
    return Agreement(cpu_group(mesh), ranks_of(mesh))
