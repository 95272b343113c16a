"""specialize: a trace for many sizes at those of a call."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture_symbolic
from passes.dynamic_shapes.specialize import specialize
from passes.ir.errors import InputError
from passes.ir.layout import Shape
from passes.ir.program import Program, Symbolic, TensorType
from passes.normalize import normalize
from tests.passes.helpers import Apply, captured, printed

ALL = frozenset((name, dim) for name in ("x", "y") for dim in range(3))


def symbolic(module: nn.Module, varying: frozenset[tuple[str, int]] = ALL, **shapes: Shape) -> Symbolic:
    """A trace for many sizes, shown float inputs of `shapes`."""
    inputs = {name: torch.empty(shape) for name, shape in shapes.items()}
    tracing = Tracing(True, True, contextlib.nullcontext())
    return capture_symbolic(module, inputs, tracing, varying)


def static(module: nn.Module, **shapes: Shape) -> Program:
    """The trace for these sizes alone."""
    return captured(module, True, **{name: torch.empty(shape) for name, shape in shapes.items()})


# --- programs ---------------------------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """Has sizes of its input in shapes, numbers and what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, object]:
        """x: [batch, length, 6]."""
        batch, length, _ = x.shape
        hidden = self.proj(x) + torch.arange(length, device=x.device).unsqueeze(1)
        flat = hidden.view(batch * length, -1)
        return {"mean": flat.sum() / batch, "zeros": x.new_zeros(2 * length + 1), "tokens": batch * length}


BEFORE = """\
size x.0: at least 2
size x.1: at least 2
input x: float32[x.0, x.1, 6]
parameter proj.weight: float32[8, 6]
parameter proj.bias: float32[8]
%linear = linear(x, proj.weight, proj.bias)
%arange = arange(end=x.1, device=cpu, pin_memory=False)
%unsqueeze = unsqueeze(%arange, dim=1)
%add = add(%linear, %unsqueeze)
%view = view(%add, size=[x.0*x.1, -1])
%sum = sum(%view)
%div = div(%sum, other=x.0)
%new_zeros = new_zeros(x, size=[2*x.1 + 1], pin_memory=False)
output mean: %div
output zeros: %new_zeros
output tokens: x.0*x.1"""

AFTER = """\
input x: float32[3, 10, 6]
parameter proj.weight: float32[8, 6]
parameter proj.bias: float32[8]
%linear = linear(x, proj.weight, proj.bias)
%arange = arange(end=10, device=cpu, pin_memory=False)
%unsqueeze = unsqueeze(%arange, dim=1)
%add = add(%linear, %unsqueeze)
%view = view(%add, size=[30, -1])
%sum = sum(%view)
%div = div(%sum, other=3)
%new_zeros = new_zeros(x, size=[21], pin_memory=False)
output mean: %div
output zeros: %new_zeros
output tokens: 30"""


def lines(program: object) -> str:
    """The printed program, without the comments."""
    return "\n".join(line.split("  #")[0] for line in str(program).splitlines())


def same(one: Program, other: Program) -> bool:
    """Whether two programs are one in normal form."""
    return str(normalize(one)) == str(normalize(other))


def test_before_and_after() -> None:
    traced = symbolic(Sizes(), x=(4, 8, 6))
    assert lines(traced) == BEFORE
    assert lines(specialize(traced, {"x": (3, 10, 6)})) == AFTER


def test_types_are_numbers() -> None:
    """Nothing of the symbols is left in any type or argument: the program is that of a trace at these sizes."""
    program = specialize(symbolic(Sizes(), x=(4, 8, 6)), {"x": (3, 10, 6)})
    assert same(program, static(Sizes(), x=(3, 10, 6)))
    assert all(type(size) is int for item in program.types.values() for size in item.shape)


def _scaled(x: Tensor) -> Tensor:
    return x * x.shape[1] ** -0.5


def _half(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1] // 2)


def _window(x: Tensor) -> Tensor:
    return x[:, -4:] if x.shape[1] >= 4 else x + 1


def _crossed(x: Tensor, y: Tensor) -> Tensor:
    return x.flatten() + y.flatten()


def _square(x: Tensor) -> Tensor:
    return x @ x


