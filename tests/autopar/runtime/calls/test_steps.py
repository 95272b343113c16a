"""Micro-batches at run time: parts of a rank's part, and what comes together of them."""

import contextlib

import pytest
import torch
from torch import Tensor

from autopar.runtime.calls.steps import forward_backward, parts, together
from autopar.runtime.generated.bases import Cut, MicroBatching


@pytest.mark.parametrize("where", [Cut(0, 1, 1), Cut(0, 1, 2), Cut(0, 3, 2), Cut(1, 1, 1), Cut(1, 2, 3)])
def test_parts_come_together(where: Cut) -> None:
    """Every element is in one part, and finds its place again."""
    whole = torch.arange(24 * 24).reshape(24, 24)
    cut = parts(whole, where, 2)
    assert torch.equal(together(cut, where), whole)
    assert torch.equal(torch.cat([part.flatten() for part in cut]).sort().values, whole.flatten())
    assert all(part.is_contiguous() for part in cut)


def test_each_group_gives_to_all_parts() -> None:
    """Two groups of four samples: each half has two of each group."""
    first, second = parts(torch.arange(8), Cut(0, 1, 2), 2)
    assert first.tolist() == [0, 1, 4, 5]
    assert second.tolist() == [2, 3, 6, 7]


class Still:
    """Nothing travels."""

    def holding_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to hold."""
        return contextlib.nullcontext()

    def keeping_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to keep."""
        return contextlib.nullcontext()


def test_totals_come_first_and_gradients_add_up() -> None:
    """The mean of those that count, two at a time."""
    weight = torch.tensor(2.0, requires_grad=True)
    values, counts = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([True, False, True, True])
    calls: list[str] = []

    def total(given: list[Tensor]) -> list[object]:
        calls.append("total")
        return [given[0].sum()]

    def program(given: list[Tensor]) -> list[object]:
        calls.append("program")
        part, counted, number = given
        scaled = weight * part
        return [scaled.where(counted, 0.0).sum() / number, scaled, "a name", number]

    batching = MicroBatching(2, (Cut(0, 1, 1), Cut(0, 1, 1)), ("P", Cut(0, 1, 1), "R", "R"), 0, None, ((1, ()),))
    loss, scaled, name, number = forward_backward(batching, [values, counts], (), total, program, Still())
    assert calls == ["total", "total", "program", "program"]
    torch.testing.assert_close(loss, torch.tensor(16.0 / 3))
    torch.testing.assert_close(weight.grad, torch.tensor(8.0 / 3))
    assert isinstance(scaled, Tensor)
    assert not scaled.requires_grad
    assert scaled.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert (name, number) == ("a name", torch.tensor(3))
