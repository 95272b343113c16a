"""The operators that capture writes: calls as text, and what they run."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from passes.ir.errors import CaptureError
from passes.ops import TRACED, overload_for, read, written
from tests.passes import custom

PATH = "tests.passes.custom"


class _Any(torch.autograd.Function):
    """Takes anything."""


class _Holder:
    class Inner(torch.autograd.Function):
        """Not at the top level of its module, but to be found."""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((1, -2.5, None, True, "a 'quoted' \"word\"\n"), "(1, -2.5, None, True, 'a \\'quoted\\' \"word\"\\n')"),
        ((float("inf"), -float("inf"), torch.bfloat16), "(inf, -inf, torch.bfloat16)"),
        (((1, (2,)), [3, ()], {"a": 4, 5: {}}), "((1, (2, ), ), [3, ()], {'a': 4, 5: {}})"),
    ],
)
def test_arguments_are_text_and_back(args: tuple[object, ...], text: str) -> None:
    """An argument that is no tensor comes back as it was."""
    call = written(_Any, args, {})
    assert call.arguments == text
    assert call.tensors == call.sizes == ()
    cls, given, named = read(call.function, call.arguments, (), ())
    assert (cls, tuple(given), named) == (_Any, args, {})


def test_arguments_by_name() -> None:
    """They stay by name."""
    call = written(_Any, (1,), {"last": [2]})
    assert call.arguments == "(1, last=[2])"
    assert read(call.function, call.arguments, (), ())[1:] == ([1], {"last": [2]})


def test_tensors_stand_aside() -> None:
    """Tensors are x0, x1, … in the text, wherever they are; one that stands twice is two."""
    x, y = torch.ones(2), torch.zeros(3)
    call = written(_Any, (x, [y, 1], {"z": (x,)}), {})
    assert call.arguments == "(x0, [x1, 1], {'z': (x2, )})"
    assert [item is other for item, other in zip(call.tensors, (x, y, x), strict=True)] == [True] * 3
    _, given, _ = read(call.function, call.arguments, ("a", "b", "c"), ())
    assert given == ["a", ["b", 1], {"z": ("c",)}]
    _, given, _ = read(call.function, "(n1, n0)", (), (5, 6))
    assert given == [6, 5]


def test_functions_are_found_by_path() -> None:
    """Also those in classes, but not those in functions, and not what another one stands in the place of."""
    assert written(_Holder.Inner, (), {}).function == f"{__name__}:_Holder.Inner"

    class Local(torch.autograd.Function):
        """In a function."""

    with pytest.raises(
        CaptureError, match=r"Local of tests.passes.test_ops cannot be found .* top level of its module"
    ):
        written(Local, (), {})
    with pytest.raises(ImportError, match="the program calls nowhere:Nothing, which this process cannot import"):
        read("nowhere:Nothing", "()", (), ())


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), {1, 2}, [object()], slice(1)])
def test_other_arguments_are_refused(value: object) -> None:
    """A value that would not come back as it was is refused."""
    with pytest.raises(CaptureError, match=r"is given a .*, which cannot be written into a program: give it tensors"):
        written(_Any, (value,), {})


def _call(cls: type, *args: object) -> Tensor:
    call = written(cls, args, {})
    result: Tensor = overload_for(1, drawn=False)(call.tensors, call.function, call.arguments)
    return result


def test_the_backward_is_the_functions_own() -> None:
    """A rounding whose gradient passes, and one that turns it around."""
    x = torch.tensor([0.2, 1.7, -3.4], requires_grad=True)
    result = _call(custom.Reversal, _call(custom.StraightThrough, x), 0.5)
    assert torch.equal(result, torch.tensor([0.0, 2.0, -3.0]))
    result.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([-0.5, -1.0, -1.5]))


def test_a_function_is_asked_which_gradients_are_needed() -> None:
    """Of two factors only one may need its own."""
    x, scale = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0)
    _call(custom.Scaled, x, scale, {"weight": 3.0}).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, scale)
    scale.requires_grad_()
    _call(custom.Scaled, x.detach(), scale, {"weight": 3.0}).sum().backward()
    assert scale.grad is not None
    assert torch.equal(scale.grad, torch.full((3,), 3.0))


def test_several_results() -> None:
    """They come as a list; one that is marked so has no gradient."""
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    call = written(custom.Centered, (x,), {})
    centered, mean = TRACED(call.tensors, call.function, call.arguments)
    assert torch.equal(centered + mean, x)
    assert (centered.requires_grad, mean.requires_grad) == (True, False)


@pytest.mark.long
def test_a_process_that_only_runs_has_the_operators() -> None:
    """Importing the runtime is enough: a program is planned in one process and runs in others."""
    source = inspect.cleandoc(f"""
        import torch
        import autopar.runtime
        x = torch.ones(2, requires_grad=True)
        torch.ops.autopar.autograd_function.one([x], "{PATH}:Reversal", "(x0, 2.0)").sum().backward()
        assert x.grad.tolist() == [-2.0, -2.0]
        assert torch.ops.autopar.delta_scan.default and torch.ops.autopar.selective_scan.default
    """)
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
