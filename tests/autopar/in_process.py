"""All ranks of a mesh as threads of this process, with collectives among them.

One rank runs at a time, until it waits for others in a collective; then the next one goes on. So runs are the same
every time, and it is known at once when ranks wait for each other in vain.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from autopar.runtime import Axis
from autopar.runtime.state import spanning
from passes.ir.mesh import Mesh

T = TypeVar("T")
Coordinate = tuple[int, ...]

# Seconds that all ranks may take.
_PATIENCE = 300.0


class StuckError(RuntimeError):
    """Ranks do not take part in the same collectives: real ones would wait forever."""


@dataclass
class _Meeting:
    """A collective of one group that not all ranks have come to yet: what is called, and what each brings."""

    call: tuple[object, ...]
    given: dict[int, Tensor] = field(default_factory=dict)


class Threads:
    """As many ranks as threads; stands in for `torch.ops._c10d_functional` while they run.

    Groups are called by their members: "0 2".
    """

    def __init__(self, count: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._own = threading.local()
        self._ready: deque[int] = deque(range(count))
        self._waiting: dict[int, str] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._stuck = ""

    def run(self, function: Callable[[int], T]) -> list[T]:
        """`function(rank)` of all ranks.

        Raises what the first rank raised that did, or StuckError.
        """
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        done = threading.Event()

        def work(rank: int) -> None:
            self._own.rank = rank
            self._turns[rank].acquire()
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors[rank] = error
            if len(results) + len(errors) == len(self._turns):
                done.set()
            else:
                self._go_on()

        with mock.patch("autopar.runtime.generated.collectives.collectives", self):
            for rank in range(len(self._turns)):
                threading.Thread(target=work, args=(rank,), daemon=True).start()
            self._go_on()
            if not done.wait(_PATIENCE):
                raise StuckError("a rank does not come back")
        for error in errors.values():
            if not isinstance(error, StuckError):
                raise error
        for error in errors.values():
            raise error
        return [results[rank] for rank in range(len(self._turns))]

    def _go_on(self) -> None:
        """Let the next rank run; if there is none, the others wait in vain and are told one by one."""
        if not self._ready:
            if not self._stuck:
                at = "; ".join(f"rank {rank} at {what}" for rank, what in sorted(self._waiting.items()))
                self._stuck = f"ranks wait in vain: {at}; the others are done"
            self._ready.append(min(self._waiting))
        self._turns[self._ready.popleft()].release()

    def _meet(self, group: str, tensor: Tensor, *call: object) -> list[Tensor]:
        """The tensors of all ranks of `group`, in rank order."""
        rank: int = self._own.rank
        assert tensor.is_contiguous(), f"{call} is given a tensor that is not contiguous"
        meeting = self._meetings.setdefault(group, _Meeting((*call, tensor.dtype, tuple(tensor.shape))))
        if meeting.call != (*call, tensor.dtype, tuple(tensor.shape)):
            raise StuckError(f"rank {rank} calls {call} with {tuple(tensor.shape)}, others {meeting.call}")
        meeting.given[rank] = tensor
        members = [int(member) for member in group.split()]
        if len(meeting.given) == len(members):
            del self._meetings[group]
            for member in members:
                if member != rank:
                    del self._waiting[member]
                    self._ready.append(member)
        else:
            self._waiting[rank] = f"{call} of {group} with {tuple(tensor.shape)}"
            self._go_on()
            self._turns[rank].acquire()
            if rank in self._waiting:
                del self._waiting[rank]
                raise StuckError(self._stuck)
        return [meeting.given[member] for member in members]

    # --- the operators that the runtime calls ---

    def wait_tensor(self, tensor: Tensor) -> Tensor:
        """Everything is there already."""
        return tensor

    def all_reduce(self, tensor: Tensor, operation: str, group: str) -> Tensor:
        """The sum, or the elementwise largest, on every rank."""
        assert tensor.dtype != torch.bool, "flags are not summed"
        given = torch.stack(self._meet(group, tensor, "all_reduce", operation))
        return {"sum": given.sum, "max": given.amax}[operation](0)

    def all_gather_into_tensor(self, tensor: Tensor, size: int, group: str) -> Tensor:
        """The tensors of all ranks, concatenated along the first dim."""
        given = self._meet(group, tensor, "all_gather", size)
        return torch.cat(given)

    def reduce_scatter_tensor(self, tensor: Tensor, operation: str, size: int, group: str) -> Tensor:
        """This rank's part, along the first dim, of the sum."""
        given = self._meet(group, tensor, "reduce_scatter", operation, size)
        return torch.stack(given).sum(0).chunk(size)[self._place(group)].clone()

    def all_to_all_single(self, tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
        """The parts for this rank, along the first dim, of what each has."""
        every = self._meet(group, torch.tensor(sent), "the sizes of an all_to_all")
        given = self._meet(group, tensor, "all_to_all")
        place = self._place(group)
        parts = [item.split(sizes.tolist())[place] for item, sizes in zip(given, every, strict=True)]
        assert [len(part) for part in parts] == list(received), "ranks expect other sizes than are sent"
        return torch.cat(parts)

    def _place(self, group: str) -> int:
        return group.split().index(str(self._own.rank))


def axes_at(coordinate: Coordinate, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes, and all spans of adjacent ones, as the rank at `coordinate` sees them; groups are called as `Threads`
    wants them."""

    def group(axes: tuple[int, ...]) -> str:
        own = [place if axis not in axes else None for axis, place in enumerate(coordinate)]
        members = [
            rank
            for rank, other in enumerate(mesh.coordinates())
            if all(place is None or place == there for place, there in zip(own, other, strict=True))
        ]
        return " ".join(map(str, members))

    single = zip(mesh.names, mesh.sizes, coordinate, strict=True)
    axes = [Axis(name, size, place, group((axis,))) for axis, (name, size, place) in enumerate(single)]
    return spanning(axes, mesh.spans, group)
