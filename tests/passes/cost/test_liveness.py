"""Peaks of small programs, against bytes computed by hand."""

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from passes.cost.liveness import (
    KINDS,
    BackwardProfile,
    Event,
    Form,
    ForwardProfile,
    MemoryPeak,
    PartPeak,
    ResultStorage,
    StepPeaks,
    StorageRef,
    Task,
    forward,
)
from passes.cost.liveness.graph import ACTIVATIONS, GRADIENTS, TRANSIENT, Ledger, Noted, Storage, rerun
from passes.cost.liveness.graph import Recomputable as MadeAgain
from passes.cost.schedules import Held
from passes.ir.plan import ProgramPlan


class Linear(nn.Module):
    """x: [rows, 8] -> the sum of a linear of 16 features, of whose result nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, 8]."""
        return {"loss": nn.functional.linear(x, self.weight).sum()}


class Squares(nn.Module):
    """A chain: each square keeps what it is made of."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.count = count

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [100]."""
        y = x * self.weight
        for _ in range(self.count):
            y = y * y
        return {"loss": y.sum()}


class Layer(nn.Module):
    """x + silu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, width]."""
        return x + nn.functional.silu(self.linear(x))


class Layers(nn.Module):
    """Equal layers one after the other."""

    def __init__(self, count: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.sum()}


def planned(model: nn.Module, x: Tensor, mesh: Mapping[str, int] | None = None, **options: object) -> ProgramPlan:
    """The plan of the only program."""
    given = {"cluster": "ideal", "optimizer": "sgd", **options}
    (program,) = autopar.plan(model, mesh or {"dp": 1}, {"x": x}, **given).programs.values()
    return program


def test_one_linear() -> None:
    """float32: a weight of 16 x 8, 32 rows of 8, a result of 32 x 16, a scalar and its gradient.

    In the backward pass the gradient of the result is one number spread out, so it takes no room of its own.
    """
    weight, batch, result, scalar = 512, 1024, 2048, 4
    program = planned(Linear(), torch.zeros(32, 8))
    assert program.memory["parameters"] == weight
    assert program.memory["inputs"] == batch
    assert sum(program.memory.values()) == weight + batch + result + scalar
    assert program.peak_moment == "forward of /sum"
    # In inference the same; adamw keeps two tensors and a number that is counted on, and makes two on the way.
    infer = planned(Linear(), torch.zeros(32, 8), objective="infer")
    assert sum(infer.memory.values()) == weight + batch + result + scalar
    few = planned(Linear(), torch.zeros(1, 8), optimizer="adamw")
    assert few.peak_moment == "optimizer step"
    assert few.memory["optimizer states"] == 2 * weight + 4
    assert few.memory["gradients"] == weight
    assert few.memory["transient tensors"] == 2 * weight
    assert few.memory["outputs"] == scalar


@pytest.mark.parametrize("count", [1, 2, 5])
def test_chain(count: int) -> None:
    """Of a chain of squares of 400 bytes all links but the last are kept, and the last is still in its variable when
    the sum is there. The backward pass of a square makes two products, one per factor; their sum comes after what the
    square kept is gone. Both scalars stay, the loss and its gradient."""
    program = planned(Squares(count), torch.zeros(100))
    kept = 400 * count
    forward_peak, backward_peak = kept + 400 + 4, kept + 2 * 400 + 4 + 4
    assert sum(program.memory.values()) == 400 + 400 + max(forward_peak, backward_peak)


def test_a_split_batch_takes_its_part() -> None:
    """Half of the rows on each of two devices: half of the result, and a sum that is still to be added up. The batch of
    the caller is whole, the part a copy."""
    whole = planned(Linear(), torch.zeros(64, 8))
    parts = planned(Linear(), torch.zeros(64, 8), {"dp": 2}, constraints={"@linear": {"out": {"dp": "S(0)"}}})
    assert whole.memory["activations"] == 4096
    assert parts.memory["activations"] == 2048 + 4
    assert parts.memory["inputs"] == whole.memory["inputs"] * 1.5


def test_a_weight_on_a_data_axis() -> None:
    """Half of a weight of 512 bytes on each of two devices, one row of 32 bytes on each.

    Without a backward pass what was received (512), the weight (512) and the sum that is added up (4) stay to the end.
    In training most is there when the gradient (512) is copied into what is sent (512) and what comes back (256) is
    there; the weight is gone.
    """
    split = {"@linear": {"out": {"dp": "S(0)"}}, "weight": {"stored": {"dp": "S(0)"}}}
    train = planned(Linear(), torch.zeros(2, 8), {"dp": 2}, constraints=split)
    assert train.peak_moment == "reduction of gradients of weight"
    assert train.memory["parameters"] == 256
    assert train.memory["gradients"] == 512 + 256
    assert train.memory["communication buffers"] == 512
    infer = planned(Linear(), torch.zeros(2, 8), {"dp": 2}, constraints=split, objective="infer")
    assert infer.memory["gathered parameters"] == 512
    assert infer.memory["communication buffers"] == 512 + 4


