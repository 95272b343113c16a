"""deferred: marks the products of a stage whose weight gradients are computed apart from the backward pass, and later.

Zero-bubble schedules (Qi et al. 2023) fill the time in which a rank waits with gradients of weights, which no other
rank waits for. The backward pass of a product then computes the gradient of its other operand, and keeps that operand
and the gradient of the result. What a weight is computed from (a cast, a transpose, collectives of its own) has its
backward pass later, too. Gradients of all other parameters (norms, biases, embeddings, grouped products) take little
time, and stay in the backward pass.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from passes.ir.lowered import Body, Compute, Loop, Redistribution, Stage, Statement

# The weight among the operands of a product, and the operand that it is multiplied with.
OPERANDS: Mapping[str, tuple[int, int]] = {
    "linear": (1, 0),
    "addmm": (2, 1),
    "matmul": (1, 0),
    "mm": (1, 0),
    "bmm": (1, 0),
}


def deferred(stage: Stage, flowing: Set[str]) -> Stage:
    """`stage` with the products marked whose weight gradients are computed apart: a weight is computed from trained
    parameters alone, and the other operand takes a gradient as well. Those values are in `flowing` that take one."""
    trained = {item.name for item in stage.program.parameters if item.trainable}
    body = stage.body
    weights = set(_weights(body, trained, flowing))
    statements = tuple(
        replace(
            item, body=_marked(item.body, set(_weights(item.body, _inside(item, trained, weights), flowing)), flowing)
        )
        if isinstance(item, Loop)
        else _product(item, weights, flowing)
        for item in body.statements
    )
    return replace(stage, body=replace(body, statements=statements))


def _inside(loop: Loop, trained: Set[str], weights: Set[str]) -> set[str]:
    """The weights that the body of a loop begins with: parameters, those of its copies, and values from outside."""
    owned = {own for own, names in loop.owned.items() if trained >= set(names)}
    carried = len(loop.initial)
    shared = zip(loop.body.arguments[carried:], loop.shared, strict=True)
    return {*trained, *owned, *(inner for inner, outer in shared if outer in weights)}


def _weights(body: Body, given: Set[str], flowing: Set[str]) -> Iterator[str]:
    """The values of a body that are computed from the weights `given` alone, as far as they take gradients."""
    found = set(given)
    for item in body.statements:
        if isinstance(item, Redistribution) and item.source in found:
            found.add(item.result)
        elif isinstance(item, Compute):
            read = {name for name in item.op.operands if _flows(name, flowing)}
            if read and read <= found:
                found.update(item.op.results)
    yield from found


def _marked(body: Body, weights: Set[str], flowing: Set[str]) -> Body:
    return replace(body, statements=tuple(_product(item, weights, flowing) for item in body.statements))


def _product(item: Statement, weights: Set[str], flowing: Set[str]) -> Statement:
    """A statement, marked if it is such a product."""
    if not isinstance(item, Compute) or item.body or item.op.kind not in OPERANDS:
        return item
    arguments = item.op.arguments
    if (arguments.get("beta", 1), arguments.get("alpha", 1)) != (1, 1):
        return item
    weight, other = (item.op.operands[slot] for slot in OPERANDS[item.op.kind])
    if weight not in weights or other in weights or not (_flows(weight, flowing) and _flows(other, flowing)):
        return item
    return replace(item, deferred=(weight, other))


def _flows(name: str, flowing: Set[str]) -> bool:
    """Whether a value, in whatever layout, takes a gradient."""
    return name.partition("~")[0] in flowing
