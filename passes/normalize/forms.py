"""Canonical forms: every op in one form, and no op without effect.

A mean of a loss is a sum by a count, exact however the batch is spread; elementwise losses are reduced by sum or mean.
Their `reduction` is 0 for none, 1 for mean, 2 for sum. Masks of attention become `is_causal`, windows, rows and
documents."""

from collections.abc import Set
from dataclasses import replace
from math import prod
from typing import cast

import torch

from passes.ir.arguments import Argument, Ref, listed
from passes.ir.program import Op, Program, TensorType, differentiable
from passes.normalize.masks import attention
from passes.normalize.rewriter import KEEP, Rewrite, Rewriter
from passes.normalize.views import VIEWS, expanded, integers, only, reshaped
from passes.rules.pointwise import ELEMENTWISE_LOSSES

_NONE, _MEAN, _SUM = 0, 1, 2
# Stands for the device that the program runs on.
_HERE = torch.device("cpu")


def _labelled(rewriter: Rewriter, op: Op) -> Argument:
    """cross_entropy_loss, nll_loss: the mean is over the labels that count, each by the weight of its class."""
    arguments = dict(op.arguments)
    target, weight, ignored = (arguments[name] for name in ("target", "weight", "ignore_index"))
    logits, labels = rewriter.type(arguments["self"]), rewriter.type(target)
    if arguments["reduction"] != _MEAN:
        return KEEP
    loss = rewriter.types[op.results[0]]
    summed = rewriter.write(op, op.target, loss, **{**arguments, "reduction": _SUM})
    if labels.dtype.is_floating_point:
        classes = logits.shape[1] if len(logits.shape) > 1 else logits.shape[0]
        return rewriter.write(op, "aten.div.Scalar", loss, summed, prod(logits.shape) // classes)
    counted = rewriter.write(op, "aten.ne.Scalar", TensorType(labels.shape, torch.bool), target, ignored)
    if weight is None:
        count = rewriter.write(op, "aten.sum.default", TensorType((), torch.int64), counted)
        return rewriter.write(op, "aten.div.Tensor", loss, summed, count)
    weights = TensorType(labels.shape, rewriter.type(weight).dtype)
    zero = rewriter.write(op, "aten.zeros.default", TensorType((), labels.dtype), (), dtype=labels.dtype, device=_HERE)
    known = rewriter.write(op, "aten.where.self", labels, counted, target, zero)
    own = rewriter.write(op, "aten.embedding.default", TensorType((*labels.shape, 1), weights.dtype),
                         rewriter.write(op, "aten.reshape.default",
                                        TensorType((rewriter.type(weight).shape[0], 1), weights.dtype),
                                        weight, (rewriter.type(weight).shape[0], 1)), known)  # fmt: skip
    own = rewriter.write(op, "aten.reshape.default", weights, own, labels.shape)
    none = rewriter.write(
        op, "aten.zeros.default", TensorType((), weights.dtype), (), dtype=weights.dtype, device=_HERE
    )
    own = rewriter.write(op, "aten.where.self", weights, counted, own, none)
    count = rewriter.write(op, "aten.sum.default", TensorType((), weights.dtype), own)
    return rewriter.write(op, "aten.div.Tensor", loss, summed, count)


def _elementwise(rewriter: Rewriter, op: Op) -> Argument:
    """The loss of each element, and their sum or mean."""
    reduction = op.arguments["reduction"]
    if reduction not in (_MEAN, _SUM):
        return KEEP
    loss = rewriter.types[op.results[0]]
    operands = [rewriter.types[name].shape for name in op.operands[:2]]
    shape = tuple(torch.broadcast_shapes(*operands))  # type: ignore[no-untyped-call]
    each = rewriter.write(op, op.target, TensorType(shape, loss.dtype), **{**op.arguments, "reduction": _NONE})
    return rewriter.write(op, "aten.mean.default" if reduction == _MEAN else "aten.sum.default", loss, each)


LOSSES: dict[str, Rewrite] = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), _labelled),
    **dict.fromkeys(ELEMENTWISE_LOSSES, _elementwise),
}


