"""Opt-in: rules found by running an op on shards. A plan has some only where the user passes `discover=True`.

For every set of operand dims of one size: cut them, run the op on each part, and find how the results combine
(by concatenation or by a sum), forward and backward, in float64, for several draws of values, on 2 and on 3 ranks. A
split that always gives the result of the whole op is a factor. EasyDist (ShardCombine) finds its rules like this.

Sampling is no proof: such rules test the written ones, and are suggestions for ops without a rule. They contain plain
splits only (no local forms, no collectives inside, no splits inside a dim), and no costs. They hold for the sizes of a
call; `passes/micro_batches.py` derives those for a micro-batch from them.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from math import gcd

import torch
from torch import Tensor

from autopar.discover.draws import Drawn, draws_of, run_with
from autopar.discover.splits import MOST_OPERANDS, Split, divides, find_linear, find_splits, holds
from passes.ir.program import Dims, Factor, Op, Part, Program, Role, Rule, Saved, TensorType
from passes.rules import signature, written_rule

logger = logging.getLogger("autopar")


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
