"""Workspace of ops: memory besides their operands, results, and the gradients of both.

From the allocations of torch's backward formulas and of this package's local forms; a test compares the tables with
them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.program import Op


@dataclass(frozen=True)
class Workspace:
    """In multiples of the first operand's size: the tensors that autograd saves besides those of the rule, and the
    temporaries that are live at once in the backward pass."""

    kept: float = 0.0
    backward: float = 0.0


NONE = Workspace()
# pow: the power below and its product with the exponent. rsqrt: the result to the third, and half of that.
# cross_entropy_loss: the gradient of the logarithms.
BY_KIND: Mapping[str, Workspace] = {
    "pow": Workspace(backward=2.0),
    "rsqrt": Workspace(backward=2.0),
    "cross_entropy_loss": Workspace(backward=1.0),
}
# vocabulary_cross_entropy saves differences and their exponentials, of which the rule counts one.
BY_BODY: Mapping[str, Workspace] = {"vocabulary_cross_entropy": Workspace(kept=1.0, backward=1.0)}
# The same in tensors of the result's size, where an operand that is repeated has a gradient: products of full size
# before they are summed (of a divisor: the quotient, its negative, and the product with the gradient).
REPEATED: Mapping[str, float] = {"mul": 1.0, "div": 3.0}


def workspace(
    op: Op, bodies: Collection[str], operands: Sequence[float], flows: Sequence[bool], result: float
) -> tuple[float, float]:
    """Additional bytes that autograd saves, and bytes of temporaries in the backward pass. `bodies` are the local forms
    that run, `operands` and `result` bytes on one device, `flows` says which operands have a gradient."""
    if not operands:
        return 0.0, 0.0
    found = next((BY_BODY[body] for body in bodies if body in BY_BODY), BY_KIND.get(op.kind, NONE))
    backward = found.backward * operands[0]
    if any(flowing and size < result for flowing, size in zip(flows, operands, strict=True)):
        backward += REPEATED.get(op.kind, 0.0) * result
    return found.kept * operands[0], backward
