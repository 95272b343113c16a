"""The scan of linear attention where ranks have consecutive chunks each.

The state after a rank's chunks is a linear function of that before them, plus something. All ranks gather these
functions, so that each has the state before its own chunks without waiting for the ranks before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.generated.collectives import all_gather, reduce_scatter
from autopar.runtime.generated.digits import Digits
from autopar.runtime.state import Axis, rank_along
from passes.ir.layout import P, R, S
from passes.scans.delta import add_carry_gradients, carry, delta_scan, scan_gradients

# The dim of chunks.
_CHUNKS = 2


def split_delta_scan(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    reads: Tensor,
    weights: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    *,
    digits: Digits,
) -> tuple[Tensor, Tensor, Tensor]:
    """`delta_scan` of this rank's chunks: the results, the states before them, and the state after all chunks, which is
    the same on every rank. Shapes are those of `delta_scan`; `state` is that before all chunks."""
    axes = [axis for axis, _ in digits]
    operands = (query, key, values, reads, weights, decay, state)
    result, states, last = _SplitScan.apply(axes, *operands)  # type: ignore[no-untyped-call]
    return result, states, last


class _SplitScan(torch.autograd.Function):
    """The scan, which saves its operands, the states of its chunks, and the functions of all ranks."""

    @staticmethod
    def forward(ctx: Any, axes: Sequence[Axis], *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        *operands, state = given
        query, key, values, reads, weights, decay = (each for each in operands if each is not None)
        every = carry(key, values, reads, decay).unsqueeze(_CHUNKS)
        for axis in reversed(axes):
            every = all_gather(every, axis, src=S(_CHUNKS), dst=R)
        rank, _ = rank_along(axes)
        between = states_between(every, state)
        result, states, _ = delta_scan(query, key, values, reads, weights, decay, between[rank])
        ctx.axes, ctx.rank = axes, rank
        # The states are a result for the sake of the backward pass alone.
        ctx.mark_non_differentiable(states)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, values, reads, weights, decay, states, every, state)
        return result, states, between[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_result: Tensor | None, of_states: None, of_last: Tensor | None) -> tuple[Any, ...]:
        *operands, states, every, state = ctx.saved_tensors
        of_before: Tensor | None
        of_state: Tensor | None
        found, of_before = scan_gradients(operands, states, of_result, None)
        # All ranks have the gradient of the last state; the sum over them has it once.
        of_every, of_state = gradients_between(every, state, of_before, ctx.rank, of_last if ctx.rank == 0 else None)
        # What is not returned is freed.
        of_before, of_state = None, None if state is None else of_state
        for axis in ctx.axes:
            of_every = reduce_scatter(of_every, axis, src=P, dst=S(_CHUNKS))
        passing = (1, 2, 3, 5)
        add_carry_gradients(
            [operands[slot] for slot in passing], of_every.squeeze(_CHUNKS), [found[slot] for slot in passing]
        )
        return None, *found, of_state


def states_between(every: Tensor, state: Tensor | None) -> list[Tensor]:
    """The states before the chunks of each rank, and that after all.

    every: [batch, heads, ranks, width, width + value width], what `carry` gives of the chunks of each rank.
    """
    width = every.shape[-2]
    found = [torch.zeros_like(every[:, :, 0, :, width:]) if state is None else state]
    for rank in range(every.shape[_CHUNKS]):
        by, more = every[:, :, rank, :, :width], every[:, :, rank, :, width:]
        found.append(by @ found[-1] + more)
    return found


def gradients_between(
    every: Tensor, state: Tensor | None, of_before: Tensor, own: int, of_last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of `every` and of the state before all chunks, where that before the chunks of rank `own` has the
    gradient `of_before`, and that after all `of_last`."""
    width = every.shape[-2]
    between, found = states_between(every, state), torch.zeros_like(every)
    of_now = of_last
    for rank in reversed(range(every.shape[_CHUNKS])):
        if of_now is not None:
            found[:, :, rank, :, :width] = of_now @ between[rank].mT
            found[:, :, rank, :, width:] = of_now
            of_now = every[:, :, rank, :, :width].mT @ of_now
        if rank == own:
            of_now = of_before if of_now is None else of_now + of_before
    assert of_now is not None
    return found, of_now
