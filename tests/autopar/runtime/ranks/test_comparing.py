"""Calls that differ between ranks are errors on all of them, and comparing them neither waits nor sends much."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.ranks import values
from autopar.testing import run_ranks
from tests.models import Stack

Batch = dict[str, torch.Tensor]


def batch(samples: int = 8, seed: int = 0) -> Batch:
    """Inputs of a `Stack`."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, samples, 16, dtype=torch.float64, generator=generator)
    return {"x": x, "target": target}


def parallel_stack(freeze: str = "") -> tuple[autopar.DistributedModule, nn.Module, DeviceMesh]:
    """A stack on a mesh of 2 x 2, the stack itself, and the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Stack().double()
    if freeze:
        model.get_parameter(freeze).requires_grad_(False)
    return autopar.parallelize(model, mesh, batch(), cluster="ideal"), model, mesh


def said(run: Callable[[], object]) -> str:
    """The InputError that is raised."""
    with pytest.raises(autopar.InputError) as caught:
        run()
    return str(caught.value)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding in float64."""
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def compare_gradients(dist_model: nn.Module, model: nn.Module) -> None:
    """One step of both: the same loss and gradients, and none where there should be none."""
    dist_model.zero_grad()
    model.zero_grad()
    ours, theirs = dist_model(**batch())["loss"], model(**batch())["loss"]
    assert close(ours, theirs)
    ours.backward()
    theirs.backward()
    for name, parameter in model.named_parameters():
        grad = dist_model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            assert close(grad.full_tensor(), parameter.grad), name


# --- what ranks are called with ---------------------------------------------------------------------------------------


def _different(_: object = None) -> dict[str, str]:
    """The message for each difference, on a module that goes on working."""
    dist_model, model, mesh = parallel_stack()
    rank = mesh.get_rank()
    found = {"own samples": said(lambda: dist_model(**batch(seed=rank)))}
    found["own sizes"] = said(lambda: dist_model(**batch(8 if rank == 0 else 4)))
    found["dtype"] = said(
        lambda: dist_model(**{name: leaf.float() if rank == 2 else leaf for name, leaf in batch().items()})
    )
    found["missing"] = said(lambda: dist_model(**({"x": batch()["x"]} if rank == 1 else batch())))
    with torch.no_grad() if rank == 3 else nullcontext():
        found["gradients"] = said(lambda: dist_model(**batch()))
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 3):
        found["autocast"] = said(lambda: dist_model(**batch()))
    dist_model.train(rank != 1)
    found["mode"] = said(lambda: dist_model(**batch()))
    dist_model.train()
    with dist_model.holding_gradients() if rank == 2 else nullcontext():
        found["within"] = said(lambda: dist_model(**batch()))
    dist_model.random.seed(rank)
    found["random"] = said(lambda: dist_model(**batch()))
    dist_model.random.seed(0)
    found["calls"] = said(lambda: dist_model(**batch()) if rank else dist_model.from_local(batch(), axes=("dp",)))
    parameter = dist_model.get_parameter("blocks.1.up.bias")
    parameter.requires_grad_(rank != 2)
    found["frozen"] = said(lambda: dist_model(**batch()))
    parameter.requires_grad_(True)
    compare_gradients(dist_model, model)
    return found


def test_ranks_that_are_called_differently() -> None:
    """Every difference is the same sentence on all ranks, but for the one whose own error it is."""
    every = run_ranks(_different, 4)
    own = {("dtype", 2), ("missing", 1)}
    for name, message in every[0].items():
        assert all(found[name] == message for rank, found in enumerate(every) if (name, rank) not in own), name
    first = every[0]
    advice = "give each rank's own samples through from_local(batch, axes=('dp',))"
    assert first["own samples"] == (
        "target had other values on rank 1 of the mesh than on rank 0 in call 1 of this module: a call takes the "
        f"global batch, the same on every rank; {advice}"
    )
    assert first["own sizes"] == (
        "ranks are called differently in call 2: rank 1 of the mesh has target float64[4, 16], rank 0 has target "
        "float64[8, 16]; pass the same global batch on every rank, or each rank's own samples through "
        "from_local(batch, axes=('dp',))"
    )
    assert first["dtype"].startswith("rank 2 of the mesh raised in call 2: InputError: x is float32[8, 16], but")
    assert every[2]["dtype"].startswith("x is float32[8, 16], but was planned as float64[8, 16]")
    assert "rank 1 of the mesh raised in call 2: InputError: missing argument target" in first["missing"]
    assert every[1]["missing"].startswith("missing argument target")
    assert "rank 3 of the mesh is called with no gradients, rank 0 is called with gradients" in first["gradients"]
    assert "rank 3 of the mesh is called with torch.bfloat16, rank 0 is called with no autocast" in first["autocast"]
    assert "rank 1 of the mesh is in evaluation mode, rank 0 is in training mode; call train() or" in first["mode"]
    assert "rank 2 of the mesh is in holding_gradients(), rank 0 is in none of its contexts; enter" in first["within"]
    assert "rank 1 of the mesh draws other random numbers than rank 0; seed the module's" in first["random"]
    assert first["calls"].startswith("rank 1 of the mesh is in a call of the module, rank 0 in from_local(): all ranks")
    assert (
        "the parameter 'blocks.1.up.bias' requires a gradient on rank 0 of the mesh, but not on rank 2; change "
        "requires_grad on all ranks alike" in first["frozen"]
    )


