"""Opt-in: rules found by running an op on shards. A plan has some only where the user passes `discover=True`.

For every set of operand dims of one size: cut them, run the op on each part, and find how the results combine
(by concatenation or by a sum), forward and backward, in float64, for several draws of values, on 2 and on 3 ranks. A
split that always gives the result of the whole op is a factor. EasyDist (ShardCombine) finds its rules like this.

Sampling is no proof: such rules test the written ones, and are suggestions for ops without a rule. They contain plain
splits only (no local forms, no collectives inside, no splits inside a dim), and no costs. They hold for the sizes of a
call; `passes/micro_batches/` derives those for a micro-batch from them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd, prod

import torch
from torch import Tensor

from autopar.discover.calls import Drawn, draws_of, gradients_of, run_with
from passes.ir.log import logger
from passes.ir.program import Op, Program, TensorType, has_gradient
from passes.ir.rule import Dims, Factor, Part, Role, Rule, Saved, parts_of
from passes.rules import signature, written_rule

MOST_OPERANDS = 6
_MOST_WAYS = 400
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
_SINGLE = 1e-4

Coordinate = tuple[int, ...]


def discover(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The rule that running `op` on shards suggests; None if no split is found.

    The op runs on the CPU on random values, with small sizes where it takes these. An op that draws random numbers is
    not looked at. It must look whether its operands fit together before it reads them.
    """
    if not op.operands or not op.results or len(op.operands) > 4 * MOST_OPERANDS:
        return None
    draws, own = draws_of(op, types)
    return suggested(op, types, draws, own) if draws else None


def suggested(op: Op, types: Mapping[str, TensorType], draws: Sequence[Drawn], own: Sequence[Drawn]) -> Rule | None:
    """The rule of `op` that draws of its form suggest, at least one of them; `own` are draws with its own sizes."""
    # Small sizes may make another form of the op than it has: where its own sizes divide, they decide.
    found = [split for split in find_splits(draws) if not own or not divides(own[0], split) or holds(own, [split], [2])]
    linear = tuple(find_linear(draws))
    shapes = [types[name].shape for name in op.operands], [types[name].shape for name in op.results]
    rule = _rule(found, linear, shapes, _saved(draws[0]))
    return rule if rule.factors and any(factor.role is not Role.WHOLE for factor in rule.factors.values()) else None


def rules_for(program: Program) -> Mapping[Hashable, Rule]:
    """Find and log rules for the ops of a program without a written rule; returns them by signature."""
    tried: dict[Hashable, Rule | None] = {}
    for op in program.ops:
        key = signature(op, program.types)
        if key in tried or written_rule(op, program.types) is not None:
            continue
        tried[key] = rule = discover(op, program.types)
        if rule is not None:
            logger.warning(
                "no sharding rule speaks for %s; running it on shards suggests this one, which is no proof: %s",
                op.kind,
                rule_text(rule),
            )
    return {key: rule for key, rule in tried.items() if rule is not None}


# --- splits ----------------------------------------------------------------------------------------------------------


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


def holds(draws: Sequence[Drawn], splits: Sequence[Split], ways: Sequence[int]) -> bool:
    """Whether an op that is split by `splits`, one per axis of `ways` ranks, gives what the whole op gives: its results
    and the gradients of its operands, for every draw."""
    return all(_holds(drawn, splits, ways, seed) for seed, drawn in enumerate(draws))


def divides(drawn: Drawn, split: Split) -> bool:
    """Whether all dims that a split cuts divide by 2."""
    cut = [whole.shape[dim] for whole, dim in zip(drawn.results, split.results, strict=True) if dim is not None]
    return _divide(drawn, split.dims, 2) and all(size % 2 == 0 for size in cut)


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
            found, owned = run_with(drawn.call, [values[coordinate] for values in operands], drawn.flowing)
            if len(found) != len(results):
                return False
            given = []
            for index, (tensor, whole) in enumerate(zip(found, drawn.cotangents, strict=True)):
                results[index][coordinate] = tensor.detach()
                dims = [split.results[index] for split in splits]
                part = None if whole is None else _part(whole, dims, ways, coordinate)
                if (part is not None) != tensor.requires_grad or (part is not None and part.shape != tensor.shape):
                    return False
                given.append(part)
            for slot, gradient in enumerate(gradients_of(found, owned, given)):
                gradients[slot][coordinate] = gradient
    except Exception:
        # The op does not take the parts; what it raises then is its own choice.
        return False
    for index, whole in enumerate(drawn.results):
        dims = [split.results[index] for split in splits]
        summed = [axis for axis in axes if dims[axis] is None]
        if not _same(results[index], whole, dims, summed, ways):
            return False
    for slot, gradient in enumerate(drawn.gradients):
        dims = [split.dims.get(slot) for split in splits]
        # The gradient of an operand that all ranks use whole is a pending sum; that of a pending sum is whole.
        summed = [axis for axis in axes if dims[axis] is None and slot not in splits[axis].pending]
        if gradient is not None and not _same(gradients[slot], gradient, dims, summed, ways):
            return False
    return True


