"""`autopar::delta_scan`: the states of linear attention by the delta rule (Yang et al. 2024), chunk after chunk.

    new = values - reads @ state
    result = query @ state + weights @ new
    next state = decay * state + key^T @ new

A trace of the loop has an op for each step of each chunk. This is one op, which saves its operands and the states; the
backward pass computes `new` again.
"""

import torch
from torch import Tensor

DELTA_SCAN = "autopar.delta_scan.default"


@torch.library.custom_op("autopar::delta_scan", mutates_args=())
def delta_scan(
    query: Tensor, key: Tensor, values: Tensor, reads: Tensor, weights: Tensor, decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The results, the states before all chunks, and the state after the last one.

    query, key, reads: [batch, heads, chunks, places, width]; values, results: [batch, heads, chunks, places, value
    width]; weights: [batch, heads, chunks, places, places]; decay: [batch, heads, chunks]; a state: [batch, heads,
    width, value width], of which None is zero; the states: [batch, heads, chunks, width, value width].
    """
    result, states, last = _empty(key, values)
    now = last.zero_() if state is None else state
    for chunk in range(query.shape[2]):
        states[:, :, chunk] = now
        new = values[:, :, chunk] - reads[:, :, chunk] @ now
        result[:, :, chunk] = query[:, :, chunk] @ now + weights[:, :, chunk] @ new
        now = now * decay[:, :, chunk, None, None] + key[:, :, chunk].mT @ new
    return result, states, now.clone() if now is state else now


def _empty(key: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like the results."""
    batch, heads, chunks, places, wide = values.shape
    states = values.new_empty(batch, heads, chunks, key.shape[-1], wide)
    result = values.new_empty(batch, heads, chunks, places, wide)
    return result, states, values.new_empty(batch, heads, key.shape[-1], wide)


@delta_scan.register_fake
def _(
    query: Tensor, key: Tensor, values: Tensor, reads: Tensor, weights: Tensor, decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(key, values)


def _keep(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor | None, ...],
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    operands = [each for each in inputs[:-1] if each is not None]
    # The states are a result for the sake of the backward pass alone.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, output[1])
    ctx.has_state = inputs[-1] is not None  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, of_result: Tensor | None, of_states: None, of_last: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, values, reads, weights, decay, states = ctx.saved_tensors  # type: ignore[attr-defined]
    found = [torch.empty_like(each) for each in (query, key, values, reads, weights, decay)]
    of_query, of_key, of_values, of_reads, of_weights, of_decay = found
    of_result = torch.zeros_like(values) if of_result is None else of_result
    of_now = torch.zeros_like(states[:, :, 0]) if of_last is None else of_last
    for chunk in reversed(range(query.shape[2])):
        own, now = of_result[:, :, chunk], states[:, :, chunk]
        new = values[:, :, chunk] - reads[:, :, chunk] @ now
        of_new = weights[:, :, chunk].mT @ own + key[:, :, chunk] @ of_now
        of_query[:, :, chunk] = own @ now.mT
        of_key[:, :, chunk] = new @ of_now.mT
        of_values[:, :, chunk] = of_new
        of_reads[:, :, chunk] = -of_new @ now.mT
        of_weights[:, :, chunk] = own @ new.mT
        of_decay[:, :, chunk] = (of_now * now).sum((-2, -1))
        carried = of_now * decay[:, :, chunk, None, None]
        of_now = carried + query[:, :, chunk].mT @ own - reads[:, :, chunk].mT @ of_new
    return *found, of_now if ctx.has_state else None  # type: ignore[attr-defined]


torch.library.register_autograd("autopar::delta_scan", _backward, setup_context=_keep)
