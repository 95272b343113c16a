"""Lower bounds on the seconds of the products of one op, whatever splits it.

A method splits the multiplications, and those tensors that carry one of its factors. With all methods that split the
same tensors taken together as one kind, which splits into exp(x) parts, a product of F multiplications whose result has
E elements takes, on the busiest rank (`compute.product_seconds`, multiplied out),

    (F exp(-all) + F fill / E exp(-others) + 2 depth E exp(-own) + 2 depth fill) / rate,

where `own` is the sum of x over the kinds that split its result, `others` over those that do not, and `all` over both.
This is convex in x and falls with each, so that the least of a sum of products lies where x adds up to log(devices).
All meshes have their splits among these x, and a rank that repeats work of others splits less.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import torch

from passes.cost.compute import Work, attention_fill
from passes.cost.hardware import Device
from passes.ir.rule import Dims, Rule

# Steps towards the least at most, and the part of the value within which a bound is near enough.
_STEPS, _NEAR = 60, 1e-4


class Product(NamedTuple):
    """A product of `flops` on one device whose result has so many elements: the gradient of the operand `slot`, or the
    result of the op, None."""

    flops: float
    elements: float
    slot: int | None


@dataclass(frozen=True)
class Term:
    """`seconds` that are split by the methods of these `kinds`."""

    seconds: float
    kinds: frozenset[int]


# What the methods of a kind split: the results, if `None` is in it, and the operands in these slots.
Kind = frozenset[int | None]


def kinds_of(rule: Rule, left_out: Iterable[str] = ()) -> list[Kind] | None:
    """The kinds of methods that split the factors of an op, but for those that are `left_out`. None where some split
    one result and not another: the elements of all together have no kind.

    Factors that no method may split count, too: a pipeline splits the batch in time, whatever the op offers.
    """
    found = dict.fromkeys(_kinds(rule, frozenset(left_out)))
    return None if None in found else [kind for kind in found if kind is not None]


def _kinds(rule: Rule, left_out: frozenset[str]) -> Iterator[Kind | None]:
    for name in (*rule.factors, *rule.joint):
        method = rule.method(name)
        if method is None or not left_out.isdisjoint(method.factors):
            continue
        results = {_carries(dims, method.factors) for dims in rule.results}
        operands = (slot for slot, dims in enumerate(rule.operands) if _carries(dims, method.factors))
        yield None if len(results) != 1 else frozenset((*operands, *([None] if True in results else [])))


def _carries(dims: Dims, factors: Sequence[str]) -> bool:
    return any(part.factor in factors for parts in dims for part in parts)


def least_products(
    products: Sequence[Product], kinds: Sequence[Kind] | None, work: Work, device: Device, devices: int
) -> float:
    """A lower bound on the seconds of these products of one op on the busiest of so many devices. Without `kinds` each
    may be split so that it is fastest.

    Attention runs a fused kernel, whose heads are at most as wide, or products in single precision.
    """
    if kinds is None:
        alone = (Product(flops, elements, None) for flops, elements, _ in products)
        return sum(least_products([each], _ANY, work, device, devices) for each in alone)
    terms = [term for each in products for term in _terms(each, kinds, work, device)]
    least = least_sum(terms, len(kinds), devices)
    return min(least, _single_s(sum(each.flops for each in products), work, device) / devices) if work.width else least


# The kinds of a result that methods may split or leave whole.
_ANY: Sequence[Kind] = (frozenset({None}), frozenset())


def full_rate_s(flops: float, work: Work, device: Device) -> float:
    """The fewest seconds of so many multiplications of an op on one device."""
    if not work.width:
        return flops / device.rate(work.dtype)
    fused = flops * (1 + device.softmax / work.width) / (device.attention * device.peak(work.dtype))
    return min(fused, _single_s(flops, work, device))


def _single_s(flops: float, work: Work, device: Device) -> float:
    return flops / device.rate(work.dtype if work.dtype.itemsize >= torch.float32.itemsize else torch.float32)


def _terms(product: Product, kinds: Sequence[Kind], work: Work, device: Device) -> Iterator[Term]:
    """The terms of a product's seconds. Fused attention has no term of its depth."""
    flops, elements, slot = product
    own = frozenset(index for index, kind in enumerate(kinds) if slot in kind)
    every = frozenset(range(len(kinds)))
    if work.width:
        fill, depth, rate = attention_fill(work.width, device), 0.0, device.attention * device.peak(work.dtype)
        multiplied = flops * (1 + device.softmax / work.width)
    else:
        fill, depth, rate = device.fill, device.depth, device.rate(work.dtype)
        ratio = rate / device.unaligned_rate(work.dtype, work.batched) if work.unaligned else 1.0
        multiplied = flops * ratio
    yield Term(multiplied / rate, every)
    if fill:
        yield Term(multiplied * fill / elements / rate, every - own)
    if depth:
        yield Term(2 * elements * depth / rate, own)
        yield Term(2 * depth * fill / rate, frozenset())


def least_sum(terms: Sequence[Term], kinds: int, devices: int) -> float:
    """A lower bound on the sum of `terms` (seconds), however methods of so many kinds split over `devices`."""
    if not kinds or devices == 1:
        return sum(term.seconds for term in terms)
    ways = log(devices)
    x = [ways / kinds] * kinds
    best = 0.0
    for _ in range(_STEPS):
        now = [term.seconds * exp(-sum(x[kind] for kind in term.kinds)) for term in terms]
        falls = [sum(own for own, term in zip(now, terms, strict=True) if kind in term.kinds) for kind in range(kinds)]
        more = max(range(kinds), key=lambda kind: falls[kind])
        # A convex function is nowhere below its tangents.
        value = sum(now)
        best = max(best, value - ways * falls[more] + sum(part * fall for part, fall in zip(x, falls, strict=True)))
        fewer = min((kind for kind in range(kinds) if x[kind] > 0), key=lambda kind: falls[kind])
        moved = _moved(terms, now, more, fewer, x[fewer])
        if value - best <= _NEAR * value or not moved:
            break
        x[more], x[fewer] = x[more] + moved, x[fewer] - moved
    return best


def _moved(terms: Sequence[Term], now: Sequence[float], more: int, fewer: int, most: float) -> float:
    """By how much the split of one kind grows, and that of another one shrinks, where the sum of both is least."""
    falling = sum(own for term, own in zip(terms, now, strict=True) if more in term.kinds and fewer not in term.kinds)
    rising = sum(own for term, own in zip(terms, now, strict=True) if fewer in term.kinds and more not in term.kinds)
    if falling <= rising:
        return 0.0
    return min(log(falling / rising) / 2, most) if rising else most