def canonical(program: Program, kept: Set[str] = frozenset()) -> Program:
    """Write every op in its canonical form; drop ops without effect, but for those that read parameters and inputs that
    are `kept`."""
    rewriter = Rewriter(program, kept)
    flowing = differentiable(program)
    for original in program.ops:
        op = rewriter.current(original)
        if op.arguments.get("sparse"):
            # Gradients of tables are dense; their values are those of sparse ones.
            op = replace(op, arguments={**op.arguments, "sparse": False})
        if op.kind == "detach" and not any(name in flowing for name in original.operands):
            rewriter.replaced[op.results[0]] = op.arguments["self"]
            continue
        rewrite = _REWRITES.get(op.kind)
        rewriter.put(op, rewrite(rewriter, op) if rewrite else KEEP)
    return rewriter.finish()


def _dropout(rewriter: Rewriter, op: Op) -> Argument:
    """Dropout that is off does nothing."""
    return KEEP if op.arguments["train"] and op.arguments["p"] else only(op)


def _padded_convolution(rewriter: Rewriter, op: Op) -> Argument:
    """conv with padding "valid" or "same": padding as numbers."""
    padding = op.arguments["padding"]
    if not isinstance(padding, str):
        return _unbatched(rewriter, op)
    source = op.arguments["input"]
    shape = rewriter.type(source).shape
    kernel = rewriter.type(op.arguments["weight"]).shape[2:]
    dilation = integers(op.arguments["dilation"])
    totals = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in totals):
        # One more after than before, as torch does; zeros are written.
        around = tuple(side for total in reversed(totals) for side in (0, total % 2))
        wide = shape[: len(shape) - len(totals)] + tuple(
            size + total % 2 for size, total in zip(shape[-len(totals) :], totals, strict=True)
        )
        source = rewriter.write(op, "aten.pad.default", TensorType(wide, rewriter.type(source).dtype), source, around)
    changed = {"input": source, "padding": tuple(total // 2 for total in totals)}
    type = rewriter.types[op.results[0]]
    return rewriter.write(op, f"aten.{op.kind}.default", type, **{**op.arguments, **changed})


def _unbatched(rewriter: Rewriter, op: Op) -> Argument:
    """A convolution of one sample is one of a batch of one."""
    source, type = op.arguments["input"], rewriter.types[op.results[0]]
    if len(type.shape) == len(rewriter.type(op.arguments["weight"]).shape):
        return KEEP
    sample = reshaped(rewriter, op, source, (1, *rewriter.type(source).shape))
    batch = TensorType((1, *type.shape), type.dtype)
    result = rewriter.write(op, op.target, batch, **{**op.arguments, "input": sample})
    return reshaped(rewriter, op, result, type.shape)


def _one_hot(rewriter: Rewriter, op: Op) -> Argument:
    """one_hot: a comparison with the numbers of all classes."""
    type = rewriter.types[op.results[0]]
    classes = type.shape[-1]
    if prod(type.shape) == 0:
        return KEEP
    source = only(op)
    labels = rewriter.type(source)
    every = TensorType((classes,), torch.int64)
    numbers = rewriter.write(op, "aten.arange.default", every, classes, dtype=torch.int64, device=torch.device("cpu"))
    column = reshaped(rewriter, op, source, (*labels.shape, 1))
    equal = rewriter.write(op, "aten.eq.Tensor", TensorType(type.shape, torch.bool), column, numbers)
    return rewriter.write(op, "aten.to.dtype", type, equal, type.dtype)


def _masked_scatter(rewriter: Rewriter, op: Op) -> Argument:
    """Rows where a mask is set become the rows of the source, one after the other (images among words, say).

    A row is the last dim, along which the mask is repeated. The number of a row is how many are set up to it.
    """
    source, mask, rows = (op.arguments[name] for name in ("self", "mask", "source"))
    type, given = rewriter.types[op.results[0]], rewriter.type(rows)
    width = type.shape[-1] if type.shape else 0
    if not given.shape or given.shape[-1] != width or 0 in type.shape:
        return KEEP
    made = next((other for other in reversed(rewriter.ops) if cast(Ref, mask).name in other.results), None)
    if made is not None and made.kind == "expand":
        mask = made.arguments["self"]
    if rewriter.type(mask).shape[-1:] != (1,):
        return KEEP
    count, places = prod(type.shape[:-1]), prod(given.shape) // width
    flag = expanded(rewriter, op, mask, (*type.shape[:-1], 1))
    number = TensorType((count,), torch.int64)
    running = rewriter.write(op, "aten.cumsum.default", number, reshaped(rewriter, op, flag, (count,)), 0)
    index = rewriter.write(op, "aten.sub.Tensor", number, running, 1)
    index = rewriter.write(op, "aten.clamp.default", number, index, 0, places - 1)
    listed = reshaped(rewriter, op, rows, (places, width))
    picked = rewriter.write(op, "aten.index_select.default", TensorType((count, width), type.dtype), listed, 0, index)
    return rewriter.write(op, "aten.where.self", type, flag, reshaped(rewriter, op, picked, type.shape), source)


def _masked_put(rewriter: Rewriter, op: Op) -> Argument:
    """index_put of one value by a mask: a `where` between two tensors."""
    source, values = op.arguments["self"], op.arguments["values"]
    indices = listed(op.arguments["indices"])
    type, given = rewriter.type(source), rewriter.type(values)
    if len(indices) != 1 or op.arguments["accumulate"]:
        return KEEP
    mask = rewriter.type(indices[0])
    inner = len(type.shape) - len(mask.shape)
    if mask.dtype != torch.bool or (len(given.shape) > inner and prod(given.shape) != 1):
        return KEEP
    flag = reshaped(rewriter, op, indices[0], (*mask.shape, *(1,) * inner))
    if len(given.shape) > inner:
        values = reshaped(rewriter, op, values, ())
    return rewriter.write(op, "aten.where.self", type, flag, values, source)


def _adaptive_mean(rewriter: Rewriter, op: Op) -> Argument:
    """Means over equal blocks."""
    source, type = only(op), rewriter.types[op.results[0]]
    given = rewriter.type(source)
    rank = int(op.kind[-2])
    free, before, after = given.shape[:-rank], given.shape[-rank:], type.shape[-rank:]
    if any(size == 0 or made == 0 or size % made for size, made in zip(before, after, strict=True)):
        return KEEP
    blocks = tuple(part for size, made in zip(before, after, strict=True) for part in (made, size // made))
    inner = tuple(len(free) + 2 * place + 1 for place in range(rank))
    return rewriter.write(op, "aten.mean.dim", type, reshaped(rewriter, op, source, (*free, *blocks)), inner)


def _instance_norm(rewriter: Rewriter, op: Op) -> Argument:
    """Each channel of each sample by itself: group norm with as many groups as channels."""
    arguments = op.arguments
    if not arguments["use_input_stats"] or arguments["running_mean"] is not None:
        return KEEP
    type = rewriter.types[op.results[0]]
    given = (arguments["input"], type.shape[1], arguments["weight"], arguments["bias"], arguments["eps"])
    return rewriter.write(op, "aten.group_norm.default", type, *given)


def _vectors(rewriter: Rewriter, op: Op) -> Argument:
    """A product with a vector is one with a matrix of one row or column; the dim goes away again."""
    left, right = op.arguments["self"], op.arguments.get("other", op.arguments.get("mat2", op.arguments.get("vec")))
    right = right if right is not None else op.arguments["tensor"]
    shapes = [rewriter.type(item).shape for item in (left, right)]
    if all(len(shape) >= 2 for shape in shapes):
        return KEEP
    type = rewriter.types[op.results[0]]
    one = shapes[0] if len(shapes[0]) >= 2 else (1, *shapes[0])
    other = shapes[1] if len(shapes[1]) >= 2 else (*shapes[1], 1)
    operands = [reshaped(rewriter, op, item, shape) for item, shape in zip((left, right), (one, other), strict=True)]
    batch = torch.broadcast_shapes(one[:-2], other[:-2])  # type: ignore[no-untyped-call]
    shape = (*batch, one[-2], other[-1])
    product = rewriter.write(op, "aten.matmul.default", TensorType(shape, type.dtype), *operands)
    return reshaped(rewriter, op, product, type.shape)


_REWRITES: dict[str, Rewrite] = {
    **VIEWS,
    **LOSSES,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _padded_convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _unbatched),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
    **dict.fromkeys(("matmul", "mv", "dot"), _vectors),
    "scaled_dot_product_attention": attention,
    "masked_scatter": _masked_scatter,
    "index_put": _masked_put,
    "one_hot": _one_hot,
    **{f"adaptive_avg_pool{rank}d": _adaptive_mean for rank in (1, 2, 3)},
    "instance_norm": _instance_norm,
}
