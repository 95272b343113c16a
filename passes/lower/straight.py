"""straight: lowers the planning problem and its solution to the statements of one pipeline stage.

Each op reads its operands in the layouts of its strategy; a redistribution is placed before the first use that needs it
and shared by the later uses in its block; that of a parameter by those in a copy of a region alone. Sizes among the
arguments become local.
"""

from dataclasses import dataclass, field, replace

import torch

from passes.cost.live_ranges import saved_edges
from passes.ir.arguments import Argument, Ref, references, rename
from passes.ir.choices import Problem, Solution, Strategy
from passes.ir.folded import Carry, Folded, Region
from passes.ir.grouping import grouped
from passes.ir.layout import Layout
from passes.ir.lowered import Body, Compute, Loop, Redistribution, Returned, Split, Stage, Statement
from passes.ir.mesh import Mesh
from passes.ir.program import Op, TensorType, draws
from passes.ir.redistribution import redistribution
from passes.rules import find_rule
from passes.rules.local_forms import form_that_runs
from passes.rules.memory_order import memory_order
from passes.rules.strategies import local_arguments, named_choices, op_context


@dataclass(frozen=True)
class Casts:
    """dtypes where they are not those of the program: parameters are stored in `master`, computed with as in the
    program, and their gradients reduced in `reduce`."""

    master: torch.dtype | None = None
    reduce: torch.dtype | None = None


def straight_code(folded: Folded, problem: Problem, solution: Solution, mesh: Mesh, casts: Casts) -> Stage:
    """`folded` under `solution`, in one stage. Each region is lowered once."""
    return _Lowering(folded, problem, solution, mesh, casts).run()


@dataclass
class _Scope:
    """The statements of one body so far, and the name of each value in each layout."""

    parent: "_Scope | None"
    statements: list[Statement] = field(default_factory=list)
    changed: dict[tuple[str, Layout], str] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    shared: dict[tuple[str, Layout], str] = field(default_factory=dict)


