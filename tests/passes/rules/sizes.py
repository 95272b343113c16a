"""Calls of the form of another, with sizes that divide and are not alike."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, islice

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.program import find_overload
from tests.passes.rules.normal import differentiates, normal_form
from tests.passes.rules.samples import Sample, tensors_of


def sizes_of(sample: Sample) -> tuple[int, ...]:
    """All sizes in a call: those of the dims of its tensors, then the sizes among its arguments."""
    return tuple(_Sizes(sample).values)


def wide(sample: Sample) -> int:
    """How many dims of its tensors are not 1."""
    return sum(size > 1 for tensor in tensors_of(sample) for size in tensor.shape)


def alike(value: object) -> Hashable:
    """An argument as rules may tell it from others: of numbers that are not whole only whether they are 0, 1 or -1."""
    return "a number" if isinstance(value, float) and value not in (0, 1, -1) else repr(value)


def form(sample: Sample) -> Hashable:
    """What two calls share that differ only in sizes and values."""
    numbers: dict[int, int] = {}
    pattern = tuple(size if size < 2 else numbers.setdefault(size, len(numbers) + 2) for size in sizes_of(sample))
    named = _Sizes(sample).others()
    return sample.target, pattern, named


class _Sizes:
    """The sizes in a call, and the call with other ones."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.leaves, self.tree = pytree.tree_flatten((sample.arguments, sample.options))
        schema = find_overload(sample.target)._schema.arguments
        names = [item.name for item in schema if not item.kwarg_only][: len(sample.arguments)] + list(sample.options)
        sizes = set(re.findall(r"SymInt\S* (\w+)", str(find_overload(sample.target)._schema)))
        sized: list[bool] = []
        for name, argument in zip(names, (*sample.arguments, *sample.options.values()), strict=True):
            sized += [name in sizes] * len(pytree.tree_leaves(argument))
        self.dims: list[tuple[int, int]] = []
        self.integers: list[int] = []
        for place, (leaf, is_size) in enumerate(zip(self.leaves, sized, strict=True)):
            if isinstance(leaf, Tensor):
                self.dims += [(place, dim) for dim in range(leaf.dim())]
            elif is_size and type(leaf) is int:
                self.integers.append(place)

    @property
    def values(self) -> list[int]:
        """Sizes of dims, then integers."""
        return [self.leaves[place].shape[dim] for place, dim in self.dims] + [
            self.leaves[place] for place in self.integers
        ]

    def others(self) -> Hashable:
        """All that is no size."""
        found: list[Hashable] = []
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                found.append((leaf.dim(), leaf.dtype))
            elif place not in self.integers:
                found.append(alike(leaf))
        return str(self.tree), tuple(found)

    def with_values(self, values: Sequence[int], cheap: bool = False) -> Sample:
        """The call with other sizes; tensors whose shape changes get values like those that they had.

        With `cheap`, which is for trying whether an operator takes the sizes, floating tensors have one value only.
        """
        leaves = list(self.leaves)
        for place, value in zip(self.integers, values[len(self.dims) :], strict=True):
            leaves[place] = value
        shapes: dict[int, list[int]] = {}
        for (place, _), value in zip(self.dims, values, strict=False):
            shapes.setdefault(place, []).append(value)
        grown = {old: new for old, new in zip(self.values, values, strict=True) if new > old}
        for place, shape in shapes.items():
            if shape == list(leaves[place].shape):
                continue
            if cheap and leaves[place].is_floating_point():
                leaves[place] = leaves[place].flatten()[0].expand(shape)
            else:
                leaves[place] = resampled(leaves[place], shape, grown)
        arguments, options = pytree.tree_unflatten(leaves, self.tree)
        return replace(self.sample, arguments=arguments, options=options)

    def elements(self, values: Sequence[int]) -> int:
        """How many elements the tensors of the call would have with other sizes."""
        found: dict[int, int] = {}
        for (place, _), value in zip(self.dims, values, strict=False):
            found[place] = found.get(place, 1) * value
        return sum(found.values())


