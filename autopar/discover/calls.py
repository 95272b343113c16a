"""Calls of one operator, and the same with other sizes, found by trying what the operator takes.

No sharding rule is asked: the calls are what rules are found by.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in the order of the schema."""
        leaves = pytree.tree_leaves((self.arguments, self.options))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Call":
        """The call with `tensors` in place of the tensors among its arguments."""
        rest = iter(tensors)
        filled = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.arguments, self.options))
        return Call(self.target, *filled)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results when the tensors among the arguments are `tensors`."""
        filled = self.with_tensors(tensors)
        result = find_overload(self.target)(*filled.arguments, **filled.options)
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

    def changed(self, call: C, values: Sequence[int], remade: Callable[[Tensor, Sequence[int]], Tensor]) -> C:
        """`call` with other sizes; `remade(tensor, shape)` is the tensor in place of one whose shape changes."""
        leaves = list(self.leaves)
        for place, value in zip(self.integers, values[len(self.dims) :], strict=True):
            leaves[place] = value
        shapes: dict[int, list[int]] = {}
        for (place, _), value in zip(self.dims, values, strict=False):
            shapes.setdefault(place, []).append(value)
        for place, shape in shapes.items():
            if shape != list(leaves[place].shape):
                leaves[place] = remade(leaves[place], shape)
        arguments, options = pytree.tree_unflatten(leaves, self.tree)
        return replace(call, arguments=arguments, options=options)


# --- other sizes -----------------------------------------------------------------------------------------------------

PRIMES = (2, 3, 5, 7, 11, 13)
# Calls whose tensors have more are not run.
MOST_ELEMENTS = 50_000


def taken(call: Call) -> Shapes | None:
    """The shapes of the results if the operator takes the call, and all of it is small but not empty."""
    if sum(tensor.numel() for tensor in call.tensors) > MOST_ELEMENTS:
        return None
    sizes = Sizes(call)
    if any(sizes.leaves[place] > 1 for place in sizes.integers):
        # Sizes among the arguments may make results much larger than what they are made of.
        shapes = shapes_on(call, "meta")
        if shapes is not None and sum(map(prod, shapes)) > MOST_ELEMENTS:
            return None
    shapes = shapes_on(call, "cpu")
    return shapes if shapes and all(map(prod, shapes)) and sum(map(prod, shapes)) <= MOST_ELEMENTS else None


def shapes_on(call: Call, device: str) -> Shapes | None:
    """The shapes of the results; None where the operator does not take the call, or does not run on `device`."""
    try:
        with torch.no_grad():
            results = call.run([tensor.to(device) for tensor in call.tensors])
    except Exception:
        return None
    return tuple(tuple(tensor.shape) for tensor in results)


def resized(call: C, unit: int) -> C:
    """The call with zeros of sizes that are `unit` or primes times it, as far as the operator takes them.

    Sizes that are equal change together; those that are multiples of them change along where they must.
    """
    sizes = Sizes(call)
    original, values = sizes.values, sizes.values
    shapes = shapes_on(call, "meta") or ()
    for size in dict.fromkeys(original):
        places = [place for place, value in enumerate(values) if value == original[place] == size > 1]
        targets = [unit * factor for factor in (1, *PRIMES) if unit * factor not in values] or [unit]
        for together, target in product(_together(places, values, len(sizes.dims)), targets):
            grown = [value // size * target if place in together else value for place, value in enumerate(values)]
            found = shapes_on(sizes.changed(call, grown, _zeros), "meta")
            changes = changed_sizes(shapes, found or ())
            # A size whose growth makes a result smaller is that of a window. An argument alone is a size only if it is
            # one of a result.
            is_window = target > size and any(new < old for old, new in changes)
            is_size = min(together) < len(sizes.dims) or (size, target) in changes
            if found is not None and is_size and not is_window:
                values, shapes = grown, found
                break
    return sizes.changed(call, values, _zeros)


def changed_sizes(before: Shapes, after: Shapes) -> set[tuple[int, int]]:
    """The sizes of results that differ, as pairs."""
    return {
        pair
        for old, new in zip(before, after, strict=False)
        for pair in zip(old, new, strict=False)
        if pair[0] != pair[1]
    }


def _together(equal: Sequence[int], values: Sequence[int], dims: int) -> Iterator[Sequence[int]]:
    """Places of sizes that may have to change together, those `equal` among them; the first `dims` are of tensors."""
    if equal:
        size = values[equal[0]]
        multiples = [place for place, value in enumerate(values) if value > size and value % size == 0]
        for places in (equal, [place for place in equal if place < dims]):
            if places:
                yield places
                yield from ([*places, other] for other in multiples)
                yield [*places, *multiples]


def _zeros(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros without memory: values are drawn later."""
    return torch.zeros((), dtype=tensor.dtype).expand(tuple(shape))
