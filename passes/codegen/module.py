"""The source of a generated module: its imports, its classes, the statements of their functions, and the expressions by
which these read submodules of the model."""

import keyword
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from passes.codegen.expressions import Scope, computed, value_text
from passes.codegen.lines import WIDTH, broken, signature, statement
from passes.ir.arguments import Argument, Ref
from passes.ir.layout import Placement, format_layout
from passes.ir.lowered import Body, Compute, FunctionVariables, Loop, LoopVariables, Redistribution, Stage, Variables
from passes.ir.mesh import Mesh
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep
from passes.ir.vocabulary import identifier, import_order, numbered

# Names that generated classes define themselves.
_ATTRIBUTES = {
    "axes",
    "build",
    "constants",
    "copies",
    "copy_groups",
    "deferred",
    "device",
    "drawn",
    "forward",
    "gathering",
    "groups",
    "random",
    "recomputed",
    "root",
}


def class_name(loop: Loop, taken: set[str]) -> str:
    """The class of the region's entries, or a name after the list that they stand in."""
    depth = loop.region.name.count(".") + 1
    owners = [op.module_class for op in loop.region.ops if op.module.split("[")[0].count(".") + 1 == depth]
    base = owners[0] if owners else "".join(part.title() for part in loop.region.name.split(".") if part.isidentifier())
    if len(loop.region.copies[0]) > 1:
        base += f"Group{len(loop.region.copies[0])}"
    return numbered(base or "Layer", taken.__contains__, separator="")


def loop_name(index: int, loops: Sequence[Loop]) -> str:
    """The name of a loop's copies: that of the module list that contains them."""
    name = identifier(_owner(loops[index]) or "copies")
    is_alone = [identifier(_owner(loop)) for loop in loops].count(name) == 1
    return name if is_alone and name not in _ATTRIBUTES else f"{name}_{index}"


def copy_path(own: str, region: str, entries: int) -> str:
    """The path of a copy's own parameter: "layer.mlp.down_proj.weight"."""
    rest = own.removeprefix(region)
    index, _, rest = rest.removeprefix("[").partition("]") if entries > 1 else ("", "", rest)
    return (f"layer_{index}" if entries > 1 else "layer") + attribute(rest.removeprefix(".").split("."))


def attribute(path: Sequence[str]) -> str:
    """The attribute expression of a submodule: ".layers[0].mlp"."""
    return "".join(
        f".{part}"
        if part.isidentifier() and not keyword.iskeyword(part)
        else f"[{part if part.isdecimal() and str(int(part)) == part else repr(part)}]"
        for part in path
    )


def unpacked(names: Sequence[str]) -> str:
    """The left side of an assignment from a tuple."""
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def _owner(loop: Loop) -> str:
    """The list that a region is of, without the path to it."""
    return loop.region.name.rpartition(".")[0].rsplit(".", 1)[-1]


INDENT = " " * 8


@dataclass
class Shared:
    """State that the functions of one module share: its `stage`, and the variables that each loop assigns.

    While functions are written, `used` collects the names of the runtime that they take, and `functional` whether they
    call torch.nn.functional.
    """

    stage: Stage
    mesh: Mesh
    assigned: Sequence[LoopVariables]
    used: set[str] = field(default_factory=set)
    functional: bool = False


