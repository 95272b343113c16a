"""Run the generated module of one rank of any mesh on tensors without values, and measure the memory of its steps.

The ranks are those of torch's "fake" process group, whose collectives send nothing; memory is what torch's MemTracker
says.
"""

import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _ExtraFields_Allocation
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from autopar.loading import load, placed_parts
from autopar.models.info import read_model
from autopar.options import Options
from autopar.planner import PlannedModel, plan_model
from autopar.plans.cuda_attention import CudaAttention
from autopar.request import Request, make_request
from autopar.runtime import DistributedModule
from autopar.runtime.calls.programs import LoadedModel
from autopar.runtime.fsdp import manager, reductions
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.fsdp.managers import FSDPManagers
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.groups import axes_group
from autopar.runtime.state import axes_of
from passes.cost.liveness import MACHINES

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "sgd_momentum": partial(torch.optim.SGD, momentum=0.9),
}


def predicted_and_measured(
    model: nn.Module, mesh: Mapping[str, int], inputs: Mapping[str, object], **options: object
) -> tuple[int, int, PlannedModel]:
    """Bytes at the peak of a step of `model` (on meta) as planned, and as MemTracker finds them on the last rank. Where
    ranks differ it has most: of a split sequence it attends to all that comes before."""
    settings = Options(**{"cluster": "h100", "memory_limit": 1e15, **options})  # type: ignore[arg-type]
    request = make_request(mesh, settings)
    with without_values():
        planned = plan_model(model, read_model(model, dict(inputs), request), request)
    predicted = sum(planned.plan.programs[request.objective].memory.values())
    return int(predicted), measure(model, planned, request, inputs, request.mesh.size - 1), planned


@contextmanager
def without_values() -> Iterator[None]:
    """Plans made in this context are of tensors without values, which autograd never adds in place."""
    machines = {name: replace(machine, in_place=False) for name, machine in MACHINES.items()}
    with mock.patch.dict(MACHINES, machines):
        yield


@contextmanager
def _mesh(request: Request, rank: int) -> Iterator[DeviceMesh]:
    """The mesh of a request as `rank` sees it, with collectives that send nothing."""
    sizes = request.mesh.sizes
    dist.init_process_group("fake", rank=rank, world_size=prod(sizes), store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=request.mesh.names)
            # Groups are made once, of ranks that have values.
            axes_of(mesh, range(len(sizes), len(request.mesh.spans)))
            yield mesh
    finally:
        dist.destroy_process_group()


def measure(model: nn.Module, planned: PlannedModel, request: Request, inputs: Mapping[str, object], rank: int) -> int:
    """The most bytes that lie on `rank` during two steps."""
    kernels = CudaAttention() if request.cluster.device.type == "cuda" else nullcontext()
    with _mesh(request, rank) as mesh, _real_groups(), FakeTensorMode(allow_non_fake_inputs=True), kernels:
        module = _module(model, planned, request, mesh)
        batch = pytree.tree_map_only(torch.Tensor, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), dict(inputs))
        return _steps(module, batch, request)


