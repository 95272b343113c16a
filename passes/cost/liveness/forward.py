"""The simulated forward pass: statement by statement, as the generated code runs, variables included."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from passes.cost.liveness.fsdp_units import FSDPSimulation
from passes.cost.liveness.graph import (
    COMMUNICATION,
    TRANSIENT,
    AutogradNode,
    Copy,
    Event,
    ForwardProfile,
    Ledger,
    Noted,
    Prober,
    Recomputed,
    SavedTensor,
    Skip,
    Storage,
    Task,
    Value,
    fetch,
    place_of,
    play,
    settle,
)
from passes.ir.lowered import (
    Body,
    Compute,
    FunctionVariables,
    Loop,
    LoopVariables,
    Redistribution,
    Stage,
    Variables,
    after,
)
from passes.ir.program import TensorType

# Of more copies than this only the first and the last ones are run: three at the beginning, two at the end.
BEGINNING, END = 3, 2


@dataclass
class Frame:
    """A running function, one of a copy of a region if it is `inner`. `names` are its variables by value, `variables`
    their values, `resident` are parameters, buffers and constants, `gathered` the parameters that FSDP units gather.
    `lists` are the lists that loops collect, `aside` the other values that are live until it returns. `weights` are
    values computed from parameters, `later` those that are computed when an op reads them."""

    names: FunctionVariables
    resident: Mapping[str, Value]
    gathered: Mapping[str, Value] = field(default_factory=dict)
    inner: bool = False
    variables: dict[str, Value] = field(default_factory=dict)
    lists: dict[str, list[Value]] = field(default_factory=dict)
    aside: list[Storage] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)
    later: dict[str, Redistribution] = field(default_factory=dict)

    def read(self, name: str) -> Value:
        """A value by its name in the program."""
        if name in self.resident:
            return self.resident[name]
        if name in self.names.elements:
            variable, index = self.names.elements[name]
            return self.lists[variable][index]
        return self.variables[self.names.names[name]]

    def assign(self, name: str, value: Value) -> None:
        """Assign a value to its variable, which releases the variable's previous value."""
        self.variables[self.names.names[name]] = value


@dataclass(frozen=True)
class _Read:
    """A statement as it runs: its expression, its operands without repetition, and the number of the operand that the
    gradient of a weight is computed from apart."""

    text: str
    operands: tuple[str, ...]
    factor: int | None


class Expressions:
    """The expressions of the statements of one stage, each found once by the `prober`."""

    def __init__(self, prober: Prober) -> None:
        self.prober = prober
        # The statement is held, so that its number is its own.
        self._known: dict[int, tuple[Compute, _Read]] = {}

    def of(self, statement: Compute, types: Mapping[str, TensorType], copied: frozenset[str]) -> _Read:
        """A statement as it runs; operands in `copied` are read as copies."""
        if id(statement) not in self._known:
            operands = tuple(dict.fromkeys(statement.op.operands))
            factor = operands.index(statement.deferred[1]) if statement.deferred else None
            text = self.prober.compute(statement, types, copied)
            self._known[id(statement)] = statement, _Read(text, operands, factor)
        return self._known[id(statement)][1]


