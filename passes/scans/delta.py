"""`autopar::delta_scan`: the states of linear attention by the delta rule (Yang et al. 2024), chunk after chunk.

    new = values - reads @ state
    result = query @ state + weights @ new
    next state = decay * state + key^T @ new, where decay is one number for each head, or for each row of its state

A trace of the loop has an op for each step of each chunk. This is one op, which saves its operands and the states; the
backward pass computes `new` again.

The state after a chunk is linear in that before it, plus something: (decay - key^T @ reads) @ state + key^T @ values.
So is that after several chunks (`carry`), which ranks with other chunks need to begin with theirs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scan_chunks(
    query: Tensor, key: Tensor, values: Tensor, reads: Tensor, weights: Tensor, decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The results, the states before all chunks, and the state after the last one.

    query, key, reads: [batch, heads, chunks, places, width]; values, results: [batch, heads, chunks, places, value
    width]; weights: [batch, heads, chunks, places, places]; decay: [batch, heads, chunks, width], or 1 in place of
    the width; a state: [batch, heads, width, value width], of which None is zero; the states: [batch, heads, chunks,
    width, value width].
    """
    result, states, last = _empty(key, values)
    now = last.zero_() if state is None else state
    for chunk in range(query.shape[2]):
        states[:, :, chunk] = now
        new = values[:, :, chunk] - reads[:, :, chunk] @ now
        result[:, :, chunk] = query[:, :, chunk] @ now + weights[:, :, chunk] @ new
        now = now * decay[:, :, chunk, :, None] + key[:, :, chunk].mT @ new
    return result, states, now.clone() if now is state else now


delta_scan = torch.library.custom_op("autopar::delta_scan", scan_chunks, mutates_args=())


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
    *operands, states = ctx.saved_tensors  # type: ignore[attr-defined]
    found, of_state = scan_gradients(operands, states, of_result, of_last)
    return *found, of_state if ctx.has_state else None  # type: ignore[attr-defined]


torch.library.register_autograd("autopar::delta_scan", _backward, setup_context=_keep)


def scan_gradients(
    operands: Sequence[Tensor], states: Tensor, of_result: Tensor | None, of_last: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The gradients of the six first operands of `delta_scan`, and of the state before all chunks."""
    query, key, values, reads, weights, decay = operands
    found = [torch.empty_like(each) for each in operands]
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
        of_decay[:, :, chunk] = _of_decay(of_now, now, decay.shape[-1])
        carried = of_now * decay[:, :, chunk, :, None]
        of_now = carried + query[:, :, chunk].mT @ own - reads[:, :, chunk].mT @ of_new
    return found, of_now


def carry(key: Tensor, values: Tensor, reads: Tensor, decay: Tensor) -> Tensor:
    """The state after all chunks as a function of that before them, `by @ state + more`: by and more side by side,
    [batch, heads, width, width + value width]. Operands are those of `delta_scan`."""
    now = _unchanged(key, values)
    for chunk in range(key.shape[2]):
        now = _next(now, key[:, :, chunk], values[:, :, chunk], reads[:, :, chunk], decay[:, :, chunk])
    return now


def add_carry_gradients(operands: Sequence[Tensor], of_carry: Tensor, found: Sequence[Tensor]) -> None:
    """Add to `found` the gradients of key, values, reads and decay, the `operands` of `carry`, whose result has the
    gradient `of_carry`. The states between chunks are computed again."""
    key, values, reads, decay = operands
    of_key, of_values, of_reads, of_decay = found
    width = key.shape[-1]
    states = [_unchanged(key, values)]
    for chunk in range(key.shape[2] - 1):
        states.append(_next(states[-1], key[:, :, chunk], values[:, :, chunk], reads[:, :, chunk], decay[:, :, chunk]))
    of_now = of_carry
    for chunk in reversed(range(key.shape[2])):
        now = states.pop()
        new = _new(now, values[:, :, chunk], reads[:, :, chunk])
        of_new = key[:, :, chunk] @ of_now
        of_key[:, :, chunk].add_(new @ of_now.mT)
        of_values[:, :, chunk].add_(of_new[..., width:])
        of_reads[:, :, chunk].sub_(of_new @ now.mT)
        of_decay[:, :, chunk].add_(_of_decay(of_now, now, decay.shape[-1]))
        of_now = of_now * decay[:, :, chunk, :, None] - reads[:, :, chunk].mT @ of_new


def _of_decay(of_next: Tensor, now: Tensor, channels: int) -> Tensor:
    """The gradient of the decay of a chunk, one for the whole state or one for each of its rows."""
    product = of_next * now
    return product.sum(-1) if channels > 1 else product.sum((-2, -1)).unsqueeze(-1)


def _unchanged(key: Tensor, values: Tensor) -> Tensor:
    """The function that returns the state that it is given."""
    batch, heads, _, _, width = key.shape
    found = values.new_zeros(batch, heads, width, width + values.shape[-1])
    found[..., :width].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return found


def _new(now: Tensor, values: Tensor, reads: Tensor) -> Tensor:
    """The new values of a chunk as a function of the state before all chunks."""
    new = (reads @ now).neg_()
    new[..., -values.shape[-1] :].add_(values)
    return new


def _next(now: Tensor, key: Tensor, values: Tensor, reads: Tensor, decay: Tensor) -> Tensor:
    """The state after a chunk as a function of the state before all chunks."""
    return (now * decay[..., None]).add_(key.mT @ _new(now, values, reads))
