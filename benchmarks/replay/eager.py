"""Bytes that ops take one by one, beside those that rules count: autograd's formulas, as torch has them.

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


def beyond(statement: Compute, body: Body, forced: Forced) -> tuple[float, float]:
    """Bytes of an op forward and backward, beyond those that its rule counts; below 0 where it counts too many."""
    op = statement.whole
    formula = _FORMULAS.get(op.kind)
    flowing = [name for name in op.operands if name.partition("~")[0] in forced.folded.flowing]
    if formula is None or not flowing:
        return 0.0, 0.0
    first = body.types[op.operands[0]]
    return formula(
        Sizes(
            _size(op.results[0], body, forced),
            tuple(_size(name, body, forced) for name in flowing),
            float(first.shape[-1] * first.dtype.itemsize if first.shape else 0),
        )
    )


def sums(body: Body, forced: Forced) -> float:
    """Bytes that adding up the gradients of values that several ops read takes, each sum a kernel of its own."""
    uses: Counter[str] = Counter()
    for statement in body.statements:
        if isinstance(statement, Compute):
            uses.update(name for name in statement.whole.operands if name.partition("~")[0] in forced.folded.flowing)
    owned = {name for region in forced.folded.regions for name in region.owned}
    owned.update(item.name for item in forced.lowered.program.parameters)
    return sum(
        3 * (count - 1) * _size(name, body, forced) for name, count in uses.items() if count > 1 and name not in owned
    )


def _size(name: str, body: Body, forced: Forced) -> float:
    type = body.types[name]
    return float(prod(local_shape(type.shape, body.layouts[name], forced.mesh)) * type.dtype.itemsize)


def _power(sizes: Sizes) -> tuple[float, float]:
    """A power less by one, times the exponent, times the gradient: seven passes, of which three are counted."""
    return 0.0, 4 * sizes.result


def _product(sizes: Sizes) -> tuple[float, float]:
    """Each factor's gradient reads that of the result and the other factor; where the factor is broadcast it is written
    whole, and read again to be summed."""
    if len(sizes.operands) != 2:
        return 0.0, 0.0
    taken = 0.0
    for own, other in (sizes.operands, sizes.operands[::-1]):
        taken += sizes.result + other + own + (2 * sizes.result if own < sizes.result else 0.0)
    return 0.0, taken - sizes.result - 2 * sum(sizes.operands)


def _sum(sizes: Sizes) -> tuple[float, float]:
    """The gradient of a sum is that of its terms, and nothing is copied, unless a term is broadcast."""
    passed = [own for own in sizes.operands if own == sizes.result]
    return 0.0, -(sizes.result + sum(passed)) if len(passed) == len(sizes.operands) else -sum(passed)


def _loss(sizes: Sizes) -> tuple[float, float]:
    """The softmax of long rows reads three times forward, and the gradient twice backward, where that of the picked
    logarithms is first filled with zeros: four and five passes, of which two and two are counted."""
    logits = sizes.operands[0]
    return (2 * logits, 3 * logits) if sizes.row > _ROW else (0.0, logits)


_FORMULAS: Mapping[str, Callable[[Sizes], tuple[float, float]]] = {
    "pow": _power,
    "mul": _product,
    "add": _sum,
    "cross_entropy_loss": _loss,
}
