"""The scan of selective state spaces where ranks have consecutive places each.

A state decays element by element, so what a rank's places do to a state is a factor and something that is added. All
ranks gather these, so that each has the state before its own places without waiting for the ranks before it. In the
backward pass the gradients of states go the other way, likewise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.generated.collectives import all_gather
from autopar.runtime.generated.digits import Digits
from autopar.runtime.state import Axis, rank_along
from passes.ir.layout import R, S
from passes.scans.selective import Blocks

# The dim of ranks.
_RANKS = 2


def split_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, digits: Digits
) -> tuple[Tensor, Tensor]:
    """`selective_scan` of this rank's places: the results, and the state after all places, which is the same on every
    rank. Shapes are those of `selective_scan`."""
    axes = [axis for axis, _ in digits]
    results, last = _SplitScan.apply(axes, x, dt, a, b, c)  # type: ignore[no-untyped-call]
    return results, last


class _SplitScan(torch.autograd.Function):
    """The scan, which saves its operands, the state before its places, and the factors of all ranks."""

    @staticmethod
    def forward(ctx: Any, axes: Sequence[Axis], *operands: Tensor) -> tuple[Tensor, Tensor]:
        blocks = Blocks.of(*operands)
        _, end = blocks.states(None)
        factors, ends = _of_all_ranks(torch.cat((blocks.factor(), end)), axes).chunk(2)
        before, last = states_between(factors, ends, rank_along(axes)[0])
        states, _ = blocks.states(before)
        ctx.axes = axes
        ctx.set_materialize_grads(False)
        # Not with the ends, which it is a part of.
        ctx.save_for_backward(*operands, before, factors.clone())
        return blocks.results(states).to(operands[0].dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_results: Tensor | None, of_last: Tensor | None) -> tuple[Any, ...]:
        *operands, before, factors = ctx.saved_tensors
        blocks = Blocks.of(*operands)
        by_place = blocks.by_place(torch.zeros_like(operands[0]) if of_results is None else of_results)
        of_ends = blocks.of_ends(by_place)
        _, of_before = blocks.of_states(of_ends, None)
        every = _of_all_ranks(of_before, ctx.axes)
        of_end = gradient_after(factors, every, rank_along(ctx.axes)[0], of_last)
        after, _ = blocks.of_states(of_ends, of_end)
        del of_ends
        states, _ = blocks.states(before)
        return None, *blocks.gradients(operands, states, by_place, after)


def states_between(factors: Tensor, ends: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The states before the places of rank `own`, and after those of all ranks.

    factors, ends: what the places of each rank do to a state, [batch, channels, ranks, width].
    """
    now = before = torch.zeros_like(ends[:, :, 0])
    for rank in range(ends.shape[_RANKS]):
        before = now if rank == own else before
        now = torch.addcmul(ends[:, :, rank], factors[:, :, rank], now)
    return before, now


def gradient_after(factors: Tensor, of_befores: Tensor, own: int, of_last: Tensor | None) -> Tensor:
    """The gradient of the state after the places of rank `own`.

    of_befores: the gradients that the results of each rank give the state before its places, [batch, channels, ranks,
    width]; of_last: that of the state after the places of all ranks, which all ranks have.
    """
    now = torch.zeros_like(of_befores[:, :, 0]) if of_last is None else of_last
    for rank in reversed(range(own + 1, of_befores.shape[_RANKS])):
        now = torch.addcmul(of_befores[:, :, rank], factors[:, :, rank], now)
    return now


def _of_all_ranks(own: Tensor, axes: Sequence[Axis]) -> Tensor:
    """[batch, channels, ranks, width] of [batch, channels, width] on each."""
    every = own.unsqueeze(_RANKS)
    for axis in reversed(axes):
        every = all_gather(every, axis, src=S(_RANKS), dst=R)
    return every
