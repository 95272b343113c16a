"""variables: a pipeline stage in, the variables of its generated functions out.

Variables have readable names. A value that leaves its module is named after the module ("q_proj",
"input_layernorm"), one that the model returns after the field ("loss"), the values that layers pass on "hidden". A
result computed within a module takes over the variable of an operand that is not read any more, as in `x = x + 1`.
That decides how long tensors live, so the memory simulator reads the same variables as code generation.
"""

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence

from passes.ir.arguments import Ref, references
from passes.ir.grouping import grouped
from passes.ir.lowered import Body, Compute, FunctionVariables, Loop, LoopVariables, Redistribution, Stage, Variables
from passes.ir.mesh import Mesh
from passes.ir.program import Op
from passes.ir.vocabulary import RESERVED, identifier, numbered, plain

# Stands for a reader that is not a module: a loop, or the function's return.
_NO_MODULE = "?"


def hints(body: Body, returned: Mapping[str, str]) -> dict[str, str]:
    """The names that values of `body` should have, by value.

    A value that leaves its module is named after the module ("q_proj"), one that the model returns after the field
    ("loss"), values that layers pass on "hidden". `returned` maps values to the fields that return them.
    """
    readers = _reading_modules(body)
    loops = (item for item in body.statements if isinstance(item, Loop))
    found = {_origin(initial): "hidden" for loop in loops for initial in loop.initial[:1]}
    leaving = grouped(
        (item.op.module, value)
        for item in body.statements
        if isinstance(item, Compute)
        for value in item.op.results
        if not all(_within(reader, item.op.module) for reader in readers.get(value, ()))
    )
    for module, values in leaving.items():
        leaf = module.rsplit(".", 1)[-1].partition("[")[0]
        for value in values:
            if leaf == "*" or leaf.replace("-", "").isdigit():
                found[value] = "hidden"
            elif leaf and len(values) == 1:
                found.setdefault(value, identifier(leaf))
    found.update({_origin(value): identifier(name.rsplit(".", 1)[-1]) for value, name in returned.items()})
    return found


def _origin(value: str) -> str:
    """The value before its redistributions."""
    return value.partition("~")[0]


def _within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(f"{owner}.") or not owner


def _reading_modules(body: Body) -> dict[str, list[str]]:
    """The modules that read each value."""
    # A redistribution passes on what its own readers read.
    reads = [
        (_origin(value), statement.op.module if isinstance(statement, Compute) else _NO_MODULE)
        for statement in body.statements
        if not isinstance(statement, Redistribution)
        for value in statement.reads
    ]
    return grouped([*reads, *((_origin(value), _NO_MODULE) for value in body.results)])


# Names of results of operators whose own name shadows a builtin or says little.
_KINDS = {
    "abs": "magnitude",
    "all": "every",
    "any": "some",
    "cross_entropy_loss": "loss",
    "linear_cross_entropy": "loss",
    "chunked_attention": "attention",
    "eq": "mask",
    "ge": "mask",
    "gt": "mask",
    "le": "mask",
    "lt": "mask",
    "max": "largest",
    "min": "least",
    "ne": "mask",
    "neg": "negative",
    "padded_conv1d": "convolved",
    "pow": "power",
    "scaled_dot_product_attention": "attention",
    "sum": "total",
}

# Operators whose result never takes over the variable of an operand.
_LOSSES = {"cross_entropy_loss", "linear_cross_entropy"}
_OWN = {"chunked_attention", "cos", "scaled_dot_product_attention", "sin", "softmax", *_LOSSES}

# Suffixes for views of a value that is still read later.
_VIEWS = {
    "expand": "expanded",
    "permute": "permuted",
    "reshape": "flat",
    "select": "part",
    "slice": "part",
    "to": "cast",
    "transpose": "transposed",
    "unsqueeze": "expanded",
}


