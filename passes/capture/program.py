"""The program of a trace: its inputs, with symbols for their sizes that are not fixed, parameters, buffers and
constants, the ops of its graph and of the graphs inside it, and the names of its outputs."""

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import sympy
import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec

from passes import ops
from passes._torch import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    ShapeEnv,
    operator_name,
    pytree,
    schema_of,
    storage_id,
)
from passes.capture.exporting import Exported, refusal
from passes.capture.functions import properties_of
from passes.capture.source import line_of_node, lines_of_node
from passes.ir.arguments import Argument, Ref, bound_arguments, freeze, references
from passes.ir.errors import CaptureError
from passes.ir.grouping import grouped
from passes.ir.leaves import Inputs, given_name, input_leaves
from passes.ir.log import logger
from passes.ir.program import (
    REPEATABLE,
    Buffer,
    Input,
    Op,
    Parameter,
    Program,
    StateChange,
    TensorType,
    has_gradient,
    sparse_or_nested,
)
from passes.ir.sizes import as_number

_SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool


class Symbols:
    """The sizes of inputs that are not fixed in a trace, as symbols that say which dim they are."""

    def __init__(self) -> None:
        self.named: dict[sympy.Symbol, sympy.Symbol] = {}
        self.environment: ShapeEnv | None = None

    def name(self, inputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give names to the symbols in the sizes of the inputs: that of the first dim that is the symbol."""
        sizes = {
            f"{name}.{dim}": size.node
            for name, tensor in inputs
            for dim, size in enumerate(cast(Sequence[object], tensor.shape))
            if isinstance(size, torch.SymInt)
        }
        for name, node in sorted(sizes.items(), key=lambda item: not item[1].expr.is_Symbol):
            self.environment = node.shape_env
            for symbol in sorted(node.expr.free_symbols - set(self.named), key=str):
                own = name if node.expr.is_Symbol else f"{name} ({symbol})"
                self.named[symbol] = sympy.Symbol(own, integer=True, positive=True)

    def knows(self, value: object) -> bool:
        """Whether `value` is a number that follows from sizes of inputs alone."""
        return isinstance(value, _SymbolicNumber) and value.node.expr.free_symbols <= set(self.named)

    def written(self, value: object) -> object:
        """Such a number as an expression of the named symbols, or as the number that it always is."""
        assert isinstance(value, _SymbolicNumber)
        return as_number(value.node.expr.xreplace(self.named))

    def ranges(self, exported: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
        """The lower and upper bound of each symbol."""
        found = {}
        for symbol, name in self.named.items():
            allowed = exported.range_constraints[symbol]
            found[str(name)] = int(allowed.lower), int(allowed.upper) if allowed.upper.is_Integer else None
        return found

    def conditions(self, program: Program) -> tuple[object, ...]:
        """Guards of the trace and assertions of the model, as conditions on the named symbols."""
        asserted = [value for op in program.ops if op.kind == "_assert_scalar" for value in op.arguments.values()]
        found: dict[object, None] = {value: None for value in asserted if isinstance(value, sympy.Basic)}
        if self.environment is None:
            return tuple(found)
        for guard in self.environment.guards:
            condition = self.environment.replace(guard.expr)
            if not condition.free_symbols <= set(self.named):
                raise CaptureError(f"the trace depends on {condition}, which is no size of an input")
            if condition != sympy.true:
                found[condition.xreplace(self.named)] = None
        return tuple(found)


class GraphWriter:
    """Writes the ops of one exported graph and of the graphs inside it."""

    def __init__(self, module: nn.Module, symbols: Symbols) -> None:
        self.module = module
        self.symbols = symbols
        self.ops: list[Op] = []
        self.types: dict[str, TensorType] = {}
        self.taken: dict[str, int] = {}
        self.copied: set[str] = set()
        self.changes: list[StateChange] = []
        self.parameters: set[str] = set()
        self.inputs: set[str] = set()
        # Views by name: a result, and the operand that it is a view of.
        self.viewed: dict[str, str] = {}

    def name(self, hint: str) -> str:
        """A new result name."""
        count = self.taken.get(hint, 0)
        self.taken[hint] = count + 1
        return f"%{hint}_{count}" if count else f"%{hint}"

    def graph(self, graph_module: torch.fx.GraphModule, known: dict[torch.fx.Node, object]) -> object:
        """Write a graph whose placeholders are `known`; returns what it returns."""
        for node in graph_module.graph.nodes:
            if node.op == "get_attr":
                known[node] = operator.attrgetter(str(node.target))(graph_module)
            elif node.op == "call_function":
                known[node] = self.call(node, known)
            elif node.op == "output":
                return _known(node.args[0], known)
        raise AssertionError("an exported graph has an output")

    def type(self, tensor: torch.Tensor) -> TensorType:
        """The type of a traced tensor, sizes that vary as expressions."""
        symbols = self.symbols
        shape = tuple(symbols.written(size) if symbols.knows(size) else size for size in tensor.shape)
        assert not any(isinstance(size, torch.SymInt) for size in shape), "a trace has no sizes that depend on data"
        return TensorType(cast(tuple[int, ...], shape), tensor.dtype)

    def call(self, node: torch.fx.Node, known: dict[torch.fx.Node, object]) -> object:
        """Write one call; returns a reference or a list of them. A number that follows from sizes needs no op."""
        value = node.meta.get("val")
        if self.symbols.knows(value):
            return self.symbols.written(value)
        if isinstance(value, (bool, int, float)):
            # Some versions of torch leave calls in a trace whose results it knows, such as that of a size.
            return value
        args = tuple(_known(item, known) for item in node.args)
        kwargs = {name: _known(item, known) for name, item in node.kwargs.items()}
        if node.target is operator.getitem:
            return cast(Sequence[object], args[0])[cast(int, args[1])]
        if isinstance(node.target, HigherOrderOperator):
            return self.higher_order(node, args)
        if not isinstance(node.target, OpOverload):
            raise self.refusal(node, f"{node.target} is no operator on tensors")
        return self.write(node.target, args, kwargs, node)

    def write(
        self, target: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], node: torch.fx.Node
    ) -> object:
        """Append an op whose results have the types that tracing found."""
        arguments = bound_arguments(target, args, kwargs)
        if target == ops.TRACED:
            target = _known_function(node, arguments)
        changed = self.changed(target, arguments)
        noted = None if changed is None else self.change(changed, target, arguments, node)
        if noted is not None:
            return noted
        value = node.meta.get("val")
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        results = []
        for item in (item for item in values if item is not None):
            if not isinstance(item, torch.Tensor):
                raise self.refusal(node, f"{target} returns {item!r}, which is no tensor")
            if (layout := sparse_or_nested(item)) is not None:
                dense = "compute with a dense one, or take and add rows with index_select and index_add"
                raise self.refusal(node, f"it makes a {layout} tensor ({dense})")
            results.append(self.name(schema_of(target).name.split("::")[1]))
            self.types[results[-1]] = self.type(item)
        if _copies(target, node):
            self.copied.update(results)
        else:
            viewed = [arguments[item.name] for item in schema_of(target).arguments if item.alias_info is not None]
            self.viewed.update({name: item.name for item in viewed if isinstance(item, Ref) for name in results})
        module, module_class = _module(node)
        self.ops.append(Op(str(target), arguments, tuple(results), module, module_class, _source(node)))
        made = [Ref(name) for name in results]
        return made if isinstance(value, (list, tuple)) else (made[0] if made else None)

    def refusal(self, node: torch.fx.Node, reason: str) -> CaptureError:
        """The error for a module in which `node` stands."""
        return refusal(self.module, line_of_node(node), reason)

    def changed(self, target: OpOverload, arguments: Mapping[str, Argument]) -> str | None:
        """The input or parameter that an op changes in place."""
        for parameter in schema_of(target).arguments:
            argument = arguments[parameter.name]
            if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(argument, Ref):
                name = argument.name
                while name in self.viewed:
                    name = self.viewed[name]
                return name if name in self.inputs or name in self.parameters else None
        return None

    def change(self, name: str, target: OpOverload, arguments: Mapping[str, Argument], node: torch.fx.Node) -> object:
        """Note a change of a parameter that can be made to each of its parts, before anything is computed, and return
        it; None for a change of an input, which is an op like others, if it would be the same the next time.

        Raises CaptureError for any other change of what was given to the model.
        """
        if name in self.inputs:
            if operator_name(target) in REPEATABLE:
                logger.warning(
                    "%s changes its input %r in place at %s: a distributed module leaves the caller's tensor as it is",
                    type(self.module).__name__,
                    name,
                    line_of_node(node),
                )
                return None
            raise self.refusal(node, f"it changes the input {name!r} in place (work on a copy of it)")
        (_, first), *others = arguments.items()
        assert isinstance(first, Ref)
        views = {view for view in self.viewed if self.whole(view) == name}
        read = any(not {*op.results} <= views and {*op.operands} & {name, *views} for op in self.ops)
        pointwise = torch.Tag.pointwise in target.tags and not any(list(references(value)) for _, value in others)
        if read or not pointwise or self.whole(first.name) != name:
            raise self.refusal(
                node,
                f"it changes the parameter {name!r} in place, which is followed only where every element is changed by "
                "itself, with numbers, before the parameter is used",
            )
        self.changes.append(StateChange(name, str(target), dict(others)))
        return first

    def whole(self, name: str) -> str | None:
        """The parameter that `name` is, with or without its gradient."""
        makers = {result: op for op in self.ops for result in op.results}
        while name in self.viewed and makers[name].kind in ("detach", "alias"):
            name = self.viewed[name]
        return name if name in self.parameters else None

    def higher_order(self, node: torch.fx.Node, args: tuple[object, ...]) -> object:
        """Write the graph inside `torch.no_grad()` in place; what it computes has no gradient. An operand that it hands
        on as it is, as `to` does where there is nothing to convert, keeps its own.
        """
        is_autocast = str(node.target) == "wrap_with_autocast"
        if not is_autocast and str(node.target) != "wrap_with_set_grad_enabled":
            raise self.refusal(node, f"{node.target} takes functions of tensors, for which there is no plan")
        inner, *operands = args[4:] if is_autocast else args[1:]
        assert isinstance(inner, torch.fx.GraphModule)
        # There is no autocast around the model that the model could switch off.
        if is_autocast and args[2] is not False:
            lines = [item for item in inner.graph.nodes if line_of_node(item) is not None]
            reason = "it enters autocast, which a plan does not keep (leave it out, and pass precision=)"
            raise self.refusal(lines[0] if lines else node, reason)
        placeholders = [item for item in inner.graph.nodes if item.op == "placeholder"]
        known = dict(zip(placeholders, operands, strict=True))
        if is_autocast or args[0]:
            return self.graph(inner, known)
        self.refuse_changes(inner, known)
        outputs = self.graph(inner, known)
        returned = cast(Sequence[object], inner.graph.output_node().args[0])
        detach = torch.ops.aten.detach.default

        def detached(value: object) -> object:
            if not isinstance(value, Ref) or not has_gradient(self.types[value.name].dtype):
                return value
            if value.name in self.parameters:
                # One that was changed in place, and is what it was.
                return value
            name = self.name("detach")
            self.types[name] = self.types[value.name]
            module, module_class = _module(node)
            self.ops.append(Op(str(detach), {"self": value}, (name,), module, module_class, _source(node)))
            return Ref(name)

        assert isinstance(outputs, (list, tuple))
        origins = [_handed_on(item) for item in returned]
        return [
            known[origin] if isinstance(origin, torch.fx.Node) and origin.op == "placeholder" else detached(value)
            for origin, value in zip(origins, outputs, strict=True)
        ]

    def refuse_changes(self, inner: torch.fx.GraphModule, known: Mapping[torch.fx.Node, object]) -> None:
        """Raise for activations that are changed in place without gradient: only their values would change."""
        for node in inner.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            for position, parameter in enumerate(schema_of(node.target).arguments):
                written = parameter.alias_info is not None and parameter.alias_info.is_write
                changed = known.get(node.args[position]) if written and position < len(node.args) else None
                if isinstance(changed, Ref) and changed.name.startswith("%"):
                    raise self.refusal(
                        node,
                        "it changes a tensor in place under no_grad, which a trace cannot keep apart from a change "
                        "with gradient (write it without in-place, or on a buffer)",
                    )


def _known_function(node: torch.fx.Node, arguments: dict[str, Argument]) -> OpOverload:
    """Add the properties of an autograd function to the arguments of its call; returns the overload to call."""
    operands = [item.meta["val"] for item in cast(Sequence[torch.fx.Node], node.args[0])]
    types = tuple(TensorType(tuple(map(_hint, operand.shape)), operand.dtype) for operand in operands)
    sizes = tuple(_hint(item.meta["val"]) for item in cast(Sequence[torch.fx.Node], node.kwargs.get("sizes", ())))
    try:
        properties = properties_of(str(arguments["function"]), str(arguments["arguments"]), types, sizes)
    except CaptureError as error:
        where = _source(node)
        raise CaptureError(f"{where}: {error}" if where else str(error)) from error
    arguments.update(pointwise=properties.pointwise, linear=properties.linear)
    return ops.overload_for(len(node.meta["val"]), drawn=properties.drawn)


def _hint(size: object) -> int:
    """A size; for a dynamic one, its value in the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else cast(int, size)


def _copies(target: OpOverload, node: torch.fx.Node) -> bool:
    """Whether an op that may or may not share memory with its operand gave a copy of it."""
    if not schema_of(target).arguments or schema_of(target).arguments[0].alias_info is None or not node.args:
        return False
    operand, result = node.args[0], node.meta.get("val")
    before = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    if not isinstance(before, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return bool(storage_id(before) != storage_id(result))


# Ops that return their operand itself where it already is what they would make of it.
_HANDING_ON = frozenset((
    "to", "type_as", "contiguous", "flatten", "atleast_1d", "atleast_2d", "atleast_3d", "real", "positive", "conj",
    "resolve_conj", "resolve_neg", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
))  # fmt: skip


def _handed_on(item: object) -> object:
    """The node whose result `item` is, not a copy and not a view: that of an operand if ops hand it on."""
    while isinstance(item, torch.fx.Node) and item.op == "call_function":
        source, place = item, None
        if item.target is operator.getitem:
            source, place = cast(tuple[torch.fx.Node, int], item.args)
        if not isinstance(source.target, OpOverload):
            return item
        name = schema_of(source.target).name.split("::")[1]
        if place is not None and name == "broadcast_tensors":
            operand: object = cast(Sequence[object], source.args[0])[place]
        elif place is None and name in _HANDING_ON:
            operand = source.args[0]
        else:
            return item
        if not isinstance(operand, torch.fx.Node) or not _is_same(operand.meta.get("val"), item.meta.get("val")):
            return item
        item = operand
    return item


def _is_same(before: object, after: object) -> bool:
    """Whether two traced tensors have the same memory and the same elements."""
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.shape == after.shape and before.dtype == after.dtype and storage_id(before) == storage_id(after)


def _known(argument: torch.fx.node.Argument, known: Mapping[torch.fx.Node, object]) -> object:
    """An argument of a node with the nodes in it replaced by what they are known as."""
    return torch.fx.node.map_arg(argument, lambda used: cast(torch.fx.node.Argument, known[used]))


def _module(node: torch.fx.Node) -> tuple[str, str]:
    """Path and class of the innermost module that a node stands in."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return "", ""
    path, owner = stack[-1]
    return path, (owner if isinstance(owner, str) else owner.__name__).split(".")[-1]


def _source(node: torch.fx.Node) -> str:
    """The line of the model that a node comes from: "modeling_llama.py:123"."""
    lines = lines_of_node(node)
    return f"{os.path.basename(lines[0].file)}:{lines[0].number}" if lines else ""


def program_of(module: nn.Module, traced: Exported, example: Inputs, gradients: bool, symbols: Symbols) -> Program:
    """The program of a trace of `module` with the inputs `example`.

    Raises CaptureError for a graph that has no program, and for a trainable tensor that the module does not register.
    """
    exported = traced.program
    builder = GraphWriter(module, symbols)
    owned = _owned(module, exported, gradients)
    symbols.name(_given_tensors(exported, example))
    placeholders = _Placeholders(module, traced, owned, builder, gradients)
    leaves = iter(input_leaves(example))
    for node, spec in _placeholders(exported):
        placeholders.read(node, spec, leaves)
    inputs, constants = tuple(placeholders.inputs), placeholders.constants
    given: tuple[Parameter | Buffer | Input, ...] = (*owned.parameters.values(), *owned.buffers.values(), *inputs)
    builder.types.update({item.name: item.type for item in given})
    builder.types.update({name: _type(constant) for name, constant in constants.items()})
    builder.parameters, builder.inputs = set(owned.parameters), {item.name for item in inputs}
    returned = builder.graph(exported.graph_module, placeholders.known)
    assert isinstance(returned, (list, tuple))
    tree = exported.module_call_graph[0].signature.out_spec
    return Program(
        inputs,
        tuple(owned.parameters.values()),
        tuple(owned.buffers.values()),
        constants,
        tuple(builder.ops),
        tuple(freeze(item) for item in returned),
        _output_names(tree),
        tree,
        builder.types,
        copied=frozenset(builder.copied),
        changes=tuple(builder.changes),
    )


@dataclass(frozen=True)
class _Owned:
    """The parameters and buffers of a module by their first names, and for every name all names of the same tensor."""

    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    parameter_names: Mapping[str, tuple[str, ...]]
    buffer_names: Mapping[str, tuple[str, ...]]


def _owned(module: nn.Module, exported: torch.export.ExportedProgram, gradients: bool) -> _Owned:
    parameter_names = _aliases(module.named_parameters(remove_duplicate=False))
    buffer_names = _aliases(module.named_buffers(remove_duplicate=False))
    parameters = {
        # In the dtype that it was traced in.
        name: Parameter(
            parameter_names[name], _type(exported.state_dict.get(name, item)), gradients and item.requires_grad
        )
        for name, item in module.named_parameters()
    }
    buffers = {name: Buffer(buffer_names[name], _type(buffer)) for name, buffer in module.named_buffers()}
    return _Owned(parameters, buffers, parameter_names, buffer_names)


def _placeholders(exported: torch.export.ExportedProgram) -> Iterator[tuple[torch.fx.Node, InputSpec]]:
    """The placeholders of a graph with their input specifications."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return zip(nodes, exported.graph_signature.input_specs, strict=True)


def _given_tensors(exported: torch.export.ExportedProgram, example: Inputs) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the trace that stand for those in `example`, by name."""
    nodes = [node for node, spec in _placeholders(exported) if spec.kind == InputKind.USER_INPUT]
    return [
        (name, node.meta["val"])
        for (name, leaf), node in zip(input_leaves(example), nodes, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]


@dataclass
class _Placeholders:
    """Reads the placeholders of a graph. `known` has what each stands for in the program; `inputs` and `constants` are
    those of the program."""

    module: nn.Module
    traced: Exported
    owned: _Owned
    builder: GraphWriter
    gradients: bool
    known: dict[torch.fx.Node, object] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self, node: torch.fx.Node, spec: InputSpec, leaves: Iterator[tuple[str, object]]) -> None:
        """Read one placeholder; `leaves` are the inputs by name, from the next one on.

        Raises CaptureError for one of a kind that a program does not have.
        """
        target = str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            self.known[node] = Ref(self.owned.parameter_names[target][0])
        elif spec.kind == InputKind.BUFFER:
            self.known[node] = Ref(self.owned.buffer_names[target][0])
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constant = self.traced.program.constants[target]
            _refuse_trainable(self.module, constant, self.gradients)
            self._refuse_traced(node, constant)
            if (layout := sparse_or_nested(constant)) is not None:
                line = next((line_of_node(user) for user in node.users), None)
                raise refusal(self.module, line, f"it computes with a {layout} tensor (hold a dense one)")
            self.known[node] = self._constant(f"{target} (constant)", constant)
        elif spec.kind == InputKind.USER_INPUT:
            self.known[node] = self._given(node, spec, *next(leaves))
        else:
            raise CaptureError(f"the model holds {spec.target!r}, an input of the kind {spec.kind.name}")

    def _refuse_traced(self, node: torch.fx.Node, constant: torch.Tensor) -> None:
        """Raise CaptureError for a tensor of another trace, which has no values, in a model that has some."""
        owned = [*self.module.parameters(), *self.module.buffers()]
        if isinstance(constant, FakeTensor) and not any(isinstance(tensor, FakeTensor) for tensor in owned):
            line = next((line_of_node(user) for user in node.users), None)
            raise refusal(
                self.module,
                line,
                f"it computes with a tensor of shape {list(constant.shape)} that an earlier trace left where the model "
                "keeps it for its next calls: compute it once, in the constructor, or hold it in a dict, a list or an "
                "attribute of a module",
            )

    def _constant(self, name: str, value: torch.Tensor) -> Ref:
        """A constant; equal ones are one, so that layers which make their own are alike."""
        for known, other in self.constants.items():
            if (
                (_type(other), other.device) == (_type(value), value.device)
                and not value.is_meta
                and other.equal(value)
            ):
                return Ref(known)
        self.constants[name] = value
        return Ref(name)

    def _given(self, node: torch.fx.Node, spec: InputSpec, name: str, leaf: object) -> object:
        """The input called `name`: a value, a constant of the plan, or an input of the program."""
        if isinstance(spec.arg, ConstantArgument) or not isinstance(leaf, torch.Tensor):
            return freeze(leaf)
        if name in self.traced.constants:
            return self._constant(given_name(name), self.traced.constants[name])
        taken = name in self.owned.parameter_names or name in self.owned.buffer_names
        inner = f"{name} (input)" if taken else name
        type = self.builder.type(node.meta["val"])
        self.inputs.append(Input(inner, name, type, self.gradients and leaf.requires_grad))
        return Ref(inner)


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _aliases(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """For every name all the names of the same tensor, in the module's order."""
    by_identity = grouped((id(tensor), name) for name, tensor in named)
    return {name: tuple(names) for names in by_identity.values() for name in names}


def _refuse_trainable(module: nn.Module, constant: torch.Tensor, gradients: bool) -> None:
    """Raise CaptureError for a tensor that a model trains, but does not register."""
    if gradients and constant.requires_grad:
        raise CaptureError(
            f"{module.__class__.__name__} computes with a trainable tensor of shape {list(constant.shape)} that is "
            "none of its parameters, so it would get no gradient: register it as a parameter, or detach it"
        )


def _output_names(tree: pytree.TreeSpec) -> tuple[str, ...]:
    """A name for every leaf of the output: "loss", "past_key_values[3]"."""

    def names(spec: pytree.TreeSpec, path: str) -> Iterator[str]:
        if spec.is_leaf():
            yield path
            return
        children = spec.children()
        keys = getattr(spec.context, "_fields", spec.context)
        keys = keys if isinstance(keys, (list, tuple)) else ()
        named = len(keys) == len(children) and all(isinstance(key, str) for key in keys)
        for index, child in enumerate(children):
            inner = f".{keys[index]}".lstrip("" if path else ".") if named else f"[{index}]"
            yield from names(child, path + inner)

    return tuple(names(tree, ""))
