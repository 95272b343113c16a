"""Lower bounds on the products of an op against all splits of its factors."""

from itertools import product
from math import prod
from random import Random

import pytest

from passes.cost.splits import Term, kinds_of, least_sum
from passes.ir.rule import Factor, Part, Role, Rule


@pytest.mark.parametrize("seed", range(20))
def test_no_split_takes_less(seed: int) -> None:
    """Of random terms over up to four kinds of methods, and the bound is near to the least of all real splits."""
    random = Random(seed)
    kinds, devices = random.randint(1, 4), 64
    terms = [
        Term(10 ** random.uniform(-3, 3), frozenset(kind for kind in range(kinds) if random.random() < 0.5))
        for _ in range(6)
    ]
    bound = least_sum(terms, kinds, devices)
    # All splits into powers of the square root of two.
    steps = range(13)
    splits = [exponents for exponents in product(steps, repeat=kinds) if sum(exponents) <= 12]
    values = [
        sum(term.seconds / prod(2 ** (exponents[kind] / 2) for kind in term.kinds) for term in terms)
        for exponents in splits
    ]
    assert bound <= min(values) * (1 + 1e-9)
    assert bound >= 0.8 * min(values)


def test_one_device_splits_nothing() -> None:
    """Nor do ops without methods."""
    terms = [Term(2.0, frozenset({0})), Term(1.0, frozenset())]
    assert least_sum(terms, 1, 1) == 3.0
    assert least_sum(terms, 0, 64) == 3.0
    assert least_sum(terms, 1, 4) == pytest.approx(1.5)


def test_factors_that_no_method_splits_count() -> None:
    """A pipeline may split the batch where a method may not."""
    batch, out = (Part("batch", 8),), (Part("out", 4),)
    factors = {"batch": Factor(8, Role.WHOLE), "out": Factor(4)}
    rule = Rule(factors, operands=((batch,), (out,)), results=((batch, out),))
    assert kinds_of(rule) == [frozenset({None, 0}), frozenset({None, 1})]
    assert kinds_of(rule, ["out"]) == [frozenset({None, 0})]
