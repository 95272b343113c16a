"""Scaled dot-product attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import cast

import torch

from passes.ir.bands import Band, band_of
from passes.ir.figures import least
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Factor, Method, Part, Role, Rule, Saved
from passes.rules.attention_forms import runs_in_blocks, runs_in_chunks
from passes.rules.parts import factors, one, rule_for

_WHOLE = dict.fromkeys(("keys", "width", "mask_keys"), Role.WHOLE)


@rule_for("scaled_dot_product_attention", "chunked_attention")
def attention(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch heads queries width, batch heads keys width, batch heads keys value_width.

    There may be no heads, no batch, or several of it. With fewer key heads than query heads, a query head is (heads,
    groups) and keys and values have no groups. Split queries attend to all keys; where attention is causal the local
    form knows which queries it has, and so where it has a window. It takes as many keys as queries, and no dropout. The
    method "ring" splits queries and keys at once, where there is no dropout and no mask of queries by keys; attention
    to all keys takes any number of both. Rows of masks, and the documents of keys, are whole on every rank. Other
    operands are of [..., queries or 1, keys or 1]; attention in chunks has no ring.
    """
    query, key, value = (types[name].shape for name in op.operands[:3])
    if len(query) < 2 or len({len(query), len(key), len(value)}) > 1 or prod(query) == 0:
        return None
    if query[:-3] != key[:-3] or key[:-2] != value[:-2]:
        return None
    names = ["batch", *(f"batch{dim}" for dim in range(1, len(query)))]
    batch = tuple(one(name, size) for name, size in zip(names, query[:-3], strict=False))
    shared: tuple[Part, ...] = ()
    own: tuple[Part, ...] = ()
    if len(query) > 2:
        heads, groups = key[-3], query[-3] // key[-3]
        if heads * groups != query[-3] or (groups != 1 != heads and not op.arguments["enable_gqa"]):
            return None
        shared = one("heads", heads)
        own = (*shared, *one("groups", groups))
    above = (*batch, own) if len(query) > 2 else batch
    below = (*batch, shared) if len(query) > 2 else batch
    queries, keys = one("queries", query[-2]), one("keys", key[-2])
    width, value_width = one("width", query[-1]), one("value_width", value[-1])
    result: Dims = (*above, queries, value_width)
    operands: list[Dims] = [(*above, queries, width), (*below, keys, width), (*below, keys, value_width)]
    causal = bool(op.arguments["is_causal"])
    band = band_of(causal, cast("Sequence[int] | None", op.arguments.get("window")))
    masks = [types[name] for name in op.operands[3:]]
    for mask in masks:
        last = one("mask_keys", key[-2]) if _is_row(mask, key[-2]) else keys
        scores, offset = (*above, queries, last), len(above) + 2 - len(mask.shape)
        operands.append(tuple(scores[offset + dim] if size != 1 else () for dim, size in enumerate(mask.shape)))
    roles = dict(_WHOLE)
    has_form = len(query) == 4 and not op.arguments.get("dropout_p") and (band.is_full or query[-2] == key[-2])
    in_blocks = causal or runs_in_blocks(op)
    withheld = _withheld(op, types, band)
    if in_blocks and not has_form:
        roles["queries"] = Role.WHOLE
    else:
        withheld.pop("queries", None)
    in_stripes = causal and band.before is None
    ring = {} if withheld else {"ring": Method(("queries", "keys"), "ring_attention", Role.FREE, in_stripes)}
    # Of the products of the forward pass one is over the width and makes scores, the other reads them; of the backward
    # pass, in which fused kernels make the scores again, three and two.
    inner, outer = query[-1], value[-1]
    forward, back = inner + outer, 3 * inner + 2 * outer
    return Rule(
        _reaching(factors(*operands, result, roles=roles), band),
        tuple(operands),
        (result,),
        linear=(frozenset({2}),),
        forms={"queries": _form(op)} if in_blocks and has_form else {},
        joint=ring,
        withheld=withheld,
        multiplications=2.0 * prod(query[:-2]) * _scores(query[-2], key[-2], band) * forward,
        backward=(back / forward / 3,) * 3 + (0.0,) * (len(operands) - 3),
        divided={"value_width": (outer / forward, 2 * outer / back)},
        saved=(*(Saved(slot) for slot in _saved(op)), *(() if runs_in_chunks(op) else (Saved(0, result=True),))),
    )


# The dtypes of the numbers of documents; masks are flags or are added to scores.
_DOCUMENTS = (torch.int32, torch.int64)


def _withheld(op: Op, types: Mapping[str, TensorType], band: Band) -> dict[str, str]:
    """Why there is no local form of split queries, nor a ring."""
    (*_, queries, _), (*_, keys, _) = (types[name].shape for name in op.operands[:2])
    reason, masks = "", [types[name] for name in op.operands[3:]]
    if op.arguments.get("dropout_p"):
        reason = f"it has dropout of {op.arguments['dropout_p']}, which blocks cannot draw as the whole does"
    elif not band.is_full and queries != keys:
        reason = f"it is causal or in a window, with {queries} queries and {keys} keys"
    elif len(types[op.operands[0]].shape) != 4:
        reason = "its operands have other dims than samples, heads, places and width"
    if reason:
        return {"queries": reason, "ring": reason}
    if runs_in_chunks(op):
        return {"ring": "soft caps, sinks and biases need all keys of a query at once"}
    squares = [mask.shape for mask in masks if not _is_row(mask, keys) and mask.dtype not in _DOCUMENTS]
    if squares:
        return {"ring": f"its mask of shape {list(squares[0])} is for queries by keys"}
    return {"ring": "it has a single query or key"} if min(queries, keys) == 1 else {}


def _form(op: Op) -> str:
    """The local form of attention of which queries are split."""
    return "chunked_attention" if runs_in_chunks(op) else "blockwise_attention"


def _is_row(mask: TensorType, keys: int) -> bool:
    """Whether a mask of flags, or the documents of keys, are the same for all queries."""
    is_of_keys = len(mask.shape) == 4 and mask.shape[2:] == (1, keys)
    return is_of_keys and mask.dtype in (torch.bool, *_DOCUMENTS)


def _saved(op: Op) -> Sequence[int]:
    """The operands that are saved; a kernel of the op itself saves masks as numbers."""
    return range(len(op.operands) if runs_in_blocks(op) else 3)


def _scores(queries: int, keys: int, band: Band) -> float:
    """The number of scores of a head that are computed; of causal attention half."""
    if band.before is None and not band.after:
        return queries * keys / (1 if band.is_full else 2)
    before = queries if band.before is None else least((band.before + 1, queries))
    after = least((band.after or 0, queries - 1))
    return queries * (before + after) - (before**2 + after**2) / 2


def _reaching(found: dict[str, Factor], band: Band) -> dict[str, Factor]:
    """`found` with the keys before and after its place that a query attends to, where it does not to all."""
    if band.is_full or "queries" not in found:
        return found
    queries = found["queries"]
    most = queries.size - 1
    before, after = (most if side is None else cast(int, least((side, most))) for side in (band.before, band.after))
    return {**found, "queries": replace(queries, reach=(before, after))}
