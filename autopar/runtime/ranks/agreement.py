"""Agreement between the ranks of a mesh, over CPU process groups only, so that no device is waited for.

Before a call runs, its descriptions are compared (`Agreement`). While a module is made, one rank may compute for all,
and an error of one is raised on all (`together`, `from_first`). Every rank of the mesh calls all this in the same
order, with the same `phase`: what the ranks are doing, for messages ("planning the model").
"""

import contextlib
import hashlib
import pickle
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import group_timeout
from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import cpu_group, ranks_of
from passes._torch import without_function_modes
from passes.ir.errors import AutoparError, InputError, RankFailedError

T = TypeVar("T")

_PHASE = "comparing calls between ranks"

# Maximum number of ranks that gather numbers in one collective.
FEW_RANKS = 8

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


@dataclass(frozen=True)
class Difference:
    """The descriptions of a call on the first rank where it differs from that on rank 0, and on rank 0 (or on the rank
    `other`)."""

    rank: int
    theirs: Mapping[str, object]
    ours: Mapping[str, object]
    other: int = 0

    @property
    def name(self) -> str:
        """The first name under which they differ."""
        return next(name for name in (*self.ours, *self.theirs) if self.ours.get(name) != self.theirs.get(name))

    def __str__(self) -> str:
        theirs, ours = self.theirs.get(self.name, "left out"), self.ours.get(self.name, "left out")
        return f"rank {self.rank} of the mesh has {self.name} {theirs}, rank {self.other} has {self.name} {ours}"


class HeldComparison:
    """Compares what ranks say of the parameters that they hold. In a pipeline these are not the same on all ranks:
    each is compared between those that hold it."""

    def __init__(self, agreement: "Agreement") -> None:
        self._agreement = agreement
        # What was said last, as text, and its number; and the numbers of all ranks that were found to agree.
        self._said: tuple[Mapping[str, object], int] = ({}, 0)
        self._agreed: list[int] = []

    def number(self, mine: Mapping[str, object]) -> int:
        """A number of what this rank says, for `Agreement.compared`."""
        if mine != self._said[0]:
            (number,) = struct.unpack("q", hashlib.blake2b(repr(mine).encode(), digest_size=8).digest())
            self._said = dict(mine), number
        return self._said[1]

    def difference(self, numbers: list[int], mine: Mapping[str, object]) -> Difference | None:
        """The first name of which ranks that hold it say different things, given the `numbers` of all ranks.

        Collective over the mesh where the numbers have changed, and are not equal.
        """
        if len(set(numbers)) == 1 or numbers == self._agreed:
            return None
        every = self._agreement.gathered(dict(mine))
        first: dict[str, int] = {}
        for rank, own in enumerate(every):
            for name, said in own.items():
                other = first.setdefault(name, rank)
                if every[other][name] != said:
                    return Difference(rank, {name: said}, {name: every[other][name]}, other)
        self._agreed = numbers
        return None


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
                kind = InputError if item.expected else RankFailedError
                raise kind(f"rank {rank} of the mesh raised in {where}: {item.said}")
            descriptions.append(item)
        ours = descriptions[0]
        rank = next(rank for rank, theirs in enumerate(descriptions) if theirs != ours)
        return numbers, Difference(rank, descriptions[rank], ours)

    @contextlib.contextmanager
    def telling(self, what: str, where: str) -> Iterator[None]:
        """A context before `compared` with the same `what` and `where`: an exception of one rank is raised on all."""
        try:
            yield
        except BaseException as error:
            # An interrupt too: the other ranks get to know of it first.
            self.compared(what, where, Raised.of(error))
            raise

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, equally many, in the order of the mesh.

        gloo's all-gather goes around a ring, so among many ranks messages are sent whose number grows with the
        logarithm of theirs. Among few it is faster: where ranks that share a core send to each other at the same time,
        gloo waits for locks without pausing.
        """
        size = len(self._order)
        known = torch.tensor([list(own)], dtype=torch.int64, device="cpu")
        with naming_collectives(_PHASE):
            if size <= FEW_RANKS:
                gathered = known.new_empty(size, len(own))
                # The functional collective takes 0.15 ms more, a third of the call.
                dist.all_gather(list(gathered.unsqueeze(1).unbind()), known, group=self._group)
                in_group = gathered.tolist()
            else:
                in_group = self._by_messages(known, size)
        return [in_group[place] for place in self._order]

    def _by_messages(self, known: Tensor, size: int) -> list[list[int]]:
        """Gather rows in the order of the group by Bruck's algorithm: `known` has this rank's row, then those of the
        ranks after it."""
        while len(known) < size:
            distance = len(known)
            known = torch.cat([known, self._shifted(known[: size - distance], distance, size)])
        found: list[list[int]] = known.roll(self._rank, 0).tolist()
        return found

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


# --- errors of one rank, raised on all --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """An exception of one rank for the others: `error` is pickled, or None where it is not autopar's own."""

    rank: int
    error: bytes | None
    said: str
    trace: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "_Failure":
        trace = "".join(traceback.format_exception(error))
        return cls(rank, _pickled(error), f"{type(error).__name__}: {error}".rstrip(": "), trace)

    def for_others(self, phase: str) -> AutoparError:
        """The exception that another rank raises."""
        if self.error is not None:
            return cast(AutoparError, unpickled(self.error))
        ended = "was interrupted" if self.said.startswith(_INTERRUPTS) else "failed"
        error = RankFailedError(f"rank {self.rank} of the mesh {ended} while {phase}: {self.said}")
        error.add_note(f"On rank {self.rank} of the mesh:\n{self.trace}")
        return error

    def named(self, error: AutoparError, phase: str) -> AutoparError:
        """`error`, which this rank raised, with the rank in its message."""
        if self.error is not None:
            error.args = (f"{error} (raised on rank {self.rank} of the mesh, while {phase})", *error.args[1:])
        return error


