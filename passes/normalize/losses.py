"""Losses: a mean is a sum by a count, exact however the batch is spread; elementwise losses are reduced by sum or mean.

`reduction` is 0 for none, 1 for mean, 2 for sum.
"""

from math import prod

import torch

from passes.ir.program import Argument, Op, TensorType
from passes.normalize.rewriter import KEEP, Rewrite, Rewriter
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
    flag = TensorType(labels.shape, torch.bool)
    counted = rewriter.write(op, "aten.ne.Scalar", flag, target, ignored)
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
