"""Costs of single ops in eager mode beyond those of sharding rules: torch's autograd formulas.

Rules count what a backward pass must read and write. Where nothing is fused each gradient has kernels of its own
(torch's tools/autograd/derivatives.yaml and FunctionsManual.cpp, 2.5 to 2.13).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from benchmarks.replay.graphs import Forced
from passes.ir.layout import local_shape
from passes.ir.lowered import Body, Compute

# Rows of softmax that are longer are read anew for their maximum, their sum, and the result (`host_softmax` in
# aten/src/ATen/native/cuda/SoftMax.cu): the shared memory that a block has by default.
_ROW = 48 * 1024


@dataclass(frozen=True)
class Sizes:
    """Bytes of an op's result on one rank, of those of its operands that gradients flow to, and of a row of the first
    operand."""

    result: float
    operands: tuple[float, ...]
    row: float


@dataclass(frozen=True)
class Beyond:
    """Bytes of an op forward and backward, and kernels backward, beyond those that are counted (one kernel for each
    op); below 0 where too many are."""

    forward: float = 0.0
    backward: float = 0.0
    kernels: int = 0


def beyond(statement: Compute, body: Body, forced: Forced) -> Beyond:
    """The cost of an op beyond that of its rule."""
    op = statement.whole
    formula = FORMULAS.get(op.kind)
    flowing = [name for name in op.operands if name.partition("~")[0] in forced.folded.flowing]
    if formula is None or not flowing:
        return Beyond()
    first = body.types[op.operands[0]]
    return formula(
        Sizes(
            _size(op.results[0], body, forced),
            tuple(_size(name, body, forced) for name in flowing),
            float(first.shape[-1] * first.dtype.itemsize if first.shape else 0),
        )
    )


def sums(body: Body, forced: Forced) -> Beyond:
    """The cost of summing the gradients of values that several ops read, with one kernel per sum."""
    uses: Counter[str] = Counter()
    for statement in body.statements:
        if isinstance(statement, Compute):
            uses.update(name for name in statement.whole.operands if name.partition("~")[0] in forced.folded.flowing)
    owned = {name for region in forced.folded.regions for name in region.owned}
    owned.update(item.name for item in forced.stage.program.parameters)
    added = {name: count - 1 for name, count in uses.items() if count > 1 and name not in owned}
    taken = sum(3 * count * _size(name, body, forced) for name, count in added.items())
    return Beyond(backward=taken, kernels=sum(added.values()))


def _size(name: str, body: Body, forced: Forced) -> float:
    type = body.types[name]
    return float(prod(local_shape(type.shape, body.layouts[name], forced.mesh)) * type.dtype.itemsize)


def _power(sizes: Sizes) -> Beyond:
    """A power less by one, times the exponent, times the gradient: seven passes, of which three are counted."""
    return Beyond(backward=4 * sizes.result, kernels=2)


def _product(sizes: Sizes) -> Beyond:
    """Each factor's gradient reads that of the result and the other factor; where the factor is broadcast it is written
    whole, and read again to be summed."""
    if len(sizes.operands) != 2:
        return Beyond()
    taken, kernels = 0.0, 0
    for own, other in (sizes.operands, sizes.operands[::-1]):
        broadcast = own < sizes.result
        taken += sizes.result + other + own + (2 * sizes.result if broadcast else 0.0)
        kernels += 2 if broadcast else 1
    return Beyond(backward=taken - sizes.result - 2 * sum(sizes.operands), kernels=kernels - 1)


def _sum(sizes: Sizes) -> Beyond:
    """The gradient of a sum is that of its terms: nothing is copied, unless a term is broadcast."""
    passed = [own for own in sizes.operands if own == sizes.result]
    if len(passed) < len(sizes.operands):
        return Beyond(backward=-sum(passed))
    return Beyond(backward=-(sizes.result + sum(passed)), kernels=-1)


def _loss(sizes: Sizes) -> Beyond:
    """The softmax of long rows reads three times forward, and the gradient twice backward, where that of the picked
    logarithms is first filled with zeros: four and five passes, of which two and two are counted."""
    logits = sizes.operands[0]
    if sizes.row > _ROW:
        return Beyond(2 * logits, 3 * logits, 2)
    return Beyond(0.0, 2 * logits, 2)


FORMULAS: Mapping[str, Callable[[Sizes], Beyond]] = {
    "pow": _power,
    "mul": _product,
    "add": _sum,
    "cross_entropy_loss": _loss,
}