class Forward:
    """Runs the statements of a stage forward. `resident` are parameters, buffers and constants by name; `fsdp` gathers
    some of the parameters; `updated` are the buffers that the program changes, which are read as copies; without
    `training` no gradient flows. `stays` are the bytes, by kind, that skipped copies hold after the pass."""

    def __init__(
        self,
        stage: Stage,
        ledger: Ledger,
        expressions: Expressions,
        variables: Variables,
        resident: Mapping[str, Value],
        fsdp: FSDPSimulation,
        training: bool,
        stays: dict[str, Storage],
    ) -> None:
        self.ledger = ledger
        self.prober = expressions.prober
        self.expressions = expressions
        self.variables = variables
        self.resident = resident
        self.fsdp = fsdp
        self.updated = frozenset(name for name, _ in stage.updates)
        self.noted = Noted() if training and stage.reruns else None
        self.training = training
        self.stays = stays
        self.running: _FirstRun | _SecondRun | None = None
        self.phase = "forward"
        self.count = 0
        self.loops = 0

    def body(self, body: Body, frame: Frame, copied: frozenset[str]) -> None:
        """Run the statements of a body; operands in `copied` are read as copies."""
        for statement in body.statements:
            if isinstance(statement, Compute):
                self.compute(statement, body.types, frame, copied)
            elif isinstance(statement, Redistribution) and statement.unit_steps and not frame.inner:
                frame.later[statement.result] = statement
            elif isinstance(statement, Redistribution) and statement.unit_steps:
                frame.weights.add(statement.result)
                self.change(statement, frame.gathered[statement.source], partial(frame.assign, statement.result))
            elif isinstance(statement, Redistribution):
                if statement.parameter:
                    frame.weights.add(statement.result)
                self.change(statement, frame.read(statement.source), partial(frame.assign, statement.result))
            else:
                self.ledger.block = statement.block
                self.loop(statement, frame)
                self.ledger.block = after(statement.block)

    def compute(
        self, statement: Compute, types: Mapping[str, TensorType], frame: Frame, copied: frozenset[str]
    ) -> None:
        """Run an op."""
        op, own = statement.op, self.expressions.of(statement, types, copied)
        values = {name: frame.read(name) for name in own.operands if name not in frame.later}
        groups = self.fsdp.units.around_ops.get(op.key, ()) if op.key is not None and not frame.inner else ()
        if groups:
            passed = [name for name in values if name not in frame.resident and name not in frame.weights]
            entered = self.fsdp.enter(groups, [values[name] for name in passed], self.next)
            values.update(zip(passed, entered, strict=True))
            del entered
        for name in own.operands:
            if name in frame.later:
                values[name] = self.change(frame.later[name], frame.gathered[frame.later[name].source], lambda _: None)
        operands = [values[name] for name in own.operands]
        del values
        results = self.run(
            op.key or op.kind,
            own.text,
            operands,
            len(op.results),
            TRANSIENT,
            recomputed=statement.recomputed,
            factor=own.factor,
        )
        del operands
        self.fsdp.leave(groups, results)
        for name in op.results:
            frame.assign(name, results.pop(0))

    def change(self, statement: Redistribution, value: Value, hold: Callable[[Value], object]) -> Value:
        """The result of a redistribution in the generated code; `hold` is called with the result of each line."""
        name = f"{'gather' if statement.parameter else 'redistribution'} of {statement.source}"
        texts = [
            self.prober.change(step, dtypes)
            for step, dtypes in zip(statement.steps[statement.unit_steps :], statement.step_dtypes, strict=True)
        ]
        if not texts and not statement.unit_steps:
            texts = [f"x0.to({statement.dtypes[0]})"]
        if not texts:
            hold(value)
        for text in texts:
            (result,) = self.run(name, text, [value], 1, COMMUNICATION)
            if result.storage is not value.storage:
                if self.noted is not None and statement.regathered:
                    self.noted.note(result.storage, Task(text, (value.form,), (False,)), [value.storage])
                if not statement.parameter:
                    result.storage.turn(TRANSIENT)
                    settle([result.storage])
            hold(result)
            value = result
        return value

    def run(
        self,
        name: str,
        text: str,
        operands: Sequence[Value],
        results: int,
        kind: str,
        *,
        recomputed: bool = False,
        factor: int | None = None,
    ) -> list[Value]:
        """Run an expression: its allocations and saved tensors; with `recomputed` its result is recomputed instead of
        saved. `factor` is that of its node."""
        self.ledger.moment = f"{self.phase} of {name}"
        task = Task(text, tuple(item.form for item in operands), tuple(item.flows for item in operands))
        profile = self.prober.forward(task)
        own: dict[int, Storage] = {}
        events = profile.events if self.running is None else self.running.events(profile)
        play(events, own, self.ledger, kind)
        storages = [item.storage for item in operands]
        node: AutogradNode | None = None
        if recomputed and self.noted is not None:
            remade = Task(text, task.operands, (False,) * len(operands))
            self.noted.note(place_of(profile.results[0].place, own, storages), remade, storages)
        if any(task.flows):
            found = [None if place is None else place_of(place, own, storages) for place in profile.saved]
            attached = [place_of(place, own, storages) for place in profile.attached]
            edges = [item.edge for item in operands]
            saved, block = self.keep(found), self.ledger.block
            node = AutogradNode(self.next(), edges, name, block, task, profile.saved, saved, results, attached, factor)
            del found
        if kind == TRANSIENT:
            settle(list(own.values()))
        made = []
        for slot, result in enumerate(profile.results):
            storage = place_of(result.place, own, storages)
            made.append(Value(storage, result.form, node if result.flows else None, slot))
        return made

    def keep(self, found: Sequence[Storage | None]) -> list[SavedTensor | None]:
        """The saved tensors of a node, or their recomputation."""
        if self.running is not None:
            return self.running.keep(found)
        return [item if item is None or self.noted is None else self.noted.keep(item) for item in found]

    def next(self) -> int:
        """The number of the next node."""
        self.count += 1
        return self.count

    def loop(self, loop: Loop, frame: Frame) -> None:
        """Run the copies of a region. If only the carried values leave the copies, those between the first and the last
        are alike: they are counted, not run."""
        number, region, assigned = self.loops, loop.region, self.variables.loops[self.loops]
        self.loops += 1
        for carry, initial in zip(region.carries, loop.initial, strict=True):
            frame.assign(carry.argument, frame.read(initial))
        frame.lists.update({name: [] for name in assigned.every.values()})
        going_out = {copy for _, outside in loop.exports for copy, name in enumerate(outside) if name is not None}
        count = len(loop.copies)
        skipped = range(BEGINNING, count - END)
        if len(skipped) < 2 or going_out & set(skipped):
            skipped = range(0)
        before: dict[str, int] = {}
        skip: Skip | None = None
        for copy in range(count):
            if copy in skipped:
                if skip is None:
                    grown = {kind: size - before[kind] for kind, size in self.ledger.by_kind().items()}
                    skip = self.skip(
                        [assigned.last[carry.next] for carry in region.carries], frame, grown, len(skipped)
                    )
                continue
            before = self.ledger.by_kind()
            if skip is not None and copy == count - 1:
                skip.above = self.count + 1
            self.copy(loop, number, frame, copy, assigned)

    def skip(self, carried: Sequence[str], frame: Frame, grown: Mapping[str, int], copies: int) -> Skip:
        """Count `copies` copies, each of which adds `grown` bytes by kind; `carried` are the variables that pass
        through."""
        names = list(dict.fromkeys(carried))
        values = [frame.variables[name] for name in names]
        node = Skip(self.next(), [value.edge for value in values], self.count, copies, self.stays)
        node.count(self.ledger, grown)
        for slot, (name, value) in enumerate(zip(names, values, strict=True)):
            frame.variables[name] = Value(value.storage, value.form, node if value.flows else None, slot)
        if not any(value.flows for value in values):
            frame.aside += node.bulk.values()
        return node

    def copy(self, loop: Loop, number: int, frame: Frame, copy: int, assigned: LoopVariables) -> None:
        """Run one copy: the redistributions before it, its function, and the assignment of its results."""
        region = loop.region
        if copy:
            for change in loop.between:
                if change is not None:
                    argument = next(item.argument for item in region.carries if item.next == change.source)
                    source = assigned.last[change.source]
                    self.change(change, frame.variables[source], partial(frame.assign, argument))
        names = {own: every[copy] for own, every in loop.owned.items()}
        gathered = self.fsdp.parameters
        own_gathered = {own: gathered[name] for own, name in names.items() if name in gathered}
        resident = {**self.resident, **{own: self.resident[name] for own, name in names.items()}}
        inner = Frame(self.variables.regions[number], resident, {**gathered, **own_gathered}, inner=True)
        given = [frame.read(name) for name in (*(carry.argument for carry in region.carries), *loop.shared)]
        groups = self.fsdp.around_copy(number, copy)
        given = self.fsdp.enter(groups, given, self.next)
        for argument, value in zip(loop.body.arguments, given, strict=True):
            inner.assign(argument, value)
        del given
        copied = frozenset(self.updated | {own for own, name in names.items() if name in self.updated})
        if loop.recompute == "full" and self.training:
            self.running = _FirstRun(self.checkpoint(loop.body, inner, copied))
        self.body(loop.body, inner, copied)
        self.running = None
        returned = [inner.read(name) for name in loop.body.results]
        del inner
        self.fsdp.leave(groups, returned)
        for name in loop.body.results:
            value = returned.pop(0)
            frame.variables[assigned.last[name]] = value
            if name in assigned.every:
                frame.lists[assigned.every[name]].append(value)

    def checkpoint(self, body: Body, frame: Frame, copied: frozenset[str]) -> Copy:
        """A copy that the backward pass recomputes from its saved arguments."""
        names, resident, gathered = frame.names, frame.resident, frame.gathered
        arguments = {name: frame.read(name) for name in body.arguments}
        like = {name: (value.form, value.maker, value.slot) for name, value in arguments.items()}
        inputs = [self.noted.keep(item.storage) if self.noted else item.storage for item in arguments.values()]
        nodes: list[int] = []

        def run(copy: Copy) -> dict[tuple[int, int], Storage]:
            recomputed = Frame(names, resident, gathered, inner=True)
            for (name, (form, maker, slot)), saved in zip(like.items(), copy.inputs, strict=True):
                assert saved is not None
                recomputed.assign(name, Value(fetch(saved, self.ledger, self.prober), form, maker, slot))
            second, noted = _SecondRun(len(copy.nodes)), self.noted
            self.running, self.noted, self.phase = second, None, "recomputation"
            with contextlib.suppress(_EnoughError):
                self.body(body, recomputed, copied)
            self.running, self.noted, self.phase = None, noted, "forward"
            return second.found

        return Copy(list(inputs), run, nodes)


