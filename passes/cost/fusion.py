"""Fusion: the tensors that never reach memory when chains of ops are compiled into one kernel.

A compiler joins ops that go over the same elements: pointwise ops, casts, copies, concatenations, and reductions of
rows with the ops before and after them. So norms, softmax, losses, dropout and rotary embeddings, written out or not,
read their input once and write their result once; as hand-written fused kernels do. The intermediate tensors are
recomputed in the backward pass from the inputs of the chain. Matrix products, attention, lookups and everything else
read from memory and write to it.

This is a property of the program alone, independent of the layouts: costs remain sums over ops. A tensor that is
redistributed in the middle of a chain is written and read after all; this is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from passes.ir.folded import Folded, Region
from passes.ir.grouping import grouped, representatives
from passes.ir.program import Op
from passes.ir.rule import Rule
from passes.rules import find_rule
from passes.rules.cheap import is_view
from passes.rules.memory_order import memory_order
from passes.rules.pointwise import TABLE

# Ops that are not pointwise but reduce rows or move elements.
_JOINED = frozenset(
    {
        *TABLE,
        *("to", "where", "cat", "stack", "pad", "constant_pad_nd", "reshape", "contiguous"),
        *("sum", "mean", "amax", "amin", "var", "var_mean", "linalg_vector_norm"),
        *("layer_norm", "rms_norm", "softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"),
        *("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
    }
)


@dataclass(frozen=True, slots=True)
class Fused:
    """Memory accesses of an op in a chain.

    - `operands`, `results`: those that it does not read from memory, and does not write to memory.
    - `starts`: whether it is the op that launches the kernel.
    - `recompute_operands`, `recompute_results`: its operands and results that the backward pass reads from memory, to
      recompute the intermediate tensors of the chain.
    """

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    starts: bool = True
    recompute_operands: frozenset[int] = frozenset()
    recompute_results: frozenset[int] = frozenset()


def fusion(folded: Folded) -> dict[str, Fused]:
    """The memory accesses of the ops of `folded` that are fused with others, by their first result."""
    copied = memory_order(folded).copied
    bodies = list(_bodies(folded))
    found: dict[str, Fused] = {}
    for number, ops in enumerate(bodies):
        outside = {name for other, body in enumerate(bodies) if other != number for op in body for name in op.operands}
        found |= _chains(ops, folded, copied, outside | _handed_on(folded))
    return found


def joined(folded: Folded) -> Mapping[str, Fused]:
    """`fusion` of a compiled program, in which only the regions are compiled; ops outside of them are not fused."""
    if not folded.program.compiled:
        return {}
    inside = {op.results[0] for region in folded.regions for op in region.ops if op.results}
    return {name: fused for name, fused in fusion(folded).items() if name in inside}


def _bodies(folded: Folded) -> Iterator[Sequence[Op]]:
    """The ops of every region, and the runs of ops between them."""
    for inside, items in groupby(folded.items, lambda item: isinstance(item, Region)):
        if inside:
            yield from (item.ops for item in items if isinstance(item, Region))
        else:
            yield [item for item in items if isinstance(item, Op)]


def _handed_on(folded: Folded) -> set[str]:
    """The results of regions that their next copy or the program outside reads, and the outputs and buffers of the
    program."""
    names = set(folded.program.returned)
    for region in folded.regions:
        names.update(region.results, (carry.initial for carry in region.carries))
    return names


@dataclass(frozen=True)
class _Link:
    """An op in a chain: the number of an op that stands for the chain, the op's rule and operands (what views are of),
    and which of them it takes from the ops before it in the chain."""

    chain: int
    op: Op
    rule: Rule
    operands: tuple[str, ...]
    inner: frozenset[int]


def _chains(ops: Sequence[Op], folded: Folded, copied: Set[str], outside: Set[str]) -> dict[str, Fused]:
    """The ops of one body that are in chains."""
    links, written = _links(ops, folded, copied, outside)
    found: dict[str, Fused] = {}
    for chain in grouped((link.chain, link) for link in links).values():
        found |= _chain(chain, written, folded.flowing)
    return found


def _links(ops: Sequence[Op], folded: Folded, copied: Set[str], outside: Set[str]) -> tuple[list[_Link], set[str]]:
    """Every op that can be fused, with its chain, and the tensors that are read outside of the chain that computes
    them.

    Two ops are fused if one reads a result of the other, and no path between them contains an op that cannot be fused:
    the longest path to each has equally many of these.
    """
    roots: dict[str, str] = {}
    makers: dict[str, int] = {}
    depths: list[int] = []
    joined: list[bool] = []
    together: list[tuple[int, int]] = []
    links: list[_Link] = []
    written: set[str] = set()
    for place, op in enumerate(ops):
        rule = find_rule(op, folded.types, folded.program.rules)
        operands = tuple(roots.get(name, name) for name in op.operands)
        view = is_view(rule, op.results[0] in copied)
        joins = not view and rule is not None and not rule.multiplications and op.kind in _JOINED
        before = [makers[name] for name in operands if name in makers]
        depths.append(max((depths[maker] + (not joined[maker]) for maker in before), default=0))
        joined.append(joins)
        if view:
            roots.update(dict.fromkeys(op.results, operands[0]))
        else:
            makers.update(dict.fromkeys(op.results, place))
        written.update(roots.get(name, name) for name in op.results if name in outside)
        inner = set[int]()
        for slot, name in enumerate(() if view else operands):
            maker = makers.get(name)
            if joins and maker is not None and joined[maker] and depths[maker] == depths[place]:
                inner.add(slot)
                together.append((maker, place))
            else:
                written.add(name)
        if joins and rule is not None:
            links.append(_Link(place, op, rule, operands, frozenset(inner)))
    chains = representatives(together)
    return [replace(link, chain=chains.get(link.chain, link.chain)) for link in links], written


def _chain(links: Sequence[_Link], written: Set[str], flowing: Set[str]) -> dict[str, Fused]:
    """The memory accesses of the ops of one chain."""
    makers = {name: link for link in links for name in link.op.results}
    used = {name for link in links for name in link.operands}
    needed: set[str] = set()
    waiting = [name for link in links for name in _saved(link, flowing)]
    made = set[str]()
    while waiting:
        name = waiting.pop()
        if name in makers and name not in written and name in used:
            waiting += () if name in made else makers[name].operands
            made.add(name)
        else:
            needed.add(name)
    found: dict[str, Fused] = {}
    read: set[str] = set()
    for number, link in enumerate(links):
        absent, reread = set(link.inner), set[int]()
        for slot, name in enumerate(link.operands):
            if name in read or slot in link.inner:
                absent.add(slot)
            elif name in needed:
                reread.add(slot)
            read.add(name)
        results = dict(enumerate(link.op.results))
        kept = frozenset(index for index, name in results.items() if name in used and name not in written)
        reread_results = frozenset(index for index, name in results.items() if name in needed)
        found[link.op.results[0]] = Fused(frozenset(absent), kept, number == 0, frozenset(reread), reread_results)
    return found


def _saved(link: _Link, flowing: Set[str]) -> Iterator[str]:
    """The tensors from which the gradient of an op is computed."""
    if not any(name in flowing for name in link.op.results):
        return
    for item in link.rule.saved:
        if not item.needed_by or any(link.op.operands[slot] in flowing for slot in item.needed_by):
            yield link.op.results[item.index] if item.result else link.operands[item.index]
