"""Rules found by running an op on shards.

For every set of operand dims of one size: cut them, run the op on each part, and see what puts the results together
(the parts of a dim, or a sum), forward and backward, in float64, for several draws of values, on 2 and on 3 ranks. A
way to split that always gives what the whole op gives is a factor. EasyDist (ShardCombine) finds its rules like this.

Sampling is no proof: such rules are a second opinion on the written ones, and a suggestion for ops that have none. They
know plain splits only (no local forms, no collectives inside, no splits inside a dim), and what the op costs is not
among what is found.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd, prod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.calls import Call, resized, runs
from passes.ir.program import Op, Program, Ref, TensorType, find_overload, has_gradient
from passes.rules import signature, written_rule
from passes.rules.rule import Dims, Factor, Part, Role, Rule, Saved

logger = logging.getLogger("autopar")

# Divide by 2 and by 3; what is left of the first when cut still divides by 2, for ops that take elements in pairs.
_UNITS = (12, 6)
_MOST_OPERANDS = 6
_MOST_WAYS = 400
_DRAWS = 3
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
_SINGLE = 1e-4
_SMALLEST = 1e-5

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """One way to split an op: the dim of each operand that is cut, those operands that are pending sums, and for each
    result the dim in which it is cut; None if it is a pending sum."""

    dims: Mapping[int, int]
    pending: frozenset[int]
    results: tuple[int | None, ...]

    @property
    def sums(self) -> bool:
        """Whether some result is a pending sum."""
        return None in self.results


def discover(op: Op, types: Mapping[str, TensorType], tensors: Sequence[Tensor] | None = None) -> Rule | None:
    """The rule that running `op` on shards suggests; None if it finds no way to split it.

    The op runs on the CPU on random values, with small sizes where it takes these; `tensors` are operands whose values
    it takes, where others may not do (indices, probabilities). An op that draws random numbers is not looked at.
    It must look whether its operands fit together before it reads them.
    """
    if not op.operands or not op.results or len(op.operands) > 4 * _MOST_OPERANDS:
        return None
    draws = _draws(op, types, tensors)
    if not draws:
        return None
    found = list(find_splits(draws))
    linear = tuple(find_linear(draws))
    shapes = [types[name].shape for name in op.operands], [types[name].shape for name in op.results]
    rule = _rule(found, linear, shapes, _saved(draws[0]))
    return rule if rule.factors and any(factor.role is not Role.WHOLE for factor in rule.factors.values()) else None


def rules_for(program: Program) -> Mapping[Hashable, Rule]:
    """Rules for the ops of a program that no written rule speaks for, by signature; what is found is logged."""
    found: dict[Hashable, Rule] = {}
    tried: set[Hashable] = set()
    for op in program.ops:
        key = signature(op, program.types)
        if key in tried or written_rule(op, program.types) is not None:
            continue
        tried.add(key)
        rule = discover(op, program.types)
        if rule is not None:
            found[key] = rule
            logger.warning(
                "no sharding rule speaks for %s; running it on shards suggests this one, which is no proof: %s",
                op.kind,
                rule_text(rule),
            )
    return found


# --- calls with values ----------------------------------------------------------------------------------------------


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


def _draws(op: Op, types: Mapping[str, TensorType], tensors: Sequence[Tensor] | None) -> list[Drawn]:
    """Calls of the form of `op` with random values, in float64; empty where the op does not run or is random."""
    for call in _small_calls(op, types, tensors):
        found = []
        flowing = _flowing(call, tensors is not None)
        for seed in range(_DRAWS):
            generator = torch.Generator().manual_seed(seed)
            for values in _kinds_of_values(call, tensors is not None):
                drawn = _drawn(call, [values(tensor, generator) for tensor in call.tensors], flowing, generator)
                if drawn is not None:
                    found.append(drawn)
                    break
        if len(found) == _DRAWS and not _is_random(found[0]):
            return found
    return []


def _small_calls(op: Op, types: Mapping[str, TensorType], tensors: Sequence[Tensor] | None) -> Iterator[Call]:
    """Calls of the form of `op` with small sizes that divide; first with dims that are alike staying alike."""
    given = iter(tensors) if tensors is not None else None

    def made(argument: object) -> object:
        if isinstance(argument, Ref):
            if given is not None:
                return _double(next(given))
            type = types[argument.name]
            dtype = torch.float64 if type.dtype.is_floating_point else type.dtype
            return torch.zeros((), dtype=dtype).expand(type.shape)
        return [made(item) for item in argument] if isinstance(argument, tuple) else _double_type(argument)

    schema = op.overload._schema.arguments
    arguments = {name: made(value) for name, value in op.arguments.items()}
    call = Call(
        op.target,
        tuple(arguments[item.name] for item in schema if not item.kwarg_only),
        {item.name: arguments[item.name] for item in schema if item.kwarg_only},
    )
    if runs(call) and all(size == 1 or size % _UNITS[-1] == 0 for tensor in call.tensors for size in tensor.shape):
        yield call
    for unit, on, ties in product(_UNITS, ("cpu", "meta"), ("equal", "aligned", "free")):
        small = resized(call, unit, ties, on)
        if runs(small):
            yield small
    if runs(call):
        yield call


def _flowing(call: Call, given: bool) -> frozenset[int]:
    """Operands that torch can give a gradient for: all floating ones, unless it says so."""
    floating = frozenset(slot for slot, tensor in enumerate(call.tensors) if tensor.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    for values in _kinds_of_values(call, given):
        operands = [values(tensor, generator) for tensor in call.tensors]
        if _runs_with(call, operands, frozenset()):
            if _runs_with(call, operands, floating):
                return floating
            return frozenset(slot for slot in floating if _runs_with(call, operands, frozenset({slot})))
    return floating


def _runs_with(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> bool:
    try:
        results, owned = _run(call, operands, flowing)
        _gradients(results, owned, [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in results])
    except Exception:
        return False
    return True


def _is_random(drawn: Drawn) -> bool:
    """Whether the op gives something else when it runs again."""
    if torch.Tag.nondeterministic_seeded not in find_overload(drawn.call.target).tags:
        return False
    again, _ = _run(drawn.call, drawn.operands, drawn.flowing)
    return not all(torch.allclose(new.detach(), old) for new, old in zip(again, drawn.results, strict=True))


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64) if tensor.is_floating_point() else tensor.detach()


def _double_type(argument: object) -> object:
    is_floating = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if is_floating else argument


Values = Callable[[Tensor, torch.Generator], Tensor]


def _kinds_of_values(call: Call, given: bool) -> Iterator[Values]:
    """Ways to draw values, of which an op may take one only: any sign or positive, indices up to each size.

    Given values are taken in another order, or numbers between 0 and 1 in place of those that are not whole.
    """
    if given:
        yield _shuffled
        yield _fractions
        return
    sizes = sorted({size for tensor in call.tensors for size in tensor.shape if size > 1}, reverse=True)
    for high in [*sizes, 2, 1]:
        for least in (None, 0.25):

            def values(
                tensor: Tensor, generator: torch.Generator, high: int = high, least: float | None = least
            ) -> Tensor:
                shape = tuple(tensor.shape)
                if tensor.dtype == torch.bool:
                    return torch.rand(shape, generator=generator) < 0.5
                if not tensor.is_floating_point():
                    return torch.randint(0, high, shape, generator=generator).to(tensor.dtype)
                if least is None:
                    return torch.randn(shape, generator=generator, dtype=torch.float64)
                return least + torch.rand(shape, generator=generator, dtype=torch.float64) / 2

            yield values


def _shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return tensor
    flat = tensor.flatten()
    return flat[torch.randperm(len(flat), generator=generator)].reshape(tensor.shape)


def _fractions(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return _shuffled(tensor, generator)
    return 0.25 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 2


def _drawn(call: Call, operands: Sequence[Tensor], flowing: frozenset[int], generator: torch.Generator) -> Drawn | None:
    """What the whole op gives; None where it does not take the values, or where what it makes of them says nothing."""
    try:
        results, owned = _run(call, operands, flowing)
        cotangents = tuple(
            torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) if tensor.requires_grad else None
            for tensor in results
        )
        gradients = _gradients(results, owned, cotangents)
    except Exception:
        return None
    found = [tensor.detach() for tensor in (*results, *gradients) if tensor is not None]
    if not all(map(_tells, found)) or not any(
        bool(tensor.any()) or not has_gradient(tensor.dtype) for tensor in results
    ):
        return None
    filled, options = pytree.tree_unflatten(
        _with(pytree.tree_leaves((call.arguments, dict(call.options))), operands),
        pytree.tree_structure((call.arguments, dict(call.options))),
    )
    same = Call(call.target, filled, options)
    return Drawn(same, tuple(tensor.detach() for tensor in results), cotangents, gradients, flowing)


def _tells(tensor: Tensor) -> bool:
    """Whether values can be compared: all are finite, and they are not all so small that anything would be right."""
    if not has_gradient(tensor.dtype) or not tensor.numel():
        return True
    largest = float(tensor.abs().max())
    return bool(tensor.isfinite().all()) and (largest == 0 or largest > _SMALLEST)


def _with(leaves: Sequence[object], operands: Sequence[Tensor]) -> list[object]:
    rest = iter(operands)
    return [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _run(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a call with these operands; those in `flowing` have a gradient."""
    owned = [tensor.clone().requires_grad_(slot in flowing) for slot, tensor in enumerate(operands)]
    return call.run(owned), owned


