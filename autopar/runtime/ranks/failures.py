"""Failures of other ranks, as this rank sees them: a collective that breaks or times out becomes a RankFailedError.

A rank that raises within a call leaves a report in the job's key-value store, where the others find it when their own
collective fails. A rank that is killed leaves none.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch.distributed as dist

from autopar.runtime.ranks.groups import job_store, job_timeout
from autopar.runtime.ranks.heartbeats import silent_ranks
from passes.ir.errors import RankFailedError

# Parts of the messages that gloo and NCCL end a collective with; torch raises them as plain RuntimeErrors.
_OF_COLLECTIVES = (
    "gloo/",
    "closed by peer",
    "reset by peer",
    "Timed out waiting",
    "pair closure",
    "NCCL error",
    "NCCL communicator",
)
# Keys of the store: how often ranks raised, and each report by its number, from 1.
_COUNT = "autopar/raised"
_LONGEST_REPORT = 2000
_MOST_REPORTS = 4


def is_collective_failure(error: BaseException) -> bool:
    """Whether `error` was raised by a collective of torch, and not by what autopar or the model checks."""
    if isinstance(error, RankFailedError):
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(part in str(error) for part in _OF_COLLECTIVES)


def rank_failure(error: BaseException, where: str) -> RankFailedError:
    """The RankFailedError for `error`, which a collective raised in `where` ("call 3 of LlamaForCausalLM")."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    cause = (
        "; ".join(_reports())
        or _silence()
        or (
            "another rank raised, died, runs another collective, or did not answer within the job's timeout of "
            f"{_seconds()}: see the first error in the logs of the other ranks"
        )
    )
    return RankFailedError(f"{where} failed, because {cause} (the collective ended with: {first_line})")


def raise_named(error: RuntimeError, where: str) -> NoReturn:
    """Raise `error`, or a RankFailedError that says `where` if a collective has raised it."""
    if is_collective_failure(error):
        raise rank_failure(error, where) from error
    raise error


@contextlib.contextmanager
def naming_collectives(where: str) -> Iterator[None]:
    """Context in which errors of collectives become a RankFailedError that names `where`."""
    try:
        yield
    except RuntimeError as error:
        raise_named(error, where)


T = TypeVar("T")


class FailureReports:
    """Runs the calls of a module: tells the other ranks of what they raise, and names failures of others in them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = 0
        self._running = False
        self._key: str | None = None

    def run(self, call: Callable[..., T], *args: object, **kwargs: object) -> T:
        """`call(*args, **kwargs)`. Raises RankFailedError where a collective in it failed.

        A call within another one counts as a part of it.
        """
        if self._running:
            return call(*args, **kwargs)
        self._running = True
        self._calls += 1
        try:
            result = call(*args, **kwargs)
        except RankFailedError as error:
            raise RankFailedError(f"{self._where()}: {error}") from error
        except BaseException as error:
            # The other ranks are told of all that ends this call, an interrupt too.
            if is_collective_failure(error):
                raise rank_failure(error, self._where()) from error
            self._tell(f"{type(error).__name__} in {self._where()}: {error}".rstrip(": "))
            raise
        finally:
            self._running = False
        self._withdraw()
        return result

    def _where(self) -> str:
        return f"call {self._calls} of {self._name}"

    def _tell(self, report: str) -> None:
        # The rank that hosts the store may be gone; the exception of this rank is raised all the same.
        with contextlib.suppress(RuntimeError):
            store = job_store()
            if store is not None:
                self._key = _key(store.add(_COUNT, 1))
                store.set(self._key, f"rank {dist.get_rank()} raised {report}"[:_LONGEST_REPORT])

    def _withdraw(self) -> None:
        """Withdraw the report, if there is one: this rank continued after it had raised."""
        key, self._key = self._key, None
        store = job_store() if key is not None else None
        if key is not None and store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(key, "")


def _silence() -> str:
    """The ranks that do not live any more, as far as they have a heartbeat."""
    ranks = silent_ranks()
    if not ranks:
        return ""
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return f"{who} died: there is no sign of life in the job's store"


def _reports() -> list[str]:
    """The latest reports of ranks that raised."""
    store = job_store()
    found: list[str] = []
    if store is None:
        return found
    # The rank that hosts the store may be gone.
    with contextlib.suppress(RuntimeError):
        count = store.add(_COUNT, 0)
        for number in range(max(count - _MOST_REPORTS, 0) + 1, count + 1):
            report = store.get(_key(number)).decode(errors="replace") if store.check([_key(number)]) else ""
            found += [report] if report else []
    return found


def _key(number: int) -> str:
    return f"autopar/raised/{number}"


def _seconds() -> str:
    timeout = job_timeout()
    return "unknown length" if timeout is None else f"{timeout.total_seconds():g} s"
