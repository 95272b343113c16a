"""Process groups over several axes of a mesh, and CPU groups of whole meshes.

A group is made at the first request and cached: connections and NCCL communicators are expensive, and two models on one
mesh share them. The functions that make groups are collective: every rank of the mesh calls them in the same order. The
names of groups say what they are for and of which ranks: ranks that have made other groups before find each other.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha1
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import Store, default_store, group_timeout, named_group, set_group_timeout

# Ranks, backend and purpose: requests for the same get one group.
_Key = tuple[tuple[int, ...], str | None, str]
_Axes = tuple[int, ...]

# Timeouts of groups that were made without one: of gloo, and of NCCL.
_DEFAULT_TIMEOUTS = frozenset(
    limit for limit in (default_pg_timeout, default_pg_nccl_timeout) if isinstance(limit, timedelta)
)

# Groups belong to the job, not to a module, so the cache is that of the process. Its keys are default process groups,
# weakly: after destroy_process_group() the groups are gone; the next default group gets its own.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = WeakKeyDictionary()
# The same by mesh and axes. A mesh holds its groups, which may be the default group, so it is a weak key too.
_of_spans: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[DeviceMesh, dict[_Axes, dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)


def cpu_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of all ranks of `mesh` that sends CPU tensors without the device: gloo, or what the job has for CPUs.

    It is neither the default group nor one of the mesh, so that collectives of others (a checkpoint that is saved from
    a thread) cannot come between. Its ranks are sorted; `ranks_of` gives the order of the mesh. Collective over the
    mesh.
    """
    backends = dict(item.split(":", 1) for item in dist.get_backend_config().split(",") if ":" in item)
    return _group(tuple(sorted(ranks_of(mesh))), backends.get("cpu", "gloo"), "cpu")


def axes_group(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[dist.ProcessGroup, Tensor]:
    """The group of the ranks that differ from this one on `axes` alone, and these ranks in the order of the mesh.

    Collective over the mesh. The group of a single axis is the mesh's own.
    """
    ranks = axes_ranks(mesh, axes).reshape(-1)
    if len(axes) == 1:
        return mesh.get_group(axes[0]), ranks
    return _group(tuple(sorted(ranks.tolist())), None, "axes"), ranks


def span_group(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one on adjacent `axes` alone, in row-major order of their numbers in
    the groups of the axes, of which each is sorted. Collective over the mesh, once for these axes."""
    known = _of_spans.setdefault(_default_group(), WeakKeyDictionary()).setdefault(mesh, {})
    key = tuple(axes)
    if key not in known:
        ranks = axes_ranks(mesh, axes)
        for axis in range(ranks.ndim):
            ranks = ranks.sort(axis).values
        known[key] = _group(tuple(ranks.flatten().tolist()), None, "axes")
    return known[key]


def ranks_group(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """The group of these ranks for one purpose. Collective over them."""
    return _group(tuple(sorted(ranks)), None, purpose)


def line_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The group of the ranks along one axis, in the order of the axis. Collective over the mesh.

    It is made with the timeout of the job, which messages between two ranks take from nowhere else: the mesh's own
    group may have torch's default, half an hour.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    return _group(tuple(axes_ranks(mesh, (names.index(axis),)).flatten().tolist()), None, "line")


def axes_ranks(mesh: DeviceMesh, axes: Sequence[int]) -> Tensor:
    """The ranks that differ from this one on `axes` alone, of the shape that the mesh has on these axes."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh.mesh[tuple(slice(None) if axis in axes else place for axis, place in enumerate(coordinate))]


def data_mesh(mesh: DeviceMesh, sharded: Sequence[int], replicated: Sequence[int]) -> DeviceMesh:
    """A mesh for `fully_shard` from axes of `mesh`: "shard", and before it "replicate" if there are such axes.

    Collective over the mesh.
    """
    shard, shard_ranks = axes_group(mesh, sharded)
    if not replicated:
        return DeviceMesh.from_group(shard, mesh.device_type, shard_ranks, mesh_dim_names=("shard",))
    replicate, _ = axes_group(mesh, replicated)
    ranks = axes_ranks(mesh, (*replicated, *sharded)).reshape(replicate.size(), shard.size())
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicate, shard], mesh.device_type, ranks, mesh_dim_names=names)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of `mesh`, in its order."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def job_timeout() -> timedelta | None:
    """The timeout that the default process group was made with; None where its backend has none."""
    return group_timeout(_default_group())


def take_job_timeout(mesh: DeviceMesh) -> None:
    """Let the groups of the mesh's axes have the timeout of the job where they have torch's default.

    `init_device_mesh` takes no timeout, and makes its groups without that of `init_process_group`.
    """
    timeout = job_timeout()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if timeout is not None and group_timeout(group) in _DEFAULT_TIMEOUTS - {timeout}:
            set_group_timeout(group, timeout)


def job_store() -> Store | None:
    """The key-value store of the default process group, which every rank can read and write; None without one."""
    return default_store() if dist.is_initialized() else None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "no process group is initialized"
    return group


def _group(ranks: tuple[int, ...], backend: str | None, purpose: str) -> dist.ProcessGroup:
    """The group of `ranks`; it takes the timeout of the job, not torch's default."""
    known = _made.setdefault(_default_group(), {})
    key = ranks, backend, purpose
    if key not in known:
        # Asked for where it matters: not every version of torch has it.
        in_order = ranks == tuple(sorted(ranks))
        new_group = dist.new_group if in_order else partial(dist.new_group, sort_ranks=False)
        with named_group(f"autopar_{purpose}_{sha1(repr(key).encode(), usedforsecurity=False).hexdigest()}"):
            known[key] = new_group(
                list(ranks),
                timeout=job_timeout(),
                backend=backend,
                # Only its members take part: the mesh may be a part of all ranks.
                use_local_synchronization=True,
                group_desc=f"autopar_{purpose}",
            )
    return known[key]