def _gradients(
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


# --- what holds -----------------------------------------------------------------------------------------------------


def holds(draws: Sequence[Drawn], splits: Sequence[Split], ways: Sequence[int]) -> bool:
    """Whether an op that is split by `splits`, one per axis of `ways` ranks, gives what the whole op gives: its results
    and the gradients of its operands, for every draw."""
    return all(_holds(drawn, splits, ways, seed) for seed, drawn in enumerate(draws))


def _holds(drawn: Drawn, splits: Sequence[Split], ways: Sequence[int], seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    coordinates = list(product(*map(range, ways)))
    axes = range(len(splits))
    operands = [
        _spread(tensor, [split.dims.get(slot) for split in splits],
                [axis for axis in axes if slot in splits[axis].pending], ways, generator)
        for slot, tensor in enumerate(drawn.operands)
    ]  # fmt: skip
    gradients: list[dict[Coordinate, Tensor | None]] = [{} for _ in operands]
    results: list[dict[Coordinate, Tensor | None]] = [{} for _ in drawn.results]
    try:
        for coordinate in coordinates:
            found, owned = _run(drawn.call, [values[coordinate] for values in operands], drawn.flowing)
            if len(found) != len(results):
                return False
            given = []
            for index, tensor in enumerate(found):
                results[index][coordinate] = tensor.detach()
                whole = drawn.cotangents[index]
                dims = [split.results[index] for split in splits]
                given.append(None if whole is None else _part(whole, dims, ways, coordinate))
                if (whole is not None) != tensor.requires_grad or (
                    whole is not None and tensor.shape != _part(whole, dims, ways, coordinate).shape
                ):
                    return False
            for slot, gradient in enumerate(_gradients(found, owned, given)):
                gradients[slot][coordinate] = gradient
    except Exception:
        # The op does not take the parts.
        return False
    for index, whole in enumerate(drawn.results):
        dims = [split.results[index] for split in splits]
        summed = [axis for axis in axes if dims[axis] is None]
        if not _same(results[index], whole, dims, summed, ways):
            return False
    for slot, gradient in enumerate(drawn.gradients):
        dims = [split.dims.get(slot) for split in splits]
        # What all ranks use whole, each in another way, has a gradient that is a sum; that of a pending sum is whole.
        summed = [axis for axis in axes if dims[axis] is None and slot not in splits[axis].pending]
        if gradient is not None and not _same(gradients[slot], gradient, dims, summed, ways):
            return False
    return True


def _part(whole: Tensor, dims: Sequence[int | None], ways: Sequence[int], coordinate: Coordinate) -> Tensor:
    """What the rank at `coordinate` has of `whole`: axes that cut one dim cut it one after the other."""
    for dim, count, index in zip(dims, ways, coordinate, strict=True):
        if dim is not None:
            if whole.shape[dim] % count:
                raise ValueError("a dim does not divide")
            whole = whole.chunk(count, dim)[index]
    return whole


def _spread(
    whole: Tensor, dims: Sequence[int | None], pending: Sequence[int], ways: Sequence[int], generator: torch.Generator
) -> dict[Coordinate, Tensor]:
    """An operand on all ranks; a pending sum as random addends."""
    places = list(product(*(range(ways[axis]) for axis in pending)))
    addends = [torch.randint(-9, 10, whole.shape, generator=generator).to(whole.dtype) for _ in places[1:]]
    addends.insert(0, whole - sum(addends, torch.zeros_like(whole)) if addends else whole)
    by_place = dict(zip(places, addends, strict=True))
    return {
        coordinate: _part(by_place[tuple(coordinate[axis] for axis in pending)], dims, ways, coordinate)
        for coordinate in product(*map(range, ways))
    }


def _same(
    values: Mapping[Coordinate, Tensor | None],
    whole: Tensor,
    dims: Sequence[int | None],
    summed: Sequence[int],
    ways: Sequence[int],
) -> bool:
    """Whether `values`, summed over the axes in `summed`, are the parts of `whole`."""
    allowed = 0.0
    if has_gradient(whole.dtype) and whole.numel():
        allowed = _TOLERANCE.get(whole.dtype, _SINGLE) * max(1e-3, float(whole.abs().max()))
    for coordinate in values:
        line = [
            values[other]
            for other in values
            if all(axis in summed or other[axis] == coordinate[axis] for axis in range(len(ways)))
        ]
        expected = _part(whole, dims, ways, coordinate)
        if any(item is None or item.shape != expected.shape or item.dtype != expected.dtype for item in line):
            return False
        given = [item for item in line if item is not None]
        if expected.dtype == torch.bool:
            # A sum of flags is no flag.
            if len(given) > 1 or not torch.equal(given[0], expected):
                return False
        elif expected.numel():
            error = float((torch.stack(given).sum(0) - expected).abs().max())
            if not error <= allowed:
                return False
    return True


# --- looking for splits ---------------------------------------------------------------------------------------------


def find_splits(draws: Sequence[Drawn]) -> Iterator[Split]:
    """Ways to split an op that hold, alone and with each other; a dim stands in one of them only."""
    found: list[Split] = []
    for split in _candidates(draws[0]):
        taken = {(slot, dim) for other in found for slot, dim in other.dims.items()}
        if taken & set(split.dims.items()):
            continue
        if not _holds_alone(draws, split):
            continue
        if any(other.sums and split.sums and other.pending != split.pending for other in found):
            continue
        if all(holds(draws[:1], [other, split], [_least(draws[0], other), _least(draws[0], split)]) for other in found):
            found.append(split)
            yield split


def _holds_alone(draws: Sequence[Drawn], split: Split) -> bool:
    """Whether a split holds on 2 and on 3 ranks, as far as these divide its dims."""
    ways = [count for count in (2, 3) if all(size % count == 0 for size in _sizes(draws[0], split))]
    return all(holds(draws[:1], [split], [count]) for count in ways) and all(
        holds(draws[1:], [split], [count]) for count in ways
    )


def _sizes(drawn: Drawn, split: Split) -> list[int]:
    return [drawn.operands[slot].shape[dim] for slot, dim in split.dims.items()]


def _least(drawn: Drawn, split: Split) -> int:
    return 2 if all(size % 2 == 0 for size in _sizes(drawn, split)) else 3


def _candidates(drawn: Drawn) -> Iterator[Split]:
    """Sets of operand dims of one size, at most one of each operand, small sets first, with all that results may be."""
    sizes = {size for tensor in drawn.operands for size in tensor.shape if size > 1 and not (size % 2 and size % 3)}
    sets: list[dict[int, int]] = []
    for size in sorted(sizes):
        places = [
            [None, *(dim for dim, extent in enumerate(tensor.shape) if extent == size)] for tensor in drawn.operands
        ]
        if prod(map(len, places)) <= _MOST_WAYS:
            sets += [{slot: dim for slot, dim in enumerate(chosen) if dim is not None} for chosen in product(*places)]
    for dims in sorted((dims for dims in sets if dims), key=len):
        others = [slot for slot, tensor in enumerate(drawn.operands) if slot not in dims and has_gradient(tensor.dtype)]
        for results in _results(drawn, dims):
            if None not in results:
                yield Split(dims, frozenset(), results)
                continue
            for count in range(min(len(others), 2) + 1):
                for pending in combinations(others, count):
                    yield Split(dims, frozenset(pending), results)


def _results(drawn: Drawn, dims: Mapping[int, int]) -> list[tuple[int | None, ...]]:
    """What the results may be when these dims are cut: told from the shapes that the first rank gets."""
    ways = 2 if all(drawn.operands[slot].shape[dim] % 2 == 0 for slot, dim in dims.items()) else 3
    operands = [
        tensor.chunk(ways, dims[slot])[0] if slot in dims else tensor for slot, tensor in enumerate(drawn.operands)
    ]
    try:
        results, _ = _run(drawn.call, operands, frozenset())
    except Exception:
        return []
    if len(results) != len(drawn.results):
        return []
    found: list[int | None] = []
    for part, whole in zip(results, drawn.results, strict=True):
        if part.dim() != whole.dim():
            return []
        changed = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
        if len(changed) > 1 or any(ways * part.shape[dim] != whole.shape[dim] for dim in changed):
            return []
        found.append(changed[0] if changed else None)
    return [tuple(found)]


def find_linear(draws: Sequence[Drawn]) -> Iterator[frozenset[int]]:
    """Sets of operands that may be pending sums together, so that all results are; small sets first."""
    floating = [slot for slot, tensor in enumerate(draws[0].operands) if has_gradient(tensor.dtype)]
    if len(floating) > _MOST_OPERANDS:
        sets = [frozenset({slot}) for slot in floating] + [frozenset(floating)]
    else:
        sets = [frozenset(chosen) for count in range(1, len(floating) + 1) for chosen in combinations(floating, count)]
    for together in sets:
        split = Split({}, together, (None,) * len(draws[0].results))
        if all(holds(draws, [split], [ways]) for ways in (2, 3)):
            yield together


# --- the rule -------------------------------------------------------------------------------------------------------


def _rule(
    splits: Sequence[Split],
    linear: tuple[frozenset[int], ...],
    shapes: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]],
    saved: tuple[Saved, ...],
) -> Rule:
    """A rule whose factors are `splits`; all other dims stay whole."""
    factors: dict[str, Factor] = {}
    tensors: list[list[list[Part]]] = []
    for side, given in zip(("operand", "result"), shapes, strict=True):
        for slot, shape in enumerate(given):
            dims: list[list[Part]] = []
            for dim, size in enumerate(shape):
                name = f"{side}{slot}_{dim}"
                dims.append([Part(name, size)] if size != 1 else [])
            tensors.append(dims)
    count = len(shapes[0])
    for split in splits:
        places = [(slot, dim) for slot, dim in split.dims.items()]
        places += [(count + index, dim) for index, dim in enumerate(split.results) if dim is not None]
        every = [*shapes[0], *shapes[1]]
        size = 0
        for slot, dim in places:
            size = gcd(size, every[slot][dim])
        if size == 1:
            continue
        slot, dim = places[0]
        name = f"x{slot}d{dim}"
        factors[name] = Factor(size, Role.SUM if split.sums else Role.FREE)
        for slot, dim in places:
            rest = every[slot][dim] // size
            tensors[slot][dim] = [Part(name, size), *([Part(f"rest{slot}_{dim}", rest)] if rest != 1 else [])]
    for parts in (parts for dims in tensors for parts in dims):
        for part in parts:
            factors.setdefault(part.factor, Factor(part.size, Role.WHOLE))
    made: list[Dims] = [tuple(map(tuple, dims)) for dims in tensors]
    added = frozenset(slot for split in splits if split.sums for slot in split.pending)
    return Rule(factors, tuple(made[:count]), tuple(made[count:]), added=added, linear=linear, saved=saved)


