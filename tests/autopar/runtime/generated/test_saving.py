"""Recompute gives the same gradients and keeps nothing but the operands."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime import recomputed
from autopar.runtime.generated.saving import saving


def _chain(x: Tensor, weight: Tensor, kept: list[StorageWeakRef]) -> Tensor:
    """A product of what four cheap steps make, one of which autograd keeps the result of, and one a view of."""
    power = recomputed(lambda x: x.pow(2), x)
    root = recomputed(lambda power: (power + 1.0).rsqrt(), power)
    scaled = recomputed(lambda x, root: x * root, x, root)
    turned = recomputed(lambda scaled: scaled.tanh(), scaled)
    kept += [StorageWeakRef(item.untyped_storage()) for item in (power, root, scaled, turned)]
    return turned.t() @ weight


def test_gradients_are_the_same_and_nothing_is_kept() -> None:
    """All tensors between the operands and the product are freed after the forward pass."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    plain: list[StorageWeakRef] = []
    expected = torch.autograd.grad(_chain(x, weight, plain).sum(), (x, weight))
    kept: list[StorageWeakRef] = []
    with saving():
        result = _chain(x, weight, kept)
    assert all(item.expired() for item in kept)
    got = torch.autograd.grad(result.sum(), (x, weight))
    assert all(map(torch.equal, got, expected))


def test_without_saving_all_is_kept() -> None:
    """As autograd does it."""
    x = torch.randn(4, 3, requires_grad=True)
    kept: list[StorageWeakRef] = []
    result = _chain(x, torch.randn(4, 2), kept)
    assert not kept[3].expired() or not kept[2].expired()
    result.sum().backward()


def test_twice_backward() -> None:
    """A graph that is kept can be gone through again."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with saving():
        loss = _chain(x, torch.randn(4, 2, dtype=torch.float64), []).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize(
    "view",
    [
        torch.view_as_real,
        torch.conj,
        lambda made: torch.view_as_real(made)[..., 1],
        lambda made: made.conj().imag,
        lambda made: made.conj().t()[1:],
    ],
)
def test_views_of_complex_numbers(view: Callable[[Tensor], Tensor]) -> None:
    """Parts and conjugates of what is made again are kept as views of it, whatever type they have."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.complex128, requires_grad=True)

    def loss() -> Tensor:
        seen = view(recomputed(lambda x: x * x, x))
        return (seen * seen.detach().cos() + seen * seen).abs().square().sum()

    (expected,) = torch.autograd.grad(loss(), x)
    with saving():
        result = loss()
    (got,) = torch.autograd.grad(result, x)
    assert torch.equal(got, expected)


def test_what_changed_is_refused() -> None:
    """As autograd does it."""
    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(4, 2)
    with saving():
        loss = _chain(x, weight, []).sum()
    with torch.no_grad():
        x += 1.0
    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        loss.backward()
