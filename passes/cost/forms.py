"""The part of an op that a rank runs under a strategy: its local forms, the kernel of its attention, and its workspace.

Workspace is memory besides operands, results, and the gradients of both: from the allocations of torch's backward
formulas, and from what local forms say themselves. A test compares all of it with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from passes.cost.compute import Work
from passes.ir.choices import Strategy
from passes.ir.layout import Shape, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Role, Rule
from passes.rules.attention_kernels import Kernel, attention_kernel, attention_workspace
from passes.rules.local_forms import LOCAL_FORMS, FormContext, LocalForm, Split, Workspace
from passes.rules.strategies import Choice, OpContext

_PLAIN = LocalForm()


def shares(rule: Rule | None, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float]:
    """The part of the multiplications of an op, forward and backward, that the busiest rank has."""
    forward = backward = 1.0
    if rule is None:
        return forward, backward
    splits: dict[tuple[str, ...], list[Split]] = {}
    for choice, size in zip(choices, sizes, strict=True):
        if choice.factors:
            splits.setdefault((choice.form, *choice.factors), []).append(Split(size, choice.major))
    for (form, *factors), each in splits.items():
        share = (LOCAL_FORMS[form] if form else _PLAIN).share(each)
        parts = rule.divided.get(factors[0], (1.0, 1.0))
        forward, backward = (
            whole * (1 - part + part * share) for whole, part in zip((forward, backward), parts, strict=True)
        )
    return forward, backward


def form_contexts(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Iterator[tuple[LocalForm, FormContext]]:
    """The local forms that run, and their contexts: one for each axis that splits a factor of one."""
    rule = context.rule
    if rule is None or not any(choice.form for choice in choices):
        return
    shapes = tuple(
        local_shape(type.shape, layout, mesh) for type, layout in zip(context.operands, strategy.operands, strict=True)
    )
    reduced = prod(factor.size for factor in rule.factors.values() if factor.role is Role.INSIDE)
    splits = [(choice, size) for choice, size in zip(choices, mesh.sizes, strict=True) if choice.form]
    inside = prod(size for choice, size in splits if rule.factors[choice.factors[0]].role is Role.INSIDE)
    rows = prod(shapes[0]) * inside // reduced
    for axis, choice in enumerate(choices):
        if choice.form:
            later = (size for other, size in splits if other.factors == choice.factors and other.major > choice.major)
            dim, reach = strategy.operands[0][axis].dim, rule.factors[choice.factors[0]].reach
            dtype = context.operands[0].dtype
            yield (
                LOCAL_FORMS[choice.form],
                FormContext(context.op, axis, mesh.sizes[axis], shapes, dtype, rows, dim, prod(later), reach, device),
            )


# Passes over scores without a fused kernel: the first product writes them, the softmax reads and writes, the second
# product reads them. A mask is read, and added to them. The backward pass has twice the products.
_FORWARD_PASSES, _MASK_PASSES, _BACKWARD_PASSES = 4, 3, 6


class Attention(NamedTuple):
    """Attention on one rank: the kernel, the local query, key and value, and whether scores are masked."""

    kernel: Kernel
    operands: tuple[Shape, ...]
    is_masked: bool


def local_attention(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Attention | None:
    """The attention that a rank computes; None for other ops."""
    if context.op.kind != "scaled_dot_product_attention":
        return None
    shapes = tuple(
        local_shape(type.shape, layout, mesh)
        for type, layout in zip(context.operands[:3], strategy.operands[:3], strict=True)
    )
    masked = len(context.operands) > 3
    split = any(choice.form for choice in choices)
    if split:
        # The local form repeats grouped heads.
        query, keys = shapes[0], shapes[1:]
        shapes = (query, *((each[0], query[1], *each[2:]) for each in keys))
    kernel = attention_kernel(
        device,
        context.operands[0].dtype,
        shapes,
        masked=masked or split,
        dropout=bool(context.op.arguments["dropout_p"]),
    )
    return Attention(kernel, shapes, masked or split or bool(context.op.arguments["is_causal"]))


def attention_work(work: Work, attention: Attention) -> Work:
    """`work` as the kernel does it: without a fused one as products and passes over whole scores, at least in single
    precision. Tiles of fused ones are as wide as the widths on average."""
    query, key, value = attention.operands
    if attention.kernel is not Kernel.MATH:
        return replace(work, width=(query[-1] + value[-1]) / 2)
    scores = prod(query[:-1]) * key[-2]
    dtype = work.dtype if work.dtype.itemsize >= torch.float32.itemsize else torch.float32
    forward = 2.0 * scores * (query[-1] + value[-1])
    parts = sum(work.backward)
    passed = scores * dtype.itemsize
    return replace(
        work,
        dtype=dtype,
        reads=work.reads + (_FORWARD_PASSES + _MASK_PASSES * attention.is_masked) * passed,
        back=work.back + _BACKWARD_PASSES * passed,
        forward=forward,
        backward=[2 * forward * part / parts for part in work.backward] if parts else work.backward,
        elements=scores,
        unaligned=False,
        batched=True,
    )


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
