"""Attention as models write it out, in chunks of queries, without scores of all of them.

No kernel has soft caps, sinks, or biases with gradients. Scores of a chunk are computed for the keys that its queries
reach, and computed again in the backward pass, which saves the operands alone. All is computed in the dtypes in which a
model does it, and the softmax of a query is over all of its keys at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.generated.digits import Digits, places
from passes._torch import DataDependentOutputException
from passes.ir.bands import CHUNK, Band, band_of

Documents = tuple[Tensor, Tensor]


class Options(TypedDict, total=False):
    """Options of attention in chunks. `bias`, `mask` and the documents of queries have the queries of this rank."""

    bias: Tensor | None
    sink: Tensor | None
    mask: Tensor | None
    documents: Documents | None
    digits: Digits
    causal: bool
    window: tuple[int, int] | None
    scale: float | None
    soft_cap: float | None
    dtype: torch.dtype | None
    fills: str
    least: float | None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """Attention of a part of the queries to all keys, as `autopar::chunked_attention` has it (see `passes/ops.py`).

    query: [batch, heads, queries of this rank, width]; key: [batch, key heads, keys, width]; value: [batch, key heads,
    keys, value width].
    """
    given, form = _read(query, key, value, options)
    return _attended(given, form, _chunks(query.shape[2], key.shape[2], form.digits, form.band, CHUNK))


def largest_chunk(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """The same, of which only the chunk with most scores is computed: it takes the same memory."""
    given, form = _read(query, key, value, options)
    chunks = _chunks(query.shape[2], key.shape[2], form.digits, form.band, CHUNK)
    by_scores = sorted(chunks, key=lambda chunk: _length(chunk.queries) * _length(chunk.keys))
    return _attended(given, form, by_scores[-1:])


def _read(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple["_Given", "_Form"]:
    scale, digits = options.get("scale"), tuple(options.get("digits", ()))
    band = band_of(options.get("causal", False), options.get("window"))
    tensors = (options.get(name) for name in ("bias", "sink", "mask"))
    given = _Given(query, key, value, *tensors, *(options.get("documents") or (None, None)))  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    how = options.get("soft_cap"), options.get("dtype"), options.get("fills", ""), options.get("least")
    return given, _Form(scale, *how, band, digits)


def _attended(given: "_Given", form: "_Form", chunks: Sequence["_Chunk"]) -> Tensor:
    result: Tensor = _ChunkedAttention.apply(*given, form, chunks)  # type: ignore[no-untyped-call]
    return result


class _Given(NamedTuple):
    """The operands; `mask` are flags, and `queries` and `keys` the numbers of documents."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None
    mask: Tensor | None
    queries: Tensor | None
    keys: Tensor | None


@dataclass(frozen=True)
class _Form:
    """The form of scores: scale, soft cap, the dtype of the softmax, what a mask fills, with which number (None: the
    least of the dtype of scores), the band, and the digits of this rank's queries."""

    scale: float
    cap: float | None
    dtype: torch.dtype | None
    fills: str
    least: float | None
    band: Band
    digits: Digits


class _Chunk(NamedTuple):
    """Local queries at ascending `places` in the sequence, and all the keys that they reach."""

    queries: slice
    keys: slice
    places: Sequence[int]

    def at(self, device: torch.device) -> Tensor:
        """The places on a device, which makes them itself where they are at equal distances: to copy them would wait
        for it."""
        where = self.places
        if isinstance(where, range):
            return torch.arange(where.start, where.stop, where.step, device=device)
        return torch.tensor(where, device=device)


@lru_cache(maxsize=128)
def _chunks(count: int, size: int, digits: Digits, band: Band, most: int) -> tuple[_Chunk, ...]:
    """The chunks of this rank's `count` queries, of at most so many queries each."""
    own = np.arange(count) if band.is_full else places(count, size, digits)
    found = []
    for start in range(0, count, most):
        queries = slice(start, min(start + most, count))
        there = tuple(map(int, own[queries]))
        first = 0 if band.before is None else max(0, there[0] - band.before)
        last = size if band.after is None else min(size, there[-1] + band.after + 1)
        found.append(_Chunk(queries, slice(first, last), () if band.is_full else _as_range(there)))
    return tuple(found)