def _saved(drawn: Drawn) -> tuple[Saved, ...]:
    """Which operands and results autograd keeps."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results, operands = _run(drawn.call, drawn.operands, drawn.flowing)
    places = [Saved(slot) for slot, tensor in enumerate(operands) if tensor.untyped_storage().data_ptr() in kept]
    places += [
        Saved(index, result=True)
        for index, tensor in enumerate(results)
        if tensor.untyped_storage().data_ptr() in kept and tensor.untyped_storage().data_ptr() not in
        {operand.untyped_storage().data_ptr() for operand in operands}
    ]  # fmt: skip
    return tuple(places)


def rule_text(rule: Rule) -> str:
    """A rule for people, as einsum writes it: "f0 ., . f1 -> f0 f1"; dots are dims that stay whole."""

    def tensor(dims: Dims) -> str:
        names = [
            "".join("." if rule.factors[part.factor].role is Role.WHOLE else part.factor for part in parts) or "1"
            for parts in dims
        ]
        return " ".join(names) or "()"

    text = ", ".join(map(tensor, rule.operands)) + " -> " + ", ".join(map(tensor, rule.results))
    sums = [", ".join(map(str, sorted(together))) for together in rule.linear]
    return text + (f"; pending sums pass through operands {' or '.join(sums)}" if sums else "")
