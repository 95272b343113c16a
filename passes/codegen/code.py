"""The statements of one generated function."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from passes.codegen.expressions import expression
from passes.codegen.forms import form
from passes.codegen.lines import statement
from passes.codegen.names import Names, hints, identifier, plain
from passes.codegen.places import loop_name, unpacked
from passes.codegen.values import value_text
from passes.ir.layout import Letter, format_layout
from passes.ir.lowered import Body, Change, Compute, Held, Loop
from passes.ir.mesh import Mesh
from passes.ir.program import Argument, Op, Ref, TensorType
from passes.ir.redistribution import Step
from passes.ir.vocabulary import RESERVED

INDENT = " " * 8

_SUFFIXES = {
    "all_gather": "gathered",
    "all_reduce": "reduced",
    "all_to_all": "exchanged",
    "reduce_scatter": "scattered",
    "convert": "converted",
}


@dataclass
class Shared:
    """What the functions of one module share.

    `held` says what an engine gathers, `loops` are all that there are. While functions are written, `used` collects the
    names of the runtime that they take, `functional` whether they call torch.nn.functional, and `called` by the ids of
    loops what the arguments of their regions are called.
    """

    mesh: Mesh
    held: Held
    loops: Sequence[Loop]
    used: set[str] = field(default_factory=set)
    functional: bool = False
    called: dict[int, list[str]] = field(default_factory=dict)


class Code:
    """The body of one forward function: `lines` of statements, and what they read."""

    def __init__(
        self,
        shared: Shared,
        body: Body,
        paths: Mapping[str, str],
        returned: Mapping[str, str],
        updated: Set[str],
        *,
        inner: bool,
    ) -> None:
        self.inner = inner
        self.shared = shared
        self.mesh = shared.mesh
        self.body = body
        self.paths = paths
        self.paths_used: set[str] = set()
        self.updated = updated
        self.lines: list[str] = []
        self.names = Names(body, hints(body, returned), {*RESERVED, *shared.mesh.names})
        self.axes_used = False
        self.place = ""
        self.weights: set[str] = set()
        self.written: dict[str, str] = {}

    @property
    def types(self) -> Mapping[str, TensorType]:
        """The global type of every value."""
        return self.body.types

    def prologue(self) -> list[str]:
        """What the function begins with: the axes, if it uses them."""
        return [f"{INDENT}{unpacked(self.mesh.names)} = self.axes"] if self.axes_used else []

    def use(self, name: str) -> str:
        """A name of the runtime, to be imported."""
        self.shared.used.add(name)
        return name

    def function(self, name: str) -> str:
        """A function of torch.nn.functional."""
        self.shared.functional = True
        return f"F.{name}"

    def axis(self, index: int) -> str:
        """The variable that holds an axis."""
        self.axes_used = True
        return self.mesh.names[index]

    def read(self, value: str) -> str:
        """The expression that reads a value."""
        if value in self.written:
            return self.written[value]
        if value in self.paths:
            self.paths_used.add(self.paths[value])
            # What is read of a buffer that changes is what it was before.
            before = ".clone()" if value in self.updated else ""
            return f"{self.use('local')}({self.paths[value]}){before}"
        return self.names.of[value]

    def gathered(self, parameter: str) -> str:
        """The expression that reads a parameter as the engine gives it."""
        self.paths_used.add(self.paths[parameter])
        return f"{self.use('gathered')}({self.paths[parameter]})"

    def gathered_for_op(self, item: Change) -> str:
        """A parameter as the engine gives it, with the steps that follow, as an expression."""
        right = self.gathered(item.source)
        reduce = item.dtypes[1]
        dtypes = f", grad_dtype={reduce}" if reduce is not None else ""
        for step in item.steps[item.engine :]:
            right = self.step(step, right, item.again, dtypes)
        return right

    def around(self, op: Op, right: str) -> str:
        """An op with what the engine has to do for it."""
        groups = self.shared.held.groups
        for number in self.shared.held.ops.get(op.key, ()) if not self.inner else ():
            operands = [self.read(name) for name in op.operands if name not in self.paths and name not in self.weights]
            given = "".join(f", {name}" for name in dict.fromkeys(operands))
            first = next(iter(groups[number].parameters))
            right = f'self.gathering("{first}", lambda{given[1:]}: {right}{given})'
        return right

    def value(self, argument: Argument) -> str:
        """An argument as an expression."""
        return value_text(argument, self.read)

    def leaf(self, value: Argument, name: str) -> str:
        """What is returned; of a buffer that changes before that, what it was."""
        if not isinstance(value, Ref) or value.name not in self.updated:
            return self.value(value)
        held = self.names.fresh(identifier(name), f"{value.name}~returned")
        self.lines.append(f"{INDENT}{held} = {self.read(value.name)}")
        return held

    def statements(self, statements: Iterable[Compute | Change | Loop]) -> None:
        """Write them all."""
        for position, item in enumerate(statements):
            self.names.position = position
            if isinstance(item, Compute):
                self.compute(item)
            elif isinstance(item, Change):
                self.change(item)
            else:
                self.loop(item, loop_name(self.shared.loops.index(item), self.shared.loops))
            self.names.forget()

    def where(self, op: Op) -> None:
        """A comment where the statements come from another part of the model."""
        place = f"{op.module or 'the model'}  ({op.module_class})" if op.module_class else op.module or "the model"
        if place != self.place:
            self.place = place
            self.lines.append(f"{INDENT}# {place}")

    def note(self, value: str) -> str:
        """Type and layout of a value, as a comment."""
        return f"{self.body.types[value]} {format_layout(self.body.layouts[value], self.mesh)}"

    def compute(self, item: Compute) -> None:
        """Write an op or a local form."""
        op = item.op
        self.where(op)
        right = self.around(op, self.again(item) if item.recomputed else self.computed(item))
        left = ", ".join(self.names.result(op.kind, value, self.passed_on(op, value)) for value in op.results)
        source = f"  {op.line}" if op.line else ""
        indent = INDENT
        if item.draws is not None:
            axes = "".join(f", {self.axis(axis)}" for axis in item.draws)
            self.lines.append(f'{INDENT}with self.drawn("{op.key}"{axes}):')
            indent += "    "
        self.lines += statement(indent, left, right, f"{self.note(op.results[0])}{source}")

    def computed(self, item: Compute) -> str:
        """An op or a local form as an expression."""
        return form(self, item) if item.body else expression(self, item.op)

    def again(self, item: Compute) -> str:
        """A call of what is computed again, as a function of its operands."""
        texts = {name: self.read(name) for name in item.op.operands}
        for name, text in texts.items():
            base = text if text.isidentifier() else identifier(name.replace("~", "_").rsplit(".", 1)[-1])
            chosen, count = base, 1
            while chosen in self.written.values() or chosen in (RESERVED - {text}) or chosen in self.mesh.names:
                count += 1
                chosen = f"{base}_{count}"
            self.written[name] = chosen
        right, names = self.computed(item), ", ".join(self.written.values())
        self.written = {}
        return f"{self.use('recomputed')}(lambda {names}: {right}, {', '.join(texts.values())})"

    def passed_on(self, op: Op, value: str) -> list[str]:
        """Operands whose variable may go on to hold `value`: no parameters; of several operands those of its type."""
        types = self.body.types
        alone = len(op.operands) == 1
        return [
            operand
            for operand in op.operands
            if operand not in self.paths
            and operand not in self.weights
            and (op.kind == "to" or types[operand].dtype == types[value].dtype)
            and (alone or types[operand].shape == types[value].shape)
        ]

    def change(self, item: Change) -> None:
        """Write the steps of a redistribution."""
        if item.engine and not self.inner:
            # It is there only while the op runs that reads it.
            self.names.of[item.result] = self.gathered_for_op(item)
            self.weights.add(item.result)
            return
        right = self.gathered(item.source) if item.engine else self.read(item.source)
        steps = item.steps[item.engine :]
        target = self.names.take_over(item.result, item.source)
        if target is None:
            base = identifier("_".join(item.source.split(".")[-2:]))
            if not item.parameter:
                base = f"{identifier(self.names.of.get(item.source, base))}_{_SUFFIXES[steps[-1].collective]}"
            target = self.names.fresh(base, item.result)
        if item.parameter:
            self.weights.add(item.result)
        note = self.note(item.result)
        if not steps:
            compute = None if item.engine else item.dtypes[0]
            self.lines += statement(INDENT, target, right if compute is None else f"{right}.to({compute})", note)
        for number, (step, (compute, reduce)) in enumerate(zip(steps, item.step_dtypes, strict=True)):
            dtypes = f", dtype={compute}" if compute is not None else ""
            dtypes += f", grad_dtype={reduce}" if reduce is not None else ""
            comment = note if number == len(steps) - 1 else ""
            self.lines += statement(INDENT, target, self.step(step, right, item.again, dtypes), comment)
            right = target

    def step(self, step: Step, operand: str, again: bool, dtypes: str = "") -> str:
        """One step as a call."""
        extra = (", keep=False" if again else "") + dtypes
        source, target = self.letter(step.source), self.letter(step.target)
        return f"{self.use(step.collective)}({operand}, {self.axis(step.axis)}, src={source}, dst={target}{extra})"

    def letter(self, letter: Letter) -> str:
        """A letter of a layout as an expression."""
        self.use(letter.kind)
        return str(letter)

    def loop(self, loop: Loop, name: str) -> None:
        """Write the loop over the copies of a region.

        What a copy carries on stays in one variable. Of a value that is used outside, the last copy's stays in a
        variable, and those of all copies in a list where an earlier one is used.
        """
        region, names = loop.region, self.names
        self.lines.append(f"{INDENT}# {region.name} x {region.count}")
        self.place = ""
        carried: dict[str, str] = {}
        for carry, initial in zip(region.carries, loop.initial, strict=True):
            held = names.take_over(carry.argument, initial)
            if held is None:
                held = names.fresh("hidden", carry.argument)
                self.lines.append(f"{INDENT}{held} = {self.read(initial)}")
            carried[carry.argument] = held
        given = [*carried.values(), *(self.read(value) for value in loop.shared)]
        self.shared.called[id(loop)] = [
            *(plain(held) for held in carried.values()),
            *(_argument(names.of.get(value, value)) for value in loop.shared),
        ]
        results: dict[str, str] = {}
        for carry in region.carries:
            results.setdefault(carry.next, carried[carry.argument])
        lists: dict[str, str] = {}
        for value, outside in loop.exports:
            if value not in results:
                results[value] = names.fresh(identifier(value), f"{value}~last")
            if any(outer is not None for outer in outside[:-1]):
                lists[value] = names.fresh(f"every_{identifier(value)}", f"{value}~every")
                self.lines.append(f"{INDENT}{lists[value]} = []")
        changes = [change for change in loop.between if change is not None]
        counted = f"index, copy in enumerate(self.{name})" if changes else f"copy in self.{name}"
        self.lines.append(f"{INDENT}for {counted}:")
        if changes:
            self.lines.append(f"{INDENT}    if index:")
        for change in changes:
            argument = next(carry.argument for carry in region.carries if carry.next == change.source)
            right = results[change.source]
            for step in change.steps:
                call = self.step(step, right, change.again)
                self.lines += statement(f"{INDENT}        ", carried[argument], call)
                right = carried[argument]
        left = ", ".join(results[value] for value in loop.body.results)
        called = (
            f"self.recomputed(copy, {', '.join(given)})" if loop.recompute == "full" else f"copy({', '.join(given)})"
        )
        self.lines += statement(f"{INDENT}    ", left, called)
        self.lines += [f"{INDENT}    {every}.append({results[value]})" for value, every in lists.items()]
        for value, outside in loop.exports:
            used = {copy: outer for copy, outer in enumerate(outside) if outer is not None}
            for copy, outer in used.items():
                names.of[outer] = f"{lists[value]}[{copy}]" if value in lists else results[value]
            if used:
                holder = lists.get(value, results[value])
                names.live[holder] = max(used.values(), key=names.last)


def _argument(name: str) -> str:
    """A variable of the caller as a parameter's name."""
    return plain(name) if name.isidentifier() else identifier(name.partition("~")[0])
