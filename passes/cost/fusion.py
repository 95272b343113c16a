"""Which tensors never reach memory when chains of ops are compiled into one kernel.

A compiler joins ops that go over the same elements: pointwise ops, casts, copies, concatenations, and reductions of
rows with what stands before and after them. So norms, softmax, losses, dropout and rotary embeddings, written out or
not, read their input once and write their result once; that is also what hand-written fused kernels do. What lies
between is made again in the backward pass from what the chain read. Matrix products, attention, lookups and everything
else read from memory and write to it.

This is a property of the program alone, whatever layouts are chosen: prices stay sums over ops. Where ranks exchange a
tensor in the middle of a chain, it is written and read after all; that is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

from passes.ir.program import Folded, Op, Region, TensorType, references
from passes.rules import find_rule
from passes.rules.pointwise import TABLE
from passes.rules.strides import strided

# What is not pointwise and goes over rows, or moves elements.
_JOINED = frozenset(
    {
        *TABLE,
        *("to", "where", "cat", "stack", "pad", "constant_pad_nd", "reshape"),
        *("sum", "mean", "amax", "amin", "var", "var_mean", "linalg_vector_norm"),
        *("layer_norm", "rms_norm", "softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"),
        *("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
    }
)


@dataclass(frozen=True, slots=True)
class Fused:
    """Of an op in a chain: the operands that it does not read from memory, the results that it does not write there,
    and whether it is the one that starts the kernel."""

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    starts: bool = True


def fusion(folded: Folded) -> dict[str, Fused]:
    """For the ops of `folded` that are joined to others, by their first result, what of them stays in registers."""
    copied = strided(folded)
    bodies = list(_bodies(folded))
    found: dict[str, Fused] = {}
    for number, ops in enumerate(bodies):
        outside = {name for other, body in enumerate(bodies) if other != number for op in body for name in op.operands}
        found |= _chains(ops, folded.types, copied, outside | _handed_on(folded))
    return found


def _bodies(folded: Folded) -> Iterator[Sequence[Op]]:
    """The ops of every region, and the runs of ops between them."""
    for inside, items in groupby(folded.items, lambda item: isinstance(item, Region)):
        if inside:
            yield from (item.ops for item in items if isinstance(item, Region))
        else:
            yield [item for item in items if isinstance(item, Op)]


def _handed_on(folded: Folded) -> set[str]:
    """What regions give to their next copy and to the outside, and what the program returns and keeps."""
    names = {name for value in folded.program.outputs for name in references(value)}
    names.update(update.value for update in folded.program.updates)
    for region in folded.regions:
        names.update(carry.initial for carry in region.carries)
        names.update(carry.next for carry in region.carries)
        names.update(export.value for export in region.exports)
    return names


def _chains(
    ops: Sequence[Op], types: Mapping[str, TensorType], copied: Set[str], outside: Set[str]
) -> dict[str, Fused]:
    """The chains of one body: joined are ops of which one reads the other's result, with nothing between them, on any
    way, that is not joined."""
    roots: dict[str, str] = {}
    makers: dict[str, int] = {}
    depths: list[int] = []
    joined: list[bool] = []
    chains = list(range(len(ops)))
    inner: list[set[int]] = [set() for _ in ops]
    needed = set(outside)
    first: set[tuple[int, str]] = set()
    for place, op in enumerate(ops):
        rule = find_rule(op, types)
        operands = [roots.get(name, name) for name in op.operands]
        view = rule is not None and not rule.moves and not (op.kind == "reshape" and op.operands[0] in copied)
        joins = not view and rule is not None and not rule.multiplications and op.kind in _JOINED
        before = [makers[name] for name in operands if name in makers]
        depth = max((depths[maker] + (not joined[maker]) for maker in before), default=0)
        depths.append(depth)
        joined.append(joins)
        if view:
            for name in op.results:
                roots[name] = operands[0]
                needed.update({operands[0]} if name in outside else ())
            continue
        makers.update(dict.fromkeys(op.results, place))
        for slot, name in enumerate(operands):
            maker = makers.get(name)
            if joins and maker is not None and joined[maker] and depths[maker] == depth:
                inner[place].add(slot)
                _join(chains, maker, place)
            else:
                needed.add(name)
    read = {roots.get(name, name) for op in ops for name in op.operands}
    found: dict[str, Fused] = {}
    begun: set[int] = set()
    for place, op in enumerate(ops):
        if not joined[place]:
            continue
        chain = _chain(chains, place)
        for slot, name in enumerate(roots.get(name, name) for name in op.operands):
            if (chain, name) in first:
                inner[place].add(slot)
            first.add((chain, name))
        kept = frozenset(index for index, name in enumerate(op.results) if name in read and name not in needed)
        fused = Fused(frozenset(inner[place]), kept, chain not in begun)
        begun.add(chain)
        if fused != Fused():
            found[op.results[0]] = fused
    return found


def _chain(chains: list[int], place: int) -> int:
    """The first op of the chain that an op is in."""
    while chains[place] != place:
        chains[place] = chains[chains[place]]
        place = chains[place]
    return place


def _join(chains: list[int], one: int, other: int) -> None:
    one, other = _chain(chains, one), _chain(chains, other)
    chains[max(one, other)] = min(one, other)
