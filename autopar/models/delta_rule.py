"""Models of `transformers` with linear attention by the gated delta rule (Yang et al. 2024).

Without its kernels `transformers` computes it in loops, over the places of a chunk where a trace is made, and over the
chunks. A trace has an op for each step of these in each layer. Here the places of a chunk are one triangular solve, as
`transformers` does outside of traces, and the chunks are one op.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from passes.capture.source import replaced
from passes.ir.log import logger
from passes.scans import delta_scan

# The function of modules of `transformers`, and the arguments that it has in all of them.
_FUNCTION = "torch_chunk_gated_delta_rule"
_KNOWN = (
    "query", "key", "value", "g", "beta",
    "chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
)  # fmt: skip
# Arguments for kernels: without these `transformers` refuses them.
_DOCUMENTS = ("cu_seqlens", "seq_idx")
_EPSILON = 1e-6

Given = Tensor | int | bool | None
Rule = Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def without_loops(model: nn.Module) -> Iterator[None]:
    """Enter around a trace of `model`: the delta rule in chunks is computed without loops."""
    with ExitStack() as stack:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            found: Rule | None = getattr(sys.modules.get(name), _FUNCTION, None)
            if found is None:
                continue
            if set(_KNOWN) <= set(inspect.signature(found).parameters):
                stack.enter_context(replaced(sys.modules[name], _FUNCTION, partial(_called, found)))
            else:
                logger.info("this version of transformers has another delta rule, which is traced in its loops")
        yield


def _called(original: Rule, *given: Given, **named: Given) -> tuple[Tensor, Tensor | None]:
    """A call of the function of `transformers`."""
    if any(named.get(name) is not None for name in _DOCUMENTS):
        return original(*given, **named)
    arguments = inspect.signature(original).bind(*given, **named).arguments
    return cast(Rule, gated_delta_rule)(**{name: arguments[name] for name in _KNOWN if name in arguments})


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
    logarithms of decays `g` and the rates `beta`: [batch, length, value heads]; a state: [batch, value heads, width,
    value width].
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
    total = _in_chunks(decay, chunk_size, 2).cumsum(-1)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=total.device).triu(1)
    # The decay from each place of a chunk to each later one.
    between = (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    system, weights = wide @ key.mT * between, query @ key.mT * between
    since = total.exp()[..., None]
    values, reads = (
        torch.linalg.solve_triangular(system, each, upper=False, unitriangular=True) for each in (narrow, wide * since)
    )
    left = (total[..., -1:] - total).exp()[..., None]
    state = None if initial_state is None else initial_state.to(values.dtype)
    made, _, last = delta_scan(query * since, key * left, values, reads, weights, total[..., -1].exp(), state)
    result = made.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype).contiguous()
    return result, last if output_final_state else None


def _in_chunks(tensor: Tensor, size: int, dim: int) -> Tensor:
    """`tensor` with zeros after the end of `dim`, which is cut into chunks of `size`."""
    more = -tensor.shape[dim] % size
    if more:
        tensor = pad(tensor, (*(0, 0) * (tensor.dim() - 1 - dim), 0, more))
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