_INTERRUPTS = (KeyboardInterrupt.__name__, SystemExit.__name__)


@contextlib.contextmanager
def together(mesh: DeviceMesh, phase: str) -> Iterator[None]:
    """A block that every rank runs; if it raises on any, raise on all at its end.

    Where all ranks raise, each raises its own exception. Otherwise all raise the AutoparError of the first rank that
    raised one, which its message names. For another exception, which includes KeyboardInterrupt and SystemExit, that is
    a RankFailedError, and the rank itself raises what it was.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        # An interrupt too: it is told to the others before it goes on.
        error = raised
    own = None if error is None else _Failure.of(_place(mesh), error)
    every = Agreement(mesh).gathered(own, phase)
    failures = [item for item in every if item is not None]
    if not failures:
        return
    if error is not None and (not isinstance(error, AutoparError) or len(failures) == len(every)):
        raise error
    first = next((item for item in failures if item.error is not None), failures[0])
    if first == own:
        assert isinstance(error, AutoparError)
        raise first.named(error, phase)
    raise first.named(first.for_others(phase), phase) from error


def from_first(mesh: DeviceMesh, run: Callable[[], T], phase: str) -> T:
    """Run on the first rank alone; every rank gets what it returned, or raises what it raised.

    The others raise RankFailedError where the first raised another exception than an AutoparError, or was interrupted.
    """
    is_first = _place(mesh) == 0
    box: list[bytes | _Failure] = [b""]
    try:
        if is_first:
            result = run()
            box = [pickle.dumps(result)]
    except BaseException as error:
        # An interrupt too: it is told to the others before it goes on.
        box = [_Failure.of(0, error)]
        raise
    finally:
        with naming_collectives(phase):
            dist.broadcast_object_list(box, src=ranks_of(mesh)[0], group=cpu_group(mesh), device=torch.device("cpu"))
    if is_first:
        return result
    (sent,) = box
    if isinstance(sent, _Failure):
        raise sent.for_others(phase)
    return cast(T, unpickled(sent))


def unpickled(sent: bytes) -> object:
    """Unpickle an object from another process. Its tensors are as they were sent, whatever modes are active."""
    with warnings.catch_warnings(), without_function_modes():
        # A tree's specification warns about its own parts when it is unpickled.
        warnings.simplefilter("ignore", FutureWarning)
        return cast(object, pickle.loads(sent))


def _place(mesh: DeviceMesh) -> int:
    """The position of this rank in the mesh."""
    return ranks_of(mesh).index(dist.get_rank())


def _pickled(error: BaseException) -> bytes | None:
    """An error of autopar, pickled; None if it cannot be sent to other ranks."""
    if not isinstance(error, AutoparError):
        return None
    try:
        sent = pickle.dumps(error)
        pickle.loads(sent)
    except Exception:
        # Whatever keeps it from being sent, its message is sent as text.
        return None
    return sent
