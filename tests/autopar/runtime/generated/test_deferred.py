"""Products whose weight gradients are computed apart: as autograd computes them, only later."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.runtime.generated.deferred import DeferredGradients

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Product, Callable[[DeferredGradients], Product], tuple[int, ...]]] = {
    "linear": (functional.linear, lambda apart: apart.linear, (5, 4)),
    "addmm": (lambda x, w, b: torch.addmm(b, x[0], w), lambda apart: lambda x, w, b: apart.addmm(b, x[0], w), (4, 5)),
    "matmul": (lambda x, w, b: x @ w + b, lambda apart: lambda x, w, b: apart.matmul(x, w) + b, (4, 5)),
    "experts": (lambda x, w, b: x @ w + b, lambda apart: lambda x, w, b: apart.matmul(x, w) + b, (6, 4, 5)),
    "one matrix for the batch": (
        lambda x, w, b: x @ w + b,
        lambda apart: lambda x, w, b: apart.matmul(x, w) + b,
        (1, 4, 5),
    ),
}


def leaves(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """An operand, a weight and a bias."""
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((6, 3, 4), shape, (5,))]


def computed(apart: DeferredGradients) -> int:
    """Compute the gradients that are left; their number."""
    due = apart.take()
    for each in due:
        each.accumulate()
    return len(due)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_autograd(name: str) -> None:
    """The backward pass leaves the weight, and computes all else; two micro-batches that overlap add up."""
    plain, deferred, shape = CASES[name]
    expected, found, apart = leaves(shape), leaves(shape), DeferredGradients()
    for scale in (1.0, 2.0):
        plain(scale * expected[0], *expected[1:]).square().sum().backward()
    # The second forward pass comes before the first gradients are taken.
    first, second = (deferred(apart)(scale * found[0], *found[1:]).square().sum() for scale in (1.0, 2.0))
    first.backward()
    assert found[1].grad is None
    assert computed(apart) == 1
    second.backward()
    assert computed(apart) == 1
    assert computed(apart) == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_what_a_weight_is_computed_from_comes_later() -> None:
    """A weight that is cast and transposed, and read twice."""

    def run(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
        weight = w.double().transpose(0, 1) * 3.0
        return product(product(x, weight).relu(), weight).square().sum()

    grads = []
    for apart in (None, DeferredGradients()):
        torch.manual_seed(0)
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        w = nn.Parameter(torch.randn(4, 4))
        run(functional.linear if apart is None else apart.linear, x, w).backward()
        if apart is not None:
            assert w.grad is None
            assert computed(apart) == 2
        grads.append((x.grad, w.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_recomputation_runs_once() -> None:
    """A checkpointed product is computed twice in all: forward, and again in the backward pass alone."""
    x, w, _ = leaves((5, 4))
    apart, runs = DeferredGradients(), []

    def run(given: Tensor) -> Tensor:
        runs.append(1)
        return apart.linear(apart.linear(given, w).sin() @ w, w)

    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).square().sum().backward()
    assert w.grad is not None
    plain = [tensor.detach().requires_grad_() for tensor in (x, w)]
    functional.linear(functional.linear(*plain).sin() @ plain[1], plain[1]).square().sum().backward()
    assert computed(apart) == 2
    assert len(runs) == 2
    torch.testing.assert_close(w.grad, plain[1].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_without_one_of_the_gradients_nothing_is_left(frozen: int) -> None:
    """A weight times what takes no gradient is the backward pass's own, as a frozen weight is nobody's."""
    expected, found, apart = leaves((5, 4)), leaves((5, 4)), DeferredGradients()
    for own in (expected, found):
        own[frozen].requires_grad_(False)
    functional.linear(*expected).square().sum().backward()
    apart.linear(*found).square().sum().backward()
    assert computed(apart) == 0
    for one, other in zip(found, expected, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_autocast() -> None:
    """Products are cast as torch casts its own, gradients back."""
    expected, found, apart = leaves((5, 4), torch.float32), leaves((5, 4), torch.float32), DeferredGradients()
    with torch.autocast("cpu", torch.bfloat16):
        whole, result = functional.linear(*expected), apart.linear(*found)
    assert result.dtype == whole.dtype == torch.bfloat16
    whole.float().square().sum().backward()
    result.float().square().sum().backward()
    assert computed(apart) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)
