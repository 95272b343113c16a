"""Gloo ranks that stay for the whole test run: they are started once, and given one job after the other."""

import atexit
import contextlib
import pickle
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.testing.ranks import fork_server

T = TypeVar("T")

_SECONDS = 300.0


class Pool:
    """`count` processes that form a gloo process group."""

    def __init__(self, count: int) -> None:
        context = fork_server()
        self.folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, self.folder.name, other), daemon=True)
            process.start()
            other.close()
            self.pipes.append(own)
            self.processes.append(process)
        atexit.register(self.stop)

    def run(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Call `function(*arguments)` on every rank; its results in rank order.

        Raises RuntimeError with what the first rank that failed says, or if one takes too long.
        """
        payload = pickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(payload)
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=_SECONDS)
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                good, value = _received(pipe)  # type: ignore[arg-type]
                if not good:
                    self.stop()
                    raise RuntimeError(f"rank {rank}: {value}")
                results[rank] = value
            if not ready:
                self.stop()
                raise RuntimeError(f"ranks {sorted(waiting.values())} did not finish")
        return [results[rank] for rank in sorted(results)]

    def stop(self) -> None:
        """End the processes."""
        ranks.cache_clear()
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        good, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "died"
    return good, value


@cache
def ranks(count: int) -> Pool:
    """The ranks of this process."""
    return Pool(count)


def _serve(rank: int, count: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count, init_method=f"file://{folder}/store")
    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = pipe.recv_bytes()
            try:
                function, arguments = pickle.loads(payload)
                message = pickle.dumps((True, function(*arguments)))
            except BaseException:
                message = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(message)
