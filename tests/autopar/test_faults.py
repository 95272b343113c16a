"""The table of faults in docs/faults.md: what one rank does wrong, and the error that all others end with."""

import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.loading.cache import _replace as _really_replace
from autopar.testing import RankError, run_ranks
from tests.models import Stack

RANKS = 2
TIMEOUT_S = 4.0

# Type and message of what a rank raised.
Ended = tuple[str, str]


def inputs(batch: int = 4) -> dict[str, torch.Tensor]:
    """Inputs of a `Stack`."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(batch, 16, generator=generator) for name in ("x", "target")}


def parallelized(axis: str = "dp", **options: object) -> autopar.DistributedModule:
    """A `Stack` on all ranks: parameters are gathered by FSDP units on "dp", repeated on "ddp", and those of
    `up` are split on "tp"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    constraints = {
        "dp": {"*": {"stored": {"dp": "S(0)"}, "used": {"dp": "R"}}},
        "ddp": {"*": {"stored": {"ddp": "I"}, "used": {"ddp": "R"}}},
        "tp": {"blocks.*.up.weight": {"stored": {"tp": "S(0)"}, "used": {"tp": "S(0)"}}},
    }
    chosen = {"cluster": "ideal", "constraints": constraints[axis], **options}
    return autopar.parallelize(Stack(depth=1), mesh, inputs(), **chosen)  # type: ignore[arg-type]


def ended(run: Callable[[], object]) -> Ended:
    """The type and message of what a call raises; empty where it raises nothing."""
    try:
        run()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def raising(error: BaseException) -> Callable[..., object]:
    """A function that raises."""

    def run(*args: object, **kwargs: object) -> object:
        raise error

    return run


# --- within parallelize -----------------------------------------------------------------------------------------------


# What fails, on which rank, with what.
STAGES: Mapping[str, tuple[str, int, BaseException]] = {
    "request": ("autopar.api.make_request", 1, ValueError("bad argument")),
    "request, named": ("autopar.api.make_request", 1, autopar.InputError("memory_limit is -1")),
    "request, interrupted": ("autopar.api.make_request", 1, KeyboardInterrupt()),
    "fingerprint": ("autopar.api.values_fingerprint", 1, MemoryError("no memory")),
    "capture": ("autopar.models.info.capture", 0, autopar.CaptureError("cannot trace Stack")),
    "capture, unexpected": ("autopar.models.info.capture", 0, KeyError("unexpected")),
    "plan": ("autopar.models.info.normalize", 0, ZeroDivisionError("division")),
    "plan, interrupted": ("autopar.models.info.normalize", 0, KeyboardInterrupt()),
    "plan, exited": ("autopar.models.info.normalize", 0, SystemExit(3)),
    "loading": ("autopar.loading.placed_parts", 1, torch.OutOfMemoryError("out of memory")),
    "loading, first rank": ("autopar.loading.placed_parts", 0, torch.OutOfMemoryError("out of memory")),
    "loading, interrupted": ("autopar.loading.placed_parts", 1, KeyboardInterrupt()),
    "other sizes": ("autopar.plans.dynamic_shapes._Planner.generated", 0, KeyError("sizes")),
    "other sizes, interrupted": ("autopar.plans.dynamic_shapes._Planner.generated", 0, KeyboardInterrupt()),
    "other sizes, loading": ("autopar.loading.load_source", 1, OSError(28, "disk full")),
}
# Type and message on the other rank.
SEEN: Mapping[str, Ended] = {
    "request": ("RankFailedError", "rank 1 of the mesh failed while checking the arguments: ValueError: bad argument"),
    "request, named": (
        "InputError",
        "memory_limit is -1 (raised on rank 1 of the mesh, while checking the arguments)",
    ),
    "request, interrupted": (
        "RankFailedError",
        "rank 1 of the mesh was interrupted while checking the arguments: KeyboardInterrupt",
    ),
    "fingerprint": (
        "RankFailedError",
        "rank 1 of the mesh failed while comparing the models of the ranks: MemoryError: no memory",
    ),
    "capture": ("CaptureError", "cannot trace Stack"),
    "capture, unexpected": (
        "RankFailedError",
        "rank 0 of the mesh failed while planning the model: KeyError: 'unexpected'",
    ),
    "plan": ("RankFailedError", "rank 0 of the mesh failed while planning the model: ZeroDivisionError: division"),
    "plan, interrupted": (
        "RankFailedError",
        "rank 0 of the mesh was interrupted while planning the model: KeyboardInterrupt",
    ),
    "plan, exited": ("RankFailedError", "rank 0 of the mesh was interrupted while planning the model: SystemExit: 3"),
    "loading": (
        "RankFailedError",
        "rank 1 of the mesh failed while loading parameters and generated source: OutOfMemoryError: out of memory",
    ),
    "loading, first rank": (
        "RankFailedError",
        "rank 0 of the mesh failed while loading parameters and generated source: OutOfMemoryError: out of memory",
    ),
    "loading, interrupted": (
        "RankFailedError",
        "rank 1 of the mesh was interrupted while loading parameters and generated source: KeyboardInterrupt",
    ),
    "other sizes": (
        "RankFailedError",
        "call 1 of Stack: rank 0 of the mesh failed while planning for other sizes of the inputs: KeyError: 'sizes'",
    ),
    "other sizes, interrupted": (
        "RankFailedError",
        "call 2 of Stack: rank 0 of the mesh was interrupted while planning for other sizes of the inputs: "
        "KeyboardInterrupt",
    ),
    "other sizes, loading": (
        "RankFailedError",
        "call 3 of Stack: rank 1 of the mesh failed while loading generated source: OSError: [Errno 28] disk full",
    ),
}