class _Lowering:
    def __init__(self, folded: Folded, problem: Problem, solution: Solution, mesh: Mesh, casts: Casts) -> None:
        self.folded = folded
        self.casts = casts
        self.problem = problem
        self.solution = solution
        self.mesh = mesh
        self.groups = grouped(((edge.consumer, edge.operand), edge.group) for edge in problem.edges)
        self.sources = {
            node.name: solution.strategy(problem, index).results[0]
            for index, node in enumerate(problem.nodes)
            if node.kind in ("input", "buffer", "parameter")
        }
        self.parameters = {node.name: self.sources[node.name] for node in problem.nodes if node.kind == "parameter"}
        self.carries = {node.name: index for index, node in enumerate(problem.nodes) if node.kind == "carry"}
        self.outputs = {node.name: node.key for node in problem.nodes if node.key.startswith("output ")}
        self.copied = memory_order(folded).copied
        edges = grouped((edge.group, edge) for edge in problem.edges)
        self.saved = {group for group, own in edges.items() if saved_edges(problem, solution.configuration, own)}
        self.count = 0

    def run(self) -> Stage:
        program = self.folded.program
        scope = _Scope(None)
        inner = {name for region in self.folded.regions for name in region.owned}
        for name, layout in self.sources.items():
            if name not in inner:
                self._define(scope, name, layout)
        for item in self.folded.items:
            if isinstance(item, Region):
                self._region(item, scope)
            else:
                self._op(item, scope)
        outputs = tuple(
            self._output(label, value, scope)
            for label, value in zip(program.output_names, program.outputs, strict=True)
        )
        updates = tuple(
            (update.buffer, self._sink(f"update {update.buffer}", update.value, scope)) for update in program.updates
        )
        # Buffers are updated last: their new values are read then.
        results = tuple(name for output in outputs for name in references(output.value))
        results += tuple(value for _, value in updates)
        body = Body((), tuple(scope.statements), results, scope.layouts, scope.types)
        inputs = {item.name: self.sources[item.name] for item in program.inputs}
        return Stage(program, body, inputs, self._stored(), outputs, updates)

    def _stored(self) -> dict[str, Layout]:
        """The layout of every parameter of the program."""
        owned = {own: names for region in self.folded.regions for own, names in region.owned.items()}
        return {own: layout for name, layout in self.parameters.items() for own in owned.get(name, (name,))}

    def _define(self, scope: _Scope, name: str, layout: Layout, type: TensorType | None = None) -> None:
        scope.layouts[name] = layout
        scope.types[name] = type or self.folded.types[name]
        scope.own.add(name)

    def _strategy(self, key: str) -> tuple[int, Strategy]:
        index = self.problem.index[key]
        return index, self.solution.strategy(self.problem, index)

    # --- ops ---

    def _op(self, op: Op, scope: _Scope) -> None:
        node, strategy = self._strategy(op.key)
        slots = iter(range(len(op.operands)))

        def operand(name: str) -> Argument:
            slot = next(slots)
            return Ref(self._have(name, strategy.operands[slot], self.groups[node, slot][0], scope))

        arguments = {key: rename(value, operand) for key, value in op.arguments.items()}
        rule = find_rule(op, self.folded.types, self.folded.program.rules)
        context = op_context(op, rule, self.folded.types, self.folded.flowing, self.parameters.keys(), self.copied)
        choices = named_choices(context, strategy.methods, self.mesh)
        assert choices is not None
        forms = [(axis, choice) for axis, choice in enumerate(choices) if choice.form]
        body = form_that_runs(choice.form for choice in choices)
        assert body is not None
        digits = grouped((factor, (axis, choice.major)) for axis, choice in forms for factor in choice.factors)
        splits = {
            factor: Split(
                rule.factors[factor].size,
                self.mesh.joined(found),
                strategy.operands[0][found[0][0]].dim,
                rule.factors[factor].reach,
            )
            for factor, found in digits.items()
            if rule is not None
        }
        axes = tuple(axis for axis, placement in enumerate(strategy.results[0]) if placement.kind == "S")
        whole = replace(op, arguments=arguments)
        arguments = local_arguments(op, arguments, strategy, choices, self.folded.types, self.mesh)
        statement = Compute(
            replace(op, arguments=arguments), whole, strategy, body, splits, context.copies, axes if draws(op) else None
        )
        scope.statements.append(statement)
        for name, layout in zip(op.results, strategy.results, strict=True):
            self._define(scope, name, layout)

    def _have(self, name: str, layout: Layout, group: int, scope: _Scope) -> str:
        """The name under which a value is there in `layout`; a value from outside becomes an argument of the body."""
        if name in self.parameters:
            scope.layouts.setdefault(name, self.parameters[name])
            scope.types.setdefault(name, self.folded.types[name])
            return self._change(name, self.parameters[name], layout, group, scope, remember=scope.parent is not None)
        if name not in scope.own:
            assert scope.parent is not None, name
            outer = self._have(name, layout, group, scope.parent)
            inner = scope.shared.setdefault((outer, layout), outer)
            if inner not in scope.layouts:
                self._define(scope, inner, layout, self.folded.types[name])
                scope.own.discard(inner)
            return inner
        return self._change(name, scope.layouts[name], layout, group, scope, remember=True)

    def _change(self, name: str, before: Layout, after: Layout, group: int, scope: _Scope, *, remember: bool) -> str:
        if remember and (name, after) in scope.changed:
            return scope.changed[name, after]
        change = self._redistribution(name, before, after, group)
        if change is None:
            return name
        scope.statements.append(change)
        scope.layouts[change.result], scope.types[change.result] = after, change.type
        if remember:
            scope.changed[name, after] = change.result
        return change.result

    def _redistribution(self, name: str, before: Layout, after: Layout, group: int) -> Redistribution | None:
        """The redistribution for the uses `group` of a value; None where there is nothing to do."""
        uses = self.problem.groups[group]
        dtypes = self._dtypes(name, uses.type)
        if before == after and dtypes == (None, None):
            return None
        result = f"{name}~{self.count}"
        self.count += 1
        steps = redistribution(before, after, uses.type.shape, self.mesh, strided=uses.strided)
        regathered = (group, after) in self.solution.regathered
        return Redistribution(
            name, result, uses.type, before, after, steps, uses.gradient, uses.gradient_itemsize, regathered,
            group in self.saved, uses.parameter, dtypes, joined=uses.joined,
        )  # fmt: skip

    def _dtypes(self, name: str, type: TensorType) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes that a parameter is cast to and that its gradient is reduced in; None for its own."""
        if name not in self.parameters or not type.dtype.is_floating_point:
            return None, None
        stored = self.casts.master or type.dtype
        reduced = self.casts.reduce or type.dtype
        return (None if stored == type.dtype else type.dtype), (None if reduced == type.dtype else reduced)

    # --- regions ---

    def _region(self, region: Region, scope: _Scope) -> None:
        body_scope = _Scope(scope)
        initial = []
        for carry in region.carries:
            (group, _), layout = self._carried(carry)
            initial.append(self._have(carry.initial, layout, group, scope))
            self._define(body_scope, carry.argument, layout)
        for own in region.owned:
            if own not in self.parameters:
                self._define(body_scope, own, self.sources[own])
        for op in region.ops:
            self._op(op, body_scope)
        between = []
        for carry in region.carries:
            (_, group), layout = self._carried(carry)
            between.append(self._redistribution(carry.next, body_scope.layouts[carry.next], layout, group))
        for export in region.exports:
            for name in filter(None, export.names):
                self._define(scope, name, body_scope.layouts[export.value])
        body = Body(
            (*(carry.argument for carry in region.carries), *body_scope.shared.values()),
            tuple(body_scope.statements),
            region.results,
            body_scope.layouts,
            body_scope.types,
        )
        shared = tuple(outer for outer, _ in body_scope.shared)
        exports = tuple((export.value, export.names) for export in region.exports)
        scope.statements.append(
            Loop(region, range(region.count), body, tuple(initial), tuple(between), shared, exports)
        )

    def _carried(self, carry: Carry) -> tuple[list[int], Layout]:
        """The groups of the initial value of a carry and of the results of copies, and the layout of all of them."""
        node = self.carries[carry.argument]
        return self.groups[node, 0], self.solution.strategy(self.problem, node).results[0]

    # --- outputs ---

    def _output(self, label: str, value: Argument, scope: _Scope) -> Returned:
        if not isinstance(value, Ref):
            return Returned(label, value, None)
        exports = [export for region in self.folded.regions for export in region.exports]
        inside = next((export.value for export in exports if value.name in export.names), value.name)
        name = self._sink(self.outputs[inside], value.name, scope)
        return Returned(label, Ref(name), scope.layouts[name])

    def _sink(self, key: str, name: str, scope: _Scope) -> str:
        node, strategy = self._strategy(key)
        return self._have(name, strategy.operands[0], self.groups[node, 0][0], scope)
