"""Writes the ops of an exported graph, and of the graphs inside it, as ops of a program."""

import operator
import os
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from passes import ops
from passes._torch import HigherOrderOperator, OpOverload, schema_of, storage_id
from passes.capture.exporting import refusal
from passes.capture.functions import properties_of
from passes.capture.source import line_of_node, lines_of_node
from passes.capture.symbols import Symbols
from passes.ir.errors import CaptureError
from passes.ir.program import Argument, Op, Ref, StateChange, TensorType, bound_arguments, has_gradient, references


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
        if self.symbols.knows(node.meta.get("val")):
            return self.symbols.written(node.meta["val"])
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
        if changed is not None:
            return self.change(changed, target, arguments, node)
        value = node.meta.get("val")
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        results = []
        for item in values:
            if isinstance(item, torch.Tensor):
                name = self.name(schema_of(target).name.split("::")[1])
                self.types[name] = self.type(item)
                results.append(name)
            else:
                assert item is None, "a trace has no numbers that depend on data"
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
        """Note a change of a parameter that can be made to each of its parts, before anything is computed.

        Raises CaptureError for any other change of what was given to the model.
        """
        if name in self.inputs:
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
        """Write the graph inside `torch.no_grad()` in place; what it returns has no gradient."""
        if str(node.target) == "wrap_with_autocast" and args[2] is False:
            # There is no autocast around the model that it could switch off.
            inside, given = args[4], args[5:]
            assert isinstance(inside, torch.fx.GraphModule)
            places = [item for item in inside.graph.nodes if item.op == "placeholder"]
            return self.graph(inside, dict(zip(places, given, strict=True)))
        if str(node.target) == "wrap_with_autocast":
            inside = args[4]
            assert isinstance(inside, torch.fx.GraphModule)
            lines = [item for item in inside.graph.nodes if line_of_node(item) is not None]
            reason = "it enters autocast, which a plan does not keep (leave it out, and pass precision=)"
            raise self.refusal(lines[0] if lines else node, reason)
        if str(node.target) != "wrap_with_set_grad_enabled":
            raise self.refusal(node, f"{node.target} takes functions of tensors, for which there is no plan")
        enabled, inner, *operands = args
        assert isinstance(inner, torch.fx.GraphModule)
        placeholders = [item for item in inner.graph.nodes if item.op == "placeholder"]
        if not enabled:
            self.refuse_changes(inner, dict(zip(placeholders, operands, strict=True)))
        outputs = self.graph(inner, dict(zip(placeholders, operands, strict=True)))
        if enabled:
            return outputs
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
        return [detached(value) for value in outputs]

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
