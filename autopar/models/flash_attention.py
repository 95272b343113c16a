"""Models of `transformers` that run the kernels of flash attention.

These kernels take tokens without padding, and documents by their cumulative lengths, which a trace does not know. There
attention is written with masks, from which normal form reads windows, padding and documents.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from passes.capture.source import replaced
from passes.ir.errors import InputError
from passes.ir.log import logger

# From a mapping of implementations and a name to the function.
Interface = Callable[[object, str], Callable[..., object]]


@contextlib.contextmanager
def without_kernels(packed: bool) -> Iterator[None]:
    """Enter around a trace: flash attention is written with masks. A sample has one document, unless it may be
    `packed`: then positions say so."""
    try:
        masks = importlib.import_module("transformers.masking_utils")
        interfaces = importlib.import_module("transformers.utils.generic").GeneralInterface
        attention = importlib.import_module("transformers.integrations.flash_attention")
    except (ImportError, AttributeError):
        logger.info("this version of transformers runs flash attention otherwise: models that do cannot be traced")
        yield
        return

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object) -> Tensor:
        return flash_attention(query, key, value, mask, **options if packed else {**options, "position_ids": None})

    def found(implementations: object, name: str) -> Callable[..., object]:
        chosen = cast(Interface, before)(implementations, name)
        return _padding if chosen is masks.flash_attention_mask else chosen

    with (
        replaced(attention, "_flash_attention_forward", attend),
        replaced(interfaces, "__getitem__", found) as before,
    ):
        yield


def _padding(*, kv_length: int, attention_mask: Tensor | None = None, **_: object) -> Tensor | None:
    """The flags of keys that are no padding; those of the last `kv_length` keys are there."""
    return None if attention_mask is None else attention_mask[:, -kv_length:]


@dataclass(frozen=True)
class _Scores:
    """From the products of queries and keys to weights: the options of a call, by the names that they have there.

    `softcap` bounds scores, `s_aux` is the score of a sink by head, [heads].
    """

    is_causal: bool
    dropout: float = 0.0
    softmax_scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None


# Lengths of documents that kernels take; `transformers` ignores some without the others.
LONGEST = ("max_length_q", "max_length_k")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", *LONGEST)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> Tensor:
    """The result of `_flash_attention_forward` of `transformers.modeling_flash_attention_utils`, without its kernels.

    query: [batch, queries, heads, width]; key, value: [batch, keys, key heads, width]; the result as query. The
    `options` have the names that they have there. `attention_mask` has flags of keys, [batch, keys]. Windows are exact
    where padding is at the ends: they count it as distance.

    Raises InputError for a paged cache, and for documents whose causal attention has more keys than queries.
    """
    if options.get("block_table") is not None:
        raise InputError("attention with a paged cache (block_table) is for serving: it is not traced")
    scores = _Scores(**{name: options[name] for name in _Scores.__dataclass_fields__ if name in options})  # type: ignore[arg-type]
    dtype = options.get("target_dtype")
    if isinstance(dtype, torch.dtype) and query.dtype == torch.float32:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    shape, positions = query.shape, options.get("position_ids")
    lengths = [options.get(name) for name in _LENGTHS]
    documents: tuple[Tensor, Tensor] | None = None
    if attention_mask is None and None not in [None if each is None else True for each in lengths]:
        if scores.is_causal and query.shape[1] != key.shape[1]:
            raise InputError(
                "causal attention of documents by cumulative lengths takes as many keys as queries: there are "
                f"{key.shape[1]} keys and {query.shape[1]} queries in a sample"
            )
        # They go through all samples.
        query, key, value = (each.reshape(1, -1, *each.shape[2:]) for each in (query, key, value))
        documents = _counted(lengths[0], query), _counted(lengths[1], key)
    elif attention_mask is None and isinstance(positions, Tensor) and shape[0] == 1:
        # A document begins wherever the first position comes again.
        begins = positions.reshape(1, -1)
        documents = ((begins == begins.min()).cumsum(-1),) * 2
    seen = _seen(query.shape[1], key, scores, attention_mask, documents)
    heads = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    attended = _attended(*heads, seen, scores).transpose(1, 2)
    if attention_mask is not None:
        attended = attended.masked_fill(~attention_mask[:, -shape[1] :, None, None].bool(), 0.0)
    return attended.reshape(shape)


def _counted(lengths: object, tokens: Tensor) -> Tensor:
    """The numbers of the documents of `tokens`, [1, tokens], by their cumulative lengths, which begin with zero."""
    assert isinstance(lengths, Tensor), "cumulative lengths are a tensor"
    places = torch.arange(tokens.shape[1], device=tokens.device, dtype=lengths.dtype)
    return torch.searchsorted(lengths, places, right=True)[None]


def _seen(
    queries: int,
    key: Tensor,
    scores: _Scores,
    attention_mask: Tensor | None,
    documents: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """Flags of the keys that queries attend to, [batch or 1, 1, queries, keys]; None: all, or all before."""
    keys, window = key.shape[1], scores.sliding_window
    other = torch.arange(keys, device=key.device)[None, None, None, :]
    # The last query is at the place of the last key.
    own = torch.arange(keys - queries, keys, device=key.device)[None, None, :, None]
    terms: list[Tensor] = []
    if window is not None and keys > window:
        terms.append(other > own - window)
        if not scores.is_causal:
            terms.append(other < own + window)
    if attention_mask is not None:
        terms.append(attention_mask.bool()[:, None, None, :])
    if documents is not None:
        terms.append(documents[0][:, None, :, None] == documents[1][:, None, None, :])
    if scores.is_causal and (terms or queries != keys):
        terms.append(other <= own)
    return reduce(torch.logical_and, terms) if terms else None


def _attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scores: _Scores) -> Tensor:
    """Attention of [batch, heads, tokens, width]."""
    grouped = query.shape[1] != key.shape[1]
    scale = query.shape[-1] ** -0.5 if scores.softmax_scale is None else scores.softmax_scale
    if scores.softcap is None and scores.s_aux is None:
        causal = scores.is_causal and seen is None
        return scaled_dot_product_attention(
            query, key, value, seen, scores.dropout, causal, scale=scale, enable_gqa=grouped
        )
    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    found = query @ key.mT * scale
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    if seen is None and scores.is_causal:
        seen = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    if seen is not None:
        found = found + torch.zeros_like(seen, dtype=found.dtype).masked_fill(~seen, torch.finfo(found.dtype).min)
    if scores.s_aux is not None:
        sink = scores.s_aux.to(found.dtype).reshape(1, -1, 1, 1).expand(*found.shape[:-1], 1)
        found = torch.cat([found, sink], -1)
    weights = torch.softmax(found, -1, dtype=torch.promote_types(found.dtype, torch.float32)).to(query.dtype)
    return torch.dropout(weights[..., : key.shape[2]], scores.dropout, True) @ value


def _repeated(each: Tensor, heads: int) -> Tensor:
    """Keys or values for each of the query heads that read them."""
    batch, own, *rest = each.shape
    return each[:, :, None].expand(batch, own, heads // own, *rest).reshape(batch, heads, *rest)
