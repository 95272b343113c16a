"""Each collective means the same tensor before and after, and so does its backward pass."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from autopar import runtime
from autopar.runtime.generated.saving import saving
from autopar.runtime.state import Axis, axes_of
from autopar.testing import run_ranks
from passes.ir.layout import I, P, Placement, R, S
from passes.ir.redistribution import COLLECTIVES

SHAPE = (12, 24)
SPLITS = {"first": S(0), "second": S(1), "inner": S(1, 2)}
PLACEMENTS = [R, I, P, *SPLITS.values()]


def _changes() -> list[tuple[Placement, Placement]]:
    """All changes of one step; from one split of a dim to another one goes through R."""
    pairs = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if (a.kind, b.kind) in COLLECTIVES]
    return [(a, b) for a, b in pairs if not (a.kind == b.kind == "S" and a.dim == b.dim)]


def _parts(whole: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """The part of a tensor on each rank; a pending sum is random but for its sum."""
    if placement.kind in "RI":
        return [whole.clone() for _ in range(ranks)]
    if placement.kind == "P":
        generator = torch.Generator().manual_seed(7)
        addends = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(ranks - 1)]
        return [*addends, whole - sum(addends, torch.zeros_like(whole))]
    blocks = whole.chunk(placement.major, placement.dim)
    return [
        torch.cat([block.chunk(ranks, placement.dim)[rank] for block in blocks], placement.dim) for rank in range(ranks)
    ]


def _whole(parts: list[Tensor], placement: Placement) -> Tensor:
    """The tensor that ranks hold parts of."""
    if placement.kind in "RI":
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if placement.kind == "P":
        return sum(parts, torch.zeros_like(parts[0]))
    blocks = [part.chunk(placement.major, placement.dim) for part in parts]
    return torch.cat([block for several in zip(*blocks, strict=True) for block in several], placement.dim)


def _tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64), torch.randn(
        SHAPE, generator=generator, dtype=torch.float64
    )


def _axis(ranks: int) -> Axis:
    (axis,) = axes_of(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    return axis


def _product(ranks: Sequence[Sequence[int]]) -> Axis:
    """Both axes of the mesh of these ranks as one."""
    first, second = axes_of(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")), (2,))
    return first * second


def _run(axis_of: Callable[[], Axis]) -> list[tuple[Tensor, Tensor]]:
    """On each rank: result and gradient of every change."""
    axis, (value, gradient) = axis_of(), _tensors()
    ranks = axis.size
    found = []
    for source, target in _changes():
        operand = _parts(value, source, ranks)[axis.rank].requires_grad_()
        collective = getattr(runtime, COLLECTIVES[source.kind, target.kind])
        result = collective(operand, axis, src=source, dst=target)
        result.backward(_parts(gradient, target.gradient, ranks)[axis.rank])
        assert operand.grad is not None
        found.append((result.detach(), operand.grad))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_changes_keep_the_meaning(ranks):
    """For every pair of placements, values forward and gradients backward."""
    _check(run_ranks(_run, ranks, partial(_axis, ranks)))


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]]], ids=str)
def test_changes_over_two_axes(ranks):
    """Two axes of a mesh are as one whose ranks are numbered row by row, whatever the ranks are called."""
    results = run_ranks(_run, sum(map(len, ranks)), partial(_product, ranks))
    _check([results[rank] for row in ranks for rank in row])


def _check(results: Sequence[list[tuple[Tensor, Tensor]]]) -> None:
    """The results of `_run` on all ranks of an axis, in its order, are the tensors of all changes."""
    value, gradient = _tensors()
    for index, (source, target) in enumerate(_changes()):
        results_of = [result[index][0] for result in results]
        gradients_of = [result[index][1] for result in results]
        torch.testing.assert_close(_whole(results_of, target), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(_whole(gradients_of, source.gradient), gradient, rtol=1e-12, atol=1e-12)


def _dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    axis = _axis(2)
    operand = torch.ones(4, requires_grad=True)
    seen = []
    result = runtime.all_gather(operand, axis, src=S(0), dst=R, dtype=torch.bfloat16, grad_dtype=torch.float32)
    result.register_hook(lambda gradient: seen.append(gradient.dtype))
    result.sum().backward()
    assert operand.grad is not None
    return result.dtype, seen[0], operand.grad.dtype


def test_dtypes_of_what_is_sent():
    """Gathered in one dtype; the gradient comes back in the parameter's."""
    assert run_ranks(_dtypes, 2) == [(torch.bfloat16, torch.bfloat16, torch.float32)] * 2


def _saved(keep: bool) -> tuple[Tensor, bool]:
    """The gradients of a product with a gathered tensor, and whether that is gone after the forward pass."""
    axis = _axis(2)
    operand = torch.arange(32.0, dtype=torch.float64).reshape(4, 8).requires_grad_()
    weight = torch.ones(16, 8, dtype=torch.float64, requires_grad=True)
    with saving():
        gathered = runtime.all_gather(operand, axis, src=S(0), dst=R, keep=keep)
        result = gathered @ weight.T
        alive = StorageWeakRef(gathered.untyped_storage())
        del gathered
    # The thread that communicates may hold it for a moment longer.
    deadline = time.monotonic() + 1
    while not alive.expired() and time.monotonic() < deadline:
        time.sleep(0.01)
    freed = alive.expired()
    result.pow(2).sum().backward()
    assert operand.grad is not None
    return torch.cat([operand.grad.flatten(), weight.grad.flatten()]), freed


def test_what_is_gathered_again_is_not_kept():
    """With keep=False the gathered tensor is gone after the forward pass, and gradients are the same."""
    kept, dropped = run_ranks(_saved, 2, True), run_ranks(_saved, 2, False)
    for (expected, freed), (gradient, freed_too) in zip(kept, dropped, strict=True):
        assert torch.equal(gradient, expected)
        assert (freed, freed_too) == (False, True)


def _compiled(keep: bool) -> tuple[Tensor, int]:
    """The gradients of compiled code that gathers, and how often its backward pass does."""
    axis = _axis(2)
    operand = torch.arange(32.0, dtype=torch.float64).reshape(4, 8).requires_grad_()
    weight = torch.ones(16, 8, dtype=torch.float64, requires_grad=True)

    @partial(torch.compile, backend="aot_eager")
    def run(operand: Tensor, weight: Tensor) -> Tensor:
        gathered = runtime.all_gather(operand, axis, src=S(0), dst=R, keep=keep)
        return (gathered @ weight.T).tanh()

    with saving():
        result = run(operand, weight)
    with torch.profiler.profile() as profile:
        result.pow(2).sum().backward()
    assert operand.grad is not None
    gathers = sum(item.name == "_c10d_functional::all_gather_into_tensor" for item in profile.events())
    return torch.cat([operand.grad.flatten(), weight.grad.flatten()]), gathers


@pytest.mark.slow
def test_what_is_gathered_again_is_not_kept_in_compiled_code():
    """With keep=False compiled code gathers in the backward pass too, and gradients are the same."""
    kept, dropped = run_ranks(_compiled, 2, True), run_ranks(_compiled, 2, False)
    for (expected, gathers), (gradient, gathers_too) in zip(kept, dropped, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        assert (gathers, gathers_too) == (0, 1)
