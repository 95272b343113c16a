"""Products whose weight gradients are computed apart from the backward pass, and later: zero-bubble schedules fill the
time in which a rank waits with them.

The backward pass of such a product computes the gradient of its other operand, and keeps that operand and the gradient
of the result. The weight is no input of it for autograd: the product knows where its gradient goes, be it a parameter
or what the weight is computed from. So a backward pass that runs now leaves these weights alone, and computes all other
gradients as ever; recomputed copies run once, and nothing else does twice.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional


@dataclass(frozen=True)
class _Kind:
    """A kind of product: what it computes of operand, weight and bias, and the gradients of the operand (from that of
    the result and the weight) and of the weight (from that of the result and the operand)."""

    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    operand: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, Tensor], Tensor]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _run_matmul(operand: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return operand @ weight if bias is None else torch.addmm(bias, operand, weight)


_LINEAR = _Kind(
    functional.linear,
    lambda gradient, weight: gradient @ weight,
    lambda gradient, operand: _rows(gradient).mT @ _rows(operand),
)
_MATMUL = _Kind(
    _run_matmul,
    lambda gradient, weight: gradient @ weight.mT,
    lambda gradient, operand: operand.mT @ gradient,
)
# One matrix for all samples: their rows are multiplied together.
_MATMUL_OF_ROWS = _Kind(
    _run_matmul,
    lambda gradient, weight: gradient @ weight.mT,
    lambda gradient, operand: _rows(operand).mT @ _rows(gradient),
)


@dataclass(frozen=True)
class WeightGradient:
    """A gradient of a weight of `shape` that is to be computed, and the place in the graph of autograd that it goes
    to."""

    kind: _Kind
    gradient: Tensor
    operand: Tensor
    shape: torch.Size
    edge: GradientEdge

    def accumulate(self) -> None:
        """Compute the gradient, and run the backward pass of what the weight is computed from: it is added to the
        `.grad` of parameters."""
        with torch.no_grad():
            found = self.kind.weight(self.gradient, self.operand).sum_to_size(self.shape)
        torch.autograd.backward([self.edge], [found], retain_graph=True)


class DeferredGradients:
    """The weight gradients of one stage that backward passes have left."""

    def __init__(self) -> None:
        self._due: deque[WeightGradient] = deque()

    def take(self) -> deque[WeightGradient]:
        """Remove and return them, in the order of the backward pass."""
        due, self._due = self._due, deque()
        return due

    def _leave(self, gradient: WeightGradient) -> None:
        self._due.append(gradient)

    def linear(self, operand: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`torch.nn.functional.linear`."""
        return self._product(_LINEAR, operand, weight, bias)

    def addmm(self, bias: Tensor, operand: Tensor, weight: Tensor) -> Tensor:
        """`torch.addmm`."""
        return self._product(_MATMUL_OF_ROWS, operand, weight, bias)

    def matmul(self, operand: Tensor, weight: Tensor) -> Tensor:
        """`operand @ weight`, both with two dims or more."""
        return self._product(_MATMUL_OF_ROWS if weight.dim() == 2 else _MATMUL, operand, weight, None)

    def _product(self, kind: _Kind, operand: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given = _as_autocast(operand), _as_autocast(weight), None if bias is None else _as_autocast(bias)
        operand, weight, bias = given
        if not (torch.is_grad_enabled() and operand.requires_grad and weight.requires_grad):
            return kind.run(operand, weight, bias)
        edge = get_gradient_edge(weight)
        result: Tensor = _Product.apply(self._leave, kind, edge, operand, weight.detach(), bias)  # type: ignore[no-untyped-call]
        return result


def _as_autocast(tensor: Tensor) -> Tensor:
    """A tensor as torch.autocast gives it to products."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Product(torch.autograd.Function):
    """A product whose backward pass leaves the gradient of the weight, which has none in its graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        leave: Callable[[WeightGradient], None],
        kind: _Kind,
        edge: GradientEdge,
        operand: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(operand, weight)
        ctx.product = leave, kind, edge, None if bias is None else bias.shape  # type: ignore[attr-defined]
        return kind.run(operand, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leave, kind, edge, bias = ctx.product  # type: ignore[attr-defined]
        operand, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        leave(WeightGradient(kind, gradient, operand, weight.shape, edge))
        added = gradient.sum_to_size(bias) if ctx.needs_input_grad[5] else None  # type: ignore[attr-defined]
        return None, None, None, kind.operand(gradient, weight).sum_to_size(operand.shape), None, added
