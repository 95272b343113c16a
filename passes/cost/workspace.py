"""What ops need for themselves, besides their operands, results, and the gradients of both.

Read from what torch's backward formulas and this package's local forms allocate; a test holds the tables against it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.program import Op


@dataclass(frozen=True)
class Workspace:
    """In tensors of the first operand's size: what autograd keeps besides what the rule says, and what the backward
    pass has there at once besides all that is kept and the gradients of results and operands."""

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
# vocabulary_cross_entropy keeps differences and their exponentials, of which the rule counts one.
BY_BODY: Mapping[str, Workspace] = {"vocabulary_cross_entropy": Workspace(kept=1.0, backward=1.0)}
# The same in tensors of the result's size, where an operand that is repeated has a gradient: products of full size
# before they are summed (of a divisor: the quotient again, minus that, and the product with the gradient).
REPEATED: Mapping[str, float] = {"mul": 1.0, "div": 3.0}


def workspace(
    op: Op, bodies: Collection[str], operands: Sequence[float], flows: Sequence[bool], result: float
) -> tuple[float, float]:
    """Bytes that autograd keeps besides, and that the backward pass needs besides. `bodies` are the local forms that
    run, `operands` and `result` bytes on one device, `flows` says which operands have a gradient."""
    if not operands:
        return 0.0, 0.0
    found = next((BY_BODY[body] for body in bodies if body in BY_BODY), BY_KIND.get(op.kind, NONE))
    backward = found.backward * operands[0]
    if any(flowing and size < result for flowing, size in zip(flows, operands, strict=True)):
        backward += REPEATED.get(op.kind, 0.0) * result
    return found.kept * operands[0], backward
