"""Seconds of a linear layer and the cross entropy of its result on one device.

Products are those of `passes.cost.compute`, one for each chunk; those of a chunk with the gradient of its logits run
forward, but that of the weight runs backward where there is a single chunk. The passes over logits are those that the
runtime makes, each a kernel that reads and writes them once:

- forward: a cast to the dtype of the softmax, which also scales, or scaling alone; the largest; the softmax; for a soft
  cap two before that;
- for gradients: a cast back, which also is the product with each token's factor where classes are split, or that alone;
  the tangent of a soft cap. Each chunk adds to the gradient of the weight, at least in single precision.
"""

from collections.abc import Sequence

from passes.cost.compute import product_seconds
from passes.cost.hardware import ALIGNMENT, Device
from passes.ir.choices import Strategy
from passes.ir.figures import largest
from passes.ir.layout import local_shape
from passes.ir.linear_loss import LinearLoss
from passes.ir.mesh import Mesh
from passes.rules.local_forms import form_that_runs, linear_loss
from passes.rules.strategies import Choice, OpContext

# The kind of ops that are a linear layer with the cross entropy of its result.
LINEAR_LOSS = "linear_cross_entropy"
# Kernels of a chunk besides its products and passes: of numbers of tokens alone.
_KERNELS = 16


def local_loss(context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh) -> LinearLoss | None:
    """The linear layer with its cross entropy that a rank computes; None for other ops."""
    if context.op.kind != LINEAR_LOSS:
        return None
    shapes = [
        local_shape(type.shape, layout, mesh) for type, layout in zip(context.operands, strategy.operands, strict=True)
    ]
    flows = context.flowing_operands if context.flows else (False,) * len(shapes)
    form = form_that_runs(choice.form for choice in choices)
    return linear_loss(context.op, shapes, context.operands[0].dtype, flows, form)


def linear_loss_seconds(loss: LinearLoss, device: Device) -> tuple[float, float]:
    """Seconds forward and backward of the op on one rank."""
    item, wide = loss.dtype.itemsize, loss.wide.itemsize
    is_cast, several = item < wide, loss.chunks > 1
    hidden, weight, bias = loss.flows
    unaligned = any(row * item % ALIGNMENT for row in (loss.width, loss.classes))
    rows = loss.tokens / loss.chunks
    logits, states, weights = rows * loss.classes, rows * loss.width, loss.classes * loss.width

    def product(elements: float) -> float:
        """The product of a chunk with so many elements in its result."""
        flops = 2.0 * rows * loss.classes * loss.width
        moved = (logits + states + weights) * item / device.stream
        multiplied = product_seconds(flops, elements, loss.dtype, device, unaligned)
        return device.launch + largest(moved, multiplied)

    def passes(*moved: float) -> float:
        """Passes that move so many bytes each."""
        return sum(device.launch + each / device.stream for each in moved if each)

    forward = product(logits) + _KERNELS * device.launch
    forward += passes(*(logits * each for each in _forward_passes(loss, item, wide, is_cast)))
    if any(loss.flows):
        forward += passes(*(logits * each for each in _gradient_passes(loss, item, wide, is_cast)))
    backward = 0.0
    if hidden:
        forward += product(states) + passes(2 * states * item)
        backward += passes(2 * states * loss.chunks * item)
    if weight:
        weight_s = product(weights) + passes(2 * states * item)
        if several:
            forward += weight_s
            backward += passes(weights * (item + wide))
        else:
            backward += weight_s
    if bias:
        forward += several * passes(logits * item)
        backward += (not several) * passes(logits * item)
    forward *= loss.chunks
    if weight and several and is_cast:
        # The first chunk casts its product, the others add theirs.
        forward += passes(weights * (item + wide)) + (loss.chunks - 1) * passes(weights * (item + 2 * wide))
    return forward, backward


def _forward_passes(loss: LinearLoss, item: int, wide: int, is_cast: bool) -> list[int]:
    """Bytes of each logit that passes move for the loss."""
    found = [2 * item] * (2 * loss.is_capped)
    if is_cast or loss.is_scaled or loss.is_capped:
        found.append(item + wide)
    return [*found, wide, 2 * wide]


def _gradient_passes(loss: LinearLoss, item: int, wide: int, is_cast: bool) -> list[int]:
    """The same for the gradient of logits."""
    found = [item + wide] if is_cast or loss.is_split else []
    return [*found, 3 * item] if loss.is_capped else found