class Names:
    """The variables of one function up to the statement at `position`.

    `hints` are names that values should have, `reserved` names that no variable may have. `live` maps variables in use
    to the values that they hold.
    """

    def __init__(self, body: Body, hints: Mapping[str, str], reserved: Collection[str]) -> None:
        self.position = 0
        self.of: dict[str, str] = {}
        self.live: dict[str, str] = {}
        self.elements: dict[str, tuple[str, int]] = {}
        self.lambdas: dict[str, dict[str, str]] = {}
        self._hints = hints
        self._reserved = reserved
        self._last = _last_uses(body)
        self._generic: set[str] = set()

    def frozen(self) -> FunctionVariables:
        """The variables as the writer of the function and the memory simulator read them."""
        return FunctionVariables(self.of, self.elements, self.lambdas)

    def text(self, value: str) -> str | None:
        """The expression that reads a value; None for a value without a variable."""
        return self.frozen().text(value)

    def hint(self, value: str) -> str:
        """The name that a received value should have."""
        return self._hints.get(_origin(value)) or identifier(_origin(value))

    def is_reserved(self, name: str) -> bool:
        """Whether no variable may have this name."""
        return name in self._reserved or keyword.iskeyword(name)

    def fresh(self, base: str, *, generic: bool = False) -> str:
        """A variable that is not in use, named `base` or `base` with a number. It is free again after this statement,
        unless a value is assigned to it."""
        name = numbered(base, lambda name: name in self.live or self.is_reserved(name))
        self.live[name] = ""
        (self._generic.add if generic else self._generic.discard)(name)
        return name

    def assign(self, name: str, value: str) -> None:
        """Let variable `name` hold `value` from now on."""
        self.of[value] = name
        self.live[name] = value

    def last(self, value: str) -> int:
        """The position of the last statement that reads a value."""
        return self._last.get(value, -1)

    def ends(self, value: str) -> bool:
        """Whether the variable of a value may be assigned by this statement."""
        name = self.of.get(value)
        return name is not None and self.live.get(name) == value and self.last(value) <= self.position

    def take_over(self, value: str, source: str) -> bool:
        """Whether no later statement reads `source`: then its variable holds `value` from now on."""
        ends = self.ends(source)
        if ends:
            self.assign(self.of[source], value)
        return ends

    def release(self) -> None:
        """Free the variables of values that no later statement reads."""
        self.live = {name: value for name, value in self.live.items() if self.last(value) > self.position}

    def result(self, kind: str, value: str, operands: Sequence[str]) -> None:
        """Give the result of an operator a variable, which may be that of one of `operands`."""
        ending = [operand for operand in operands if self.ends(operand)]
        hint = self._hints.get(value)
        if hint is not None:
            name = hint if any(self.of[operand] == hint for operand in ending) else self.fresh(hint)
        elif ending and kind not in _OWN:
            name = min((self.of[operand] for operand in ending), key=lambda name: name in self._generic)
        elif kind in _VIEWS and operands and (viewed := self.text(operands[0])) is not None:
            name = self.fresh(f"{identifier(viewed)}_{_VIEWS[kind]}", generic=True)
        else:
            name = self.fresh(identifier(_KINDS.get(kind, kind)), generic=kind not in _OWN)
        self.assign(name, value)


def _last_uses(body: Body) -> dict[str, int]:
    """The position of the last statement that reads each value; results are read after all statements."""
    last = {name: position for position, statement in enumerate(body.statements) for name in statement.reads}
    return last | dict.fromkeys(body.results, len(body.statements))


_SUFFIXES = {
    "all_gather": "gathered",
    "all_reduce": "reduced",
    "all_to_all": "exchanged",
    "reduce_scatter": "scattered",
    "convert": "converted",
}


