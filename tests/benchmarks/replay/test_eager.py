"""The cost of uncompiled ops, against the kernels that torch's autograd starts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.published import DATA
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.compose import step_time
from benchmarks.replay.eager import FORMULAS, Sizes
from benchmarks.replay.parts import Parts, parts_of
from benchmarks.replay.predict import forced_of, replayed, waiting
from benchmarks.replay.records import Run, read_records, read_run
from benchmarks.replay.software import Software

ROWS, WIDTH, ITEM = 64, 256, 4
WHOLE = float(ROWS * WIDTH * ITEM)


class Kernels(TorchDispatchMode):
    """Counts the ops that read or write memory, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.moved = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.count += 1
            tensors = [item for item in tree_leaves((args, found)) if isinstance(item, torch.Tensor)]
            self.moved += sum(item.numel() * item.element_size() for item in tensors)
        return found


def backward(op: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Kernels:
    result = op(*operands)
    gradient = torch.ones_like(result)
    with Kernels() as kernels:
        torch.autograd.grad(result, [item for item in operands if item.requires_grad], gradient)
    return kernels


def tensor(*shape: int) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "op", "shapes", "counted"),
    [
        # What rules count: the gradient of the result, what was saved, and the gradients of operands.
        ("pow", lambda x: x.pow(2), [(ROWS, WIDTH)], 3 * WHOLE),
        ("mul", torch.mul, [(ROWS, WIDTH), (ROWS, WIDTH)], 5 * WHOLE),
        ("mul", torch.mul, [(ROWS, WIDTH), (ROWS, 1)], 3 * WHOLE + 2 * ROWS * ITEM),
        ("mul", torch.mul, [(WIDTH,), (ROWS, WIDTH)], 3 * WHOLE + 2 * WIDTH * ITEM),
        ("add", torch.add, [(ROWS, WIDTH), (ROWS, WIDTH)], 3 * WHOLE),
    ],
)
def test_formulas_are_those_of_autograd(
    kind: str, op: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], counted: float
) -> None:
    kernels = backward(op, *(tensor(*shape) for shape in shapes))
    sizes = tuple(float(torch.Size(shape).numel() * ITEM) for shape in shapes)
    found = FORMULAS[kind](Sizes(WHOLE, sizes, WIDTH * ITEM))
    assert found.forward == 0
    assert found.kernels == kernels.count - 1
    assert counted + found.backward == pytest.approx(kernels.moved, rel=0.01)


def test_long_rows_of_a_loss_are_read_more_often() -> None:
    logits = 8192 * 128256 * 4.0
    long, short = (FORMULAS["cross_entropy_loss"](Sizes(4.0, (logits,), row)) for row in (128256 * 4.0, 4000.0))
    assert (long.forward, long.backward) == (2 * logits, 3 * logits)
    assert (short.forward, short.backward) == (0.0, 2 * logits)


def priced(name: str) -> tuple[Run, Parts, Callable[[Software], float]]:
    record = next(record for record in read_records(DATA) if record["id"] == name)
    run = read_run(record, name)
    key, cluster = cluster_of(run)
    cluster = waiting(run, cluster)
    parts = parts_of(forced_of(run, key)[0], cluster, run.software.compiled)
    return run, parts, lambda software: step_time(replace(run, software=software), parts, cluster, False).total


def test_what_torchtune_does_beside_the_stock_class_takes_its_time() -> None:
    """At 1.7 TB/s: chunks add up seven gradients of the head, gradients are scaled once, and attention takes two blocks
    of 128 where samples of 128 would take half a block."""
    run, _, seconds = priced("torchtune-3.2-3b-+act ckpt")
    software, stream = run.software, 1.7e12
    head = 128256 * 3072 * 2
    whole = seconds(software)
    assert whole - seconds(replace(software, chunks=1)) == pytest.approx(7 * 3 * head / stream)
    assert whole - seconds(replace(software, logits=0.0)) == pytest.approx(2 * 8192 * 128256 / stream)
    parameters = 28 * (2 * 3072 * 3072 + 2 * 1024 * 3072 + 3 * 8192 * 3072) + 128256 * 3072
    assert whole - seconds(replace(software, scales=False)) == pytest.approx(4 * parameters / stream, rel=0.01)
    # Of 137 tokens that a sample may have begun before a block, 0 are in none before it, 128 in one, 8 in two.
    keys = 128 * (1 + (128 + 2 * 8) / 137) - 64
    flops = 28 * 4 * 8192 * keys * 3072 * (1 + 16 / 128)
    assert whole - seconds(replace(software, block=0)) == pytest.approx((2 + 2.5) * flops / (0.38 * 312e12))


@pytest.mark.long
def test_plans_of_torchtune_are_ranked() -> None:
    records = [record for record in read_records(DATA) if record["group"] == "torchtune"]
    runs = [read_run(record, str(record["id"])) for record in records]
    found = [replayed(run, *cluster_of(run), *forced_of(run, cluster_of(run)[0])) for run in runs]
    times = {item.run.id.removeprefix("torchtune-3.2-3b-"): item for item in found}
    assert all(abs(item.error) < 0.07 for item in found if item.error is not None)
    assert times["+packed"].predicted > times["+opt in bwd"].predicted
    assert times["+compile"].predicted < times["qlora"].predicted