def resampled(tensor: Tensor, shape: Sequence[int], grown: Mapping[int, int] | None = None) -> Tensor:
    """A tensor of `shape` with values like those of `tensor`.

    Numbers that are not whole come from between neighbouring values of the same sign, so no two are alike; others are
    drawn from those that there are. Indices into a dim that grew are spread over it.
    """
    generator = torch.Generator().manual_seed(tensor.numel())
    flat = tensor.detach().flatten().sort().values if tensor.dtype != torch.bool else tensor.flatten()
    places = torch.randint(0, len(flat), tuple(shape), generator=generator)
    drawn = flat[places]
    if tensor.is_floating_point() and not bool((flat == flat.round()).all()):
        above = flat[(places + 1).clamp(max=len(flat) - 1)]
        share = torch.rand(tuple(shape), generator=generator, dtype=torch.float64).to(tensor.dtype)
        between = drawn + share * (above - drawn)
        same = (drawn.sign() == above.sign()) & drawn.isfinite() & above.isfinite()
        return torch.where(same, between, drawn)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and grown:
        limit = min((old for old in grown if old > int(flat[-1])), default=0)
        if limit:
            extended = torch.randint(0, grown[limit], tuple(shape), generator=generator).to(tensor.dtype)
            return torch.where(drawn < 0, drawn, extended)
    return drawn


_PRIMES = (2, 3, 5, 7, 11, 13)
_MOST_ELEMENTS = 50_000
_MOST_ATTEMPTS = 40


def _runs(sample: Sample) -> list[Tensor] | None:
    """What the operator itself gives, if it takes the call and all stays small."""
    try:
        with torch.no_grad():
            results = sample.run(tensors_of(sample))
    except Exception:
        return None
    elements = [tensor.numel() for tensor in results]
    return results if all(elements) and sum(elements) <= _MOST_ELEMENTS else None


def _large(sample: Sample) -> bool:
    """Whether the operator, run on shapes alone, says that its results are large."""
    arguments, options = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to("meta"), (sample.arguments, sample.options)
    )
    call = replace(sample, arguments=arguments, options=options)
    try:
        return sum(tensor.numel() for tensor in call.run(tensors_of(call))) > _MOST_ELEMENTS
    except Exception:
        return False


