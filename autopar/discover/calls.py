"""Calls of one operator, the same with other sizes, found by trying what the operator takes, and with random values.

No sharding rule is asked: the calls are what rules are found by.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from passes._torch import pytree, schema_of
from passes.ir.arguments import Ref, find_overload
from passes.ir.grouping import grouped
from passes.ir.program import Op, TensorType, has_gradient

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
        return [leaf for leaf in pytree.tree_leaves((self.arguments, self.options)) if isinstance(leaf, Tensor)]

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
        shapes = grouped((place, value) for (place, _), value in zip(self.dims, values, strict=False))
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
        # What an operator raises for arguments that it does not take is its own choice.
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


# --- random values ---------------------------------------------------------------------------------------------------

# Sizes divide by 2 and by 3; what is left of the first when cut divides by 2, for ops that take elements in pairs.
_UNITS = (12, 6)
_DRAWS = 3
_SMALLEST = 1e-5
# Elements of all operands and results up to which an op is also run as it is.
_LARGE = 1 << 22

# A draw of values for an operand.
Values = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Drawn:
    """A call with its results and, for random gradients of these, the gradients of its operands (None without one)."""

    call: Call
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    flowing: frozenset[int]

    @property
    def operands(self) -> list[Tensor]:
        """The operands."""
        return self.call.tensors


def call_of(op: Op, tensors: Sequence[Tensor]) -> Call:
    """The call that `op` is with these operands, in float64."""
    rest = iter(tensors)

    def made(argument: object) -> object:
        if isinstance(argument, tuple):
            return [made(item) for item in argument]
        if isinstance(argument, torch.dtype):
            return _double(argument)
        return next(rest) if isinstance(argument, Ref) else argument

    schema = schema_of(op.overload).arguments
    arguments = {name: made(value) for name, value in op.arguments.items()}
    return Call(
        op.target,
        tuple(arguments[item.name] for item in schema if not item.kwarg_only),
        {item.name: arguments[item.name] for item in schema if item.kwarg_only},
    )


def draws_of(op: Op, types: Mapping[str, TensorType]) -> tuple[list[Drawn], list[Drawn]]:
    """Draws of the form of `op` with small sizes, where it takes these, and draws with its own, where these are not
    large. Empty where the op does not run or is random."""
    operands = [types[name] for name in op.operands]
    call = call_of(op, [torch.zeros((), dtype=_double(type.dtype)).expand(type.shape) for type in operands])
    small = next(filter(None, (draws(item, kinds_of_values(item)) for item in _small_calls(call))), [])
    elements = sum(prod(types[name].shape) for name in (*op.operands, *op.results))
    return small, draws(call, kinds_of_values(call)) if small and elements <= _LARGE else []


def draws(call: Call, kinds: Sequence[Values]) -> list[Drawn]:
    """Several draws of values, each of the first of `kinds` that the op takes; empty where it takes none."""
    found = []
    flowing = _flowing(call, kinds)
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        for values in kinds:
            drawn = _drawn(call, [values(tensor, generator) for tensor in call.tensors], flowing, generator)
            if drawn is not None:
                found.append(drawn)
                break
    return found if len(found) == _DRAWS and not _is_random(found[0]) else []


def _small_calls(call: Call) -> Iterator[Call]:
    """Calls of the form of `call` with small sizes that divide; at last the call itself."""
    if taken(call) and all(size == 1 or size % _UNITS[-1] == 0 for tensor in call.tensors for size in tensor.shape):
        yield call
    yield from (small for unit in _UNITS if taken(small := resized(call, unit)))
    if taken(call):
        yield call


def _flowing(call: Call, kinds: Sequence[Values]) -> frozenset[int]:
    """Operands that torch can give a gradient for: all floating ones, unless it says so."""
    floating = frozenset(slot for slot, tensor in enumerate(call.tensors) if tensor.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    for values in kinds:
        operands = [values(tensor, generator) for tensor in call.tensors]
        if _runs_with(call, operands, frozenset()):
            if _runs_with(call, operands, floating):
                return floating
            return frozenset(slot for slot in floating if _runs_with(call, operands, frozenset({slot})))
    return floating


def _runs_with(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> bool:
    try:
        results, owned = run_with(call, operands, flowing)
        gradients_of(results, owned, [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in results])
    except Exception:
        # What an operator raises for values that it does not take is its own choice.
        return False
    return True


def _is_random(drawn: Drawn) -> bool:
    """Whether the op gives different results when it is rerun."""
    if torch.Tag.nondeterministic_seeded not in find_overload(drawn.call.target).tags:
        return False
    again, _ = run_with(drawn.call, drawn.operands, drawn.flowing)
    return not all(torch.allclose(new.detach(), old) for new, old in zip(again, drawn.results, strict=True))


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def kinds_of_values(call: Call) -> list[Values]:
    """Ways to draw values, of which an op may take one only: any sign or positive, indices up to each size."""
    sizes = sorted({size for tensor in call.tensors for size in tensor.shape if size > 1}, reverse=True)
    return [partial(_values, high=high, least=least) for high in [*sizes, 2, 1] for least in (None, 0.25)]


def _values(tensor: Tensor, generator: torch.Generator, high: int, least: float | None) -> Tensor:
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not tensor.is_floating_point():
        return torch.randint(0, high, shape, generator=generator).to(tensor.dtype)
    if least is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return least + torch.rand(shape, generator=generator, dtype=torch.float64) / 2


def _drawn(call: Call, operands: Sequence[Tensor], flowing: frozenset[int], generator: torch.Generator) -> Drawn | None:
    """The results of the whole op; None where it rejects the values, or where its results are degenerate."""
    try:
        results, owned = run_with(call, operands, flowing)
        cotangents = tuple(
            torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) if tensor.requires_grad else None
            for tensor in results
        )
        gradients = gradients_of(results, owned, cotangents)
    except Exception:
        # What an operator raises for values that it does not take is its own choice.
        return None
    found = [tensor.detach() for tensor in (*results, *gradients) if tensor is not None]
    if not all(map(_tells, found)) or not any(
        bool(tensor.any()) or not has_gradient(tensor.dtype) for tensor in results
    ):
        return None
    same = call.with_tensors(operands)
    return Drawn(same, tuple(tensor.detach() for tensor in results), cotangents, gradients, flowing)


def _tells(tensor: Tensor) -> bool:
    """Whether values can be compared: all are finite, and they are not all so small that anything would be right."""
    if not has_gradient(tensor.dtype) or not tensor.numel():
        return True
    largest = float(tensor.abs().max())
    return bool(tensor.isfinite().all()) and (largest == 0 or largest > _SMALLEST)


def run_with(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a call with these operands; those in `flowing` have a gradient."""
    owned = [tensor.clone().requires_grad_(slot in flowing) for slot, tensor in enumerate(operands)]
    return call.run(owned), owned


def gradients_of(
    results: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of operands for those of results; zeros where none flows."""
    pairs = [(tensor, given) for tensor, given in zip(results, cotangents, strict=True) if given is not None]
    if not pairs:
        return (None,) * len(operands)
    flowing = [tensor for tensor in operands if tensor.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, flowing, given, allow_unused=True))
    return tuple(
        None if not tensor.requires_grad else torch.zeros_like(tensor) if (item := next(found)) is None else item
        for tensor in operands
    )
