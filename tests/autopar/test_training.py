"""Training loops as people write them: exceptions that are caught, gradients that are held back and dropped."""

import contextlib
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime import DistributedModule
from autopar.runtime.fsdp.units import ParameterGroup
from autopar.runtime.ranks import values
from autopar.testing import run_ranks
from tests.autopar.stored import Spy, storage
from tests.models import Stack

AXES: Mapping[int, tuple[str, ...]] = {1: ("dp",), 2: ("dp", "tp")}


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[len(sizes)])


def batches(count: int, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """Batches for a `Stack`: [rows, 16]."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(rows, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}
        for _ in range(count)
    ]


def made(
    model: nn.Module,
    sizes: tuple[int, ...],
    inputs: Mapping[str, torch.Tensor],
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> DistributedModule:
    """A distributed model whose parameters lie in FSDP units."""
    stored = options.pop("stored", {"dp": "S(0)"})
    options = {"cluster": "ideal", "constraints": storage(**stored), "memory_limit": 1e12, **options}
    with Spy(again=options.pop("again", True), stage=options.pop("stage", 3)) as spy:
        dist_model = autopar.parallelize(model, mesh or mesh_of(sizes), inputs, **options)
    assert not spy.seen or spy.seen[0].units.units
    return dist_model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on one device."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    return {name: whole(item.grad) for name, item in model.named_parameters() if item.grad is not None}


def error(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value; infinite for other names."""
    if set(ours) != set(theirs) or not theirs:
        return float("inf")
    largest = max(float(item.abs().max()) for item in theirs.values()) or 1.0
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def steps_error(dist_model: nn.Module, model: nn.Module, data: list[dict[str, torch.Tensor]]) -> float:
    """The largest error of gradients and parameters in steps of SGD on `data`, of both models."""
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9) for item in (dist_model, model)]
    worst = 0.0
    for batch in data:
        for item, optimizer in zip((dist_model, model), optimizers, strict=True):
            optimizer.zero_grad()
            item(**batch)["loss"].backward()
        worst = max(worst, error(gradients(dist_model), gradients(model)))
        for optimizer in optimizers:
            optimizer.step()
    own = {name: whole(item.detach()) for name, item in dist_model.named_parameters()}
    return max(worst, error(own, {name: item.detach() for name, item in model.named_parameters()}))


# Gradients are reduced by `fully_shard`, or all-reduced as they are.
WAYS: list[Mapping[str, str]] = [{"dp": "S(0)"}, {"dp": "I"}]


def _each_way(run: Callable[[Mapping[str, str]], Any]) -> list[Any]:
    """`run` with parameters that are stored in parts, and whole."""
    return [run(stored) for stored in WAYS]


def each_way(run: Callable[[Mapping[str, str]], Any]) -> list[Any]:
    """The results of `run` on two ranks for both ways."""
    return [found for ways in run_ranks(_each_way, 2, run) for found in ways]


# --- exceptions that every rank catches -------------------------------------------------------------------------------


class FullError(RuntimeError):
    """Stands for an exception of a kernel, such as out of memory."""