def _as_range(places: tuple[int, ...]) -> Sequence[int]:
    """Ascending places as a range, where they are at equal distances."""
    step = places[1] - places[0] if len(places) > 1 else 1
    found = range(places[0], places[-1] + 1, step)
    return found if tuple(found) == places else places


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class _ChunkedAttention(torch.autograd.Function):
    """Attention in chunks, which are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """The result, in the dtype of the value; `arguments` are those of `_Given`, the form and the chunks."""
        given, form, chunks = _Given(*arguments[:8]), arguments[8], arguments[9]
        chunks = _widened(chunks, given, form)
        ctx.save_for_backward(*given)
        ctx.about = form, chunks
        given = _laid_out(given)
        query, value = given.query, given.value
        result = value.new_empty(*query.shape[:3], value.shape[3])
        for chunk in chunks:
            weights = _weights(_scores(given, form, chunk)[0], given, form)[0]
            result[:, :, chunk.queries] = _product(weights.to(value.dtype), value[:, :, chunk.keys])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value, bias and sink."""
        form, chunks = ctx.about
        given = _Given(*ctx.saved_tensors)
        gradients = _Gradients(given, ctx.needs_input_grad)
        given = _laid_out(given)
        for chunk in chunks:
            _add_gradients(gradients, given, form, chunk, gradient[:, :, chunk.queries])
        return (*gradients.finished(), *[None] * 5)


def _laid_out(given: _Given) -> _Given:
    """Keys and values one after another in memory, so that products of parts of them copy nothing."""
    return given._replace(key=given.key.contiguous(), value=given.value.contiguous())


def _widened(chunks: Sequence[_Chunk], given: _Given, form: _Form) -> Sequence[_Chunk]:
    """`chunks`, with all keys where a query sees none: it attends to all alike. With a sink it attends to that."""
    if given.mask is None or given.sink is not None or form.band.is_full or not chunks:
        return chunks
    flags = torch.stack([_hidden(given, form, chunk).all(-1).any() for chunk in chunks])  # type: ignore[union-attr]
    try:
        blind = flags.tolist()
    except DataDependentOutputException:
        # Tensors without values: all queries see some.
        return chunks
    whole = slice(0, given.key.shape[2])
    return [chunk._replace(keys=whole) if sees_none else chunk for chunk, sees_none in zip(chunks, blind, strict=True)]


def _hidden(given: _Given, form: _Form, chunk: _Chunk) -> Tensor | None:
    """Flags of the keys of a chunk that its queries do not see: [batch or 1, heads or 1, queries, keys]; None where
    they see all."""
    hidden: list[Tensor] = []
    if chunk.places:
        device = given.query.device
        keys = torch.arange(chunk.keys.start, chunk.keys.stop, device=device)
        own = chunk.at(device)[:, None]
        band = form.band
        hidden += [] if band.before is None else [keys < own - band.before]
        hidden += [] if band.after is None else [keys > own + band.after]
        hidden = [reduce(Tensor.logical_or_, hidden)[None, None]]
    if given.mask is not None:
        hidden.append(~_part(given.mask, chunk))
    if given.queries is not None and given.keys is not None:
        hidden.append(_part(given.queries, chunk) != _part(given.keys, chunk))
    return reduce(torch.logical_or, hidden) if hidden else None


