"""positions: the pieces of a program that pipeline stages are intervals of.

These are the ops outside of regions, each with the redistributions before it, and the copies of regions, or the pieces
that these can be cut into (`loops`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from passes.ir.errors import PipelineError
from passes.ir.lowered import Compute, Loop, Redistribution, Stage, Statement
from passes.lower.loops import copy_pieces, piece_keys, piece_name


@dataclass(frozen=True)
class Position:
    """A piece of a program that is not cut: the statements from `first` on, up to `last` (exclusive). If the last of
    these is a loop, only the statements `inside` of its copy `copy` are part of the piece. `name` is the module path of
    the copy, or of the module in it that begins there, or the key of the op."""

    name: str
    first: int
    last: int
    copy: int | None = None
    inside: range = range(0)


def positions(stage: Stage) -> tuple[Position, ...]:
    """The positions of a program that is lowered to one stage, in order."""
    found: list[Position] = []
    first = 0
    statements = ordered(stage)
    read = {name for item in statements for name in item.reads}
    for number, statement in enumerate(statements):
        if isinstance(statement, Redistribution):
            if found and first == number and statement.result not in read:
                found[-1], first = replace(found[-1], last=number + 1), number + 1
            continue
        if isinstance(statement, Compute):
            found.append(Position(statement.op.key, first, number + 1))
        else:
            inner = copy_pieces(statement)
            for copy in statement.copies:
                for inside in inner:
                    begin = first if copy == statement.copies.start and not inside.start else number
                    name = piece_name(statement, copy, inside.start)
                    found.append(Position(name, begin, number + 1, copy, inside))
        first = number + 1
    if found and first < len(statements):
        found[-1] = replace(found[-1], last=len(statements))
    return tuple(found)


def named_starts(stage: Stage, cuts: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the positions with the names `cuts`.

    A mean over samples is a sum and a quotient in micro-batches, and one op in other programs: there a stage of the sum
    alone is empty.

    Raises PipelineError for a name that begins no position, and for names out of order.
    """
    names = [item.name for item in positions(stage)]
    found: list[int] = []
    whole_means = set[int]()
    for name in cuts:
        within = (at for at, other in enumerate(names) if other.startswith((f"{name}/", f"{name}.")))
        number = names.index(name) if name in names else next(within, None)
        if number is None and name.endswith(".sum") and name.removesuffix(".sum") in names:
            number = names.index(name.removesuffix(".sum"))
            whole_means.add(number)
        if not number:
            known = list(dict.fromkeys(item.name for item in positions(stage)[1:] if item.copy is not None))
            raise PipelineError(
                f"the cut {name!r} names no module or op that a stage can begin with"
                + (f": take one of {', '.join(known[:3])}, …" if known else "")
            )
        if found and number <= found[-1] and not (number in whole_means and cuts[len(found) - 1] == f"{name}.sum"):
            raise PipelineError(f"the cut {name!r} does not come after {cuts[len(found) - 1]!r}: give cuts in order")
        found.append(number)
    return tuple(found)


def keys_of_positions(stage: Stage) -> list[list[str]]:
    """The keys of the ops of each position, in order."""
    statements = ordered(stage)
    return [list(_keys(statements, piece)) for piece in positions(stage)]


def _keys(statements: Sequence[Statement], piece: Position) -> Iterator[str]:
    for statement in statements[piece.first : piece.last]:
        if isinstance(statement, Compute):
            yield statement.op.key
        elif isinstance(statement, Loop) and piece.copy is not None:
            yield from piece_keys(statement, piece.copy, piece.inside)


def in_order(stage: Stage) -> Stage:
    """`stage` with the statements that only lay out an output right after the one that makes its source."""
    return replace(stage, body=replace(stage.body, statements=tuple(ordered(stage))))


def ordered(stage: Stage) -> list[Statement]:
    """The statements of a stage in the order of `in_order`."""
    statements = list(stage.body.statements)
    read = {name for item in statements for name in item.reads}
    sinks = [item for item in statements if isinstance(item, Redistribution) and item.result not in read]
    makers = {name: item for item in statements for name in made_by(item)}
    moved = [item for item in sinks if item.source in makers]
    kept = [item for item in statements if not any(item is other for other in moved)]
    found: list[Statement] = []
    for item in kept:
        found.append(item)
        found += [other for other in moved if makers[other.source] is item]
    return found


def made_by(statement: Statement) -> tuple[str, ...]:
    """The values of the surrounding code that a statement makes."""
    if isinstance(statement, Compute):
        return statement.op.results
    if isinstance(statement, Redistribution):
        return (statement.result,)
    return tuple(name for _, names in statement.exports for name in names if name is not None)
