"""Typing rules for our local forms."""

from collections.abc import Sequence
from contextlib import nullcontext

import spmd_types as spmd
from spmd_types import rules
from torch import Tensor
from torch.nn import functional

from autopar import runtime
from autopar.runtime import Axis
from tests.autopar.typed.layouts import is_located
from tests.autopar.typed.operators import Call, Typing, attention, beside


def vocabulary_embedding(ids: Tensor, weight: Tensor, **options: object) -> Tensor:
    """rows are summed over: ids, rows features -> ids features."""

    def rule(ids: Tensor, weight: Tensor) -> object:
        return rules.einsum("...,vd->...d", beside(ids, weight), weight, linear_in=(1,))

    def compute(ids: Tensor, weight: Tensor) -> Tensor:
        return runtime.vocabulary_embedding(ids, weight, **options)

    return _located(Call("vocabulary_embedding", compute, rule), ids, weight)


def vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, *, digits: Sequence[tuple[Axis, int]], summed: bool = True, **options: object
) -> Tensor:
    """Classes are summed over and the sum is the same on their axes: tokens classes, tokens -> ."""

    def rule(logits: Tensor, target: Tensor) -> object:
        result = rules.einsum("tv,t->t", logits, beside(target, logits))
        for name in (name for axis, _ in digits for name in axis.name.split(" * ")):
            pending = spmd.get_axis_local_type(result, name)
            result = rules.all_reduce(result, name, src=pending, dst=spmd.I)
        return rules.einsum("t->", result, linear_in=(0,)) if summed else result

    def compute(logits: Tensor, target: Tensor) -> Tensor:
        return runtime.vocabulary_cross_entropy(logits, target, digits=digits, summed=summed, **options)

    return _located(Call("vocabulary_cross_entropy", compute, rule), logits, target)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    digits: Sequence[tuple[Axis, int]] = (),
    **options: object,
) -> Tensor:
    """Width, tokens and classes are summed over, and the sum is the same on the axes of classes: tokens width, classes
    width, tokens -> ."""

    def rule(hidden: Tensor, weight: Tensor, labels: Tensor, *bias: Tensor) -> object:
        terms = ",".join(("td", "vd", "t", *("v" for _ in bias)))
        others = (beside(each, hidden) for each in (labels, *bias))
        result = rules.einsum(f"{terms}->t", hidden, weight, *others)
        for name in (name for axis, _ in digits for name in axis.name.split(" * ")):
            pending = spmd.get_axis_local_type(result, name)
            result = rules.all_reduce(result, name, src=pending, dst=spmd.I)
        return rules.einsum("t->", result, linear_in=(0,))

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        return runtime.linear_cross_entropy(hidden, weight, labels, bias=bias, digits=digits, **options)

    given = hidden, weight, labels, *(() if bias is None else (bias,))
    return _located(Call("linear_cross_entropy", compute, rule), *given)


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]] = (),
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Attention of which the queries may be split; the form knows which they are."""

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if query.is_meta:
            # How many keys the queries of a rank need, the form reads from a tensor.
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return runtime.blockwise_attention(query, key, value, digits=digits, mask=mask, **options)

    return _located(attention(compute, rows=True), query, key, value, *(() if mask is None else (mask,)))


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]] = (),
    documents: tuple[Tensor, Tensor] | None = None,
    **options: object,
) -> Tensor:
    """Attention of which the queries may be split: a bias and masks have the dims of scores, or have them once."""
    own, other = documents or (None, None)
    others = {name: options.pop(name, None) for name in ("bias", "sink", "mask")} | {"own": own, "other": other}
    names = [name for name, each in others.items() if each is not None]

    def compute(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Tensor:
        if query.is_meta:
            # How many keys the queries of a rank need, the form reads from a tensor.
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        found = dict(zip(names, given, strict=True))
        numbered = (found.pop("own"), found.pop("other")) if "own" in found else None
        return runtime.chunked_attention(query, key, value, digits=digits, documents=numbered, **found, **options)

    def rule(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> object:
        dims = [zip(each.shape, "bhq_", strict=True) for each in given]
        terms = ["".join("_" if size == 1 else dim for size, dim in own) for own in dims]
        operands = [beside(each, query) for each in given]
        return rules.einsum(f"{','.join(['bhq_', 'bh__', 'bh_w', *terms])}->bhqw", query, key, value, *operands,
                            linear_in=(2,))  # fmt: skip

    return _located(Call("chunked_attention", compute, rule), query, key, value, *(others[name] for name in names))


def split_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, rank: int, **options: object
) -> Tensor:
    """A layer norm whose normalized dims may be split: rows in, in, in -> rows in."""
    given = (weight, bias)

    def compute(x: Tensor, *scales: Tensor) -> Tensor:
        found = iter(scales)
        return runtime.split_layer_norm(
            x, *(None if item is None else next(found) for item in given), rank=rank, **options
        )

    def rule(x: Tensor, *scales: Tensor) -> object:
        inner = "klmnop"[:rank]
        terms = [f"...{inner}", *[inner] * len(scales)]
        return rules.einsum(f"{','.join(terms)}->...{inner}", x, *scales)

    return _located(Call("split_layer_norm", compute, rule), x, *(item for item in given if item is not None))


def split_softmax(x: Tensor, dim: int, **options: object) -> Tensor:
    """All dims may be split."""

    def rule(x: Tensor) -> object:
        return rules.einsum("...->...", x)

    return _located(Call("split_softmax", lambda x: runtime.split_softmax(x, dim, **options), rule), x)


def _located(call: Call, *tensors: Tensor) -> Tensor:
    with nullcontext() if all(map(is_located, tensors)) else spmd.local():
        return call(*tensors)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]],
    queries: Sequence[tuple[Axis, int]] = (),
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Attention of which queries and keys are split alike: what comes around, the checker cannot see. Where `queries`
    are split further, it is as if keys were gathered."""

    def rule(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> object:
        if queries:
            every: list[Typing] = [key, value]
            for name in (name for axis, _ in reversed(digits) for name in reversed(axis.name.split(" * "))):
                every = [rules.all_gather(each, name, src=spmd.S(2), dst=spmd.R) for each in every]
            return attention(compute, rows=True).rule(query, *every, *(() if mask is None else (mask,)))
        rows = ",b___" if mask is not None and len(mask) > 1 else ",____"
        masks = () if mask is None else (beside(mask, query),)
        return rules.einsum(f"bhq_,bhq_,bhq_{rows if masks else ''}->bhq_", query, key, value, *masks)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if query.is_meta:
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return runtime.ring_attention(query, key, value, digits=digits, queries=queries, mask=mask, **options)

    given = query, key, value, *(() if mask is None else (mask,))
    return _located(Call("ring_attention", compute, rule), *given)


FORM_RULES = {
    "blockwise_attention": blockwise_attention,
    "chunked_attention": chunked_attention,
    "linear_cross_entropy": linear_cross_entropy,
    "ring_attention": ring_attention,
    "split_layer_norm": split_layer_norm,
    "split_softmax": split_softmax,
    "vocabulary_cross_entropy": vocabulary_cross_entropy,
    "vocabulary_embedding": vocabulary_embedding,
}