class Code(Scope):
    """The body of one forward function: `lines` of statements, and what they read.

    `variables` are the function's; `paths` are the expressions that reach parameters, buffers and constants, of which
    those in `updated` change. With `inner` the function is that of a region.
    """

    def __init__(
        self,
        shared: Shared,
        body: Body,
        variables: FunctionVariables,
        paths: Mapping[str, str],
        updated: Set[str],
        *,
        inner: bool,
    ) -> None:
        self.inner = inner
        self.shared = shared
        self.mesh = shared.mesh
        self.body = body
        self.types = body.types
        self.paths = paths
        self.paths_used: set[str] = set()
        self.updated = updated
        self.lines: list[str] = []
        self.variables = variables
        self.axes_used = False
        self.place = ""
        self.gathered_around: dict[str, str] = {}
        self.lambda_names: Mapping[str, str] = {}

    def prologue(self) -> list[str]:
        """The first lines of the function: the axes, if it uses them."""
        return [f"{INDENT}{unpacked(self.mesh.names)} = self.axes"] if self.axes_used else []

    def use(self, name: str) -> str:
        """A name of the runtime, to be imported."""
        self.shared.used.add(name)
        return name

    def function(self, name: str) -> str:
        """A function of torch.nn.functional."""
        self.shared.functional = True
        return super().function(name)

    def axis(self, index: int) -> str:
        """The variable that holds an axis."""
        self.axes_used = True
        return self.mesh.names[index]

    def span(self, number: int) -> str:
        """The expression of the axes that a collective runs over."""
        self.axes_used = True
        return self.mesh.label(number)

    def read(self, value: str) -> str:
        """The expression that reads a value: in a lambda its parameter, and for a parameter of the model that is
        gathered around an op, the call that gives it."""
        if value in self.lambda_names:
            return self.lambda_names[value]
        if value in self.gathered_around:
            return self.gathered_around[value]
        if value in self.paths:
            self.paths_used.add(self.paths[value])
            # What is read of a buffer that changes is what it was before.
            before = ".clone()" if value in self.updated else ""
            return f"{self.use('local')}({self.paths[value]}){before}"
        text = self.variables.text(value)
        assert text is not None, value
        return text

    def gathered(self, parameter: str) -> str:
        """The expression that reads a parameter gathered by its FSDP unit."""
        self.paths_used.add(self.paths[parameter])
        return f"{self.use('gathered')}({self.paths[parameter]})"

    def gathered_for_op(self, item: Redistribution) -> str:
        """A parameter gathered by its FSDP unit, with the redistributions that follow, as an expression."""
        right = self.gathered(item.source)
        reduce = item.dtypes[1]
        dtypes = f", grad_dtype={reduce}" if reduce is not None else ""
        for step in item.steps[item.unit_steps :]:
            right = self.step(step, right, item.regathered, dtypes)
        return right

    def leaf(self, value: Argument, copy: str | None) -> str:
        """The expression of a returned value; a buffer that changes before the return is copied to variable `copy`
        first."""
        if copy is None or not isinstance(value, Ref):
            return self.value(value)
        self.lines.append(f"{INDENT}{copy} = {self.read(value.name)}")
        return copy

    def statements(self) -> None:
        """Write all statements."""
        for item in self.body.statements:
            if isinstance(item, Compute):
                self.compute(item)
            elif isinstance(item, Redistribution):
                self.change(item)
            else:
                self.loop(item, self.shared.stage.loops.index(item))

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
        right = self.in_lambda(item) if op.results[0] in self.variables.lambdas else computed(self, item)
        left = ", ".join(self.variables.names[value] for value in op.results)
        source = f"  {op.line}" if op.line else ""
        indent = INDENT
        if item.draws is not None:
            axes = "".join(f", {self.axis(axis)}" for axis in item.draws)
            self.lines.append(f'{INDENT}with self.drawn("{op.key}"{axes}):')
            indent += "    "
        self.lines += statement(indent, left, right, f"{self.note(op.results[0])}{source}")

    def in_lambda(self, item: Compute) -> str:
        """A call of the runtime that runs an op, given as a lambda, with the operands that the lambda takes."""
        names = self.variables.lambdas[item.op.results[0]]
        given = [self.read(value) for value in names]
        self.lambda_names = names
        right, self.lambda_names = computed(self, item), {}
        parameters = ", ".join(names.values())
        if item.recomputed:
            return f"{self.use('recomputed')}(lambda {parameters}: {right}, {', '.join(given)})"
        units = self.shared.stage.units
        around = [units.units[number] for number in units.around_ops[item.op.key]]
        for unit in around:
            passed = given if unit is around[-1] else names.values()
            call = ", ".join([f"lambda {parameters}".rstrip() + f": {right}", *passed])
            right = f'self.gathering("{next(iter(unit.parameters))}", {call})'
        return right

    def change(self, item: Redistribution) -> None:
        """Write the steps of a redistribution."""
        if item.unit_steps and not self.inner:
            # It is there only while the op runs that reads it.
            self.gathered_around[item.result] = self.gathered_for_op(item)
            return
        right = self.gathered(item.source) if item.unit_steps else self.read(item.source)
        steps, target = item.steps[item.unit_steps :], self.variables.names[item.result]
        note = self.note(item.result)
        if not steps:
            compute = None if item.unit_steps else item.dtypes[0]
            self.lines += statement(INDENT, target, right if compute is None else f"{right}.to({compute})", note)
        for number, (step, (compute, reduce)) in enumerate(zip(steps, item.step_dtypes, strict=True)):
            dtypes = f", dtype={compute}" if compute is not None else ""
            dtypes += f", grad_dtype={reduce}" if reduce is not None else ""
            comment = note if number == len(steps) - 1 else ""
            self.lines += statement(INDENT, target, self.step(step, right, item.regathered, dtypes), comment)
            right = target

    def step(self, step: RedistributionStep, operand: str, rerun: bool, dtypes: str = "") -> str:
        """One step as a call."""
        extra = (", keep=False" if rerun else "") + dtypes
        source, target = self.placement(step.source), self.placement(step.target)
        return f"{self.use(step.collective)}({operand}, {self.span(step.span)}, src={source}, dst={target}{extra})"

    def placement(self, placement: Placement) -> str:
        """A placement of a layout as an expression."""
        self.use(placement.kind)
        return str(placement)

    def loop(self, loop: Loop, number: int) -> None:
        """Write the loop over the copies of a region."""
        region, names, assigned = loop.region, self.variables.names, self.shared.assigned[number]
        name = loop_name(number, self.shared.stage.loops)
        self.lines.append(f"{INDENT}# {loop.block} x {len(loop.copies)}")
        self.place = ""
        for carry, initial in zip(region.carries, loop.initial, strict=True):
            if names.get(initial) != names[carry.argument]:
                self.lines.append(f"{INDENT}{names[carry.argument]} = {self.read(initial)}")
        self.lines += [f"{INDENT}{every} = []" for every in assigned.every.values()]
        changes = [change for change in loop.between if change is not None]
        counted = f"index, copy in enumerate(self.{name})" if changes else f"copy in self.{name}"
        self.lines.append(f"{INDENT}for {counted}:")
        if changes:
            self.lines.append(f"{INDENT}    if index:")
        for change in changes:
            carried = next(names[carry.argument] for carry in region.carries if carry.next == change.source)
            right = assigned.last[change.source]
            for step in change.steps:
                self.lines += statement(f"{INDENT}        ", carried, self.step(step, right, change.regathered))
                right = carried
        left = ", ".join(assigned.last[value] for value in loop.body.results)
        given = ", ".join([*(names[carry.argument] for carry in region.carries), *map(self.read, loop.shared)])
        called = f"self.recomputed(copy, {given})" if loop.recompute == "full" else f"copy({given})"
        self.lines += statement(f"{INDENT}    ", left, called)
        self.lines += [f"{INDENT}    {every}.append({assigned.last[value]})" for value, every in assigned.every.items()]


