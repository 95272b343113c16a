"""Workspace of ops: memory besides their operands, results, and the gradients of both.

From the allocations of torch's backward formulas; local forms say their own. A test compares all of it with them.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from passes.cost.attention import local_attention
from passes.cost.forms import form_contexts
from passes.ir.choices import Strategy
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.rules.attention_kernels import attention_workspace
from passes.rules.local_forms import Workspace
from passes.rules.rule import Choice
from passes.rules.strategies import OpContext

# Temporaries that are live at once in the backward pass, in tensors of the first operand's size.
# pow: the power below and its product with the exponent. rsqrt: the result to the third, and half of that.
# cross_entropy_loss: the gradient of the logarithms.
TEMPORARIES: Mapping[str, float] = {"pow": 2.0, "rsqrt": 2.0, "cross_entropy_loss": 1.0}
# The same in tensors of the result's size, where an operand that is repeated has a gradient: products of full size
# before they are summed (of a divisor: the quotient, its negative, and the product with the gradient).
REPEATED: Mapping[str, float] = {"mul": 1.0, "div": 3.0}


def workspace(context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str) -> Workspace:
    """Bytes that autograd saves besides what the rule says, and bytes of temporaries in the backward pass, on a rank of
    `mesh` of devices of the type `device`."""
    if not context.flows or not context.operands:
        return 0.0, 0.0
    for form, about in form_contexts(context, choices, strategy, mesh, device):
        return form.workspace(about)
    if context.op.kind not in _KINDS:
        return 0.0, 0.0
    shapes = [
        local_shape(type.shape, layout, mesh) for type, layout in zip(context.operands, strategy.operands, strict=True)
    ]
    attention = local_attention(context, choices, strategy, mesh, device)
    if attention is not None:
        masks = zip(context.operands[3:], shapes[3:], strict=True)
        converted = sum(prod(shape) for type, shape in masks if type.dtype is torch.bool)
        dropout = bool(context.op.arguments["dropout_p"])
        dtype = context.operands[0].dtype
        return attention_workspace(attention.kernel, dtype, attention.operands, mask=converted, dropout=dropout)
    operands = [prod(shape) * type.dtype.itemsize for shape, type in zip(shapes, context.operands, strict=True)]
    backward = TEMPORARIES.get(context.op.kind, 0.0) * operands[0]
    whole = context.results[0]
    result = prod(local_shape(whole.shape, strategy.results[0], mesh)) * whole.dtype.itemsize
    if any(flows and size < result for flows, size in zip(context.flowing_operands, operands, strict=True)):
        backward += REPEATED.get(context.op.kind, 0.0) * result
    return 0.0, backward


_KINDS = frozenset((*TEMPORARIES, *REPEATED, "scaled_dot_product_attention"))
