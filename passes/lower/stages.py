"""stages: cuts the straight code of a program into pipeline stages.

A program is a sequence of positions (`positions`), and a stage an interval of them. What a stage reads of an earlier
one it receives from the stage before it, so tensors that skip stages are handed on. Tensors that depend on inputs and
buffers alone (masks, rotary tables, positions), and the redistributions of parameters, are computed again where they
are read. A parameter that several stages read is held by each of them. A buffer that a call updates belongs to one
stage: a copy in another one would keep its old values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from passes.ir.arguments import references
from passes.ir.errors import PipelineError
from passes.ir.grouping import grouped
from passes.ir.layout import local_shape
from passes.ir.lowered import Body, Compute, Loop, Redistribution, Returned, Stage, Statement
from passes.ir.mesh import Mesh
from passes.ir.program import Buffer, Input, Parameter, Program, has_gradient
from passes.lower.loops import carried_before, part_of_copy, some_copies
from passes.lower.positions import Position, made_by, ordered, positions


def cut(
    stage: Stage,
    starts: Sequence[int],
    flowing: frozenset[str],
    mesh: Mesh,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Stage, ...]:
    """The stages of a program that is lowered to one; every stage but the first begins at the position of this number.
    A gradient flows through the tensors `flowing`. If it is not the first program of its model, `holders` are the
    stages of the first one that hold each parameter, and each buffer that it updates.

    Raises PipelineError where the loss is not in the last stage, where a buffer that is updated belongs to several
    stages, and where a stage reads what only other stages hold.
    """
    return _Cutter(stage, tuple(starts), flowing, mesh, holders or {}).stages()


@dataclass(frozen=True)
class Crossing:
    """The tensors that are sent over the boundary before a position, by name, and their bytes on one rank; those with
    gradients are in `flowing`. The buffers `parted` are updated, and used on both sides: no stage can begin here."""

    names: tuple[str, ...]
    bytes: int
    flowing: frozenset[str]
    gradient_bytes: int
    parted: frozenset[str]


def crossings(stage: Stage, flowing: frozenset[str], mesh: Mesh) -> tuple[Crossing, ...]:
    """The tensors that cross each boundary between two positions; a gradient flows through the tensors `flowing`."""
    pieces = positions(stage)
    cutter = _Cutter(stage, tuple(range(1, len(pieces))), flowing, mesh, {})
    spans = {name: (min(used), max(used)) for name, used in cutter.users.items() if used}
    found = []
    for number, names in enumerate(cutter.sent[:-1], 1):
        sizes = {name: cutter.bytes_of(name) for name in names}
        own = frozenset(filter(cutter.has_gradient, names))
        parted = frozenset(name for name, (first, last) in spans.items() if first < number <= last)
        found.append(Crossing(names, sum(sizes.values()), own, sum(sizes[name] for name in own), parted))
    return tuple(found)


def reads_of_positions(stage: Stage, flowing: frozenset[str], mesh: Mesh) -> list[set[str]]:
    """The names that the statements of each position read."""
    cutter = _Cutter(stage, tuple(range(1, len(positions(stage)))), flowing, mesh, {})
    return [set(_all_reads(code)) for code in cutter.code]


def _origin(name: str) -> str:
    """The value before its redistributions and its copies."""
    return name.partition("~")[0]


class _Cutter:
    """Cuts one program: `stages` are the stages, `sent` the names of the tensors that each sends on."""

    def __init__(
        self,
        stage: Stage,
        starts: tuple[int, ...],
        flowing: frozenset[str],
        mesh: Mesh,
        holders: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.whole = stage
        self.flowing = flowing
        self.mesh = mesh
        self.holders = holders
        self.statements = ordered(stage)
        self.types = dict(stage.body.types)
        self.layouts = dict(stage.body.layouts)
        stored = (*stage.program.parameters, *stage.program.buffers)
        self.stored = {item.name for item in stored} | set(stage.program.constants)
        self.inputs = {item.name for item in stage.program.inputs}
        pieces = positions(stage)
        bounds = (0, *starts, len(pieces))
        self.code = [self._piece(pieces[first:last]) for first, last in pairwise(bounds)]
        self.makers = {name: item for code in self.code for item in code for name in made_by(item)}
        self.home = {name: at for at, code in enumerate(self.code) for item in code for name in made_by(item)}
        self.updates = self._updates()
        self.code = [self._with_again(at, code) for at, code in enumerate(self.code)]
        self.outputs = [self._outputs(at) for at in range(len(self.code))]

    def _piece(self, pieces: Sequence[Position]) -> list[Statement]:
        """The statements of some positions that follow each other, and those that lay out what they carry in and on."""
        found: list[Statement] = []
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            if piece.copy is None:
                found += self.statements[piece.first : piece.last]
                at += 1
                continue
            number = next(
                number for number in range(piece.first, piece.last) if isinstance(self.statements[number], Loop)
            )
            loop = self.statements[number]
            assert isinstance(loop, Loop)
            run = [piece]
            while at + len(run) < len(pieces) and self._same_loop(pieces[at + len(run)], number):
                run.append(pieces[at + len(run)])
            found += self.statements[piece.first : number]
            found += self._of_loop(loop, run)
            ends = run[-1].copy == loop.copies[-1] and run[-1].inside.stop == len(loop.body.statements)
            found += self.statements[number + 1 : run[-1].last] if ends else ()
            at += len(run)
        return found

    def _same_loop(self, piece: Position, number: int) -> bool:
        return piece.copy is not None and piece.first == number

    def _of_loop(self, loop: Loop, run: Sequence[Position]) -> Iterator[Statement]:
        """The statements of positions of one loop that follow each other: whole copies, and a part of the first and
        the last one."""
        size = len(loop.body.statements)
        by_copy = grouped((piece.copy, piece.inside) for piece in run)
        spans = [(copy, range(inner[0].start, inner[-1].stop)) for copy, inner in by_copy.items() if copy is not None]
        whole = [copy for copy, inside in spans if inside == range(size)]
        for number, (copy, inside) in enumerate(spans):
            if inside == range(size):
                if copy == whole[0]:
                    yield from self._carried(loop, copy, entering=None if number else True)
                    yield some_copies(loop, range(copy, whole[-1] + 1))
                    yield from self._carried(loop, whole[-1] + 1, entering=False) if spans[-1][0] == whole[-1] else ()
                continue
            if not inside.start:
                yield from self._carried(loop, copy, entering=None if number else True)
            yield self._defined(part_of_copy(loop, copy, inside))
            if inside.stop == size and number == len(spans) - 1:
                yield from self._carried(loop, copy + 1, entering=False)

    def _defined(self, loop: Loop) -> Loop:
        """`loop`, the names of whose exports have types and layouts."""
        for value, names in loop.exports:
            for name in names:
                if name is not None:
                    self.types[name], self.layouts[name] = loop.body.types[value], loop.body.layouts[value]
        return loop

    def _carried(self, loop: Loop, copy: int, *, entering: bool | None) -> Iterator[Redistribution]:
        """The redistributions of carried values before `copy`: between two stages on the side where less is sent, and
        all of them where both copies are of one stage, but in different loops (`entering` is None)."""
        if copy in (loop.copies.start, loop.copies.stop):
            return
        for name, value, change in carried_before(loop, copy):
            self.types[name], self.layouts[name] = loop.body.types[value], loop.body.layouts[value]
            if change is None:
                continue
            self.types[change.result], self.layouts[change.result] = loop.body.types[value], change.after
            if entering is None or entering != (self.bytes_of(change.result) <= self.bytes_of(name)):
                yield change

    def bytes_of(self, name: str) -> int:
        """Bytes of a rank's part of a tensor."""
        type = self.types[name]
        return prod(local_shape(type.shape, self.layouts[name], self.mesh)) * type.dtype.itemsize

    # --- buffers that are updated ---

    @cached_property
    def _updated(self) -> frozenset[str]:
        """The buffers that a call updates, of this program or of the first one."""
        buffers = {item.name for item in self.whole.program.buffers}
        return frozenset(buffer for buffer, _ in self.whole.updates) | buffers & self.holders.keys()

    @cached_property
    def users(self) -> dict[str, set[int]]:
        """The stages that read each buffer that is updated, or compute its new value; a value that any stage can
        compute does not count."""
        found: dict[str, set[int]] = {name: set() for name in self._updated}
        if not found:
            return found
        for at, code in enumerate(self.code):
            for name in self._updated.intersection(_all_reads(code)):
                found[name].add(at)
        for output in self.whole.outputs:
            for name in self._updated.intersection(references(output.value)):
                found[name].add(len(self.code) - 1)
        for buffer, value in self.whole.updates:
            if value in self.home and value not in self._given:
                found[buffer].add(self.home[value])
        return found

    def _updates(self) -> list[tuple[tuple[str, str], ...]]:
        """The buffers that each stage updates, with the values that they get: a stage that uses a buffer does."""
        homes = {buffer: min(self.users[buffer], default=self._home(value)) for buffer, value in self.whole.updates}
        return [tuple(item for item in self.whole.updates if homes[item[0]] == at) for at in range(len(self.code))]

    def _check_buffers(self) -> None:
        """Raise PipelineError where several stages use a buffer that is updated."""
        for name, used in self.users.items():
            if len(used) > 1:
                raise PipelineError(
                    f"the buffer {name!r} is updated, so that one stage has to use it, but stages "
                    f"{min(used)} and {max(used)} do: cut the model elsewhere"
                )

    # --- what is computed again ---

    @cached_property
    def _given(self) -> frozenset[str]:
        """The values that depend on inputs and buffers alone that no call updates, or are parameters in another
        layout."""
        trained = {item.name for item in self.whole.program.inputs if item.trainable}
        held = {item.name for item in self.whole.program.parameters}
        plain = {*self.inputs, *self.stored} - trained - held - self._updated
        found = set(plain)
        for statement in (item for code in self.code for item in code):
            if isinstance(statement, Compute):
                if statement.draws is None and set(statement.reads) <= plain:
                    plain.update(statement.op.results)
                    found.update(statement.op.results)
            elif isinstance(statement, Redistribution):
                if statement.source in plain:
                    plain.add(statement.result)
                    found.add(statement.result)
                elif statement.source in held:
                    found.add(statement.result)
        return frozenset(found)

    def _with_again(self, at: int, code: Sequence[Statement]) -> list[Statement]:
        """The statements of a stage, with those of other stages that it runs again for what it reads and updates."""
        later = self._makers((value for _, value in self.updates[at]), range(at + 1, len(self.code)))
        earlier = self._makers((name for item in (*code, *later) for name in item.reads), range(at))
        return [*earlier, *code, *later]

    def _makers(self, names: Iterable[str], stages: range) -> list[Statement]:
        """The statements in `stages` that make some values, and what these are made of, where any stage can."""

        def is_made(name: str) -> bool:
            return name in self._given and self.home.get(name) in stages

        wanted, needed = set(filter(is_made, names)), set[int]()
        while wanted:
            maker = self.makers[wanted.pop()]
            if id(maker) not in needed:
                needed.add(id(maker))
                wanted.update(filter(is_made, maker.reads))
        return [item for number in stages for item in self.code[number] if id(item) in needed]

    # --- what is sent ---

    def _home(self, name: str) -> int:
        """The number of the stage that makes a value; the last one for what the program is given."""
        return self.home.get(name, len(self.code) - 1)

    @cached_property
    def sent(self) -> tuple[tuple[str, ...], ...]:
        """The names of the tensors that each stage sends to the next."""
        last_use: dict[str, int] = {}
        for at, code in enumerate(self.code):
            made = {name for item in code for name in made_by(item)}
            for name in (name for item in code for name in item.reads):
                if name in self.home and name not in made:
                    last_use[name] = at
        return tuple(
            tuple(name for name, home in self.home.items() if home <= at < last_use.get(name, -1))
            for at in range(len(self.code))
        )

    def _outputs(self, at: int) -> tuple[Returned, ...]:
        """The leaves of the output that stage `at` computes; plain values are the last one's."""
        last = len(self.code) - 1
        return tuple(
            output
            for output in self.whole.outputs
            if max((self._home(name) for name in references(output.value)), default=last) == at
        )

    # --- stages ---

    def stages(self) -> tuple[Stage, ...]:
        """The stages."""
        self._check_loss()
        self._check_buffers()
        received: tuple[str, ...] = ()
        found = []
        for at in range(len(self.code)):
            found.append(self._stage(at, received))
            received = self.sent[at]
        self._check_holders(found)
        return self._with_unread(found)

    def _with_unread(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages with what none reads: inputs of totals alone, parameters, buffers. Those of parameters and buffers
        that hold them for the first program take them, or else the first stage."""
        read = {item.name for stage in stages for item in _taken(stage.program)}

        def unread(name: str, at: int) -> bool:
            return name not in read and at in self.holders.get(name, (0,))

        whole, found = self.whole.program, []
        for at, stage in enumerate(stages):
            mine = {item.name for item in _taken(stage.program)}
            program = replace(
                stage.program,
                inputs=tuple(item for item in whole.inputs if item.name in mine or unread(item.name, at)),
                parameters=tuple(item for item in whole.parameters if item.name in mine or unread(item.name, at)),
                buffers=tuple(item for item in whole.buffers if item.name in mine or unread(item.name, at)),
            )
            inputs = {item.name: self.whole.inputs[item.name] for item in program.inputs}
            parameters = {item.name: self.whole.parameters[item.name] for item in program.parameters}
            found.append(replace(stage, program=program, inputs=inputs, parameters=parameters))
        return tuple(found)

    def _check_holders(self, stages: Sequence[Stage]) -> None:
        """Raise PipelineError where a stage reads what only other stages hold for the first program."""
        for at, stage in enumerate(stages):
            for item in (*stage.program.parameters, *stage.program.buffers):
                if at not in self.holders.get(item.name, (at,)):
                    raise PipelineError(
                        f"stage {at} would read {item.name!r}, which is on stage {self.holders[item.name][0]} in the "
                        f"model's first program: a copy of it would not be trained"
                    )

    def _check_loss(self) -> None:
        """Raise PipelineError where the last stage does not compute the loss."""
        scalars = [item for item in self.whole.outputs if item.name == "loss"]
        for output in scalars:
            if output not in self.outputs[-1]:
                raise PipelineError("the loss is not computed by the last stage: cut the model before its loss")

    def _needed(self, at: int, results: Iterable[str]) -> list[Statement]:
        """The statements of a stage but those that only others read from, which run them again."""
        wanted, found = set(results), list[Statement]()
        for item in reversed(self.code[at]):
            made = made_by(item)
            if not made or any(name in wanted for name in made) or isinstance(item, Loop):
                found.append(item)
                wanted.update(_all_reads([item]))
        return found[::-1]

    def _stage(self, at: int, received: tuple[str, ...]) -> Stage:
        whole, sent = self.whole, self.sent[at]
        outputs, updates = self.outputs[at], self.updates[at]
        leaves = [name for output in outputs for name in references(output.value)]
        results = (*sent, *leaves, *(value for _, value in updates))
        code = self._needed(at, results)
        read = {*_all_reads(code), *results, *(buffer for buffer, _ in updates)}
        program = replace(
            whole.program,
            inputs=tuple(item for item in whole.program.inputs if item.name in read),
            parameters=tuple(item for item in whole.program.parameters if item.name in read),
            buffers=tuple(item for item in whole.program.buffers if item.name in read),
            constants={name: value for name, value in whole.program.constants.items() if name in read},
        )
        held = {item.name for item in program.parameters}
        program = replace(program, changes=tuple(item for item in program.changes if item.parameter in held))
        body = Body(received, tuple(code), results, self.layouts, self.types)
        return Stage(
            program,
            body,
            {item.name: whole.inputs[item.name] for item in program.inputs},
            {name: layout for name, layout in whole.parameters.items() if name in held},
            outputs,
            updates,
            received=tuple(Input(name, name, self.types[name], self.has_gradient(name)) for name in received),
            sent=sent,
        )

    def has_gradient(self, name: str) -> bool:
        """Whether a gradient flows through a value."""
        return _origin(name) in self.flowing and has_gradient(self.types[name].dtype)


def _taken(program: Program) -> tuple[Input | Parameter | Buffer, ...]:
    """The inputs, parameters and buffers of a program."""
    return (*program.inputs, *program.parameters, *program.buffers)


def _all_reads(code: Iterable[Statement]) -> Iterator[str]:
    """All names that statements read, those of the copies of loops among them."""
    for item in code:
        yield from item.reads
        if isinstance(item, Loop):
            owned: Mapping[str, tuple[str, ...]] = item.owned
            for inner in item.body.statements:
                for name in inner.reads:
                    yield from owned.get(name, (name,))
