"""A linear layer and its cross entropy in chunks give the loss and the gradients of the operator, and no tensor of all
tokens by classes."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from autopar.runtime.generated.linear_loss import linear_cross_entropy
from passes.ir.arguments import find_overload
from passes.ir.linear_loss import token_chunks
from passes.ops import LINEAR_LOSS
from tests.autopar.runtime.generated.largest import Largest

WIDTH, CLASSES = 8, 24
# By name: tokens, and options; chunks have 8 tokens at most.
CASES: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "several chunks": (40, {}),
    "chunks of unequal sizes": (29, {}),
    "one chunk": (8, {}),
    "a soft cap and a scale": (40, {"soft_cap": 2.0, "scale": 0.7}),
    "a scale": (7, {"scale": 0.3}),
    "another label is ignored": (40, {"ignore_index": 3}),
    "a bias": (40, {"bias": True}),
    "a bias, one chunk": (6, {"bias": True}),
    "a bias, a soft cap": (23, {"bias": True, "soft_cap": 3.0}),
}


def _operands(tokens: int, dtype: torch.dtype = torch.float64, *, ignored: int = -100) -> tuple[Tensor, ...]:
    """Hidden states, weight, labels of which whole chunks are ignored, and a bias."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((tokens, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    labels = torch.randint(0, CLASSES, (tokens,), generator=generator)
    labels[1] = ignored
    labels[8:17] = ignored
    return hidden, weight, labels, bias


def _case(name: str) -> tuple[Sequence[Tensor], Tensor, dict[str, object]]:
    tokens, given = CASES[name]
    options = dict(given)
    hidden, weight, labels, bias = _operands(tokens, ignored=options.get("ignore_index", -100))  # type: ignore[arg-type]
    if options.pop("bias", False):
        return (hidden, weight, bias), labels, {"bias": bias, **options}
    return (hidden, weight), labels, options


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name: str, at_once: bool) -> None:
    """Also a second time, and of a multiple; and the loss without gradients."""
    operands, labels, options = _case(name)
    hidden, weight = operands[:2]
    expected = find_overload(LINEAR_LOSS)(hidden, weight, labels, **options) / 7
    found = linear_cross_entropy(hidden, weight, labels, at_once=at_once, **options) / 7  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    gradients = torch.autograd.grad(expected, operands)
    for factor in (1.0, -3.0):
        again = torch.autograd.grad(found, operands, torch.tensor(factor, dtype=torch.float64), retain_graph=True)
        for one, other in zip(again, gradients, strict=True):
            torch.testing.assert_close(one, factor * other, rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, labels, at_once=at_once, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(alone / 7, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tokens", [8, 40])
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_frozen_operands(trained: tuple[int, ...], tokens: int) -> None:
    """Those that take no gradient have none, and the others the same."""
    hidden, weight, labels, bias = _operands(tokens)
    given = [each.detach().requires_grad_(slot in trained) for slot, each in enumerate((hidden, weight, bias))]
    operands = [given[slot] for slot in trained]
    expected = torch.autograd.grad(find_overload(LINEAR_LOSS)(*given[:2], labels, given[2]), operands)
    found = torch.autograd.grad(linear_cross_entropy(*given[:2], labels, bias=given[2]), operands)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("at_once", [False, True])
def test_no_label_counts(at_once: bool) -> None:
    """The mean is no number, and its gradients are zero, as torch has it."""
    hidden, weight, labels, _ = _operands(40)
    labels = torch.full_like(labels, -100)
    for loss in (find_overload(LINEAR_LOSS)(hidden, weight, labels),
                 linear_cross_entropy(hidden, weight, labels, at_once=at_once)):  # fmt: skip
        mean = loss / (labels != -100).sum()
        assert mean.isnan()
        assert all(not each.any() for each in torch.autograd.grad(mean, (hidden, weight)))


@pytest.mark.parametrize("at_once", [False, True])
def test_half_precision(at_once: bool) -> None:
    """Loss and gradients are as near to those in float64 as the operator's, within a quarter."""
    tokens = 512
    hidden, weight, labels, _ = _operands(tokens, torch.bfloat16)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    truth = find_overload(LINEAR_LOSS)(*wide, labels) / tokens
    expected = find_overload(LINEAR_LOSS)(hidden, weight, labels, dtype=torch.float32) / tokens
    found = linear_cross_entropy(hidden, weight, labels, dtype=torch.float32, at_once=at_once) / tokens
    assert found.dtype is torch.float32
    assert abs(found - truth) <= 1.25 * abs(expected - truth) + 1e-6
    exact = torch.autograd.grad(truth, wide)
    pairs = zip(exact, *(torch.autograd.grad(each, (hidden, weight)) for each in (expected, found)), strict=True)
    for right, one, other in pairs:
        assert other.dtype is torch.bfloat16
        assert (other - right).norm() <= 1.25 * (one - right).norm()


def test_no_logits_of_all_tokens_are_made() -> None:
    """The largest tensor is a chunk's, forward and backward."""
    tokens, width, classes = 1024, 32, 512
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long)).backward()
    assert token_chunks(tokens, width) == 32
    assert largest.bytes == max(width * classes, tokens * width) * 4
