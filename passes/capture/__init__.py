"""capture: a module and the types of its inputs in, a program out. `torch.export` does the tracing.

`capture` traces for the sizes of the inputs, `capture_symbolic` for other sizes too.

The program is the training IR: `linear`, `scaled_dot_product_attention`, `layer_norm` and `cross_entropy_loss` stay
whole, and the backward is left to autograd. The module is left as it was.
"""

import contextlib
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind

from passes._torch import pytree
from passes.capture.exporting import Exported, export, possible_constants
from passes.capture.graph import GraphWriter
from passes.capture.setting import autograd_functions_written, example_of, mode_of, parameters_as, tensors_on
from passes.capture.symbols import Symbols
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs, given_name, input_leaves
from passes.ir.program import Buffer, Input, Parameter, Program, Ref, Symbolic, TensorType, freeze

CPU = torch.device("cpu")


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
    device: torch.device = CPU


def capture(module: nn.Module, inputs: Inputs, tracing: Tracing) -> Program:
    """Trace `module(**inputs)`.

    `inputs` are keyword arguments that hold the global batch; of tensors only shape, dtype, device type and
    `requires_grad` matter, other values become part of the program. So do whole numbers in tensors whose values the
    module needs while it is traced: these are no inputs of the program.

    Raises CaptureError where the module cannot be traced, or where the trace would not have its gradients.
    """
    exported, example = _traced(module, inputs, tracing, frozenset())
    return _program(module, exported, example, tracing.gradients, Symbols())


def capture_symbolic(module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]) -> Symbolic:
    """Trace `module(**inputs)` so that the dims `varying` (by input and number) of the inputs may have other sizes.

    A dim of which the trace needs the size is as it is in `inputs`. Raises CaptureError as `capture` does.
    """
    exported, example = _traced(module, inputs, tracing, varying)
    symbols = Symbols()
    program = _program(module, exported, example, tracing.gradients, symbols)
    return Symbolic(program, symbols.ranges(exported.program), symbols.conditions(program))


def _traced(
    module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]
) -> tuple[Exported, Inputs]:
    """What `torch.export` makes of the module, and the inputs that it was shown."""
    stack = contextlib.ExitStack()
    with stack:
        stack.enter_context(mode_of(module, tracing.training))
        stack.enter_context(autograd_functions_written(tracing.gradients))
        stack.enter_context(tracing.context)
        stack.enter_context(tensors_on(module, tracing.device))
        if tracing.dtype is not None:
            stack.enter_context(parameters_as(module, tracing.dtype))
        example = example_of(module, inputs, tracing.dtype)
        return export(module, example, possible_constants(inputs), varying), example


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _aliases(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """For every name all the names of the same tensor, in the module's order."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_identity.values() for name in names}


def _program(module: nn.Module, traced: Exported, example: Inputs, gradients: bool, symbols: Symbols) -> Program:
    exported = traced.program
    builder = GraphWriter(module, symbols)
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
            _refuse_trainable(module, constants[inner], gradients)
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