def _interrupted() -> str:
    dist_model, _, mesh = parallel_stack()
    if mesh.get_rank() == 1:
        with (
            mock.patch("autopar.runtime.calls.programs.bound_call", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            dist_model(**batch())
        return ""
    with pytest.raises(autopar.RankFailedError) as caught:
        dist_model(**batch())
    return str(caught.value)


def test_an_interrupt_of_one_rank_is_an_error_of_the_others() -> None:
    assert run_ranks(_interrupted, 4) == [
        "call 1 of Stack: rank 1 of the mesh raised in call 1: KeyboardInterrupt" if rank != 1 else ""
        for rank in range(4)
    ]


# --- values now and then ----------------------------------------------------------------------------------------------


class _Waits(TorchFunctionMode):
    """Counts what reads a tensor, which waits for its device."""

    READS = ("item", "tolist", "cpu", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.READS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    """Counts numbers that are read of tensors, from wherever, and all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars = self.gathers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.scalars += function is torch.ops.aten._local_scalar_dense.default
        self.gathers += function is torch.ops.c10d.allgather_.default
        return function(*args, **(kwargs or {}))


def _counted() -> tuple[list[tuple[dict[str, int], int, int, int]], str, str]:
    """For each call the reads, scalars, all-gathers and other messages before the program runs; errors of later
    calls."""
    dist_model, _, mesh = parallel_stack()
    prepare = dist_model._calls.prepared
    found = []

    def counted(*args: object) -> object:
        with (
            _Waits() as waits,
            _Ops() as ops,
            mock.patch.object(dist, "isend", wraps=dist.isend) as sends,
            mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathers,
        ):
            result = prepare(*args)
        found.append((dict(waits.seen), ops.scalars, ops.gathers, sends.call_count + gathers.call_count))
        return result

    with mock.patch.object(dist_model._calls, "prepared", counted), mock.patch.object(values, "EVERY", 6):
        for _ in range(8):
            dist_model(**batch())
    second, _, _ = parallel_stack()
    with mock.patch.object(values, "EVERY", 5):
        second(**batch())
        second(**batch(seed=mesh.get_rank() // 2))
        later = said(lambda: second(**batch()))
        second(**batch())
        second(**batch(seed=mesh.get_rank()))
        last = said(lambda: second(**batch()))
        second(**batch())
    return found, later, last


@pytest.mark.long
def test_comparing_does_not_wait() -> None:
    """One reading of 32 bytes that the CPU sent, in one all-gather; the values of calls 1, 2 and every
    n-th are read once more, at the next call but for the first, and the error names the call that differed."""
    every = run_ranks(_counted, 4)
    assert all(found == every[0] for found in every)
    counts, later, last = every[0]
    # The state of random numbers lies on the CPU, as do the bytes that are compared.
    plain = ({"numpy": 1, "tolist": 1}, 0, 1, 0)
    reading = ({"numpy": 1, "tolist": 2, "__int__": 2}, 2, 2, 0)
    assert counts == [reading, plain, reading, plain, plain, plain, reading, plain]
    assert later.startswith("target had other values on rank 2 of the mesh than on rank 0 in call 2 of this module")
    assert last.startswith("target had other values on rank 1 of the mesh than on rank 0 in call 5 of this module")


def _kinds() -> list[str]:
    """Errors of calls after three that were right, in training mode with the planned sizes."""
    dist_model, _, mesh = parallel_stack()
    for _ in range(3):
        dist_model(**batch())
    found = [said(lambda: dist_model(**batch(4, seed=mesh.get_rank())))]
    with torch.no_grad():
        found += [said(lambda: dist_model(**batch(seed=mesh.get_rank()))) for _ in range(2)]
        dist_model(**batch())
        # It is one of a kind that was compared, and not the hundredth.
        dist_model(**batch(seed=mesh.get_rank()))
        found.append(said(lambda: dist_model.eval()(**batch(seed=mesh.get_rank()))))
    return found


def test_values_are_compared_in_the_first_call_of_a_kind() -> None:
    """With another size, without gradients, in evaluation; and again if they differed."""
    every = run_ranks(_kinds, 4)
    assert all(found == every[0] for found in every)
    for number, text in zip((4, 5, 6, 9), every[0], strict=True):
        assert f"had other values on rank 1 of the mesh than on rank 0 in call {number} of this module" in text


# --- parameters that train --------------------------------------------------------------------------------------------


def _frozen() -> list[str]:
    """Parameters that were frozen when planned, frozen later, replaced and untied."""
    frozen = "blocks.0.down.weight"
    dist_model, model, mesh = parallel_stack(frozen)
    found = []
    compare_gradients(dist_model, model)
    dist_model.get_parameter(frozen).requires_grad_(True)
    found.append(said(lambda: dist_model(**batch())))
    with torch.no_grad():
        found.append(said(lambda: dist_model(**batch())))
    dist_model.get_parameter(frozen).requires_grad_(mesh.get_rank() == 3)
    found.append(said(lambda: dist_model(**batch())))
    dist_model.get_parameter(frozen).requires_grad_(False)
    # Frozen later, all of a group too, and again trained.
    for names in (
        ["blocks.0.up.weight"],
        ["blocks.1.norm.bias", "blocks.0.up.weight"],
        list(dict(model.blocks[0].named_parameters(prefix="blocks.0"))),
    ):
        for module in (dist_model, model):
            for name in names:
                module.get_parameter(name).requires_grad_(False)
        compare_gradients(dist_model, model)
        for module in (dist_model, model):
            for name in names:
                module.get_parameter(name).requires_grad_(name != frozen)
        compare_gradients(dist_model, model)
    # Others in their place, which lie alike, are read.
    values = copy.deepcopy(dist_model.state_dict())
    dist_model.load_state_dict({name: value * 2 for name, value in values.items()}, assign=True)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    dist_model.get_parameter(frozen).requires_grad_(False)
    compare_gradients(dist_model, model)
    return found


@pytest.mark.long
def test_parameters_that_change_after_planning() -> None:
    """Trained, but planned frozen, is an error by name on all ranks; frozen later is exact; others are read."""
    every = run_ranks(_frozen, 4)
    frozen = (
        "the parameter 'blocks.0.down.weight' requires a gradient, but was frozen when it was planned: freeze it "
        "again, or call parallelize anew with requires_grad_(True)"
    )
    for rank, found in enumerate(every):
        assert found[:2] == [frozen, frozen]
        assert found[2] == (frozen if rank == 3 else f"rank 3 of the mesh raised in call 2: InputError: {frozen}")


def _without_checksums(failing: int, ranks: set[int]) -> list[str]:
    """The errors of four calls, in one of which some ranks cannot take a checksum."""
    dist_model, _, _ = parallel_stack()
    said = []
    for number in range(4):
        fails = number == failing and dist.get_rank() in ranks
        error = torch.OutOfMemoryError("no memory is left")
        with mock.patch.object(values, "checksum", side_effect=error) if fails else nullcontext():
            try:
                dist_model(**batch())
                said.append("")
            except (RuntimeError, autopar.RankFailedError) as raised:
                said.append(f"{type(raised).__name__}: {raised}".removesuffix(" compared"))
    return said


@pytest.mark.long
def test_ranks_that_cannot_take_checksums() -> None:
    """One rank fails in the first call, which reads checksums at once: it raises its own error, all others the same
    one. All fail in the second, whose checksums the third would read: the third runs. So do all later calls."""
    own = "OutOfMemoryError: no memory is left"
    said = "RankFailedError: call 1 of Stack: rank 1 of the mesh raised where values of call 1 of this module are"
    first, second, *others = run_ranks(_without_checksums, 4, 0, {1})
    assert [first, *others] == [[said, "", "", ""]] * 3
    assert second == [own, "", "", ""]
    assert run_ranks(_without_checksums, 4, 1, {0, 1, 2, 3}) == [["", own, "", ""]] * 4


def _computed_on_one() -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    given = batch()
    leaf = given["x"].requires_grad_()
    dist_model = autopar.parallelize(Stack().double(), mesh, given, cluster="ideal")
    given["x"] = leaf * 1 if dist.get_rank() == 1 else leaf
    with pytest.raises(autopar.InputError) as raised:
        dist_model(**given)
    return str(raised.value)


def test_an_input_that_one_rank_has_computed() -> None:
    """Values of computed inputs are not compared, so all ranks must have computed them."""
    first, *others = run_ranks(_computed_on_one, 4)
    assert others == [first] * 3
    assert "computed with gradient" in first