def test_every_stage_of_parallelize_fails_on_all_ranks() -> None:
    results = run_ranks(_stages, RANKS)
    for name, (_, rank, error) in STAGES.items():
        named = isinstance(error, autopar.AutoparError)
        assert results[rank][name] == (SEEN[name] if named else (type(error).__name__, str(error)))
        assert results[1 - rank][name] == SEEN[name]
    assert [item["none"] for item in results] == [("", "")] * RANKS


def _stages() -> dict[str, Ended]:
    results = {}
    module = parallelized()
    for name, (target, rank, error) in STAGES.items():
        call = partial(module, **inputs(8)) if name.startswith("other sizes") else parallelized
        patched = mock.patch(target, raising(error)) if dist.get_rank() == rank else contextlib.nullcontext()
        with patched:
            results[name] = ended(call)
    # The ranks are still in step: the next attempt succeeds.
    results["none"] = ended(partial(module.forward_backward, **inputs(8)))
    return results


# --- disks ------------------------------------------------------------------------------------------------------------


def test_disks_that_cannot_be_written_on_one_rank() -> None:
    """Another folder serves; where there is none, all ranks are told."""
    results = run_ranks(_disks, RANKS)
    for name in ("unwritable", "full"):
        assert [item[name] for item in results] == [("", "")] * RANKS
    for item in results:
        kind, said = item["no folder"]
        assert kind == "CacheError"
        assert "neither to the cache nor to a temporary folder" in said
        assert "set AUTOPAR_CACHE to a folder on another disk" in said
    assert "(raised on rank 1 of the mesh, while loading parameters and generated source)" in results[0]["no folder"][1]


def _disks() -> dict[str, Ended]:
    broken, results = dist.get_rank() == 1, {}
    with mock.patch.dict(os.environ, {"AUTOPAR_CACHE": "/proc/none"} if broken else {}):
        results["unwritable"] = ended(parallelized)
        with (
            mock.patch("autopar.loading.cache._temporary_folder", return_value=Path("/proc/none"))
            if broken
            else _nothing()
        ):
            results["no folder"] = ended(parallelized)
    with mock.patch("autopar.loading.cache._replace", _full_at_first()) if broken else _nothing():
        results["full"] = ended(parallelized)
    return results


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _full_at_first() -> Callable[..., None]:
    """A disk that is full where the cache is, and not where temporary folders are."""
    seen: list[object] = []

    def replace(*args: object) -> None:
        seen.append(args)
        if len(seen) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        _really_replace(*args)

    return replace


