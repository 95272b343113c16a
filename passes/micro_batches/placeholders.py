"""Rows that replace placeholders, one after the other: features of images among words, for instance.

In normal form the number of a row is a running count of the places over the whole batch. Where each sample has an equal
number of places and of rows, a micro-batch can count its own places, and takes its own rows. Whether the samples of a
batch are so is known when it arrives: the number of places and rows that do not match is a total that must be zero.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from passes.ir.arguments import Argument, Ref, bound_arguments, find_overload
from passes.ir.layout import P, Placement, S
from passes.ir.program import Op, Program, TensorType
from passes.micro_batches.draft import Draft


@dataclass(frozen=True)
class Placeholders:
    """Places among the elements of `flags` (bool, one dim), in the order of samples, which are replaced by `rows`.

    `count`, `number` and `bounded` compute for each place the number of its row: a running count, less one, within the
    rows. Nothing but selections of rows reads `bounded`, and nothing else reads the others.
    """

    flags: str
    rows: int
    count: Op
    number: Op
    bounded: Op

    @property
    def ops(self) -> tuple[Op, Op, Op]:
        """The ops that compute the number of the row of each place, in order."""
        return self.count, self.number, self.bounded


def placeholders(program: Program) -> tuple[Placeholders, ...]:
    """The placeholders of `program`, which is in normal form, in order."""
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        for name in dict.fromkeys(op.operands):
            readers[name].append(op)
    makers = {name: op for op in program.ops for name in op.results}
    return tuple(_found(program, makers, readers))


def _found(program: Program, makers: dict[str, Op], readers: dict[str, list[Op]]) -> Iterator[Placeholders]:
    returned = set(program.returned)
    for bounded in program.ops:
        number = _made_by(bounded, makers, "clamp")
        count = None if number is None else _made_by(number, makers, "sub")
        if number is None or count is None or count.kind != "cumsum":
            continue
        least, most = bounded.arguments.get("min"), bounded.arguments.get("max")
        (flags,), users = count.operands, readers[bounded.results[0]]
        size = program.types[flags].shape
        if number.arguments["other"] != 1 or least != 0 or not isinstance(most, int) or len(size) != 1:
            continue
        alone = [readers[op.results[0]] for op in (count, number)] == [[number], [bounded]]
        taken = all(op.kind == "index_select" and _rows(program, op, bounded.results[0]) == most + 1 for op in users)
        if alone and taken and returned.isdisjoint(name for op in (count, number, bounded) for name in op.results):
            yield Placeholders(flags, most + 1, count, number, bounded)


def _made_by(op: Op, makers: dict[str, Op], kind: str) -> Op | None:
    """The op that makes the only operand of `op`, if this is of a kind."""
    return makers.get(op.operands[0]) if op.kind == kind and len(op.operands) == 1 else None


def _rows(program: Program, selection: Op, index: str) -> int | None:
    """The number of rows that a selection by `index` takes from, if it selects rows."""
    source = selection.operands[0]
    selects = selection.operands == (source, index) and source != index and selection.arguments["dim"] == 0
    return program.types[source].shape[0] if selects else None


def can_number(draft: Draft, item: Placeholders, samples: int) -> bool:
    """Whether a micro-batch can number its own places, those of its share of the `samples` of the batch."""
    equal = draft.types[item.flags].size % samples == item.rows % samples == 0
    return equal and draft.placements[item.flags] == S(0)


def numbered(draft: Draft, item: Placeholders, op: Op) -> Op:
    """One of the ops of `item` for the places and rows of a micro-batch."""
    most = item.rows // draft.ways - 1
    return replace(op, arguments={**op.arguments, "max": most}) if op is item.bounded else op


def unmatched(draft: Draft, item: Placeholders, samples: int) -> str:
    """The number of places that samples of the batch have too many or too few, written to `draft`: a pending sum."""
    places, rows = draft.types[item.flags].size // samples, item.rows // samples
    counts = TensorType((samples,), torch.int64)
    steps: tuple[tuple[str, TensorType, Placement, tuple[Argument, ...]], ...] = (
        ("reshape.default", TensorType((samples, places), torch.bool), S(0), ((samples // draft.ways, places),)),
        ("sum.dim_IntList", counts, S(0), ((1,),)),
        ("sub.Tensor", counts, S(0), (rows,)),
        ("abs.default", counts, S(0), ()),
        ("sum.default", TensorType((), torch.int64), P, ()),
    )
    source, made = item.flags, item.bounded.results[0]
    for number, (target, type, placement, rest) in enumerate(steps):
        found = draft.named(f"{made}_unmatched_{number}", type, placement)
        arguments = bound_arguments(find_overload(f"aten.{target}"), (Ref(source), *rest), {})
        key = f"{item.bounded.key}.unmatched.{number}"
        op = replace(item.bounded, target=f"aten.{target}", arguments=arguments, results=(found,), key=key)
        draft.ops[made].append(op)
        source = found
    return source
