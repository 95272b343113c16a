"""The scan of linear attention: its gradients, and what it saves."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from passes.scans.delta import add_carry_gradients, carry, delta_scan


def _operands(*, state: bool, channels: int = 1) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 3, 4, 3), (1, 2, 3, 4, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 3), (1, 2, 3, 4, 4)]
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in [*shapes, (1, 2, 3, channels), (1, 2, 3, 5)]
    ]
    return [*drawn[:6], drawn[6] if state else None]


def test_gradients() -> None:
    """Of the results and the last state, of each alone, and without a state at first."""
    for state, channels in ((True, 1), (False, 1), (True, 3)):
        operands = _operands(state=state, channels=channels)
        for results in (slice(0, 3, 2), slice(0, 1), slice(2, 3)):
            assert gradcheck(lambda *given, own=results: delta_scan(*given)[own], operands, fast_mode=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_chunks_follow_each_other(channels: int) -> None:
    """Two halves, the second from the last state of the first, give what the whole does."""
    *operands, state = _operands(state=True, channels=channels)
    whole = delta_scan(*operands, state)
    first = delta_scan(*(each[:, :, :1] for each in operands if each is not None), state)
    second = delta_scan(*(each[:, :, 1:] for each in operands if each is not None), first[2])
    for one, parts in zip(whole[:2], zip(first[:2], second[:2], strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), one)
    torch.testing.assert_close(second[2], whole[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_chunks_as_a_function_of_the_state_before(channels: int) -> None:
    """It gives the last state for any state before, and its gradients those of autograd."""
    *operands, state = _operands(state=True, channels=channels)
    (query, key, values, reads, weights, decay), before = (each for each in operands if each is not None), state
    assert before is not None
    given = key, values, reads, decay
    function = carry(*given)
    by, more = function[..., :3], function[..., 3:]
    torch.testing.assert_close(by @ before + more, delta_scan(query, key, values, reads, weights, decay, before)[2])
    cotangent = torch.randn_like(function)
    expected = torch.autograd.grad(function, given, cotangent)
    found = [torch.ones_like(each) for each in given]
    with torch.no_grad():
        add_carry_gradients(given, cotangent, found)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted + 1)
