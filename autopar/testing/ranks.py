"""Run a function on several ranks of this machine: on CPUs over gloo, or on CUDA devices over NCCL."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

from autopar._torch import PRELOADED
from autopar.launch.world import check_device_type

T = TypeVar("T")

# Modules that the fork server imports once, so that a rank starts in tenths of a second.
_preloaded = [
    "torch",
    *PRELOADED,
    "torch.distributed.tensor",
    "torch.export",
    "transformers.exporters.exporter_dynamo",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "autopar",
    "autopar.testing",
]


def preload(*modules: str) -> None:
    """Let ranks start with `modules` imported: the fork server imports them once, where each rank would import again
    what the module of its function does.

    Called before ranks are started for the first time; later it changes nothing. Modules that are missing are skipped.
    """
    _preloaded.extend(modules)


def fork_server() -> ForkServerContext:
    """The context whose processes start with the preloaded modules.

    A process has one fork server, with the modules of whoever starts it first: all that start ranks take it from here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context


# Seconds that the other ranks get to say something once one has failed, and to leave once all are done.
_PARTING = 5.0

# Seconds that ranks get to connect, and that the others get once one cannot; how often ranks are started in all.
_CONNECTING = 120.0
_RETRYING = 0.5
_ATTEMPTS = 3


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message contains the error of each."""


def run_ranks(
    function: Callable[..., T], ranks: int, *args: object, timeout: float = 300.0, device_type: str = "cpu"
) -> list[T]:
    """Call `function(*args)` on `ranks` processes that form a process group; returns their results in rank order.

    On "cpu" the group is gloo's. On "cuda" each rank has a device, in turn, and the group is NCCL's, with gloo for CPU
    tensors; more ranks than devices share them, to try things out: their messages go through sockets.

    Function, arguments and results must pickle. Processes come from a fork server that has torch loaded. The function
    is called once all ranks are connected; ranks that cannot connect (gloo refuses a connection now and then on a busy
    machine) are started again, at most twice.

    Raises ClusterError where there is no device of `device_type`. Raises RankError if a rank raises or dies, or if they
    have not all connected and finished after `timeout` seconds; none is left running.
    """
    check_device_type(device_type)
    results: list[T] = run_connected(_CONNECT[device_type], ranks, pickle.dumps((function, args)), timeout)
    return results


def run_connected(connect: Callable[[int, int, str], None], ranks: int, payload: bytes, timeout: float) -> list[Any]:
    """`run_ranks` for a pickled call, with the function by which each rank joins the others."""
    deadline = time.monotonic() + timeout
    for attempt in range(_ATTEMPTS):
        with _started(connect, ranks) as (pipes, processes):
            try:
                _results(pipes, processes, min(deadline, time.monotonic() + _CONNECTING), _RETRYING)
            except RankError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(payload)
            results = _results(pipes, processes, deadline)
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(_PARTING)
            return results
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _started(
    connect: Callable[[int, int, str], None], ranks: int
) -> Iterator[tuple[list[Connection], list[ForkServerProcess]]]:
    """Processes that connect to each other, with a pipe to each; none is left running at the end."""
    context = fork_server()
    pipes: list[Connection] = []
    processes: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder:
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe()
                process = context.Process(target=_rank, args=(connect, rank, ranks, folder, sender), daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            yield pipes, processes
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _results(
    pipes: Sequence[Connection], processes: Sequence[ForkServerProcess], deadline: float, parting: float = _PARTING
) -> list[Any]:
    """The results of the ranks until `deadline`; as soon as one fails, the others get `parting` seconds to report their
    errors."""
    # Of each rank whether it succeeded, and its result or its error.
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for rank in (rank for rank, pipe in enumerate(pipes) if pipe in ready):
            try:
                outcomes[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(_PARTING)
                outcomes[rank] = False, f"died with exit code {processes[rank].exitcode}"
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + parting)
    if len(outcomes) < len(pipes) or not all(succeeded for succeeded, _ in outcomes.values()):
        raise RankError("\n".join(_errors(outcomes, len(pipes))))
    return [outcomes[rank][1] for rank in range(len(pipes))]


def _errors(outcomes: Mapping[int, tuple[bool, Any]], ranks: int) -> Iterator[str]:
    """The errors of failed ranks: the first in full, of the others the last line if it differs."""
    first = ""
    for rank, (succeeded, error) in sorted(outcomes.items()):
        if not succeeded:
            last = error.strip().splitlines()[-1]
            yield f"rank {rank}: {'the same' if last in first else last if first else error}"
            first = first or error
    yield from (f"rank {rank} did not finish" for rank in range(ranks) if rank not in outcomes)


def _rank(connect: Callable[[int, int, str], None], rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    import torch

    # What was preloaded lives as long as the rank: the garbage collector would only copy its pages.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    # A rank stays until all have reported: gloo takes one that leaves early for a crash. Nor is the group closed
    # properly, which would wait for ranks that failed.
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(_outcome(lambda: connect(rank, ranks, folder)))
        payload = pipe.recv_bytes()
        pipe.send_bytes(_outcome(lambda: _call(*pickle.loads(payload))))
        pipe.recv_bytes()
    os._exit(0)


def connect(rank: int, ranks: int, folder: str) -> None:
    """Join the process group of `ranks` ranks that meet over a file in `folder`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store")


def connect_devices(rank: int, ranks: int, folder: str) -> None:
    """Join the NCCL process group of `ranks` ranks that meet over a file in `folder`, each with a CUDA device."""
    import torch
    import torch.distributed as dist

    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    if ranks > devices:
        # NCCL refuses two ranks of one host on one device. Ranks that are on several hosts, as far as it knows, reach
        # each other through sockets.
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks, init_method=f"file://{folder}/store")


_CONNECT: Mapping[str, Callable[[int, int, str], None]] = {"cpu": connect, "cuda": connect_devices}


def _call(function: Callable[..., T], args: Sequence[object]) -> T:
    return function(*args)


def _outcome(call: Callable[[], object]) -> bytes:
    """Whether the call succeeded, and its result or its error, pickled."""
    try:
        return pickle.dumps((True, call()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
