"""capture: a module and the types of its inputs in, a program out. `torch.export` does the tracing.

`capture` traces for the sizes of the inputs, `capture_symbolic` for other sizes too.

The program is the training IR: `linear`, `scaled_dot_product_attention`, `layer_norm` and `cross_entropy_loss` stay
whole, and the backward is left to autograd. The module is left as it was.
"""

import contextlib
import operator
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast
from unittest import mock

import sympy
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from passes import ops
from passes.exporting import Exported, export, possible_constants, refusal
from passes.functions import known_of
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs, given_name, input_leaves
from passes.ir.program import (
    Argument,
    Buffer,
    Change,
    Input,
    Op,
    Parameter,
    Program,
    Ref,
    Symbolic,
    TensorType,
    freeze,
    has_gradient,
    references,
)
from passes.ir.sizes import as_number
from passes.source import line_of_node, lines_of_node


@dataclass(frozen=True)
class Tracing:
    """How to trace.

    `training` is the mode of the module, `gradients` whether there will be a backward pass; `context` is entered around
    it; with `dtype` parameters and floating inputs are taken to be of that dtype. A module on meta is traced as if it
    were on `device`.
    """

    training: bool
    gradients: bool
    context: AbstractContextManager[object]
    dtype: torch.dtype | None = None
    device: torch.device | None = None


def capture(module: nn.Module, inputs: Inputs, tracing: Tracing) -> Program:
    """Trace `module(**inputs)`.

    `inputs` are keyword arguments that hold the global batch; of tensors only shape, dtype, device type and
    `requires_grad` matter, other values become part of the program. So do whole numbers in tensors whose values the
    module needs while it is traced: these are no inputs of the program.

    Raises CaptureError where the module cannot be traced, or where the trace would not have its gradients.
    """
    exported, example = _traced(module, inputs, tracing, frozenset())
    return _program(module, exported, example, tracing.gradients, _Symbols())


def capture_symbolic(module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]) -> Symbolic:
    """Trace `module(**inputs)` so that the dims `varying` (by input and number) of the inputs may have other sizes.

    A dim of which the trace needs the size is as it is in `inputs`. Raises CaptureError as `capture` does.
    """
    exported, example = _traced(module, inputs, tracing, varying)
    symbols = _Symbols()
    program = _program(module, exported, example, tracing.gradients, symbols)
    return Symbolic(program, symbols.ranges(exported.program), symbols.conditions(program))


def _traced(
    module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]
) -> tuple[Exported, Inputs]:
    """What `torch.export` makes of the module, and the inputs that it was shown."""
    stack = contextlib.ExitStack()
    with stack:
        stack.enter_context(_mode(module, tracing.training))
        stack.enter_context(_autograd_functions_written(tracing.gradients))
        stack.enter_context(tracing.context)
        if tracing.device is not None:
            stack.enter_context(_tensors_on(module, tracing.device))
        if tracing.dtype is not None:
            stack.enter_context(_parameters_as(module, tracing.dtype))
        example = _example(module, inputs, tracing.dtype)
        return export(module, example, possible_constants(inputs), varying), example


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put every part of `module` into one mode, without gradient checkpointing; afterwards as it was."""
    modes = [(part, part.training) for part in module.modules()]
    checkpointed = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    try:
        module.train(training)
        for part in checkpointed:
            part.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part in checkpointed:
            part.gradient_checkpointing = True  # type: ignore[assignment]


@contextlib.contextmanager
def _autograd_functions_written(gradients: bool) -> Iterator[None]:
    """Calls of custom `autograd.Function`s become operators. `torch.export` itself would keep only their forward: with
    `gradients` their gradients would be silently wrong."""
    original = torch.autograd.Function.apply

    def apply(cls: ops.Function, /, *args: object, **kwargs: object) -> object:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            raise CaptureError(
                f"{_calling_line()} checkpoints reentrantly, which a trace does not keep: pass use_reentrant=False"
            )
        if not gradients or ops.is_within() or cls.__module__.split(".")[0] == "torch":
            return original.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
        try:
            return _as_operator(cls, args, kwargs)
        except CaptureError as error:
            raise CaptureError(f"{_calling_line()}: {error}") from None

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _as_operator(cls: ops.Function, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """What a function returns, by way of the operator that stands for it in a graph."""
    call = ops.written(cls, args, kwargs)
    versions = [tensor._version for tensor in call.tensors]
    with ops.results_noted() as noted:
        results = iter(ops.TRACED(call.tensors, call.function, call.arguments, sizes=call.sizes))
    if versions != [tensor._version for tensor in call.tensors]:
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} changes a tensor that it is given: write it without in-place"
        )
    returned = noted[-1]
    if not isinstance(returned, tuple):
        return next(results)
    return tuple(next(results) if isinstance(item, torch.Tensor) else item for item in returned)


def _calling_line() -> str:
    """The line of the model that is being traced."""
    frames = [frame for frame in traceback.extract_stack() if _is_models(frame)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "the model"


def _is_models(frame: traceback.FrameSummary) -> bool:
    """Whether a line of a traceback is not torch's or ours."""
    return "/torch/" not in frame.filename and not frame.filename.startswith("<") and frame.filename != __file__