@contextmanager
def _real_groups() -> Iterator[None]:
    """Meshes hold ranks, which must have values, also where groups of them are made."""

    def made(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[dist.ProcessGroup, Tensor]:
        with unset_fake_temporarily():
            return axes_group(mesh, axes)

    with mock.patch.object(manager, "axes_group", made):
        yield


def predicted_and_allocated(
    model: nn.Module, mesh: Mapping[str, int], inputs: Mapping[str, Tensor], **options: object
) -> tuple[int, int]:
    """Bytes at the peak of a step of `model` (on meta), or of a call without gradients, as planned for CPUs, and as
    torch's profiler counts them on the last rank, whose tensors have values."""
    request = make_request(mesh, Options(**{"cluster": "ideal", "memory_limit": 1e15, **options}))  # type: ignore[arg-type]
    planned = plan_model(model, read_model(model, dict(inputs), request), request)
    predicted = sum(planned.plan.programs[request.objective].memory.values())
    optimizer_of = OPTIMIZERS[request.optimizer] if request.objective == "train" else None
    with _mesh(request, request.mesh.size - 1) as devices:
        module = _module(model, planned, request, devices)
        return int(predicted), allocated_bytes(module, inputs, optimizer_of)


def allocated_bytes(
    module: nn.Module, inputs: Mapping[str, Tensor], optimizer_of: Callable[..., torch.optim.Optimizer] | None
) -> int:
    """The most bytes on this rank in the third step of a distributed module, as torch's profiler counts them; without
    an optimizer, in the third call without gradients."""
    optimizer = None if optimizer_of is None else optimizer_of(list(module.parameters()), foreach=False)

    def step() -> None:
        if optimizer is None:
            with torch.no_grad():
                module(**inputs)
            return
        output = module.forward_backward(**inputs)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        del output

    for _ in range(2):
        step()
    states = [] if optimizer is None else [leaf for state in optimizer.state.values() for leaf in state.values()]
    resident: dict[int, int] = {}
    for tensor in (*module.parameters(), *module.buffers(), *states, *inputs.values()):
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        resident[storage.data_ptr()] = storage.nbytes()
    return sum(resident.values()) + _allocated(step)


def _allocated(step: Callable[[], None]) -> int:
    """The most bytes that are allocated and not freed at a time while `step` runs, without the numbers that ranks
    compare."""
    # What earlier steps left to the garbage collector is not of this one.
    gc.collect()
    numbers = Agreement.numbers

    def unseen(agreement: Agreement, own: Sequence[int]) -> list[list[int]]:
        """The profiler follows this thread alone. It would count these tensors, and at times not see that they are
        freed: gloo's own thread may be the last that holds them."""
        with ThreadPoolExecutor(1) as other:
            return other.submit(numbers, agreement, own).result()

    compared = mock.patch.object(Agreement, "numbers", unseen)
    with compared, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    changes: list[tuple[int, int]] = []
    events = list(found.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))


def _module(model: nn.Module, planned: PlannedModel, request: Request, mesh: DeviceMesh) -> DistributedModule:
    """The module that `distribute` returns, without values."""
    engine = _Engine(mesh)
    (units,) = planned.units
    root = placed_parts(_like(model), planned.stored, {engine: units}, request, mesh, torch.device("cpu"))
    loaded = {name: load(program, name) for name, program in planned.programs.items()}

    def other_sizes(*_: object) -> object:
        raise AssertionError("the sizes are those of the plan")

    known = LoadedModel(planned.plan, loaded, inspect.signature(model.forward), 0, other_sizes)
    return DistributedModule(root, mesh, torch.device("cpu"), known, FSDPManagers({0: engine}))


def _steps(module: DistributedModule, batch: dict[str, object], request: Request) -> int:
    """The most bytes in the second step: in the first one, DTensor runs operators on whole tensors to learn their
    shapes, which real ones never hold."""
    training = request.objective == "train"
    together = MACHINES[request.cluster.device.type].together
    optimizer = OPTIMIZERS[request.optimizer](list(module.parameters()), foreach=together) if training else None

    def step() -> None:
        run = module if optimizer is None else module.forward_backward
        output = run(**batch)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        del output

    def joins(*_: object) -> bool:
        """Replaces `joins`; a mock would record its calls, and so hold gradients."""
        return MACHINES[request.cluster.device.type].joins

    # An optimizer asks how many steps it has made; the module draws where its random numbers begin.
    random, joined = mock.patch.object(module.random, "advance"), mock.patch.object(reductions, "joins", joins)
    with mock.patch("torch.Tensor.item", return_value=1.0), random, joined:
        step()
        tracker = MemTracker()
        # It cannot tell how much is each module's when one is called several times; only the sum is of interest here.
        for hook in ("_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook", "_post_bw_hook"):
            setattr(tracker, hook, lambda *_: None)
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        tracker.track_external(*([module, *tensors] if optimizer is None else [module, optimizer, *tensors]))
        with tracker:
            step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _like(model: nn.Module) -> nn.Module:
    """A model with the same parameters and buffers, without values."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class _Engine(FSDPManager):
    """Meshes hold ranks, which must have values."""

    def _data_mesh(self, sharded: tuple[int, ...], replicated: tuple[int, ...]) -> DeviceMesh:
        with unset_fake_temporarily():
            return super()._data_mesh(sharded, replicated)
