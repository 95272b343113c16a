"""Heartbeats: ranks count in the job's key-value store as long as they live, so that others can name those that do not.

A rank beats from a thread, so it does while it computes or waits for a collective. A rank that is gone, or whose host
is, does not.
"""

import contextlib
import threading
import time

import torch.distributed as dist

from autopar._torch import Store
from autopar.runtime.ranks.groups import job_store

# Seconds between two beats, and those in which a rank that lives has beaten.
_EVERY_S, _SURELY_S = 0.5, 2.0
# Threads that beat have this name: a process has one for its default process group.
_NAME = "autopar-heartbeat"


def start_heartbeat() -> None:
    """Let this rank beat as long as its process, and the default process group, exist."""
    store = job_store()
    if store is None or any(thread.name == _NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_beat, args=(store, dist.group.WORLD), name=_NAME, daemon=True).start()


def _beat(store: Store, group: object) -> None:
    # The rank that hosts the store may be gone.
    with contextlib.suppress(RuntimeError):
        while dist.is_initialized() and dist.group.WORLD is group:
            store.add(_key(dist.get_rank()), 1)
            time.sleep(_EVERY_S)


def silent_ranks() -> list[int]:
    """The ranks of the job that have beaten before and do so no more. Takes two seconds where any rank has."""
    store = job_store()
    if store is None:
        return []
    with contextlib.suppress(RuntimeError):
        before = _counts(store)
        if not any(before):
            return []
        time.sleep(_SURELY_S)
        after = _counts(store)
        return [rank for rank, count in enumerate(before) if count and after[rank] == count]
    return []


def _counts(store: Store) -> list[int]:
    """The number of heartbeats of each rank."""
    return [store.add(_key(rank), 0) for rank in range(dist.get_world_size())]


def _key(rank: int) -> str:
    return f"autopar/alive/{rank}"
