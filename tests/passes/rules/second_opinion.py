"""A second opinion on the written rules: splits that running an op on shards finds and its rule does not have.

`python -m tests.passes.rules.second_opinion [kind ...]` prints them.
"""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_context

import torch
from torch import Tensor

from autopar.discover import discover
from passes.ir.layout import I, Letter, R
from passes.ir.mesh import Mesh
from passes.rules import registered
from passes.rules.rule import Rule
from passes.rules.strategies import op_strategies, subject
from tests.passes.rules.database import FAST, Effort, forms
from tests.passes.rules.one_op import OneOp, digits_of, one_op
from tests.passes.rules.samples import Sample, samples
from tests.passes.rules.sizes import redrawn

MESH = Mesh(("a",), (2,))

Way = tuple[tuple[Letter, ...], tuple[Letter, ...]]


def calls(kind: str, effort: Effort) -> Iterator[Sample]:
    """The calls of a kind, with sizes that divide."""
    yield from (sample for sample in samples() if sample.kind == kind)
    for sample in forms(kind, effort):
        yield from redrawn(sample, MESH.size)[:1]


def missed(sample: Sample) -> list[Way]:
    """The splits of a call in two that its rule does not have, as letters of operands and results."""
    if sample.random:
        return []
    one = one_op(sample)
    found = discover(one.op, one.folded.types, one.operands)
    return [] if found is None else sorted(_ways(one, found) - _ways(one, one.rule))


def _ways(one: OneOp, rule: Rule | None) -> set[Way]:
    about = subject(one.op, rule, one.folded.types, one.folded.flowing, set(), set())
    chosen = op_strategies(about, {2: list(digits_of(rule, 2))}, MESH)
    return {
        (
            tuple(_plain(layout[0]) for layout in strategy.operands),
            tuple(_plain(layout[0]) for layout in strategy.results),
        )
        for strategy in chosen
    }


def _plain(letter: Letter) -> Letter:
    """R and I are the same here: which of them it is shows nowhere in the values."""
    return R if letter == I else letter


def way_text(sample: Sample, way: Way) -> str:
    """A split for people: the call, and what it makes of what."""
    sides = (", ".join(map(str, letters)) for letters in way)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in sample.tensors)
    others = [item for item in sample.arguments if not _holds_tensors(item)]
    return f"{sample.kind}({shapes}; {others} {dict(sample.options)}): {' -> '.join(sides)}"


def _holds_tensors(item: object) -> bool:
    return isinstance(item, Tensor) or (isinstance(item, (list, tuple)) and any(map(_holds_tensors, item)))


def opinions(kinds: Iterable[str], effort: Effort) -> Mapping[str, Sequence[str]]:
    """What is missed, by kind."""
    found: dict[str, Sequence[str]] = {}
    for kind in kinds:
        lines = [way_text(sample, way) for sample in calls(kind, effort) for way in missed(sample)]
        if lines:
            found[kind] = lines
    return found


def main(kinds: Sequence[str]) -> None:
    """Print what is missed, each kind in a process of its own: some read what is not theirs when sizes do not fit."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for kind in kinds or registered():
        child = get_context("fork").Process(target=_print, args=(kind,))
        child.start()
        child.join()
        if child.exitcode:
            print(f"{kind} ends its process with {child.exitcode}", flush=True)


def _print(kind: str) -> None:
    for lines in opinions([kind], FAST).values():
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