class _Redraw:
    """Finds sizes that the operator takes, one after the other: each with the fewest others that must change along."""

    def __init__(self, sample: Sample, unit: int) -> None:
        self.sizes = _Sizes(sample)
        self.original = self.sizes.values
        self.values = list(self.original)
        self.count = len(self.sizes.dims)
        self.done: set[int] = set()
        self.used: set[int] = set()
        self.unit = unit

    def run(self, aligned: bool) -> Sample:
        """Dims of tensors first; then sizes among the arguments that are sizes of results."""
        for lead in range(self.count):
            if lead not in self.done and self.values[lead] > 1:
                tied = self.aligned(lead) if aligned else ()
                if not (tied and self.lead(lead, tied)):
                    self.lead(lead)
        for lead in range(self.count, len(self.values)):
            if self.values[lead] == self.original[lead] > 1:
                self.lead(lead)
        return self.sizes.with_values(self.values)

    def lead(self, lead: int, tied: tuple[int, ...] = ()) -> bool:
        """Change the size `lead` and those `tied` to it, and what must change along, if that can be done."""
        new = [self.unit * prime for prime in _PRIMES if self.unit * prime not in self.used]
        free = [target for target in (*new, self.unit) if target != self.values[lead]]
        before = self.values[lead]
        for number, together in enumerate(islice(self.companions(lead), _MOST_ATTEMPTS)):
            for target in free if number == 0 else dict.fromkeys((*free[:1], *free[-1:])):
                kept = [other for other in together if other not in tied]
                values = self.attempt(lead, (*tied, *kept), target)
                if values is None:
                    continue
                for other in tuple(kept):
                    fewer = [item for item in kept if item != other]
                    smaller = self.attempt(lead, (*tied, *fewer), target)
                    if smaller is not None:
                        kept, values = fewer, smaller
                equal = [other for other in kept if self.values[other] == before and other < self.count]
                self.values = values
                self.used.add(target)
                self.done |= {lead, *tied, *equal}
                return True
        return False

    def attempt(self, lead: int, together: Sequence[int], target: int) -> list[int] | None:
        """The sizes if `lead` becomes `target` and those `together` with it grow by as much; None if that fails.

        A size whose growth makes a result smaller is that of a window, and stays. An argument is a size only if
        it is the size of a dim of a result.
        """
        before = self.values[lead]
        values = list(self.values)
        values[lead] = target
        for other in together:
            if values[other] % before:
                return None
            values[other] = values[other] // before * target
        if self.sizes.elements(values) > _MOST_ELEMENTS or _large(self.sizes.with_values(values, cheap=True)):
            return None
        results = _runs(self.sizes.with_values(values, cheap=True))
        if results is None:
            return None
        now = _runs(self.sizes.with_values(self.values, cheap=True)) or []
        changes = {
            pair
            for old, new in zip(now, results, strict=False)
            for pair in zip(old.shape, new.shape, strict=False)
            if pair[0] != pair[1]
        }
        if lead >= self.count:
            return values if (before, target) in changes else None
        return None if target > before and any(new < old for old, new in changes) else values

    def companions(self, lead: int) -> Iterator[tuple[int, ...]]:
        """Sets of sizes that may have to change with `lead`, small ones first."""
        before = self.values[lead]
        able = [
            other
            for other, value in enumerate(self.values)
            if other != lead and other not in self.done and value > 1 and value % before == 0
        ]
        yield ()
        for other in able:
            yield (other,)
        if len(aligned := self.aligned(lead)) > 1:
            yield aligned
        if len(equal := tuple(other for other in able if self.values[other] == before)) > 2:
            yield equal
        for count in (2, 3):
            yield from combinations(able, count)

    def aligned(self, lead: int) -> tuple[int, ...]:
        """Dims of the same size in the same place, counted from the back, of other tensors."""
        if lead >= self.count:
            return ()

        def from_the_back(index: int) -> int:
            place, dim = self.sizes.dims[index]
            return dim - int(self.sizes.leaves[place].dim())

        return tuple(
            other
            for other in range(self.count)
            if other not in {lead, *self.done}
            and self.original[other] == self.original[lead]
            and from_the_back(other) == from_the_back(lead)
        )


def redrawn(sample: Sample, unit: int) -> tuple[Sample, ...]:
    """Calls of the form of `sample` whose sizes are distinct primes times `unit`, as far as the operator lets them.

    A size is changed with the fewest others without which the operator would not take it, sizes among the arguments
    and products of sizes included. There are up to three: every size that need not be that of another is another one;
    dims in the same place of several operands stay alike if they are; and all sizes times `unit` alike, which keeps
    bounds and strides in proportion.
    """
    return _redrawn(_Identity(sample), unit)


@cache
def _redrawn(given: "_Identity", unit: int) -> tuple[Sample, ...]:
    sample = given.sample
    variants = [_Redraw(sample, unit).run(aligned=False), _Redraw(sample, unit).run(aligned=True)]
    sizes = _Sizes(sample)
    if any(sizes.leaves[place] > 1 for place in sizes.integers):
        scaled = [size * unit if size > 1 else size for size in sizes.values]
        variants += [sizes.with_values(scaled)] if sizes.elements(scaled) <= _MOST_ELEMENTS else []
    found: dict[Hashable, Sample] = {}
    for variant in variants:
        if not _large(variant) and _runs(variant) is not None:
            for call in normal_form(variant):
                if differentiates(call):
                    found.setdefault((form(call), sizes_of(call)), call)
    return tuple(found.values())


class _Identity:
    """A sample as a key: by identity."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __hash__(self) -> int:
        return id(self.sample)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.sample is self.sample
