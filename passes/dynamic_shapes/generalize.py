"""generalize: one program at several sizes in, the program whose sizes are formulas out.

The passes work on numbers, but their results at different input sizes differ in dims only, and dims are polynomials
that are linear in each size (batch times sequence, sequence minus one, a part of the batch). Such a polynomial in n
sizes is determined by its values at two values of each size; samples at other sizes verify it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

import sympy

from passes.ir.errors import ExpressionError
from passes.ir.figures import size_of
from passes.ir.folded import Folded, Region
from passes.ir.program import Op, TensorType

Sizes = Mapping[str, int]


def corners(planned: Sizes, others: Sizes) -> list[dict[str, int]]:
    """The sizes at which a polynomial has to be known: each as planned, or the other; as planned first."""
    return [
        dict(zip(planned, chosen, strict=True))
        for chosen in product(*((size, others[name]) for name, size in planned.items()))
    ]


def alike(one: Folded, other: Folded) -> bool:
    """Whether two programs are equal except for their sizes."""
    return _structure(one) == _structure(other)


def generalize(samples: Sequence[tuple[Sizes, Folded]]) -> Folded:
    """The first of `samples` with figures for its sizes that differ from sample to sample.

    The first samples are at `corners`; those that follow are tried. Raises ExpressionError where programs differ by
    more than sizes, or sizes are no such polynomials.
    """
    points = [sizes for sizes, _ in samples]
    _, first = samples[0]
    for _, folded in samples[1:]:
        if not alike(first, folded):
            raise ExpressionError("the program is another one at other sizes: it has no formula for all of them")

    def typed(name: str, types: Sequence[TensorType]) -> TensorType:
        dims = zip(*(type.shape for type in types), strict=True)
        return replace(types[0], shape=tuple(fitted(f"a dim of {name}", points, values) for values in dims))

    types = {name: typed(name, [folded.types[name] for _, folded in samples]) for name in first.types}
    program = first.program
    inputs = [
        replace(item, type=typed(item.name, [folded.program.inputs[number].type for _, folded in samples]))
        for number, item in enumerate(program.inputs)
    ]
    return replace(first, types=types, program=replace(program, inputs=tuple(inputs)))


def _structure(folded: Folded) -> list[object]:
    found: list[object] = [
        (name, len(type.shape), type.dtype) for name, type in sorted(folded.types.items(), key=lambda item: item[0])
    ]
    for item in folded.items:
        ops: tuple[Op, ...] = item.ops if isinstance(item, Region) else (item,)
        found.append((item.name, item.count) if isinstance(item, Region) else "")
        found += [(op.key, op.target, op.operands, op.results) for op in ops]
    return found


def fitted(what: str, points: Sequence[Sizes], values: Sequence[int]) -> int:
    """The number that has `values` at `points`, of which the first are `corners`: a figure of its value at the first
    point, or a plain number where it is always the same.

    Raises ExpressionError where it is no polynomial that is linear in each size; `what` names it there.
    """
    if len(set(values)) == 1:
        return values[0]
    # All products of different sizes.
    terms = [chosen for count in range(len(points[0]) + 1) for chosen in combinations(points[0], count)]
    rows = [[prod(sizes[name] for name in term) for term in terms] for sizes in points]
    known = len(terms)
    factors = sympy.Matrix(rows[:known]).LUsolve(sympy.Matrix(values[:known]))
    for row, value, sizes in zip(rows, values, points, strict=True):
        if sum(factor * item for factor, item in zip(factors, row, strict=True)) != value:
            raise ExpressionError(
                f"{what} is {value} at {dict(sizes)}: it is not linear in each of these, so it has no formula"
            )
    products = [sympy.Mul(*map(sympy.Symbol, term)) for term in terms]
    return size_of(values[0], sympy.Add(*(factor * product for factor, product in zip(factors, products, strict=True))))