def _part(whole: Tensor, chunk: _Chunk) -> Tensor:
    """The part for a chunk of what scores are combined with, [..., queries or 1, keys or 1]."""
    rows = whole if whole.shape[2] == 1 else whole[:, :, chunk.queries]
    return rows if whole.shape[3] == 1 else rows[..., chunk.keys]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left: [batch, heads, m, n]; right: [batch, key heads, n, k]; heads of a group are multiplied with the same."""
    grouped = _grouped(left, right)
    return (grouped @ right).view(*left.shape[:3], right.shape[3])


def _grouped(each: Tensor, right: Tensor) -> Tensor:
    """The heads of a group one after the other: [batch, key heads, heads of a group * m, n]."""
    return each.reshape(each.shape[0], right.shape[1], -1, each.shape[3])


def _scores(given: _Given, form: _Form, chunk: _Chunk) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scores of a chunk; the hyperbolic tangents of its soft cap; the flags of hidden keys."""
    scores = _product(given.query[:, :, chunk.queries], given.key[:, :, chunk.keys].mT)
    if form.scale != 1.0:
        scores *= form.scale
    bent = None
    if form.cap is not None:
        bent = scores.div_(form.cap).tanh_()
        scores = bent * form.cap
    if given.bias is not None:
        added = _part(given.bias, chunk)
        # In the dtype that a sum of both has.
        scores = scores.add_(added) if added.dtype == scores.dtype else scores + added
    hidden = _hidden(given, form, chunk)
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min if form.least is None else form.least)
    return scores, bent, hidden


def _weights(scores: Tensor, given: _Given, form: _Form) -> tuple[Tensor, Tensor | None]:
    """The weights of a chunk in the dtype of the softmax, and that of the sink."""
    if given.sink is None:
        return scores.softmax(-1, form.dtype), None
    sink = given.sink.expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1, form.dtype)
    return weights[..., :-1], weights[..., -1:]


class _Gradients:
    """Gradients of query, key, value, bias and sink, those that are needed. What several chunks add to is at least in
    single precision."""

    def __init__(self, given: _Given, needed: Sequence[bool]) -> None:
        self.given = given
        self.found: list[Tensor | None] = []
        for each, is_needed in zip(given[:5], needed, strict=False):
            if each is None or not is_needed:
                self.found.append(None)
                continue
            once = each is given.query or (each is given.bias and each.shape[2] > 1)
            dtype = each.dtype if once else torch.promote_types(each.dtype, torch.float32)
            self.found.append(torch.zeros_like(each, dtype=dtype))

    def finished(self) -> list[Tensor | None]:
        """The gradients in the dtypes of the operands."""
        pairs = zip(self.found, self.given[:5], strict=True)
        return [None if one is None or own is None else one.to(own.dtype) for one, own in pairs]


def _add_gradients(gradients: _Gradients, given: _Given, form: _Form, chunk: _Chunk, gradient: Tensor) -> None:
    """Add those of a chunk, of which `gradient` is that of the result."""
    queries, keys, values, biases, sinks = gradients.found
    part, rows = given.key[:, :, chunk.keys], given.query[:, :, chunk.queries]
    scores, bent, hidden = _scores(given, form, chunk)
    dtype = scores.dtype
    weights, sunk = _weights(scores, given, form)
    del scores
    if values is not None:
        values[:, :, chunk.keys] += _grouped(weights.to(given.value.dtype), part).mT @ _grouped(gradient, part)
    own = _product(gradient, given.value[:, :, chunk.keys].mT).to(weights.dtype).mul_(weights)
    means = own.sum(-1, keepdim=True)
    own = own.addcmul_(weights, means, value=-1).to(dtype)
    del weights
    if sinks is not None and sunk is not None:
        sinks += _summed(-(sunk * means).to(dtype), sinks)
    if form.fills == "scores" and hidden is not None:
        own.masked_fill_(hidden, 0.0)
    if biases is not None:
        _add_biases(biases, own.masked_fill(hidden, 0.0) if form.fills == "bias" and hidden is not None else own, chunk)
    del hidden
    own = own.to(rows.dtype)
    if bent is not None:
        own = torch.ops.aten.tanh_backward(own, bent)
    own *= form.scale
    if queries is not None:
        queries[:, :, chunk.queries] = _product(own, part)
    if keys is not None:
        keys[:, :, chunk.keys] += _grouped(own, part).mT @ _grouped(rows, part)


def _add_biases(biases: Tensor, own: Tensor, chunk: _Chunk) -> None:
    part = _part(biases, chunk)
    part += _summed(own, part)


def _summed(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` summed over the dims of which `like` has one."""
    dims = [dim for dim, size in enumerate(like.shape) if size == 1 != whole.shape[dim]]
    return whole.sum(dims, keepdim=True, dtype=like.dtype) if dims else whole
