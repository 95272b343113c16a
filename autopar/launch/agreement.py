"""Agreement between ranks: one rank may compute for all, and an error of one rank is raised on all.

Everything here is sent over the mesh's CPU group, so that the device is not waited for. Every rank of the mesh calls
these functions in the same order, with the same `phase`: what the ranks are doing, for messages ("planning the model").
"""

import contextlib
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import cpu_group, ranks_of
from passes.ir.errors import AutoparError, RankFailedError

T = TypeVar("T")


@dataclass(frozen=True)
class _Raised:
    """An exception of one rank for the others: `error` is pickled, or None where it is not autopar's own."""

    rank: int
    error: bytes | None
    said: str
    trace: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "_Raised":
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
    own = None if error is None else _Raised.of(_place(mesh), error)
    every = gathered(mesh, own, phase)
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
    first = _place(mesh) == 0
    result: list[T] = []
    error: BaseException | None = None
    sent: tuple[bytes, _Raised | None] = (b"", None)
    if first:
        try:
            result.append(run())
            sent = pickle.dumps(result[0]), None
        except BaseException as raised:
            error = raised
            sent = b"", _Raised.of(0, raised)
    box = [sent]
    with naming_collectives(phase):
        dist.broadcast_object_list(box, src=ranks_of(mesh)[0], group=cpu_group(mesh), device=torch.device("cpu"))
    if error is not None:
        raise error
    if first:
        return result[0]
    payload, failure = box[0]
    if failure is not None:
        raise failure.for_others(phase)
    return cast(T, unpickled(payload))


def gathered(mesh: DeviceMesh, item: T, phase: str) -> list[T]:
    """The items of all ranks of the mesh, in its order."""
    return Agreement(mesh).gathered(item, phase)


def unpickled(sent: bytes) -> object:
    """Unpickle an object from another process."""
    with warnings.catch_warnings():
        # A tree's specification warns about its own parts when it is unpickled.
        warnings.simplefilter("ignore", FutureWarning)
        found: object = pickle.loads(sent)
        return found


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
