"""Memory of an op on one rank besides its operands, its results, and the gradients of both.

It is from the allocations of torch's backward formulas, from kernels of attention, and from what local forms say
themselves. A test compares all of it with them."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from passes.cost.attention import ATTENTION, local_attention
from passes.cost.forms import forms_of
from passes.cost.linear_loss import LINEAR_LOSS, local_loss
from passes.ir.choices import Strategy
from passes.ir.layout import Shape, local_shape
from passes.ir.mesh import Mesh
from passes.rules.attention_forms import attention_workspace
from passes.rules.form_context import Workspace
from passes.rules.scan_forms import selective_temporaries
from passes.rules.strategies import Choice, OpContext

# Temporaries that are live at once in the backward pass, in tensors of the first operand's size: the terms of the
# formulas in torch's derivatives.yaml. pow: the power below and its product with the exponent. rsqrt: the result to the
# third, and half of that. cross_entropy_loss: the gradient of the logarithms. gather, index_select: the zeros that the
# gradient is added to.
TEMPORARIES: Mapping[str, float] = {
    **dict.fromkeys(("abs", "cosh", "digamma", "exp2", "expm1", "i0", "lgamma", "log10", "log1p", "log2"), 1.0),
    **dict.fromkeys(("sin", "sinh", "sqrt", "cross_entropy_loss", "gather", "index_select"), 1.0),
    **dict.fromkeys(("linalg_vector_norm", "std", "var"), 1.0),
    **dict.fromkeys(("atan", "cos", "cumsum", "logsumexp", "pow", "reciprocal", "rsqrt", "square", "tan"), 2.0),
    **dict.fromkeys(("acosh", "asinh", "atanh"), 3.0),
    **dict.fromkeys(("asin", "erf", "erfc", "erfinv"), 4.0),
    **dict.fromkeys(("acos", "prod"), 5.0),
    "sinc": 7.0,
}
# The same in tensors of the result's size, where an operand that is repeated has a gradient: products of full size
# before they are summed (of a divisor: the quotient, its negative, and the product with the gradient).
REPEATED: Mapping[str, float] = {"mul": 1.0, "div": 3.0}


class _Rank(NamedTuple):
    """An op whose results have gradients, on a rank of `mesh` of devices of the type `device`."""

    context: OpContext
    choices: Sequence[Choice]
    strategy: Strategy
    mesh: Mesh
    device: str

    def shapes(self) -> list[Shape]:
        """The local shapes of the operands."""
        pairs = zip(self.context.operands, self.strategy.operands, strict=True)
        return [local_shape(type.shape, layout, self.mesh) for type, layout in pairs]


def _of_loss(rank: _Rank) -> Workspace:
    loss = local_loss(rank.context, rank.choices, rank.strategy, rank.mesh)
    assert loss is not None
    return loss.workspace()


def _of_selective_scan(rank: _Rank) -> Workspace:
    return 0.0, selective_temporaries(rank.shapes(), rank.context.operands[0].dtype)


def _of_attention(rank: _Rank) -> Workspace:
    attention = local_attention(*rank)
    assert attention is not None
    context = rank.context
    masks = zip(context.operands[3:], rank.shapes()[3:], strict=True)
    converted = sum(prod(shape) for type, shape in masks if type.dtype is torch.bool)
    dropout, dtype = bool(context.op.arguments["dropout_p"]), context.operands[0].dtype
    return attention_workspace(
        attention.kernel, dtype, attention.operands, rank.device, mask=converted, dropout=dropout
    )


def _of_formula(rank: _Rank) -> Workspace:
    context, kind = rank.context, rank.context.op.kind
    pairs = zip(rank.shapes(), context.operands, strict=True)
    operands = [prod(shape) * type.dtype.itemsize for shape, type in pairs]
    backward = TEMPORARIES.get(kind, 0.0) * operands[0]
    whole = context.results[0]
    result = prod(local_shape(whole.shape, rank.strategy.results[0], rank.mesh)) * whole.dtype.itemsize
    if any(flows and size < result for flows, size in zip(context.flowing_operands, operands, strict=True)):
        backward += REPEATED.get(kind, 0.0) * result
    return 0.0, backward


_Formula = Callable[[_Rank], Workspace]
# Ops by their kind, whatever local form they have.
_IN_ANY_FORM: Mapping[str, _Formula] = {LINEAR_LOSS: _of_loss}
# Ops by their kind where they have no local form, which would say itself what it allocates.
_WITHOUT_FORM: Mapping[str, _Formula] = {
    **dict.fromkeys((*TEMPORARIES, *REPEATED), _of_formula),
    **dict.fromkeys(ATTENTION, _of_attention),
    "selective_scan": _of_selective_scan,
}


def workspace(context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str) -> Workspace:
    """Bytes that autograd saves besides what the rule says, and bytes of temporaries in the backward pass, on a rank of
    `mesh` of devices of the type `device`."""
    if not context.flows or not context.operands:
        return 0.0, 0.0
    rank = _Rank(context, choices, strategy, mesh, device)
    if context.op.kind in _IN_ANY_FORM:
        return _IN_ANY_FORM[context.op.kind](rank)
    for form, about in forms_of(*rank):
        return form.workspace(about)
    formula = _WITHOUT_FORM.get(context.op.kind)
    return formula(rank) if formula is not None else (0.0, 0.0)
