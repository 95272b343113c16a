"""Messages between the ranks of a mesh about a call before it runs, over CPU process groups only."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
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

_PHASE = "comparing calls between ranks"

# The numbers of 8 bytes of a digest. All messages have the same length, whatever they are about.
_DIGEST = 3


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


@dataclass(frozen=True)
class Difference:
    """The descriptions of a call on the first rank where it differs from that on rank 0, and on rank 0."""

    rank: int
    theirs: Mapping[str, object]
    ours: Mapping[str, object]

    @property
    def name(self) -> str:
        """The first name under which they differ."""
        names = (*self.ours, *self.theirs)
        return next(name for name in names if self.ours.get(name) != self.theirs.get(name))

    def __str__(self) -> str:
        theirs, ours = self.theirs.get(self.name, "left out"), self.ours.get(self.name, "left out")
        return f"rank {self.rank} of the mesh has {self.name} {theirs}, rank 0 has {self.name} {ours}"


class Agreement:
    """Messages between the ranks of a mesh over its CPU group. Every method is collective over the mesh.

    A rank `alone` has nothing to compare: on a mesh of one, and in a simulated job, which has one process.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.alone = mesh.size() == 1 or dist.get_backend(mesh.get_group(0)) == "fake"
        if self.alone:
            return
        self._group = cpu_group(mesh)
        self._rank = dist.get_rank(self._group)
        members = dist.get_process_group_ranks(self._group)
        self._order = [members.index(rank) for rank in ranks_of(mesh)]

    def compared(
        self, what: str, where: str, mine: Mapping[str, object] | Raised, number: int = 0
    ) -> tuple[list[int], Difference | None]:
        """Compare the descriptions of a call on all ranks, by a hash.

        `what` names the method that the ranks are in, `where` the call, for messages. `mine` describes the call on this
        rank, or is the error that this rank raises as soon as the other ranks know. Returns the `number` of every rank,
        and the difference between descriptions, if there is one.

        Raises on all ranks the error of one, and InputError where ranks are in different methods.
        """
        if self.alone:
            return [number], None
        digest = hashlib.blake2b(repr(mine).encode(), digest_size=8 * _DIGEST).digest()
        every = self.numbers([*struct.unpack(f"{_DIGEST}q", digest), number])
        numbers = [other[-1] for other in every]
        if all(other[:-1] == every[0][:-1] for other in every):
            return numbers, None
        found = self.gathered((what, mine))
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                raise InputError(
                    f"rank {rank} of the mesh is in {other}, rank 0 in {found[0][0]}: all ranks must call alike, in "
                    "the same order"
                )
        if isinstance(mine, Raised):
            return numbers, None
        descriptions: list[Mapping[str, object]] = []
        for rank, (_, item) in enumerate(found):
            if isinstance(item, Raised):
                item.raise_here(rank, where)
            descriptions.append(item)
        ours = descriptions[0]
        rank = next(rank for rank, theirs in enumerate(descriptions) if theirs != ours)
        return numbers, Difference(rank, descriptions[rank], ours)

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, equally many, in the order of the mesh.

        The number of messages grows with the logarithm of the number of ranks (gloo's collectives go around a ring).
        """
        size = len(self._order)
        # Bruck's algorithm: this rank's numbers, then those of the ranks after it.
        known = torch.tensor([list(own)], dtype=torch.int64)
        with naming_collectives(_PHASE):
            while len(known) < size:
                distance = len(known)
                known = torch.cat([known, self._shifted(known[: size - distance], distance, size)])
        in_group = known.roll(self._rank, 0).tolist()
        return [in_group[place] for place in self._order]

    def gathered(self, item: T, phase: str = _PHASE) -> list[T]:
        """The items of every rank, in the order of the mesh. `phase` is what the ranks are doing, for messages."""
        if self.alone:
            return [item]
        boxes: list[T] = [item] * len(self._order)
        with naming_collectives(phase):
            dist.all_gather_object(boxes, item, group=self._group)
        return [boxes[place] for place in self._order]

    def _shifted(self, tensor: Tensor, distance: int, size: int) -> Tensor:
        """The tensor of the rank `distance` after this one; this one's goes to the rank as far before it."""
        received = tensor.clone()
        receiving = dist.irecv(received, group=self._group, group_src=(self._rank + distance) % size)
        sending = dist.isend(tensor.contiguous(), group=self._group, group_dst=(self._rank - distance) % size)
        # Point-to-point messages do not use a timeout that was set after the group was made.
        timeout = group_timeout(self._group)
        for work in (sending, receiving):
            if work is not None:
                work.wait() if timeout is None else work.wait(timeout)
        return received