class Function:
    """Follows the statements of a body and gives their results variables, in `names`.

    `stored` are parameters, buffers and constants by the names that the body reads them under; they have no variables.
    With `inner` the body is that of a region; otherwise parameters are gathered around the ops with the keys
    `gathering`. `loops` collects the variables that loops assign, and `calls` names for the arguments of the functions
    that they call.
    """

    def __init__(
        self, body: Body, names: Names, stored: Collection[str], *, inner: bool, gathering: Collection[str] = ()
    ) -> None:
        self.names = names
        self.loops: list[LoopVariables] = []
        self.calls: list[list[str]] = []
        self._body = body
        self._stored = stored
        self._weights = body.redistributed_parameters
        self._inner = inner
        self._gathering = gathering

    def follow(self) -> None:
        """Follow all statements."""
        for position, statement in enumerate(self._body.statements):
            self.names.position = position
            if isinstance(statement, Compute):
                self._compute(statement)
            elif isinstance(statement, Redistribution):
                self._change(statement)
            else:
                self._loop(statement)
            self.names.release()

    def _compute(self, statement: Compute) -> None:
        op = statement.op
        if statement.recomputed:
            self.names.lambdas[op.results[0]] = self._lambda(op.operands)
        elif op.key in self._gathering:
            given = [value for value in op.operands if value not in self._stored and value not in self._weights]
            self.names.lambdas[op.results[0]] = self._lambda(given)
        for value in op.results:
            self.names.result(op.kind, value, self._candidates(op, value))

    def _lambda(self, operands: Iterable[str]) -> dict[str, str]:
        """The parameters of a lambda that takes `operands`: variables keep their names."""
        chosen: dict[str, str] = {}
        for value in dict.fromkeys(operands):
            text = None if value in self._stored else self.names.text(value)
            is_variable = text is not None and text.isidentifier()
            base = text if text is not None and is_variable else identifier(value.replace("~", "_").rsplit(".", 1)[-1])
            chosen[value] = numbered(base, lambda name: name in chosen.values() or self.names.is_reserved(name))
        return chosen

    def _candidates(self, op: Op, value: str) -> list[str]:
        """Operands whose variable `value` may take over: no parameters; of several operands those of its type."""
        types = self._body.types
        alone = len(op.operands) == 1
        return [
            operand
            for operand in op.operands
            if operand not in self._stored
            and operand not in self._weights
            and (op.kind == "to" or types[operand].dtype == types[value].dtype)
            and (alone or types[operand].shape == types[value].shape)
        ]

    def _change(self, change: Redistribution) -> None:
        """Name the result of a redistribution. A parameter that is gathered around a single op gets no variable."""
        if (change.unit_steps and not self._inner) or self.names.take_over(change.result, change.source):
            return
        base = identifier("_".join(change.source.split(".")[-2:]))
        if not change.parameter:
            base = f"{identifier(self.names.text(change.source) or base)}_{_SUFFIXES[change.steps[-1].collective]}"
        self.names.assign(self.names.fresh(base), change.result)

    def _loop(self, loop: Loop) -> None:
        """Name what a loop assigns.

        A carried value stays in one variable. Of a result that is read after the loop, the last copy's stays in a
        variable; where an earlier copy's is read, a list has those of all copies.
        """
        names, region = self.names, loop.region
        for carry, initial in zip(region.carries, loop.initial, strict=True):
            if not names.take_over(carry.argument, initial):
                names.assign(names.fresh("hidden"), carry.argument)
        carried = [names.of[carry.argument] for carry in region.carries]
        self.calls.append([*map(plain, carried), *map(self._argument, loop.shared)])
        last = {carry.next: name for carry, name in zip(region.carries, carried, strict=True)}
        every: dict[str, str] = {}
        for value, outside in loop.exports:
            if value not in last:
                last[value] = names.fresh(identifier(value))
            if any(outer is not None for outer in outside[:-1]):
                every[value] = names.fresh(f"every_{identifier(value)}")
        for value, outside in loop.exports:
            self._export(outside, last[value], every.get(value))
        self.loops.append(LoopVariables(last, every))

    def _export(self, outside: Sequence[str | None], last: str, every: str | None) -> None:
        """Let the values `outside`, one per copy, be elements of the list `every`, or the variable `last` hold the one
        of the last copy."""
        used = {copy: outer for copy, outer in enumerate(outside) if outer is not None}
        if every is None:
            self.names.of.update(dict.fromkeys(used.values(), last))
        else:
            self.names.elements.update({outer: (every, copy) for copy, outer in used.items()})
        if used:
            self.names.live[every or last] = max(used.values(), key=self.names.last)

    def _argument(self, value: str) -> str:
        """The name of a region's argument for a value that all copies read."""
        name = self.names.text(value) or value
        return plain(name) if name.isidentifier() else identifier(name.partition("~")[0])


def name_variables(stage: Stage, mesh: Mesh) -> Variables:
    """The variables of all functions of the module that is generated for `stage`.

    `stage` is final: recompute and FSDP units are marked. No variable has the name of an axis of `mesh`, or one of
    `ir.vocabulary.RESERVED`.
    """
    program = stage.program
    stored = {item.name for item in program.parameters} | {item.name for item in program.buffers}
    returned = {name: output.name for output in stage.outputs for name in references(output.value)}
    reserved = {*RESERVED, *mesh.names}
    names = Names(stage.body, hints(stage.body, returned), reserved)
    gathering = {key for key, groups in stage.units.around_ops.items() if groups}
    whole = Function(stage.body, names, stored | set(program.constants), inner=False, gathering=gathering)
    for item in stage.received:
        names.assign(names.fresh(names.hint(item.name)), item.name)
    for item in program.inputs:
        names.assign(names.fresh(identifier(item.name)), item.name)
    whole.follow()
    regions = tuple(_region(loop, call, stored, reserved) for loop, call in zip(stage.loops, whole.calls, strict=True))
    return Variables(names.frozen(), regions, tuple(whole.loops), _returned(stage, names))


def _region(loop: Loop, arguments: Iterable[str], stored: set[str], reserved: set[str]) -> FunctionVariables:
    """The variables of a region's function, whose `arguments` should have these names."""
    names = Names(loop.body, hints(loop.body, {}), reserved)
    for argument, base in zip(loop.body.arguments, arguments, strict=True):
        names.assign(names.fresh(base), argument)
    Function(loop.body, names, stored | set(loop.region.owned), inner=True).follow()
    return names.frozen()


def _returned(stage: Stage, names: Names) -> dict[str, str]:
    """The variables that hold copies of returned buffers, by output: the buffers change before the function returns."""
    updated = {buffer for buffer, _ in stage.updates}
    return {
        output.name: names.fresh(identifier(output.name))
        for output in stage.outputs
        if isinstance(output.value, Ref) and output.value.name in updated
    }
