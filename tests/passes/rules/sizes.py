"""Calls of the form of another, with sizes that divide and are not alike."""

from collections.abc import Hashable
from functools import cache

from torch import Tensor

from autopar.discover.calls import MOST_ELEMENTS, Sizes, taken
from tests.passes.rules.normal import differentiates, normal_form
from tests.passes.rules.resizing import elements, resized, with_sizes
from tests.passes.rules.samples import Sample


def sizes_of(sample: Sample) -> tuple[int, ...]:
    """All sizes in a call: those of the dims of its tensors, then the sizes among its arguments."""
    return tuple(Sizes(sample).values)


def wide(sample: Sample) -> int:
    """The number of dims of its tensors that are not 1."""
    return sum(size > 1 for tensor in sample.tensors for size in tensor.shape)


def form(sample: Sample) -> Hashable:
    """The key that two calls share if they differ only in sizes and values."""
    numbers: dict[int, int] = {}
    pattern = tuple(size if size < 2 else numbers.setdefault(size, len(numbers) + 2) for size in sizes_of(sample))
    return sample.target, pattern, _others(sample)


def _others(sample: Sample) -> Hashable:
    """All of a call that is no size: of numbers that are not whole only whether they are 0, 1 or -1."""
    sizes = Sizes(sample)
    found: list[Hashable] = [str(sizes.tree)]
    for place, leaf in enumerate(sizes.leaves):
        if isinstance(leaf, Tensor):
            found.append((leaf.dim(), leaf.dtype))
        elif place not in sizes.integers:
            found.append(alike(leaf))
    return tuple(found)


def alike(value: object) -> Hashable:
    """An argument as rules may tell it from others: of numbers that are not whole only whether they are 0, 1 or -1."""
    return "a number" if isinstance(value, float) and value not in (0, 1, -1) else repr(value)


def scaled(sample: Sample, unit: int) -> Sample | None:
    """The call with all sizes times `unit`, bounds and strides among the arguments too; None where there are none."""
    sizes = Sizes(sample)
    if not any(sizes.leaves[place] > 1 for place in sizes.integers):
        return None
    values: list[int] = [size * unit if size > 1 else size for size in sizes.values]
    return with_sizes(sizes, sample, values) if elements(sizes, values) <= MOST_ELEMENTS else None


def redrawn(sample: Sample, unit: int) -> tuple[Sample, ...]:
    """Calls of the form of `sample` whose sizes are distinct primes times `unit`, as far as the operator lets them.

    A size is changed with the fewest others without which the operator would not take it, sizes among the arguments
    and products of sizes included. There are up to three: every size that need not be that of another is another one;
    dims in the same place of several operands stay alike if they are; and all sizes times `unit` alike, which keeps
    bounds and strides in proportion. Where none of them is left, because the normal form writes them otherwise, it is
    the sample itself.
    """
    return _redrawn(_Identity(sample), unit)


@cache
def _redrawn(given: "_Identity", unit: int) -> tuple[Sample, ...]:
    sample = given.sample
    variants = [resized(sample, unit, "free"), resized(sample, unit, "aligned"), scaled(sample, unit)]
    found: dict[Hashable, Sample] = {}
    for variant in variants:
        if variant is not None and taken(variant):
            for call in normal_form(variant):
                if differentiates(call):
                    found.setdefault((form(call), sizes_of(call)), call)
    return tuple(found.values()) or (sample,)


class _Identity:
    """A sample as a key: by identity."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __hash__(self) -> int:
        return id(self.sample)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.sample is self.sample
