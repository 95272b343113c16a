"""Calls of one operator, and the same with other sizes, found by trying what the operator takes.

No sharding rule is asked: what is made here is what rules are checked with, and found by.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from passes._torch import pytree, schema_of
from passes.ir.program import find_overload

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """A call of `target` with `arguments` in the order of its schema, and `options` by name."""

    target: str
    arguments: tuple[object, ...]
    options: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The operator's name."""
        return self.target.split(".")[1]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in the order of the schema."""
        leaves = pytree.tree_leaves((self.arguments, self.options))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results when the tensors among the arguments are `tensors`."""
        rest = iter(tensors)
        filled = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.arguments, self.options))
        result = find_overload(self.target)(*filled[0], **filled[1])
        return [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]


C = TypeVar("C", bound=Call)


class Sizes:
    """The sizes in a call: those of the dims of its tensors, then the sizes among its arguments."""

    def __init__(self, call: Call) -> None:
        self.leaves, self.tree = pytree.tree_flatten((call.arguments, dict(call.options)))
        schema = schema_of(find_overload(call.target))
        names = [item.name for item in schema.arguments if not item.kwarg_only][: len(call.arguments)]
        named = zip((*names, *call.options), (*call.arguments, *call.options.values()), strict=True)
        sizes = set(re.findall(r"SymInt\S* (\w+)", str(schema)))
        sized = [name in sizes for name, value in named for _ in pytree.tree_leaves(value)]
        self.dims: list[tuple[int, int]] = []
        self.integers: list[int] = []
        for place, (leaf, is_size) in enumerate(zip(self.leaves, sized, strict=True)):
            if isinstance(leaf, Tensor):
                self.dims += [(place, dim) for dim in range(leaf.dim())]
            elif is_size and type(leaf) is int:
                self.integers.append(place)

    @property
    def values(self) -> list[int]:
        """All of them."""
        dims = [self.leaves[place].shape[dim] for place, dim in self.dims]
        return dims + [self.leaves[place] for place in self.integers]

    @property
    def others(self) -> Hashable:
        """All of a call that is no size: of numbers that are not whole only whether they are 0, 1 or -1."""
        found: list[Hashable] = [str(self.tree)]
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                found.append((leaf.dim(), leaf.dtype))
            elif place not in self.integers:
                found.append(alike(leaf))
        return tuple(found)

    def elements(self, values: Sequence[int]) -> int:
        """The number of elements of the call's tensors with other sizes."""
        found: dict[int, int] = {}
        for (place, _), value in zip(self.dims, values, strict=False):
            found[place] = found.get(place, 1) * value
        return sum(found.values())

    def changed(self, call: C, values: Sequence[int], cheap: bool = False) -> C:
        """`call` with other sizes; tensors whose shape changes get values like those that they had.

        With `cheap`, which is for trying whether the operator takes the sizes, floating tensors have one value only.
        """
        leaves = list(self.leaves)
        for place, value in zip(self.integers, values[len(self.dims) :], strict=True):
            leaves[place] = value
        shapes: dict[int, list[int]] = {}
        for (place, _), value in zip(self.dims, values, strict=False):
            shapes.setdefault(place, []).append(value)
        grown = {old: new for old, new in zip(self.values, values, strict=True) if new > old}
        for place, shape in shapes.items():
            leaf = leaves[place]
            if shape == list(leaf.shape):
                continue
            if cheap and leaf.is_floating_point():
                same = leaf[(0,) * leaf.dim()].expand(shape)
                leaves[place] = same.contiguous() if prod(shape) <= MOST_ELEMENTS else same
            else:
                leaves[place] = resampled(leaf, shape, grown)
        arguments, options = pytree.tree_unflatten(leaves, self.tree)
        return replace(call, arguments=arguments, options=options)


def alike(value: object) -> Hashable:
    """An argument as rules may tell it from others: of numbers that are not whole only whether they are 0, 1 or -1."""
    return "a number" if isinstance(value, float) and value not in (0, 1, -1) else repr(value)


def resampled(tensor: Tensor, shape: Sequence[int], grown: Mapping[int, int] | None = None) -> Tensor:
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


# --- other sizes -----------------------------------------------------------------------------------------------------

_PRIMES = (2, 3, 5, 7, 11, 13)
# Calls whose tensors have more are not run.
MOST_ELEMENTS = 50_000
_MOST_ATTEMPTS = 40


def runs(call: Call) -> bool:
    """Whether the operator takes a call, and all of it is small but not empty."""
    return _taken(call) is not None


def _taken(call: Call) -> Shapes | None:
    """The shapes of the results if the operator takes the call, and all of it is small but not empty."""
    if sum(tensor.numel() for tensor in call.tensors) > MOST_ELEMENTS:
        return None
    sizes = Sizes(call)
    if any(sizes.leaves[place] > 1 for place in sizes.integers):
        # Sizes among the arguments may make results much larger than what they are made of.
        shapes = _shapes_on(call, "meta")
        if shapes is not None and sum(map(prod, shapes)) > MOST_ELEMENTS:
            return None
    shapes = _shapes_on(call, "cpu")
    return shapes if shapes and all(map(prod, shapes)) and sum(map(prod, shapes)) <= MOST_ELEMENTS else None


def _shapes_on(call: Call, device: str) -> Shapes | None:
    """The shapes of the results; None where the operator does not take the call, or does not run on `device`."""
    try:
        with torch.no_grad():
            results = call.run([tensor.to(device) for tensor in call.tensors])
    except Exception:
        return None
    return tuple(tuple(tensor.shape) for tensor in results)


class Resizing:
    """Finds sizes that the operator takes, one after the other: each with the fewest others that must change along.

    New sizes are primes times `unit`, or `unit` where these do not fit. With `on` "meta" only shapes are tried.
    """

    def __init__(self, call: Call, unit: int, on: str = "cpu") -> None:
        self.call = call
        self.sizes = Sizes(call)
        self.original = self.sizes.values
        self.values = list(self.original)
        self.count = len(self.sizes.dims)
        self.done: set[int] = set()
        self.used: set[int] = set()
        self.unit = unit
        self.on = on
        self.shapes = _shapes_on(call, on) or ()

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
        new = [self.unit * prime for prime in _PRIMES if self.unit * prime not in self.used]
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
        if self.on == "cpu" and self.sizes.elements(values) > MOST_ELEMENTS:
            return None
        call = self.sizes.changed(self.call, values, cheap=True)
        shapes = _taken(call) if self.on == "cpu" else _shapes_on(call, "meta")
        if shapes is None:
            return None
        changes = {
            pair
            for old, new in zip(self.shapes, shapes, strict=False)
            for pair in zip(old, new, strict=False)
            if pair[0] != pair[1]
        }
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


def resized(call: C, unit: int, ties: str, on: str = "cpu") -> C:
    """The call with sizes that are primes times `unit`, as far as the operator takes them; see `Resizing`."""
    resizing = Resizing(call, unit, on)
    return resizing.sizes.changed(call, resizing.run(ties))
