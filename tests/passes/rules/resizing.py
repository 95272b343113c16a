"""Other sizes of calls, found by trying what the operator takes: each changed with the fewest others."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import TypeVar

import torch
from torch import Tensor

from autopar.discover.calls import MOST_ELEMENTS, PRIMES, Call, Shapes, Sizes, changed_sizes, shapes_on, taken

_MOST_ATTEMPTS = 40

C = TypeVar("C", bound=Call)


class Resizing:
    """Finds sizes that the operator takes, one after the other: each with the fewest others that must change along.

    New sizes are primes times `unit`, or `unit` where these do not fit.
    """

    def __init__(self, call: Call, unit: int) -> None:
        self.call = call
        self.sizes = Sizes(call)
        self.original = self.sizes.values
        self.values = list(self.original)
        self.count = len(self.sizes.dims)
        self.done: set[int] = set()
        self.used: set[int] = set()
        self.unit = unit
        self.shapes = shapes_on(call, "cpu") or ()

    def run(self, ties: str) -> list[int]:
        """The sizes: of dims first; then those among the arguments that are sizes of results.

        `ties` says which are kept alike where they are and the operator takes it: "free" for none that need not be,
        "aligned" for dims in the same place of other tensors, "equal" for all that are the same number.
        """
        for lead in range(self.count):
            if lead not in self.done and self.values[lead] > 1:
                tied = {"free": self._none, "aligned": self.aligned, "equal": self.equal}[ties](lead)
                if not (tied and self.lead(lead, tied)):
                    self.lead(lead)
        for lead in range(self.count, len(self.values)):
            if self.values[lead] == self.original[lead] > 1:
                self.lead(lead)
        return self.values

    def lead(self, lead: int, tied: tuple[int, ...] = ()) -> bool:
        """Change the size `lead` and those `tied` to it, and what must change along, if that can be done."""
        new = [self.unit * prime for prime in PRIMES if self.unit * prime not in self.used]
        free = [target for target in (*new, self.unit) if target != self.values[lead]]
        before = self.values[lead]
        for number, together in enumerate(islice(self.companions(lead), _MOST_ATTEMPTS)):
            for target in free if number == 0 else dict.fromkeys((*free[:1], *free[-1:])):
                kept = [other for other in together if other not in tied]
                found = self.attempt(lead, (*tied, *kept), target)
                if found is None:
                    continue
                for other in tuple(kept):
                    fewer = [item for item in kept if item != other]
                    smaller = self.attempt(lead, (*tied, *fewer), target)
                    if smaller is not None:
                        kept, found = fewer, smaller
                equal = [other for other in kept if self.values[other] == before and other < self.count]
                self.values, self.shapes = found
                self.used.add(target)
                self.done |= {lead, *(other for other in tied if other < self.count), *equal}
                return True
        return False

    def attempt(self, lead: int, together: Sequence[int], target: int) -> tuple[list[int], Shapes] | None:
        """The sizes if `lead` becomes `target` and those `together` with it grow by as much, and the shapes of results.

        None if that fails.
        A size whose growth makes a result smaller is that of a window, and stays. An argument is a size only if it is
        the size of a dim of a result.
        """
        before = self.values[lead]
        values = list(self.values)
        values[lead] = target
        for other in together:
            if values[other] % before:
                return None
            values[other] = values[other] // before * target
        if elements(self.sizes, values) > MOST_ELEMENTS:
            return None
        shapes = taken(with_sizes(self.sizes, self.call, values, cheap=True))
        if shapes is None:
            return None
        changes = changed_sizes(self.shapes, shapes)
        if lead >= self.count:
            return (values, shapes) if (before, target) in changes else None
        return None if target > before and any(new < old for old, new in changes) else (values, shapes)

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

    def _none(self, lead: int) -> tuple[int, ...]:
        return ()

    def equal(self, lead: int) -> tuple[int, ...]:
        """Sizes that are the same number."""
        others = (other for other in range(len(self.values)) if other not in {lead, *self.done})
        return tuple(other for other in others if self.original[other] == self.original[lead])

    def aligned(self, lead: int) -> tuple[int, ...]:
        """Dims of the same size in the same place, counted from the back, of other tensors."""
        if lead >= self.count:
            return ()

        def from_the_back(index: int) -> int:
            place, dim = self.sizes.dims[index]
            return dim - int(self.sizes.leaves[place].dim())

        return tuple(
            other for other in self.equal(lead) if other < self.count and from_the_back(other) == from_the_back(lead)
        )


def resized(sample: C, unit: int, ties: str) -> C:
    """The call with sizes that are primes times `unit`, as far as the operator takes them; see `Resizing`."""
    resizing = Resizing(sample, unit)
    return with_sizes(resizing.sizes, sample, resizing.run(ties))


def with_sizes(sizes: Sizes, sample: C, values: Sequence[int], cheap: bool = False) -> C:
    """The call with other sizes; tensors whose shape changes get values like those that they had.

    With `cheap`, which is for trying whether the operator takes the sizes, floating tensors have one value only.
    """
    grown = {old: new for old, new in zip(sizes.values, values, strict=True) if new > old}

    def remade(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if cheap and tensor.is_floating_point():
            return tensor[(0,) * tensor.dim()].expand(tuple(shape)).contiguous()
        return resampled(tensor, shape, grown)

    return sizes.changed(sample, values, remade)


def elements(sizes: Sizes, values: Sequence[int]) -> int:
    """The number of elements of the call's tensors with other sizes."""
    found: dict[int, int] = {}
    for (place, _), value in zip(sizes.dims, values, strict=False):
        found[place] = found.get(place, 1) * value
    return sum(found.values())


def resampled(tensor: Tensor, shape: Sequence[int], grown: Mapping[int, int]) -> Tensor:
    """A tensor of `shape` with values like those of `tensor`.

    Numbers that are not whole come from between neighbouring values of the same sign, so no two are alike; others are
    drawn from those that there are. Indices into a dim that grew (from what to what is in `grown`) are spread over it.
    """
    generator = torch.Generator().manual_seed(tensor.numel())
    flat = tensor.detach().flatten()
    places = torch.randint(0, len(flat), tuple(shape), generator=generator)
    if tensor.dtype == torch.bool or tensor.is_complex():
        return flat[places]
    flat = flat.sort().values
    drawn = flat[places]
    if tensor.is_floating_point() and not bool((flat == flat.round()).all()):
        above = flat[(places + 1).clamp(max=len(flat) - 1)]
        share = torch.rand(tuple(shape), generator=generator, dtype=torch.float64).to(tensor.dtype)
        between = drawn + share * (above - drawn)
        same = (drawn.sign() == above.sign()) & drawn.isfinite() & above.isfinite()
        return torch.where(same, between, drawn)
    if not tensor.is_floating_point() and grown:
        limit = min((old for old in grown if old > int(flat[-1])), default=0)
        if limit:
            extended = torch.randint(0, grown[limit], tuple(shape), generator=generator).to(tensor.dtype)
            return torch.where(drawn < 0, drawn, extended)
    return drawn