# --- within a call ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_job(folder: str, number: int) -> Iterator[None]:
    """A process group of its own: what failed in the one before is not met again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store{number}")
    yield


def shorten_timeouts() -> None:
    """Give all process groups a short timeout, from here on, where all ranks are; planning, which others wait for, has
    had the long one."""
    dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)


def _forward(axis: str, error: BaseException) -> None:
    module = parallelized(axis)
    shorten_timeouts()
    if dist.get_rank() == 1:
        module.register_forward_pre_hook(raising(error))
    module(**inputs())


def _backward(axis: str, error: BaseException) -> None:
    module = parallelized(axis)
    shorten_timeouts()
    output = module(**inputs())
    if dist.get_rank() == 1:
        output["loss"].register_hook(raising(error))
    output["loss"].backward()


def _hook(axis: str, error: BaseException) -> None:
    module = parallelized(axis)
    shorten_timeouts()
    if dist.get_rank() == 1:
        list(module.parameters())[-1].register_post_accumulate_grad_hook(raising(error))
    module.forward_backward(**inputs())


# What the other rank says: where it failed, and, where rank 1 could leave word, why.
CALLS: Mapping[str, tuple[Callable[[str, BaseException], None], str, BaseException, str]] = {
    "forward": (
        _forward,
        "dp",
        ValueError("too long"),
        "call 1 of Stack: .* failed, because rank 1 raised ValueError in call 1 of Stack: too long",
    ),
    "backward": (_backward, "dp", ValueError("in backward"), "failed, because another rank raised, died, "),
    "hook": (
        _hook,
        "tp",
        ValueError("in a hook"),
        "call 1 of Stack: .* failed, because rank 1 raised ValueError in call 1 of Stack: in a hook",
    ),
}
MORE_CALLS = {
    "forward, interrupted": (
        _forward,
        "tp",
        KeyboardInterrupt(),
        "call 1 of Stack: .* failed, because rank 1 raised KeyboardInterrupt in call 1 of Stack",
    ),
    "backward, replicated": (
        _backward,
        "ddp",
        ValueError("in backward"),
        "^reducing the gradients of parameters failed, because another rank raised, died",
    ),
    "backward, tp": (_backward, "tp", ValueError("in backward"), CALLS["backward"][3]),
    "hook, dp": (_hook, "dp", ValueError("in a hook"), CALLS["hook"][3]),
}


def _check_calls(folder: Path, names: list[str]) -> None:
    results = run_ranks(_calls, RANKS, str(folder), names)
    for name in names:
        *_, error, message = {**CALLS, **MORE_CALLS}[name]
        assert results[1][name] == (type(error).__name__, str(error))
        kind, said = results[0][name]
        assert kind == "RankFailedError"
        assert re.search(message, said), said
        assert "gloo" in said


def _calls(folder: str, names: list[str]) -> dict[str, Ended]:
    results = {}
    for number, name in enumerate(names):
        run, axis, error, _ = {**CALLS, **MORE_CALLS}[name]
        with new_job(folder, number):
            results[name] = ended(partial(run, axis, error))
            if name == "forward":
                # It stays and does something else, as after a caught exception.
                time.sleep(TIMEOUT_S + 1.0 if dist.get_rank() == 1 else 0.0)
    return results


@pytest.mark.long
def test_an_exception_within_a_call_ends_the_others_at_the_timeout(tmp_path: Path) -> None:
    _check_calls(tmp_path, list(CALLS))


@pytest.mark.slow
def test_other_exceptions_within_calls(tmp_path: Path) -> None:
    _check_calls(tmp_path, list(MORE_CALLS))


# --- killed -----------------------------------------------------------------------------------------------------------


def _die(*_: object, **__: object) -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def _die_in(target: str) -> None:
    with mock.patch(target, _die) if dist.get_rank() == KILLED else contextlib.nullcontext():
        parallelized()


def _die_in_forward() -> None:
    module = parallelized()
    if dist.get_rank() == KILLED:
        module.register_forward_pre_hook(_die)
    module(**inputs())


def _die_in_backward() -> None:
    output = parallelized()(**inputs())
    if dist.get_rank() == KILLED:
        output["loss"].register_hook(_die)
    output["loss"].backward()


# What the others do when the first rank, which plans and keeps the store, is killed.
KILLED = 0
DEATHS: Mapping[str, tuple[Callable[[], None], str]] = {
    "planning": (partial(_die_in, "autopar.api.plan_model"), "^planning the model failed, because another rank"),
    "loading": (
        partial(_die_in, "autopar.loading.placed_parts"),
        "^loading parameters .* failed, because another rank",
    ),
    "forward": (_die_in_forward, "^call 1 of Stack: comparing calls between ranks failed, because another rank"),
    "backward": (_die_in_backward, "failed, because another rank raised, died"),
}


def _check_death(name: str, folder: Path) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(_until_death, 4, name, str(folder))
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))]
    assert [kind for kind, _ in said] == ["RankFailedError"] * 3
    for _, message in said:
        assert re.search(DEATHS[name][1], message), message


def _until_death(name: str, folder: str) -> None:
    # A job as torchrun starts it: the first rank keeps the store.
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(f"{folder}/port", size)
    if rank == 0:
        server = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
        store.set("port", str(server.port))
    else:
        server = dist.TCPStore("localhost", int(store.get("port")), size, is_master=False)
    dist.destroy_process_group()
    # Far longer than the test: the loss of a connection is enough.
    dist.init_process_group("gloo", rank=rank, world_size=size, store=server, timeout=timedelta(seconds=250))
    Path(folder, f"rank{rank}").write_text(json.dumps(ended(DEATHS[name][0])))
    # As after any exception that nobody catches: those who do not talk to the killed rank itself learn of it by this.
    os._exit(1)


def test_a_killed_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    _check_death("forward", tmp_path)


@pytest.mark.parametrize("name", ["planning", "loading", "backward"])
@pytest.mark.slow
def test_a_rank_that_is_killed_elsewhere(name: str, tmp_path: Path) -> None:
    _check_death(name, tmp_path)
