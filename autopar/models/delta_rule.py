"""Models of `transformers` with linear attention by the delta rule, with decays of heads (Gated DeltaNet, Yang et al.
2024) or of their channels (Kimi Delta Attention, Kimi Linear 2025).

Without its kernels `transformers` computes it in loops, over the places of a chunk where a trace is made, and over the
chunks. A trace has an op for each step of these in each layer. Here the places of a chunk are one triangular solve, as
`transformers` does outside of traces, and the chunks are one op.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from passes.scans.delta import delta_scan

_EPSILON = 1e-6
# Places whose decays to each other are computed channel by channel; beyond these they go by the first of such a block.
_BLOCK = 16


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention, and the last state where it is asked for, in single precision.

    query, key: [batch, length, heads, width]; value, and the result: [batch, length, value heads, value width]; the
    logarithms of decays `g`: [batch, length, value heads], or [batch, length, value heads, width] where every channel
    has its own; the rates `beta`: [batch, length, value heads]; a state: [batch, value heads, width, value width].
    """
    dtype, length, groups = query.dtype, query.shape[1], value.shape[2] // query.shape[2]
    if groups > 1:
        query, key = (each.repeat_interleave(groups, 2) for each in (query, key))
    query, key, value, decay, rate = (
        each.transpose(1, 2).to(torch.float32).contiguous() for each in (query, key, value, g, beta)
    )
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt(each.square().sum(-1, True) + _EPSILON) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    wide, narrow = key * rate[..., None], value * rate[..., None]
    query, key, wide, narrow = (_in_chunks(each, chunk_size, 2) for each in (query, key, wide, narrow))
    total = _in_chunks(decay if decay.dim() == 4 else decay[..., None], chunk_size, 2).cumsum(-2)
    products = _by_channels if decay.dim() == 4 else _by_heads
    system, weights = products(wide, key, total), products(query, key, total)
    since = total.exp()
    values, reads = (
        torch.linalg.solve_triangular(system, each, upper=False, unitriangular=True) for each in (narrow, wide * since)
    )
    left = (total[..., -1:, :] - total).exp()
    state = None if initial_state is None else initial_state.to(values.dtype)
    made, _, last = delta_scan(query * since, key * left, values, reads, weights, total[..., -1, :].exp(), state)
    result = made.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype).contiguous()
    return result, last if output_final_state else None


def _by_heads(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The product of each place in `left` with each place before it, or itself, in `right`, as much as decays leave of
    it: [..., places, places], zero after the diagonal.

    left, right: [..., places, width]; `total`, the logarithms of all decays of a chunk up to each place: [..., places,
    1].
    """
    later = _later(total.shape[-2], total.device)
    between = (total - total.mT).masked_fill(later, float("-inf")).exp()
    return left @ right.mT * between


def _by_channels(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """`_by_heads` where `total` is [..., places, width].

    The decay between two places is in no product of two matrices, unless it is cut in two: that to the first place of
    a block, and that from there. Both are below one for places before the block, so that nothing overflows; those
    within a block are multiplied channel by channel (as the kernels of flash-linear-attention do).
    """
    *above, places, width = left.shape
    size = _BLOCK if places % _BLOCK == 0 else places
    count = places // size
    rows, columns, totals = (each.reshape(*above, count, size, width) for each in (left, right, total))
    later = _later(size, total.device)
    near = (totals[..., :, None, :] - totals[..., None, :, :]).masked_fill(later[..., None], float("-inf")).exp()
    within = (rows[..., :, None, :] * columns[..., None, :, :] * near).sum(-1)
    if count == 1:
        return within.reshape(*above, places, places)
    first = totals[..., :1, :]
    # The blocks that a place is not before.
    passed = torch.arange(count, device=total.device)[:, None] * size <= torch.arange(places, device=total.device)
    until = (first - total[..., None, :, :]).masked_fill(passed[..., None], float("-inf")).exp()
    across = (rows * (totals - first).exp()) @ (right[..., None, :, :] * until).mT
    own = torch.eye(count, dtype=within.dtype, device=within.device)[:, None, :, None]
    found = across.reshape(*above, count, size, count, size) + within[..., None, :] * own
    return found.reshape(*above, places, places)


def _later(places: int, device: torch.device) -> Tensor:
    """Whether the second of two places comes after the first."""
    return torch.ones(places, places, dtype=torch.bool, device=device).triu(1)


def _in_chunks(tensor: Tensor, size: int, dim: int) -> Tensor:
    """`tensor` with zeros after the end of `dim`, which is cut into chunks of `size`."""
    more = -tensor.shape[dim] % size
    if more:
        tensor = pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, more))
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