@pytest.mark.long
def test_depth_adds_the_same_each_time() -> None:
    """Every further layer takes its weight, what it keeps, and at most its gradient."""
    sizes = {count: sum(planned(Layers(count), torch.zeros(32, 8)).memory.values()) for count in (3, 4, 5, 6, 7, 8, 20)}
    each = sizes[4] - sizes[3]
    assert all(size == sizes[3] + (count - 3) * each for count, size in sizes.items())
    # A weight of 8 x 8; its input and what silu is of, of 32 x 8.
    assert each == 256 + 2 * 1024


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("rows", [1, 32])
def test_copies_counted_are_as_if_run(optimizer: str, rows: int) -> None:
    """The copies that are counted take as much as when all are run, at whatever moment the peak is."""
    counted = planned(Layers(12), torch.zeros(rows, 8), optimizer=optimizer)
    with mock.patch.object(forward, "BEGINNING", 100):
        run = planned(Layers(12), torch.zeros(rows, 8), optimizer=optimizer)
    assert counted.memory == run.memory


class Doubling:
    """A prober that knows one statement: it makes a tensor twice as large as its operand."""

    def forward(self, task: Task) -> ForwardProfile:
        """A buffer as large as the result is there on the way."""
        (operand,) = task.operands
        size = 2 * operand.bytes
        events = (
            Event("allocate", 0, size),
            Event("allocate", 1, size),
            Event("free", 0),
        )
        form = Form.contiguous((2 * operand.shape[0],), operand.dtype)
        return ForwardProfile(events, (ResultStorage(StorageRef("own", 1), form, False),), ())

    def backward(self, task: Task, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """Not asked for."""
        raise AssertionError

    compute = change = backward


def test_what_is_made_again_stays_until_its_last_use() -> None:
    """A gathered tensor that two statements keep is kept as its shard, made again once, and gone after the second."""
    ledger = Ledger()
    shard = Storage(ledger, 40, ACTIVATIONS)
    result = Storage(ledger, 80, ACTIVATIONS)
    noted = Noted()
    noted.note(result, Task("all_gather(x0)", (Form.contiguous((10,), torch.float32),), (False,)), [shard])
    first, second, other = noted.keep(result), noted.keep(result), noted.keep(shard)
    assert isinstance(first, MadeAgain)
    assert first is second
    assert other is shard
    del result, noted
    assert ledger.total == 40
    again = rerun(first, ledger, Doubling())
    assert ledger.total == 40 + 80
    assert ledger.take_peak().peak == 40 + 2 * 80
    del again
    assert ledger.total == 40 + 80
    again = rerun(second, ledger, Doubling())
    assert ledger.total == 40 + 80
    del again
    assert ledger.total == 40
    del first, second, other, shard
    assert ledger.total == 0


def test_ledger_takes_whole_units_and_remembers_the_peak() -> None:
    """The peak is the most at once, by the kinds of then; a storage can become of another kind."""
    ledger = Ledger(unit=512, moment="a")
    first = Storage(ledger, 1, TRANSIENT)
    second = Storage(ledger, 513, ACTIVATIONS)
    ledger.moment = "b"
    first.turn(GRADIENTS)
    del second
    Storage(ledger, 100, TRANSIENT)
    peak = ledger.take_peak()
    assert peak.moment == "a"
    assert {kind: size for kind, size in peak.bytes_by_kind.items() if size} == {TRANSIENT: 512, ACTIVATIONS: 1024}
    assert {kind: size for kind, size in ledger.by_kind().items() if size} == {GRADIENTS: 512}
    assert set(ledger.by_kind()) == set(KINDS)
    # The next peak is of what comes after.
    assert ledger.take_peak().peak == 512


def test_peaks_with_micro_batches_in_flight() -> None:
    """Each part of a step grows by what its other micro-batches hold; the largest with them is the peak."""
    begin = PartPeak(MemoryPeak({ACTIVATIONS: 100}, "begin", {"": 100}), {}, 0)
    passes = PartPeak(MemoryPeak({ACTIVATIONS: 50}, "pass", {"layers": 50}), {(ACTIVATIONS, "layers"): 20}, 5)
    peaks = StepPeaks((begin, passes))
    assert [peaks.bytes_with([Held(saved)]) for saved in (1, 3, 4)] == [100, 100, 110]
    assert peaks.bytes_with([Held(1, 20), Held(4)]) == 150
    assert peaks.with_held([Held(3)]).moment == "begin"
    most = peaks.with_held([Held(4, 1)])
    assert (most.moment, most.peak, dict(most.bytes_by_block)["layers"]) == ("pass", 115, 110)