@pytest.mark.parametrize(
    ("function", "shown", "given"),
    [
        pytest.param(_scaled, {"x": (4, 8)}, {"x": (5, 7)}, id="a float"),
        pytest.param(_half, {"x": (4, 8)}, {"x": (4, 7)}, id="a quotient"),
        pytest.param(_window, {"x": (4, 8)}, {"x": (5, 6)}, id="a branch"),
        pytest.param(_crossed, {"x": (4, 6), "y": (3, 8)}, {"x": (2, 6), "y": (6, 2)}, id="a product"),
        pytest.param(_square, {"x": (4, 4)}, {"x": (5, 5)}, id="one size twice"),
        pytest.param(_scaled, {"x": (1, 8)}, {"x": (1, 5)}, id="a size of one"),
    ],
)
def test_equals_a_trace_at_these_sizes(
    function: Callable[..., Tensor], shown: dict[str, Shape], given: dict[str, Shape]
) -> None:
    traced = symbolic(Apply(function), **shown)
    assert same(specialize(traced, given), static(Apply(function), **given))
    assert same(specialize(traced, shown), static(Apply(function), **shown))


def test_only_what_varies_is_a_symbol() -> None:
    traced = symbolic(Sizes(), frozenset({("x", 0)}), x=(4, 8, 6))
    assert list(traced.ranges) == ["x.0"]
    assert "input x: float32[x.0, 8, 6]" in printed(traced.program)


class OnDevice(nn.Module):
    """Does something else where it has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.register_buffer("scale", torch.ones(6))
        self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 6]."""
        return (x @ self.weight if self.weight.device.type == "cpu" else x) * self.scale @ self.again


def test_a_module_on_meta_is_traced_as_if_on_a_device() -> None:
    """The way that a model has for its device is the one that is traced; the module stays as it was."""
    model = OnDevice().to("meta")
    tensors = [*model.parameters(), *model.buffers()]
    tracing = Tracing(True, True, contextlib.nullcontext(), torch.float64, torch.device("cpu"))
    program = capture_symbolic(model, {"x": torch.empty(4, 6)}, tracing, ALL).program
    assert [op.kind for op in program.ops] == ["matmul", "mul", "matmul"]
    assert program.types["weight"] == TensorType((6, 6), torch.float64)
    assert all(now is before for now, before in zip((*model.parameters(), *model.buffers()), tensors, strict=True))


# --- sizes that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shown", "given", "message"),
    [
        (_window, {"x": (4, 8)}, {"x": (5, 3)}, "dim 1 of x has size 3, but the model was traced for at least 4 there"),
        (_scaled, {"x": (4, 8)}, {"x": (1, 8)}, "dim 0 of x has size 1, but the model was traced for at least 2 there"),
        (_scaled, {"x": (1, 8)}, {"x": (2, 8)}, "dim 0 of x has size 2, but the model was traced for 1 there"),
        (
            _square,
            {"x": (4, 4)},
            {"x": (4, 5)},
            "dim 1 of x has size 5, but the model was traced for 4 there, which is x.0",
        ),
        (
            _crossed,
            {"x": (4, 6), "y": (3, 8)},
            {"x": (4, 6), "y": (5, 5)},
            r"the sizes x\[4, 6\], y\[5, 5\] do not fit the trace of the model, which holds where Eq\(x.0\*x.1, ",
        ),
    ],
    ids=["too short", "one", "not one", "not the same", "condition"],
)
def test_sizes_that_the_trace_excludes(
    function: Callable[..., Tensor], shown: dict[str, Shape], given: dict[str, Shape], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        specialize(symbolic(Apply(function), **shown), given)


def test_what_a_model_asserts_of_its_sizes() -> None:
    def even(x: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0)
        return x.view(2, -1)

    traced = symbolic(Apply(even), x=(4,))
    assert same(specialize(traced, {"x": (6,)}), static(Apply(even), x=(6,)))
    with pytest.raises(InputError, match=r"x\[5\] do not fit"):
        specialize(traced, {"x": (5,)})


def test_sizes_that_are_no_whole_numbers() -> None:
    traced = symbolic(Apply(_scaled), x=(4, 8))
    (first, *others) = traced.program.types.items()
    half = sympy.Symbol("x.0", integer=True, positive=True) / 2
    types = {first[0]: TensorType((half,), torch.float32), **dict(others)}
    broken = replace(traced, program=replace(traced.program, types=types))
    specialize(broken, {"x": (6, 8)})
    with pytest.raises(
        InputError, match=r"the sizes x\[5, 8\] do not fit the model: its size x.0/2 is no whole number"
    ):
        specialize(broken, {"x": (5, 8)})