class Failing(TorchDispatchMode):
    """Raises FullError at the op of a number; counts ops."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        # Ops of the profiler run while contexts are left.
        if func.namespace != "profiler":
            self.count += 1
            if self.count == self.at:
                raise FullError(str(func))
        return func(*args, **(kwargs or {}))


def _counted(run: Callable[[], object]) -> int:
    with Failing() as mode:
        run()
    return mode.count


def _fails(at: int, run: Callable[[], object]) -> None:
    with pytest.raises(FullError), Failing(at):
        run()


def _after_exceptions(options: Mapping[str, Any], places: int) -> dict[str, float]:
    data = batches(3)
    model = Stack().double()
    dist_model = made(model, (2,), data[0], **options)
    found = {}

    def output() -> torch.Tensor:
        dist_model.zero_grad()
        loss: torch.Tensor = dist_model(**data[0])["loss"]
        return loss

    # The first two calls compare values, and run more ops than others.
    for _ in range(2):
        output()
    for where, place in itertools.product(("forward", "backward"), range(places)):
        output().backward()
        count = _counted(output if where == "forward" else output().backward)
        at = 1 + (count - 1) * place // (places - 1)
        with torch.no_grad():
            for own, other in zip(dist_model.parameters(), model.parameters(), strict=True):
                other.copy_(whole(own))
        if where == "forward":
            _fails(at, output)
        else:
            _fails(at, output().backward)
        found[f"{where} {at}/{count}"] = steps_error(dist_model, model, data)
    return found


RECOVERING: list[dict[str, Any]] = [
    {},
    {"again": False, "stored": {"dp": "I"}},
    {"again": False, "stored": {"dp": "I"}, "recompute": "full"},
    {"recompute": "full"},
    {"recompute": "selective"},
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cases", "places"),
    [(RECOVERING[::2], 3), pytest.param(RECOVERING, 40, marks=pytest.mark.slow)],
    ids=["fast", "slow"],
)
def test_after_an_exception_in_any_op(cases: list[dict[str, Any]], places: int) -> None:
    """Steps after an exception in the forward or backward pass that every rank catches are those of one device."""
    for case, found in zip(cases, run_ranks(_all_after_exceptions, 2, cases, places)[0], strict=True):
        assert max(found.values()) <= 1e-12, (case, found)


@mock.patch.object(values, "EVERY", 1 << 30)
def _all_after_exceptions(cases: list[dict[str, Any]], places: int) -> list[dict[str, float]]:
    return [_after_exceptions(case, places) for case in cases]


# --- gradients that are held back -------------------------------------------------------------------------------------


class Both:
    """A distributed model and its original, which do the same; `errors` has what differs after each thing done."""

    def __init__(self, sizes: tuple[int, ...], **options: Any) -> None:
        self.data = batches(4)
        self.model = Stack().double()
        self.dist_model = made(self.model, sizes, self.data[0], **options)
        self.optimizers = [
            torch.optim.AdamW(item.parameters(), lr=0.01, foreach=False) for item in (self.dist_model, self.model)
        ]
        self.errors: dict[str, float] = {}
        self.name = ""

    def check(self, what: str) -> None:
        """Compare gradients; none is none on both sides."""
        ours, theirs = gradients(self.dist_model), gradients(self.model)
        self.errors[f"{self.name} {len(self.errors)} {what}"] = error(ours, theirs) if ours or theirs else 0.0

    def backward(self, *numbers: int) -> None:
        """Forward and backward on batches of `numbers`."""
        for number in numbers:
            for item in (self.dist_model, self.model):
                item(**self.data[number])["loss"].backward()
            self.check(f"backward {number}")

    def forward_backward(self, number: int) -> None:
        """Forward and backward on a batch in micro-batches."""
        self.dist_model.forward_backward(**self.data[number])
        self.model(**self.data[number])["loss"].backward()
        self.check(f"micro-batches of {number}")

    def each(self, what: str, change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        """Do `change` with both."""
        for item, optimizer in zip((self.dist_model, self.model), self.optimizers, strict=True):
            change(item, optimizer)
        self.check(what)

    def step(self) -> None:
        """A step of the optimizer; compares parameters."""
        self.each("step", lambda _, optimizer: optimizer.step())
        own = {name: whole(item.detach()) for name, item in self.dist_model.named_parameters()}
        theirs = {name: item.detach() for name, item in self.model.named_parameters()}
        self.errors[f"{self.name} {len(self.errors)} parameters"] = error(own, theirs)

    def pending(self) -> int:
        """The number of gradients that are not reduced."""
        found = [item.grad for item in self.dist_model.parameters()]
        return sum(
            isinstance(item, DTensor) and any(isinstance(place, Partial) for place in item.placements) for item in found
        )


ZEROING: Mapping[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "module, none": lambda model, _: model.zero_grad(),
    "module, zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer, none": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": lambda model, _: [setattr(item, "grad", None) for item in model.parameters()],
}


def _held(sizes: tuple[int, ...], options: Mapping[str, Any]) -> tuple[dict[str, float], list[int]]:
    both = Both(sizes, **options)
    hold, pending = both.dist_model.holding_gradients, []
    for name, zero in ZEROING.items():
        both.name = name
        with hold():
            both.backward(0, 1)
            pending.append(both.pending())
            both.each("zero", zero)
            both.backward(2)
            outputs = [item(**both.data[3])["loss"] for item in (both.dist_model, both.model)]
            both.each("zero between forward and backward", zero)
            for output in outputs:
                output.backward()
            both.check("backward")
        both.each("zero after", zero)
        both.backward(1)
        pending.append(both.pending())
        with hold():
            both.backward(0)
        both.backward(2)
        both.step()
        both.each("zero at the end", zero)
    both.name = "others"
    both.backward(0)
    with hold():
        both.backward(1)
        both.each("scale", lambda model, _: [item.grad.mul_(0.5) for item in model.parameters()])
        both.backward(2)
        both.each("clip", lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False))
        both.step()
        with hold():
            both.backward(3)
        both.backward(0)
    pending.append(both.pending())
    both.backward(1)
    both.step()
    return both.errors, pending


# A parameter that dp splits first and tp next has held gradients that only tp splits, in the middle of the dim.
IN_THE_MIDDLE = pytest.param(
    (2, 2),
    {"dp": "S(0)"},
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            TorchVersion(torch.__version__) < "2.13", reason="DTensor.full_tensor() raises for such a split"
        ),
    ],
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "stored"),
    [
        ((2,), {"dp": "S(0)"}),
        ((2,), {"dp": "I"}),
        pytest.param((2, 2), {"dp": "I", "tp": "S(0)"}, marks=pytest.mark.slow),
        IN_THE_MIDDLE,
    ],
)
def test_held_gradients_are_gradients(sizes: tuple[int, ...], stored: Mapping[str, str]) -> None:
    """`.grad` has gradients that are held back, too: zeroing, scaling, clipping and steps mean what they always do."""
    for errors, pending in run_ranks(_held, len(sizes) * 2, sizes, {"stored": stored}):
        assert max(errors.values()) <= 1e-11, errors
        assert pending[1::2] == [0] * 5
        assert min(pending[::2]) > 0


def _micro_batches(stored: Mapping[str, str]) -> tuple[dict[str, float], list[int], list[str]]:
    both = Both((2,), stored=stored, micro_batches=2, stage=1)
    hold, keep, pending = both.dist_model.holding_gradients, both.dist_model.keeping_parameters, []
    both.forward_backward(0)
    pending.append(both.pending())
    with hold(), keep():
        both.forward_backward(1)
        both.forward_backward(2)
        pending.append(both.pending())
    both.forward_backward(3)
    pending.append(both.pending())
    both.step()
    both.each("zero", ZEROING["optimizer, none"])
    # An exception in the forward pass of the second micro-batch, and in backward passes.
    both.name = "after an exception"
    count = _counted(lambda: both.dist_model.forward_backward(**both.data[0]))
    both.each("zero", ZEROING["optimizer, none"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in (count // 5, count // 2, count * 4 // 5):
            with hold(), keep():
                both.forward_backward(1)
                _fails(at, lambda: both.dist_model.forward_backward(**both.data[0]))
            both.each("zero", ZEROING["optimizer, none"])
            both.forward_backward(2)
            both.forward_backward(3)
            both.step()
            both.each("zero", ZEROING["optimizer, none"])
    return both.errors, pending, [str(item.message) for item in caught]


def _held_before_other_sizes(stored: Mapping[str, str]) -> tuple[dict[str, float], list[int]]:
    both, pending = Both((2,), stored=stored), []
    # A last batch that ranks cannot share: each reads the parameters as they are stored.
    (both.data[1],) = batches(1, rows=7)
    for numbers in ((0, 1), (0, 1, 2), (0, 2, 1), (1, 0)):
        with both.dist_model.holding_gradients():
            both.backward(*numbers[:-1])
            pending.append(both.pending())
        both.backward(numbers[-1])
        pending.append(both.pending())
        both.step()
        both.each("zero", ZEROING["optimizer, none"])
    return both.errors, pending


def test_held_gradients_before_batches_of_other_sizes() -> None:
    """Gradients are accumulated up to an uneven last batch, whose program has no FSDP units: what they hold is reduced
    before it adds to it."""
    for errors, pending in each_way(_held_before_other_sizes):
        assert max(errors.values()) <= 1e-11, errors
        assert pending[1::2] == [0] * 4
        assert pending[0] > 0


def _sizes_in_one_pass(stored: Mapping[str, str]) -> tuple[dict[str, float], str]:
    both = Both((2,), stored=stored)
    (both.data[1],) = batches(1, rows=7)

    def at_once(model: nn.Module, numbers: tuple[int, ...]) -> None:
        sum(model(**both.data[number])["loss"] for number in numbers).backward()

    for numbers in ((0, 1), (1, 0), (0, 1, 2)):
        for held, added in itertools.product((False, True), repeat=2):
            with both.dist_model.holding_gradients() if held else contextlib.nullcontext():
                if added:
                    both.backward(3)
                both.each(f"at once {numbers}", lambda model, _, numbers=numbers: at_once(model, numbers))
            both.backward(0)
            both.step()
            both.each("zero", ZEROING["optimizer, none"])
    weight = both.dist_model.get_parameter("blocks.0.up.weight")
    handle = weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(autopar.UnsupportedError) as refused:
        at_once(both.dist_model, (0, 1))
    both.each("zero", ZEROING["optimizer, none"])
    both.each("at once, of one size", lambda model, _: at_once(model, (0, 2)))
    handle.remove()
    return both.errors, str(refused.value)


def test_batches_of_several_sizes_in_one_backward_pass() -> None:
    """Gradients of a program with FSDP units, and of one without, are added up; a hook would be called for each."""
    for errors, refused in each_way(_sizes_in_one_pass):
        assert max(errors.values()) <= 1e-11, errors
        assert (
            "the parameter 'blocks.0.up.weight' has a hook, and one backward pass computes its gradient for" in refused
        )


def _held_then_frozen(stored: Mapping[str, str]) -> tuple[dict[str, float], int]:
    both = Both((2,), stored=stored)
    name = next(iter(dict(both.model.named_parameters())))
    with both.dist_model.holding_gradients():
        both.backward(0)
        both.each("freeze", lambda model, _: model.get_parameter(name).requires_grad_(False))
        both.backward(1)
    both.backward(2)
    pending = both.pending()
    both.step()
    both.each("unfreeze", lambda model, _: model.get_parameter(name).requires_grad_(True))
    both.backward(3)
    both.step()
    return both.errors, pending


def test_parameters_that_are_frozen_while_gradients_are_held() -> None:
    """They keep the gradients that they have, and get no others."""
    for errors, pending in each_way(_held_then_frozen):
        assert max(errors.values()) <= 1e-11, errors
        assert pending == 0


@pytest.mark.long
def test_holding_around_micro_batches() -> None:
    """Gradients are held back around calls with micro-batches, which hold them, too; exceptions in them are caught."""
    for errors, pending, failures in each_way(_micro_batches):
        assert max(errors.values()) <= 1e-11, errors
        assert pending[0] == pending[2] == 0 < pending[1]
        assert any("held back" in item for item in failures)


def _exceptions_while_holding(stored: Mapping[str, str]) -> tuple[dict[str, float], list[str]]:
    both = Both((2,), stored=stored)
    hold = both.dist_model.holding_gradients
    # Sums outlive an exception in a forward pass.
    with hold():
        both.backward(0)
        _fails(40, lambda: both.dist_model(**both.data[1]))
        both.check("after an exception in forward")
        both.backward(2)
    both.backward(3)
    both.step()
    # Of a failed backward pass all that it added to is lost.
    caught = []
    both.each("zero", ZEROING["module, none"])
    with hold():
        count = _counted(both.dist_model(**both.data[1])["loss"].backward)
    for at in (count // 2, count * 4 // 5):
        both.each("zero", ZEROING["module, none"])
        both.name = f"backward fails at {at}"
        with hold(), warnings.catch_warnings():
            warnings.simplefilter("always")
            both.backward(0)
            output = both.dist_model(**both.data[1])["loss"]
            _fails(at, output.backward)
            both.each("zero", ZEROING["module, none"])
            with pytest.warns(UserWarning, match="held back: these are lost") as found:
                both.backward(2)
            caught += [str(item.message) for item in found]
        both.backward(3)
        both.step()
    return both.errors, caught


@pytest.mark.long
def test_exceptions_while_gradients_are_held() -> None:
    """Sums outlive an exception in a forward pass; one in a backward pass loses them, and says so."""
    for errors, caught in each_way(_exceptions_while_holding):
        assert max(errors.values()) <= 1e-11, errors
        assert len(caught) == 2


def _backward_after_a_failed_one(stored: Mapping[str, str]) -> list[str]:
    both, said = Both((2,), stored=stored), []
    for at in (1, 12, 60):
        outputs = [both.dist_model(**both.data[number])["loss"] for number in (0, 1)]
        _fails(at, outputs[0].backward)
        if at > 1:
            with pytest.raises(autopar.UnsupportedError) as caught:
                outputs[1].backward()
            said.append(str(caught.value))
        both.each("zero", ZEROING["module, none"])
        both.backward(2)
        both.step()
    assert max(both.errors.values()) <= 1e-11, both.errors
    return said


def test_a_backward_pass_after_a_failed_one() -> None:
    """A forward pass from before the exception is of no use, and says so; the next one is."""
    for said in each_way(_backward_after_a_failed_one):
        assert len(said) == 2
        assert all("run the forward pass again" in item for item in said)


@pytest.mark.long
def test_recovery_in_older_versions() -> None:
    """torch 2.11 and 2.12 have no function for it."""
    for found in run_ranks(_recovered_by_hand, 2):
        assert max(found.values()) <= 1e-12, found


def _recovered_by_hand() -> dict[str, float]:
    if not hasattr(FSDPModule, "reset_iter_state"):
        return _after_exceptions({}, 4)
    with mock.patch.object(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
        return _after_exceptions({}, 4)


# --- hooks and freezing -----------------------------------------------------------------------------------------------


def _hooks(stored: Mapping[str, str]) -> dict[str, object]:
    both, found = Both((2,), stored=stored), {}
    names = ["blocks.0.up.weight", "blocks.1.norm.bias"]
    called: list[str] = []

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    def clipped(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e-3, 1e-3)

    def note(parameter: torch.Tensor) -> None:
        called.append("after" if parameter.grad is not None else "before")

    handles = []
    for item in (both.dist_model, both.model):
        for name in names:
            for hook in (doubled, clipped, lambda _: None):
                handles.append(item.get_parameter(name).register_hook(hook))
            handles.append(item.get_parameter(name).register_post_accumulate_grad_hook(note))
    both.backward(0, 1)
    found["calls"] = called
    both.each("zero", ZEROING["module, none"])
    with both.dist_model.holding_gradients(), pytest.raises(autopar.InputError, match="has a tensor hook") as caught:
        both.dist_model(**both.data[0])["loss"].backward()
    found["holding"] = str(caught.value).partition(" has")[0]
    for handle in handles:
        handle.remove()
    with both.dist_model.holding_gradients():
        both.backward(0)
    both.backward(1)
    both.step()
    # Steps of an optimizer in the backward pass.
    for item in (both.dist_model, both.model):
        item.zero_grad()
        inside = [torch.optim.SGD([parameter], lr=0.1) for parameter in item.parameters()]
        steps = [partial(_step, optimizer) for optimizer in inside]
        pairs = zip(item.parameters(), steps, strict=True)
        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter, step in pairs]
        for number in (0, 1):
            item(**both.data[number])["loss"].backward()
        for handle in handles:
            handle.remove()
    both.step()
    # One that raises, and one that returns something else.
    for hook, error_type in ((_raising, FullError), (lambda _: torch.zeros(2), autopar.InputError)):
        handle = both.dist_model.get_parameter(names[0]).register_hook(hook)
        output = both.dist_model(**both.data[0])["loss"]
        with pytest.raises(error_type):
            output.backward()
        handle.remove()
        both.each("zero", ZEROING["optimizer, none"])
        both.backward(2)
        both.step()
    found["errors"] = max(both.errors.values())
    return found


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _raising(_: torch.Tensor) -> None:
    raise FullError


@pytest.mark.long
def test_hooks_of_parameters() -> None:
    """Tensor hooks get reduced gradients, and their results are used; an exception in one is recovered from."""
    for found in each_way(_hooks):
        assert found["calls"] == ["after"] * 8
        assert found["holding"] == "parameter 'blocks.0.up.weight'"
        assert found["errors"] <= 1e-11


def _frozen(stored: Mapping[str, str]) -> dict[str, float]:
    both = Both((2,), stored=stored)
    names = [name for name, _ in both.model.named_parameters()]
    for frozen in (names[::3], names[:5], []):
        for item in (both.dist_model, both.model):
            item.zero_grad()
            for name in names:
                item.get_parameter(name).requires_grad_(name not in frozen)
        both.backward(0)
        with both.dist_model.holding_gradients():
            both.backward(1)
        both.backward(2)
        both.step()
    # Between the forward pass and the backward pass.
    outputs = [item(**both.data[3])["loss"] for item in (both.dist_model, both.model)]
    for item in (both.dist_model, both.model):
        item.zero_grad()
        item.get_parameter(names[2]).requires_grad_(False)
    for output in outputs:
        output.backward()
    both.check("frozen after the forward pass")
    return both.errors


@pytest.mark.long
def test_freezing_a_part_of_a_unit() -> None:
    """Parameters that are frozen get no gradients, the others theirs; also when they are trained again."""
    for errors in each_way(_frozen):
        assert max(errors.values()) <= 1e-11, errors


# --- lifetime ---------------------------------------------------------------------------------------------------------


def _batches_alive() -> list[bool]:
    data, model = batches(1)[0], Stack().double()
    dist_model = made(model, (2,), data)
    left = []
    for _ in range(3):
        batch = {name: tensor.clone() for name, tensor in data.items()}
        watched = [weakref.ref(tensor) for tensor in batch.values()]
        dist_model(**batch)["loss"].backward()
        del batch
        gc.collect()
        left += [reference() is not None for reference in watched]
    return left


def test_batches_are_freed() -> None:
    """The first, by which later calls are known to be as usual, too."""
    assert not any(map(any, run_ranks(_batches_alive, 2)))


def _lifetime() -> tuple[list[str], list[int]]:
    data, model = batches(2), Stack().double()
    groups, left = [], []
    for number in range(4):
        dist_model = made(model, (2, 2), data[0], stored={"dp": "S(0)", "tp": "S(0, 2)"}, mesh=_mesh())
        groups.append(len(dist.distributed_c10d._world.pg_map))
        if number:
            continue
        optimizer = torch.optim.AdamW(dist_model.parameters())
        for batch in data:
            dist_model(**batch)["loss"].backward()
            optimizer.step()
        with dist_model.holding_gradients():
            dist_model(**data[0])["loss"].backward()
        watched: dict[str, weakref.ref[object]] = {"module": weakref.ref(dist_model)}
        for name, parameter in dist_model.named_parameters():
            watched[name] = weakref.ref(parameter)
            watched[f"shard of {name}"] = weakref.ref(parameter.to_local())
        units = [item for item in gc.get_objects() if isinstance(item, ParameterGroup)]
        for number, item in enumerate(units):
            watched[f"unit {number}"] = weakref.ref(item)
            watched.update({f"{name} of unit {number}": weakref.ref(own) for name, own in item.named_parameters()})
        del dist_model, optimizer, parameter, units, item
        gc.collect()
        left = [name for name, reference in watched.items() if reference() is not None]
    return left, groups


@functools.cache
def _mesh() -> DeviceMesh:
    return mesh_of((2, 2))


@pytest.mark.long
def test_a_deleted_module_is_freed() -> None:
    """Nothing of it is left; four modules on one mesh make its process groups once."""
    for left, groups in run_ranks(_lifetime, 4):
        assert left == []
        assert len(set(groups)) == 1
