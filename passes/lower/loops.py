"""Parts of loops, for pipeline stages: some of the copies of a region, or some of the statements of one copy.

A copy is cut where no more bytes are live than are carried from copy to copy, as between attention and MLP. Values that
cross such a cut, or the boundary between two copies, get names in the surrounding code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from passes.ir.folded import Carry, Region
from passes.ir.lowered import Body, Compute, Loop, PartOfCopy, Redistribution, Statement
from passes.ir.program import Op


def copy_pieces(loop: Loop) -> tuple[range, ...]:
    """The statements of a copy in the pieces that it can be cut into; each but the first begins a module."""
    starts = [0, *_inner_starts(loop), len(loop.body.statements)]
    return tuple(range(first, last) for first, last in pairwise(starts))


def piece_name(loop: Loop, copy: int, first: int) -> str:
    """The path of the copy, layer or module that begins at statement `first` of a copy."""
    if not first:
        return loop.region.copies[copy][0]
    op, before = _next_op(loop.body, first), _op_before(loop.body, first)
    entry, rest = _place(loop.region, op)
    path = loop.region.copies[copy][entry]
    return path if entry != _place(loop.region, before)[0] else path + rest


def piece_keys(loop: Loop, copy: int, inside: range) -> Iterator[str]:
    """The keys that the ops among the statements `inside` of a copy have in the program, in order."""
    for item in loop.body.statements[inside.start : inside.stop]:
        if isinstance(item, Compute):
            entry, rest = _place(loop.region, item.op)
            yield loop.region.copies[copy][entry] + rest + item.op.key.removeprefix(item.op.module)


def some_copies(loop: Loop, copies: range) -> Loop:
    """The loop over some of the copies, with what the next copy takes among its exports."""
    start, stop = copies.start - loop.copies.start, copies.stop - loop.copies.start
    exports = {value: list(names[start:stop]) for value, names in loop.exports}
    initial = loop.initial
    if copies.start != loop.copies.start:
        initial = tuple(entering(loop, place, copies.start) for place in range(len(loop.region.carries)))
    if copies.stop != loop.copies.stop:
        for place, carry in enumerate(loop.region.carries):
            names = exports.setdefault(carry.next, [None] * len(copies))
            names[-1] = names[-1] or leaving(loop, place, copies.stop)
    kept = tuple((value, tuple(names)) for value, names in exports.items())
    return replace(loop, copies=copies, initial=initial, exports=kept)


def carried_before(loop: Loop, copy: int) -> Iterator[tuple[str, str, Redistribution | None]]:
    """The values that are carried into `copy`, where it is in another loop than the copy before: for each its name
    there, its name in the body of that copy, and the redistribution between both, if there is one."""
    for place, (carry, change) in enumerate(zip(loop.region.carries, loop.between, strict=True)):
        name = leaving(loop, place, copy)
        yield name, carry.next, change and replace(change, source=name, result=f"{name}~carried")


def titled(loop: Loop) -> Loop:
    """Some copies of a region, named by the first and the last of them."""
    first, last = (loop.region.copies[copy] for copy in (loop.copies[0], loop.copies[-1]))
    title = first[0] if first[0] == last[-1] else f"{first[0]}-{last[-1].rpartition('.')[2]}"
    return replace(loop, title=title)


def part_of_copy(loop: Loop, copy: int, inside: range) -> Loop:
    """The loop over the statements `inside` of one copy. Values of earlier statements are carried into it, and those
    that later ones read are among its exports; parameters are redistributed in each part that reads them."""
    whole = some_copies(loop, range(copy, copy + 1))
    body = whole.body
    earlier, own, later = (
        body.statements[: inside.start],
        body.statements[inside.start : inside.stop],
        body.statements[inside.stop :],
    )
    own = (*_parameters_again(body, inside), *own)
    leaves = {value: name for value, (name,) in whole.exports if name is not None}
    made, read = _made(own), _read(own)
    crossing = {**_made(earlier), **made}.keys() & {**_read(own), **_read(later)}.keys() - _of_parameters(body)
    outer = {**{value: f"{value}~in{copy}" for value in crossing}, **leaves}
    exports = {value: outer[value] for value in made if value in leaves or value in crossing & _read(later).keys()}
    if not later:
        # A copy may return what it is given.
        exports |= {value: leaves[value] for value in body.arguments if value in leaves}
    pairs = zip(body.arguments, (*whole.initial, *whole.shared), strict=True)
    given = [pair for pair in pairs if pair[0] in read or pair[0] in exports]
    count = sum(argument in body.arguments[: len(whole.initial)] for argument, _ in given)
    carried = [*given[:count], *((value, outer[value]) for value in read if value in crossing and value not in made)]
    shared = given[count:]
    keys = {item.op.key for item in own if isinstance(item, Compute)}
    region = replace(
        loop.region,
        ops=tuple(op for op in loop.region.ops if op.key in keys),
        carries=tuple(Carry(argument, name, argument) for argument, name in carried),
        owned={own: names for own, names in loop.region.owned.items() if own in read},
        exports=(),
    )
    arguments = tuple(argument for argument, _ in (*carried, *shared))
    return replace(
        whole,
        region=region,
        body=replace(body, arguments=arguments, statements=own, results=tuple(exports)),
        initial=tuple(name for _, name in carried),
        between=(None,) * len(carried),
        shared=tuple(name for _, name in shared),
        exports=tuple((value, (name,)) for value, name in exports.items()),
        part=PartOfCopy(_part_name(loop, copy, inside), _layers(loop, inside)),
    )


def leaving(loop: Loop, place: int, copy: int) -> str:
    """The name of the carried value number `place` as the copy before `copy` makes it."""
    value = loop.region.carries[place].next
    for other, names in loop.exports:
        if other == value and (name := names[copy - 1 - loop.copies.start]) is not None:
            return name
    return f"{value}~before{copy}"


def entering(loop: Loop, place: int, copy: int) -> str:
    """The name of the carried value number `place` as `copy` takes it."""
    name = leaving(loop, place, copy)
    return name if loop.between[place] is None else f"{name}~carried"


def _inner_starts(loop: Loop) -> Iterator[int]:
    """The numbers of statements that a piece can begin with: those after an op, before one that begins a module, where
    no more bytes are live than copies carry."""
    body = loop.body
    limit = sum(_bytes(body, carry.next) for carry in loop.region.carries)
    seen = {piece_name(loop, loop.copies.start, 0)}
    for number in range(1, len(body.statements)):
        before, rest = body.statements[number - 1], body.statements[number:]
        if not isinstance(before, Compute) or not any(isinstance(item, Compute) for item in rest):
            continue
        module, last = _next_op(body, number).module, before.op.module
        begins = module != last and not last.startswith(f"{module}.") and module not in loop.region.copies[0]
        if not begins or _place(loop.region, _next_op(body, number)) == (0, ""):
            continue
        name = piece_name(loop, loop.copies.start, number)
        if name not in seen and sum(_bytes(body, value) for value in _live(loop, number)) <= limit:
            yield number
        seen.add(name)


def _live(loop: Loop, number: int) -> set[str]:
    """The values that cross the boundary before a statement of a copy, without parameters and what all copies read."""
    body, carries = loop.body, loop.region.carries
    made = {*(carry.argument for carry in carries), *_made(body.statements[:number])}
    read = {*(carry.next for carry in carries), *_read(body.statements[number:])}
    return (made & read) - _of_parameters(body)


def _of_parameters(body: Body) -> set[str]:
    """The redistributed parameters of a copy."""
    found: set[str] = set()
    for item in body.statements:
        if isinstance(item, Redistribution) and (item.parameter or item.source in found):
            found.add(item.result)
    return found


def _parameters_again(body: Body, inside: range) -> tuple[Redistribution, ...]:
    """The redistributions of parameters before `inside` that its statements read."""
    again = _of_parameters(body)
    wanted = again & _read(body.statements[inside.start : inside.stop]).keys()
    found: list[Redistribution] = []
    for item in reversed(body.statements[: inside.start]):
        if isinstance(item, Redistribution) and item.result in wanted:
            found.append(item)
            wanted.add(item.source)
    return tuple(found[::-1])


def _made(statements: Sequence[Statement]) -> dict[str, None]:
    """The values that the statements of a copy make, in order."""
    found: dict[str, None] = {}
    for item in statements:
        if isinstance(item, Compute):
            found.update(dict.fromkeys(item.op.results))
        elif isinstance(item, Redistribution):
            found[item.result] = None
    return found


def _read(statements: Sequence[Statement]) -> dict[str, None]:
    """The values that the statements of a copy read, in order."""
    return dict.fromkeys(name for item in statements for name in item.reads)


def _bytes(body: Body, value: str) -> int:
    type = body.types[value]
    return prod(type.shape) * type.dtype.itemsize


def _next_op(body: Body, first: int) -> Op:
    return next(item.op for item in body.statements[first:] if isinstance(item, Compute))


def _op_before(body: Body, first: int) -> Op:
    return next(item.op for item in reversed(body.statements[:first]) if isinstance(item, Compute))


def _place(region: Region, op: Op) -> tuple[int, str]:
    """The entry of a copy that an op is of, and its module's path from there on."""
    rest = op.module.removeprefix(region.name)
    if len(region.copies[0]) == 1 or not rest.startswith("["):
        return 0, rest
    index, _, rest = rest.removeprefix("[").partition("]")
    return int(index), rest


def _layers(loop: Loop, inside: range) -> int:
    """The layers that begin among the statements `inside` of a copy."""
    found: dict[int, int] = {}
    for number, item in enumerate(loop.body.statements):
        if isinstance(item, Compute):
            found.setdefault(_place(loop.region, item.op)[0], number)
    return sum(number in inside for number in found.values())


def _part_name(loop: Loop, copy: int, inside: range) -> str:
    """The part of a copy, for plans."""
    stop = len(loop.body.statements)
    begin = f" from {piece_name(loop, copy, inside.start)}" if inside.start else ""
    end = f" up to {piece_name(loop, copy, inside.stop)}" if inside.stop < stop else ""
    return f"{loop.region.copies[copy][0]}{begin}{end}"
