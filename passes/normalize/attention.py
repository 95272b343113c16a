"""Attention that a model writes out as matrix products and a softmax: one op.

Where it is scaled dot-product attention it becomes that, with what its mask shows (see `masks`). A query whose keys are
all hidden by the least number attends to all alike, but to none in a fused kernel: so where padding or other flags may
hide all keys of a query, the op is `autopar::chunked_attention`. So it is with soft caps, sinks, and biases. Weights
that anything else reads, dropout, and masks that hide a key twice leave attention as it is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import isinf, isnan, prod

import torch

from passes.ir.arguments import Argument, Ref, bound_arguments, find_overload
from passes.ir.program import Op, Program, TensorType, differentiable
from passes.normalize.masks import Meaning, Reader, arguments_of, ungrouped, whole, with_meaning
from passes.normalize.products import weighted
from passes.normalize.rewriter import KEEP, Rewriter
from passes.normalize.scores import Flags, ScoreReader, Scores, Term, lead_of
from passes.normalize.views import permuted, reshaped
from passes.ops import CHUNKED_ATTENTION

_PRODUCTS = ("matmul", "bmm", "einsum")
_FUSED = "aten.scaled_dot_product_attention.default"


def with_attention(program: Program) -> Program:
    """The program with attention as one op wherever it is written out, or is given a bias with a gradient."""
    rewriter = Rewriter(program)
    reader, flowing = ScoreReader(rewriter, program), frozenset(differentiable(program))
    for original in program.ops:
        op = rewriter.current(original)
        found = None
        if op.kind in _PRODUCTS:
            found = _written_out(reader, op, flowing)
        elif op.target == _FUSED:
            found = _with_bias(reader, op, flowing)
        rewriter.put(op, KEEP if found is None else _rewritten(rewriter, found))
    return rewriter.finish()


@dataclass(frozen=True)
class _Attention:
    """Attention that `op` ends: query, key and value with four dims, the softmax in `dtype` (None: that of scores), and
    what is added to scores, of which `flowing` have gradients. The result of `op` has its dims in another `order`."""

    op: Op
    query: Ref
    key: Ref
    value: Ref
    scale: float | None
    terms: tuple[Term, ...]
    flags: tuple[Flags, ...]
    lead: tuple[int, int]
    flowing: frozenset[str]
    cap: float | None = None
    sink: str | None = None
    dtype: torch.dtype | None = None
    order: tuple[int, ...] = ()


def _written_out(reader: ScoreReader, op: Op, flowing: frozenset[str]) -> _Attention | None:
    """Attention of which `op` is the product of weights and values; None for other products."""
    rewriter = reader.rewriter
    if len(op.operands) != 2:
        return None
    found = ((number, reader.softmax(name)) for number, name in enumerate(op.operands))
    number, read = next(((number, read) for number, read in found if read is not None), (0, None))
    product = None if read is None else weighted(rewriter, op, number)
    if read is None or product is None:
        return None
    scores, softmax = read
    shape = rewriter.types[product.weights].shape
    lead = lead_of(scores.shapes, shape)
    heads = {rewriter.types[name].shape[:-2] for name in (scores.key, product.values)}
    if len(heads) > 1 and any(len(each) == 3 for each in (*scores.shapes, shape)):
        return None
    query, key, own = (_four(rewriter, op, name, lead) for name in (scores.query, scores.key, product.values))
    if query is None or key is None or own is None or prod(lead) != prod(shape[:-2]):
        return None
    if not _fits(rewriter, query, key, own, turned=scores.turned):
        return None
    if scores.turned:
        type = rewriter.type(key)
        turned = TensorType((*type.shape[:2], type.shape[3], type.shape[2]), type.dtype)
        key = rewriter.write(op, "aten.transpose.int", turned, key, 2, 3)
    dtypes = {rewriter.type(each).dtype for each in (query, key)}
    dtype = softmax.arguments["dtype"] or scores.dtype
    assert dtype is None or isinstance(dtype, torch.dtype)
    return _Attention(op, query, key, own, scores.scale, scores.terms, scores.flags, lead, flowing, scores.cap,
                      scores.sink, None if dtypes == {dtype} else dtype, product.order)  # fmt: skip


def _fits(rewriter: Rewriter, query: Ref, key: Ref, value: Ref, *, turned: bool) -> bool:
    """Whether keys and values are of the same samples and heads, and heads of queries those of keys, repeated."""
    own, other, last = (rewriter.type(each).shape for each in (query, key, value))
    keys = other[3] if turned else other[2]
    width = other[2] if turned else other[3]
    is_shared = own[0] == other[0] and other[:2] == last[:2] and own[1] % other[1] == 0
    return is_shared and own[3] == width and keys == last[2]


def _with_bias(reader: ScoreReader, op: Op, flowing: frozenset[str]) -> _Attention | None:
    """Fused attention with a mask of numbers that has a gradient, of which no kernel has one without all scores, or
    that hides keys by the least number."""
    rewriter, given = reader.rewriter, op.arguments
    mask = given["attn_mask"]
    if not isinstance(mask, Ref) or given["dropout_p"] or given["is_causal"]:
        return None
    if not rewriter.type(mask).dtype.is_floating_point:
        return None
    refs = [given[name] for name in ("query", "key", "value")]
    query, key, value = (item for item in refs if isinstance(item, Ref))
    shapes = [rewriter.type(each).shape for each in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or not _fits(rewriter, query, key, value, turned=False):
        return None
    scores = (*shapes[0][:3], shapes[1][2])
    found = reader.with_terms(Scores(query.name, key.name, False, (scores,)), mask.name, 1.0)
    if found is None or not (found.flags or mask.name in flowing):
        return None
    scale = given["scale"]
    assert scale is None or isinstance(scale, float)
    lead = scores[0], scores[1]
    return _Attention(op, query, key, value, scale, found.terms, found.flags, lead, flowing)


def _four(rewriter: Rewriter, op: Op, name: str, lead: tuple[int, int]) -> Ref | None:
    """A tensor with the dims of samples and heads apart; None where it has others."""
    shape = rewriter.types[name].shape
    if len(shape) == 4:
        return Ref(name)
    return reshaped(rewriter, op, Ref(name), (*lead, *shape[1:])) if shape[0] == prod(lead) else None


def _rewritten(rewriter: Rewriter, found: _Attention) -> Argument:
    """The attention, in the shape of the result of its op."""
    op = found.op
    queries, keys = (rewriter.type(each).shape[2] for each in (found.query, found.key))
    meaning, unread = _meaning(rewriter, found, queries, keys)
    if (unread or meaning.rows) and not _is_exact(found, _scores_dtype(rewriter, found)):
        return KEEP
    made = _fused(rewriter, found, meaning, unread)
    if made is None:
        made = KEEP if _is_left(rewriter, found, unread) else _chunked(rewriter, found, meaning, unread)
    if made is KEEP:
        return KEEP
    shape = rewriter.types[op.results[0]].shape
    order = found.order or tuple(range(len(shape)))
    own = tuple(shape[order.index(dim)] for dim in range(len(shape)))
    return permuted(rewriter, op, reshaped(rewriter, op, made, own), list(order))


def _scores_dtype(rewriter: Rewriter, found: _Attention) -> torch.dtype:
    """The dtype of the scores in chunks, after all terms were added."""
    dtypes = (rewriter.types[term.tensor].dtype for term in found.terms)
    return reduce(torch.promote_types, dtypes, rewriter.type(found.query).dtype)


def _is_exact(found: _Attention, dtype: torch.dtype) -> bool:
    """Whether attention in chunks, with scores of `dtype`, is as it is written also for a query whose keys are all
    hidden.

    There one number hides all that any flags hide, that of the model where scores can have it. The model may hide some
    keys twice, by the sum of two least numbers; hide others by a bias, with another number; and pass gradients to
    biases that are added after the scores were filled. A kernel returns zero where the sum of all is minus infinity.
    """
    first, several = found.flags[0], len(found.flags) > 1
    if several and any((each.fills, each.least) != (first.fills, first.least) for each in found.flags):
        return False
    if isnan(first.least) and several:
        return False
    if found.terms and not first.least >= torch.finfo(dtype).min:
        return False
    if found.op.target == _FUSED and isinf(first.least):
        return False
    if first.fills == "scores":
        return not any(term.tensor in found.flowing for term in found.terms[first.before :])
    if several:
        return False
    return first.fills == "" or all(term.filled for term in found.terms if term.tensor in found.flowing)


def _is_left(rewriter: Rewriter, found: _Attention, unread: Sequence[Flags]) -> bool:
    """Whether fused attention keeps its mask: one without a gradient that is the same for all heads, or of which as
    much would be left."""
    if found.op.target != _FUSED or any(term.tensor in found.flowing for term in found.terms):
        return False
    mask = rewriter.type(found.op.arguments["attn_mask"])
    names = (*(term.tensor for term in found.terms), *(flags.tensor for flags in unread))
    left = [rewriter.types[name].size for name in names]
    return max(left, default=0) >= mask.size or mask.shape[-3:-2] == (1,) or len(mask.shape) < 3


def _meaning(rewriter: Rewriter, found: _Attention, queries: int, keys: int) -> tuple[Meaning, tuple[Flags, ...]]:
    """The meaning of the flags that can be read, and the other flags."""
    read, unread = Meaning(), []
    kept: list[str] = []
    reader = Reader(rewriter, queries, keys)
    for flags in found.flags:
        shape = rewriter.types[flags.tensor].shape
        if len(flags.scores) == len(shape) == 3 and shape[0] != 1:
            four = _shaped(rewriter, found, flags.tensor, flags.scores).name
            flags = replace(flags, tensor=four, scores=(*found.lead, queries, keys))
        names = (*kept, flags.tensor)
        key = " ".join((*names, str(queries), str(keys)))
        if key not in rewriter.meanings:
            rewriter.meanings[key] = reader.meaning(*names)
        meaning = rewriter.meanings[key]
        known = isinstance(meaning, Meaning) and (meaning.band.is_full or queries == keys)
        if known and isinstance(meaning, Meaning) and reader.sees_itself(meaning):
            read, kept = meaning, [*names]
        else:
            unread.append(flags)
    return read, tuple(unread)


def _fused(rewriter: Rewriter, found: _Attention, meaning: Meaning, unread: Sequence[Flags]) -> Argument | None:
    """Scaled dot-product attention with the same result; None where there is none without a mask of the band."""
    types = [rewriter.type(each) for each in (found.query, found.key, found.value)]
    if found.cap is not None or found.sink is not None or len({type.dtype for type in types}) > 1:
        return None
    if any(term.tensor in found.flowing for term in found.terms):
        return None
    if found.op.target != _FUSED and (found.terms or unread or meaning.rows):
        # The kernels' gradients are not those of a sum where the least number hides all keys of a query.
        return None
    op, query = found.op, types[0]
    type = TensorType((*query.shape[:3], types[2].shape[3]), query.dtype)
    given: dict[str, Argument] = {"query": found.query, "key": found.key, "value": found.value, "scale": found.scale}
    if not found.terms and not unread and not meaning.rows:
        heads = ungrouped(rewriter, found.key, found.value) or _shared(types)
        attention = _op(rewriter, op, type, {**given, **heads})
        return with_meaning(rewriter, attention, meaning)
    if not meaning.band.is_full or meaning.documents or any(flags.fills == "scores" for flags in found.flags):
        return None
    if any(rewriter.types[term.tensor].dtype != query.dtype for term in found.terms):
        return None
    parts = _parts(rewriter, found, query.dtype)
    shapes = [rewriter.type(part).shape for part in parts]
    whole = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if whole[-2] > 1 and prod(whole) > max(map(prod, shapes)):
        # What is the same for samples, or for heads, would be repeated.
        return None
    mask = _added(rewriter, found, parts, "aten.add.Tensor")
    return rewriter.write(op, _FUSED, type, **given, **_shared(types), attn_mask=mask)


def _op(rewriter: Rewriter, like: Op, type: TensorType, given: dict[str, Argument]) -> Op:
    """Fused attention with these arguments, which is not written yet."""
    name = rewriter.fresh("%attention_n")
    rewriter.types[name] = type
    arguments = bound_arguments(find_overload(_FUSED), (), given)
    return replace(like, target=_FUSED, arguments=arguments, results=(name,))


def _shared(types: Sequence[TensorType]) -> dict[str, Argument]:
    """Whether query heads share keys."""
    return {"enable_gqa": True} if types[0].shape[1] != types[1].shape[1] else {}


def _parts(rewriter: Rewriter, found: _Attention, dtype: torch.dtype) -> list[Ref]:
    """The tensors that are added to scores; one of the least number for those that are hidden."""
    op, parts = found.op, [_term(rewriter, found, term) for term in found.terms]
    for flags in found.flags:
        seen = _flags(rewriter, found, flags)
        shape = rewriter.type(seen).shape
        zero = rewriter.write(op, "aten.zeros.default", TensorType((), dtype), (), dtype=dtype,
                              device=torch.device("cpu"))  # fmt: skip
        least = torch.finfo(dtype).min
        parts.append(rewriter.write(op, "aten.where.ScalarOther", TensorType(shape, dtype), seen, zero, least))
    return parts


def _least(rewriter: Rewriter, found: _Attention) -> float | None:
    """The number that hides scores where it matters, as biases may hide others; None for the least of the dtype that
    scores have after all terms were added."""
    if not found.terms:
        return None
    least = found.flags[0].least
    return None if least == torch.finfo(_scores_dtype(rewriter, found)).min else least


def _flags(rewriter: Rewriter, found: _Attention, flags: Flags) -> Ref:
    """Flags with four dims; a mask of zeros in a band is not one of flags yet."""
    own = _shaped(rewriter, found, flags.tensor, flags.scores)
    type = rewriter.type(own)
    if type.dtype == torch.bool:
        return own
    return rewriter.write(found.op, "aten.eq.Scalar", TensorType(type.shape, torch.bool), own, 0)


def _term(rewriter: Rewriter, found: _Attention, term: Term) -> Ref:
    """The tensor that a term adds to scores, with four dims."""
    own = _shaped(rewriter, found, term.tensor, term.scores)
    if term.times == 1.0:
        return own
    return rewriter.write(found.op, "aten.mul.Tensor", rewriter.type(own), own, term.times)


def _shaped(rewriter: Rewriter, found: _Attention, name: str, scores: tuple[int, ...]) -> Ref:
    """A tensor that is combined with scores of a shape, with four dims and without repetition."""
    while (made := rewriter.maker(name)) is not None and made.kind == "expand":
        name = made.operands[0]
    shape = rewriter.types[name].shape
    if len(scores) == 3 and len(shape) == 3 and shape[0] != 1:
        return reshaped(rewriter, found.op, Ref(name), (*found.lead, *shape[1:]))
    return whole(rewriter, found.op, name)


def _chunked(rewriter: Rewriter, found: _Attention, meaning: Meaning, unread: Sequence[Flags]) -> Argument:
    """Attention in chunks of queries."""
    op = found.op
    known = arguments_of(rewriter, op, meaning)
    flags = [_flags(rewriter, found, each) for each in unread]
    row = known["attn_mask"]
    flags = [*flags, row] if isinstance(row, Ref) else flags
    bias = _added(rewriter, found, [_term(rewriter, found, term) for term in found.terms], "aten.add.Tensor")
    hides = bool(unread) or bool(meaning.rows)
    fills = {each.fills for each in found.flags} - {""} if hides else set()
    if len(fills) > 1:
        return KEEP
    types = [rewriter.type(each) for each in (found.query, found.key, found.value)]
    type = TensorType((*types[0].shape[:3], types[2].shape[3]), types[2].dtype)
    given: dict[str, Argument] = {
        **known,
        "query": found.query,
        "key": found.key,
        "value": found.value,
        "bias": bias,
        "sink": None if found.sink is None else Ref(found.sink),
        "attn_mask": _added(rewriter, found, flags, "aten.__and__.Tensor"),
        "scale": found.scale,
        "soft_cap": found.cap,
        "dtype": found.dtype,
        "fills": next(iter(fills), ""),
        "least": _least(rewriter, found) if hides else None,
        **(ungrouped(rewriter, found.key, found.value) or _shared(types)),
    }
    return rewriter.write(op, CHUNKED_ATTENTION, type, **given)


def _added(rewriter: Rewriter, found: _Attention, parts: Sequence[Ref], target: str) -> Ref | None:
    """Tensors that are combined by an op of two; None for none."""
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        one, other = (rewriter.type(each) for each in (total, part))
        shape = tuple(torch.broadcast_shapes(one.shape, other.shape))  # type: ignore[no-untyped-call]
        type = TensorType(shape, torch.promote_types(one.dtype, other.dtype))
        total = rewriter.write(found.op, target, type, total, part)
    return total