@contextlib.contextmanager
def _tensors_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters and buffers stand as tensors on `device` that take no memory; afterwards as they were.

    On meta itself a trace would go the ways that models have for devices other than `device`.
    """
    fakes: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, nn.Parameter | None] | dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    mode = FakeTensorMode()
    try:
        for part in module.modules():
            for holder in (part._parameters, part._buffers):
                for name, tensor in holder.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        with mode:
                            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    undo.append((holder, name, tensor))
        for holder, name, tensor in undo:
            holder[name] = fakes[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for holder, name, tensor in undo:
            holder[name] = tensor  # type: ignore[assignment]


@contextlib.contextmanager
def _parameters_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Floating parameters and buffers stand as empty tensors of `dtype`; afterwards as they were."""
    replaced: dict[int, nn.Parameter] = {}
    undo: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    if id(parameter) not in replaced:
                        cast = torch.empty_like(parameter, dtype=dtype, device=parameter.device)
                        replaced[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
                    undo.append((part._parameters, name, parameter))
        for holder, name, parameter in undo:
            holder[name] = replaced[id(parameter)]
        yield
    finally:
        for holder, name, parameter in undo:
            holder[name] = parameter


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _example(module: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Fresh tensors like `inputs`, on the module's device: two inputs that are one tensor stay two inputs."""
    device = _device(module)

    def fresh(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        floating = leaf.is_floating_point() and dtype is not None
        kept = dtype if floating else leaf.dtype
        return torch.empty(leaf.shape, dtype=kept, device=device, requires_grad=leaf.requires_grad)

    example: Inputs = pytree.tree_map(fresh, dict(inputs))
    return example


_SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool


class _Symbols:
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
        """What each symbol may be at least and at most."""
        found = {}
        for symbol, name in self.named.items():
            allowed = exported.range_constraints[symbol]
            most = int(allowed.upper) if allowed.upper.is_Integer else None
            found[str(name)] = (int(allowed.lower), most)
        return found

    def conditions(self, program: Program) -> tuple[object, ...]:
        """What the trace took for granted, and what the model asserts, as conditions on the named symbols."""
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


class _Builder:
    """Writes the ops of one exported graph and of the graphs inside it."""

    def __init__(self, module: nn.Module, symbols: _Symbols) -> None:
        self.module = module
        self.symbols = symbols
        self.ops: list[Op] = []
        self.types: dict[str, TensorType] = {}
        self.taken: dict[str, int] = {}
        self.copied: set[str] = set()
        self.changes: list[Change] = []
        self.parameters: set[str] = set()
        self.inputs: set[str] = set()
        # What shares the memory of what: a result, and the operand that it is a view of.
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
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.higher_order(node, args)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise self.refusal(node, f"{node.target} is no operator on tensors")
        return self.write(node.target, args, kwargs, node)

    def write(
        self, target: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object], node: torch.fx.Node
    ) -> object:
        """Append an op whose results have the types that tracing found."""
        arguments: dict[str, Argument] = {}
        for position, parameter in enumerate(target._schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(parameter.name, parameter.default_value)
            arguments[parameter.name] = freeze(given)
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
                name = self.name(target._schema.name.split("::")[1])
                self.types[name] = self.type(item)
                results.append(name)
            else:
                assert item is None, "a trace has no numbers that depend on data"
        if _copies(target, node):
            self.copied.update(results)
        else:
            viewed = [arguments[item.name] for item in target._schema.arguments if item.alias_info is not None]
            self.viewed.update({name: item.name for item in viewed if isinstance(item, Ref) for name in results})
        module, module_class = _module(node)
        self.ops.append(Op(str(target), arguments, tuple(results), module, module_class, _source(node)))
        made = [Ref(name) for name in results]
        return made if isinstance(value, (list, tuple)) else (made[0] if made else None)

    def refusal(self, node: torch.fx.Node, reason: str) -> CaptureError:
        """The error for a module in which `node` stands."""
        return refusal(self.module, line_of_node(node), reason)

    def changed(self, target: torch._ops.OpOverload, arguments: Mapping[str, Argument]) -> str | None:
        """The input or parameter that an op changes in place."""
        for parameter in target._schema.arguments:
            argument = arguments[parameter.name]
            if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(argument, Ref):
                name = argument.name
                while name in self.viewed:
                    name = self.viewed[name]
                return name if name in self.inputs or name in self.parameters else None
        return None

    def change(
        self, name: str, target: torch._ops.OpOverload, arguments: Mapping[str, Argument], node: torch.fx.Node
    ) -> object:
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
        self.changes.append(Change(name, str(target), dict(others)))
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
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            for position, parameter in enumerate(node.target._schema.arguments):
                written = parameter.alias_info is not None and parameter.alias_info.is_write
                changed = known.get(node.args[position]) if written and position < len(node.args) else None
                if isinstance(changed, Ref) and changed.name.startswith("%"):
                    raise self.refusal(
                        node,
                        "it changes a tensor in place under no_grad, which a trace cannot keep apart from a change "
                        "with gradient (write it without in-place, or on a buffer)",
                    )


def _known_function(node: torch.fx.Node, arguments: dict[str, Argument]) -> torch._ops.OpOverload:
    """Put what is known of an autograd function into the arguments of its call; returns the overload to call."""
    operands = [item.meta["val"] for item in cast(Sequence[torch.fx.Node], node.args[0])]
    types = tuple(TensorType(tuple(map(_hint, operand.shape)), operand.dtype) for operand in operands)
    sizes = tuple(_hint(item.meta["val"]) for item in cast(Sequence[torch.fx.Node], node.kwargs.get("sizes", ())))
    try:
        known = known_of(str(arguments["function"]), str(arguments["arguments"]), types, sizes)
    except CaptureError as error:
        where = _source(node)
        raise CaptureError(f"{where}: {error}" if where else str(error)) from error
    arguments.update(pointwise=known.pointwise, linear=known.linear)
    return ops.overload_for(len(node.meta["val"]), drawn=known.drawn)


def _hint(size: object) -> int:
    """A size, or of one that varies what it is in the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else cast(int, size)


def _copies(target: torch._ops.OpOverload, node: torch.fx.Node) -> bool:
    """Whether an op that may or may not share memory with its operand gave a copy of it."""
    if not target._schema.arguments or target._schema.arguments[0].alias_info is None or not node.args:
        return False
    operand, result = node.args[0], node.meta.get("val")
    before = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    if not isinstance(before, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return bool(before.untyped_storage()._cdata != result.untyped_storage()._cdata)


def _known(argument: torch.fx.node.Argument, known: Mapping[torch.fx.Node, object]) -> object:
    """An argument of a node with the nodes in it replaced by what they are known as."""
    return torch.fx.node.map_arg(argument, lambda used: cast(torch.fx.node.Argument, known[used]))


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


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


def _aliases(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """For every name all the names of the same tensor, in the module's order."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_identity.values() for name in names}


def _program(module: nn.Module, traced: Exported, example: Inputs, gradients: bool, symbols: _Symbols) -> Program:
    exported = traced.program
    builder = _Builder(module, symbols)
    types = builder.types
    parameter_names = _aliases(module.named_parameters(remove_duplicate=False))
    buffer_names = _aliases(module.named_buffers(remove_duplicate=False))
    persistent = set(module.state_dict(keep_vars=True))
    parameters = {
        names[0]: Parameter(names, _type(parameter), gradients and parameter.requires_grad)
        for name, parameter in _traced_parameters(module, exported)
        if (names := parameter_names[name])
    }
    buffers = {
        names[0]: Buffer(names, _type(buffer), names[0] in persistent)
        for name, buffer in module.named_buffers()
        if (names := buffer_names[name])
    }
    constants: dict[str, torch.Tensor] = {}
    leaves = iter(input_leaves(example))
    inputs: list[Input] = []
    known: dict[torch.fx.Node, object] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    user_inputs = [
        node
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True)
        if spec.kind == InputKind.USER_INPUT
    ]
    given_tensors = [
        (name, node.meta["val"])
        for (name, leaf), node in zip(input_leaves(example), user_inputs, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    symbols.name(given_tensors)
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.PARAMETER:
            known[node] = Ref(parameter_names[str(spec.target)][0])
        elif spec.kind == InputKind.BUFFER:
            known[node] = Ref(buffer_names[str(spec.target)][0])
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            inner = f"{spec.target} (constant)"
            constants[inner] = exported.constants[str(spec.target)]
            known[node] = Ref(inner)
        elif spec.kind == InputKind.USER_INPUT:
            name, leaf = next(leaves)
            if isinstance(spec.arg, ConstantArgument) or not isinstance(leaf, torch.Tensor):
                known[node] = freeze(leaf)
            elif name in traced.constants:
                inner = given_name(name)
                constants[inner] = traced.constants[name]
                known[node] = Ref(inner)
            else:
                inner = f"{name} (input)" if name in parameter_names or name in buffer_names else name
                type = builder.type(node.meta["val"])
                inputs.append(Input(inner, name, type, gradients and leaf.requires_grad))
                known[node] = Ref(inner)
        else:
            raise CaptureError(f"the model holds {spec.target!r}, an input of the kind {spec.kind.name}")
    given: tuple[Parameter | Buffer | Input, ...] = (*parameters.values(), *buffers.values(), *inputs)
    for item in given:
        types[item.name] = item.type
    types.update({name: _type(constant) for name, constant in constants.items()})
    builder.parameters, builder.inputs = set(parameters), {item.name for item in inputs}
    returned = builder.graph(exported.graph_module, known)
    assert isinstance(returned, (list, tuple))
    tree = exported.module_call_graph[0].signature.out_spec
    outputs = tuple(freeze(item) for item in returned)
    return Program(
        tuple(inputs),
        tuple(parameters.values()),
        tuple(buffers.values()),
        constants,
        tuple(builder.ops),
        outputs,
        _output_names(tree),
        tree,
        types,
        copied=frozenset(builder.copied),
        changes=tuple(builder.changes),
    )


def _traced_parameters(module: nn.Module, exported: torch.export.ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters in the dtype that they were traced in."""
    for name, parameter in module.named_parameters():
        yield name, exported.state_dict.get(name, parameter)


def _output_names(tree: pytree.TreeSpec) -> tuple[str, ...]:
    """A name for every leaf of the output: "loss", "past_key_values[3]"."""

    def names(spec: pytree.TreeSpec, path: str) -> Iterator[str]:
        if spec.is_leaf():
            yield path
            return
        children = spec.children()
        keys = spec.context if isinstance(spec.context, (list, tuple)) else ()
        named = len(keys) == len(children) and all(isinstance(key, str) for key in keys)
        for index, child in enumerate(children):
            inner = f".{keys[index]}".lstrip("" if path else ".") if named else f"[{index}]"
            yield from names(child, path + inner)

    return tuple(names(tree, ""))