def _part(whole: Tensor, dims: Sequence[int | None], ways: Sequence[int], coordinate: Coordinate) -> Tensor:
    """The part of `whole` on the rank at `coordinate`; axes that cut the same dim cut it one after the other."""
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
        elif expected.numel() and not float((torch.stack(given).sum(0) - expected).abs().max()) <= allowed:
            return False
    return True


def find_splits(draws: Sequence[Drawn]) -> Iterator[Split]:
    """Ways to split an op that hold, alone and with each other; a dim stands in one of them only."""
    found: list[Split] = []
    for split in _candidates(draws[0]):
        taken = {(slot, dim) for other in found for slot, dim in other.dims.items()}
        differ = any(other.sums and split.sums and other.pending != split.pending for other in found)
        if differ or taken & set(split.dims.items()):
            continue
        # On 2 and on 3 ranks, as far as these divide its dims.
        counts = [count for count in (2, 3) if _divide(draws[0], split.dims, count)]
        if all(holds(draws, [split], [count]) for count in counts) and all(
            holds(draws[:1], [other, split], [_least(draws[0], each.dims) for each in (other, split)])
            for other in found
        ):
            found.append(split)
            yield split


def _divide(drawn: Drawn, dims: Mapping[int, int], count: int) -> bool:
    return all(drawn.operands[slot].shape[dim] % count == 0 for slot, dim in dims.items())


def _least(drawn: Drawn, dims: Mapping[int, int]) -> int:
    """The least number of ranks that a split of these dims is tried on."""
    return 2 if _divide(drawn, dims, 2) else 3


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
            most = min(len(others), 2) if None in results else 0
            for count in range(most + 1):
                for pending in combinations(others, count):
                    yield Split(dims, frozenset(pending), results)


def _results(drawn: Drawn, dims: Mapping[int, int]) -> list[tuple[int | None, ...]]:
    """The possible splits of results when these dims are cut, derived from the shapes on the first rank."""
    ways = _least(drawn, dims)
    operands = [
        tensor.chunk(ways, dims[slot])[0] if slot in dims else tensor for slot, tensor in enumerate(drawn.operands)
    ]
    try:
        results, _ = run_with(drawn.call, operands, frozenset())
    except Exception:
        # The op does not take the parts; what it raises then is its own choice.
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
    if len(floating) > MOST_OPERANDS:
        sets = [frozenset({slot}) for slot in floating] + [frozenset(floating)]
    else:
        sets = [frozenset(chosen) for count in range(1, len(floating) + 1) for chosen in combinations(floating, count)]
    for together in sets:
        split = Split({}, together, (None,) * len(draws[0].results))
        if all(holds(draws, [split], [ways]) for ways in (2, 3)):
            yield together


# --- rules -----------------------------------------------------------------------------------------------------------


def _rule(
    splits: Sequence[Split],
    linear: tuple[frozenset[int], ...],
    shapes: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]],
    saved: tuple[Saved, ...],
) -> Rule:
    """A rule whose factors are `splits`; all other dims stay whole."""
    factors: dict[str, Factor] = {}
    count, every = len(shapes[0]), [*shapes[0], *shapes[1]]
    tensors = [
        [[Part(f"whole{slot}_{dim}", size)] if size != 1 else [] for dim, size in enumerate(shape)]
        for slot, shape in enumerate(every)
    ]
    for split in splits:
        places = [
            *split.dims.items(),
            *((count + index, dim) for index, dim in enumerate(split.results) if dim is not None),
        ]
        size = gcd(*(every[slot][dim] for slot, dim in places))
        if size == 1:
            continue
        slot, dim = places[0]
        name = f"x{slot}d{dim}"
        factors[name] = Factor(size, Role.SUM if split.sums else Role.FREE)
        for slot, dim in places:
            rest = every[slot][dim] // size
            tensors[slot][dim] = [Part(name, size), *([Part(f"rest{slot}_{dim}", rest)] if rest != 1 else [])]
    made: list[Dims] = [tuple(map(tuple, dims)) for dims in tensors]
    for part in parts_of(*made):
        factors.setdefault(part.factor, Factor(part.size, Role.WHOLE))
    added = frozenset(slot for split in splits if split.sums for slot in split.pending)
    return Rule(factors, tuple(made[:count]), tuple(made[count:]), added=added, linear=linear, saved=saved)


def _saved(drawn: Drawn) -> tuple[Saved, ...]:
    """The operands and results that autograd saves."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results, operands = run_with(drawn.call, drawn.operands, drawn.flowing)
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
