"""Process groups of a mesh: made once, with the timeout of the job, gone with the default process group."""

import gc
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar._torch import group_timeout
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.generated.collectives import all_reduce
from autopar.runtime.ranks.groups import axes_group, cpu_group, job_timeout, ranks_of
from autopar.runtime.state import axes_of, axis_along
from autopar.testing import run_ranks
from passes.ir.layout import I, P

_TIMEOUT = timedelta(seconds=77)


def test_groups_of_a_mesh_are_made_once_and_take_the_timeout_of_the_job(tmp_path: object) -> None:
    results = run_ranks(_made_once, 4, f"file://{tmp_path}/store")
    assert results == [(77.0, 77.0, 77.0)] * 4


def _made_once(store: str) -> tuple[float, ...]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=store, timeout=_TIMEOUT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = cpu_group(mesh)
    assert group is cpu_group(mesh)
    assert group is cpu_group(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert group is cpu_group(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    assert group is not dist.group.WORLD
    both, ranks = axes_group(mesh, (0, 1))
    assert both is axes_group(mesh, (0, 1))[0]
    assert both is not group
    assert ranks.tolist() == ranks_of(mesh) == [0, 1, 2, 3]
    alone, row = axes_group(mesh, (1,))
    assert alone is mesh.get_group("tp")
    assert row.tolist() == ([0, 1] if rank < 2 else [2, 3])
    count = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        FSDPManager(mesh)._data_mesh((0, 1), ())
    assert len(dist.distributed_c10d._world.pg_map) == count
    limits = [job_timeout(), group_timeout(group), group_timeout(both)]
    return tuple(limit.total_seconds() for limit in limits if limit is not None)


def test_groups_do_not_outlive_the_default_process_group(tmp_path: object) -> None:
    assert run_ranks(_made_again, 2, str(tmp_path)) == [(3.0, 3.0)] * 2


def _made_again(folder: str) -> tuple[float, ...]:
    rank, sums = dist.get_rank(), []
    before: weakref.ref[dist.ProcessGroup] | None = None
    for number in range(2):
        dist.destroy_process_group()
        gc.collect()
        assert before is None or before() is None
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store{number}")
        group = cpu_group(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value, group=group)
        sums.append(value.item())
        before = weakref.ref(group)
        del group
    return tuple(sums)


def test_a_mesh_of_some_ranks_has_groups_of_these_alone() -> None:
    assert run_ranks(_on_some_ranks, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _on_some_ranks() -> list[int]:
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    items: list[int] = [0, 0]
    dist.all_gather_object(items, dist.get_rank(), group=cpu_group(part))
    return items


def test_ranks_that_made_other_groups_before_find_each_other(tmp_path: object) -> None:
    """Ranks that have made different numbers of groups would have different names from torch for their common ones."""
    total, row, column = float(0 + 1 + 2 + 3), [1.0, 1.0, 5.0, 5.0], [2.0, 4.0, 2.0, 4.0]
    expected = [[total, row[rank], column[rank], total] for rank in range(4)]
    assert run_ranks(_after_others, 4, f"file://{tmp_path}/store") == expected


def _after_others(store: str) -> list[float]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    # Ranks that do not find each other wait for no longer than this.
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=store, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for members in ([0, 1], [0, 1], [2, 3]):
        dist.new_group(members, timeout=limit, use_local_synchronization=True)
    dp, tp = axes_of(mesh, (2,))
    found = []
    for axis in (dp * tp, tp, dp):
        assert axis.size == (4 if axis.name == "dp * tp" else 2)
        value = torch.tensor(float(rank))
        found.append(all_reduce(value, axis, src=P, dst=I).item())
    assert axis_along(mesh, 2) == dp * tp
    assert (dp * tp).group == axes_group(mesh, (0, 1))[0].group_name
    value = torch.tensor(float(rank))
    return [*found, all_reduce(value, axis_along(mesh, 2), src=P, dst=I).item()]