@dataclass(frozen=True)
class Naming:
    """The names of a generated module: `title` is its first line, `class_name` the class of the whole program."""

    class_name: str
    title: str

    def of_stages(self, count: int) -> "list[Naming]":
        """The names of the modules of each pipeline stage."""
        if count == 1:
            return [self]
        numbers = range(count)
        return [Naming(f"{self.class_name}Stage{number}", f"Stage {number} of {self.title}") for number in numbers]


class ModuleWriter:
    """Writes one generated module: its imports, a class for each region, and one for the whole program."""

    def __init__(self, stage: Stage, variables: Variables, mesh: Mesh, naming: Naming) -> None:
        self.stage = stage
        self.variables = variables
        self.mesh = mesh
        self.naming = naming
        self.loops = stage.loops
        self.shared = Shared(stage, mesh, variables.loops)
        stored = (*stage.program.parameters, *stage.program.buffers)
        self.paths = {item.name: f"self.root{attribute(item.name.split('.'))}" for item in stored}
        self.updated = {buffer for buffer, _ in stage.updates}

    def source(self) -> str:
        """The source of the whole module."""
        taken = {self.naming.class_name}
        classes = []
        for loop in self.loops:
            classes.append(class_name(loop, taken))
            taken.add(classes[-1])
        whole = self.whole(classes)
        regions = [
            self.region(loop, name, variables)
            for loop, name, variables in zip(self.loops, classes, self.variables.regions, strict=True)
        ]
        imports = ["import torch"]
        if self.shared.functional:
            imports.append("import torch.nn.functional as F")
        names = ", ".join(sorted(self.shared.used, key=import_order))
        runtime = f"from autopar.runtime import {names}"
        imports += ["", *([runtime] if len(runtime) <= WIDTH else broken(f"from autopar.runtime import ({names})", ""))]
        text = "\n\n\n".join("\n".join(block) for block in (*regions, whole))
        return f'"""{self.naming.title}\n\nGenerated by autopar.\n"""\n\n' + "\n".join(imports) + f"\n\n\n{text}\n"

    def region(self, loop: Loop, name: str, variables: FunctionVariables) -> list[str]:
        """The class of a region: one copy, called with the carried and the shared tensors."""
        self.shared.used.add("RegionCopy")
        region, entries = loop.region, len(loop.region.copies[0])
        paths = {**self.paths, **{own: copy_path(own, region.name, entries) for own in region.owned}}
        updated = {own for own, names in loop.owned.items() if self.updated & set(names)}
        code = Code(self.shared, loop.body, variables, paths, self.updated | updated, inner=True)
        code.statements()
        results = ", ".join(code.read(result) for result in loop.body.results)
        lines = [f"class {name}(RegionCopy):"]
        units = units_text(self.stage, self.loops.index(loop), self.mesh)
        title = f"{loop.block}: {len(loop.copies)} copies" if loop.part is None else loop.block
        lines += [f'    """{title}.{units}"""', ""]
        lines += signature("    ", "def forward", ["self", *(variables.names[item] for item in loop.body.arguments)])
        lines += code.prologue()
        if any(text.startswith("layer") for text in code.paths_used):
            names = ["layer"] if entries == 1 else [f"layer_{index}" for index in range(entries)]
            lines.append(f"{INDENT}{unpacked(names)} = self.entries")
        return [*lines, *code.lines, f"{INDENT}return {results}"]

    def whole(self, classes: Sequence[str]) -> list[str]:
        """The class of the whole program."""
        self.shared.used.add("Generated")
        stage, variables = self.stage, self.variables
        paths = self.paths | {name: f'self.constants["{name}"]' for name in stage.program.constants}
        code = Code(self.shared, stage.body, variables.whole, paths, self.updated, inner=False)
        code.statements()
        leaves = [code.read(value) for value in stage.sent]
        leaves += [code.leaf(output.value, variables.returned.get(output.name)) for output in stage.outputs]
        for buffer, value in stage.updates:
            code.lines.append(f"{INDENT}{paths[buffer]}.copy_({code.read(value)})")
        lines = [f"class {self.naming.class_name}(Generated):"]
        lines += [f'    """{self.naming.title}"""', ""]
        if self.loops:
            lines.append("    def build(self):")
            for index, (loop, name) in enumerate(zip(self.loops, classes, strict=True)):
                lines.append(f"{INDENT}self.{loop_name(index, self.loops)} = self.copies({name}, [")
                lines += [f"{INDENT}    {value_text(loop.region.copies[copy], str)}," for copy in loop.copies]
                # Copies are counted through all stages.
                lines.append(f"{INDENT}], first={loop.copies.start})" if loop.copies.start else f"{INDENT}])")
            lines.append("")
        arguments = (variables.whole.names[item.name] for item in (*stage.received, *stage.program.inputs))
        lines += signature("    ", "def forward", ["self", *arguments])
        end = f"return {leaves[0]}," if len(leaves) == 1 else f"return {', '.join(leaves)}"
        return [*lines, *code.prologue(), *code.lines, f"{INDENT}{end if leaves else 'return ()'}"]


def units_text(stage: Stage, number: int, mesh: Mesh) -> str:
    """A sentence for each FSDP unit around a copy of loop `number` of a stage, with a space before it."""
    text, units = "", stage.units
    first = {names[0] for names in stage.loops[number].owned.values()} & units.gathered
    own = [units.units[unit] for copies in units.around_copies[number : number + 1] for unit in copies[0]]
    own += [unit for unit in units.units if not unit.gathers and first.intersection(unit.parameters)]
    for unit in own:
        kinds = [("sharded", unit.sharded), ("replicated", unit.replicated)]
        stored = [f"{kind} over {', '.join(mesh.names[axis] for axis in axes)}" for kind, axes in kinds if axes]
        count = len(units.gathered.intersection(unit.parameters))
        parameters = f"{count} parameter{'' if count == 1 else 's'} {' and '.join(stored)}"
        text += f" {'fully_shard' if unit.gathers else 'all_reduce'}: {parameters}."
    return text