class _EnoughError(Exception):
    """All saved tensors of a copy are recomputed."""


class _FirstRun:
    """The first run of a copy, of which only the arguments are saved."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.count = 0

    def events(self, profile: ForwardProfile) -> Sequence[Event]:
        """The memory events of a statement."""
        return profile.events

    def keep(self, found: Sequence[Storage | None]) -> list[SavedTensor | None]:
        """Placeholders for the tensors that the second run saves."""
        self.count += 1
        if any(item is not None for item in found):
            self.copy.nodes.append(self.count)
        return [None if item is None else Recomputed(self.copy, (self.count, slot)) for slot, item in enumerate(found)]


class _SecondRun:
    """The recomputation of a copy, until all of its saved tensors are computed; the statements numbered in `nodes` save
    tensors."""

    def __init__(self, nodes: int) -> None:
        self.left = nodes
        self.count = 0
        self.found: dict[tuple[int, int], Storage] = {}

    def events(self, profile: ForwardProfile) -> Sequence[Event]:
        """The memory events of a statement; of the last statement only those until all tensors are saved."""
        last = max((at for at, event in enumerate(profile.events) if event.what == "keep"), default=None)
        if self.left > 1 or last is None or all(place is None for place in profile.saved):
            return profile.events
        return profile.events[:last]

    def keep(self, found: Sequence[Storage | None]) -> list[SavedTensor | None]:
        """Hand out the saved tensors."""
        self.count += 1
        self.found.update({(self.count, slot): item for slot, item in enumerate(found) if item is not None})
        if any(item is not None for item in found):
            self.left -= 1
            if not self.left:
                raise _EnoughError
        return list(found)
