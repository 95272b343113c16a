"""The program of a trace: its inputs, parameters, buffers and constants, and the names of its outputs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec

from passes._torch import pytree
from passes.capture.exporting import Exported
from passes.capture.graph import GraphWriter
from passes.capture.symbols import Symbols
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs, given_name, input_leaves
from passes.ir.program import Buffer, Input, Parameter, Program, Ref, TensorType, freeze


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
    persistent = set(module.state_dict(keep_vars=True))
    parameters = {
        # In the dtype that it was traced in.
        name: Parameter(
            parameter_names[name], _type(exported.state_dict.get(name, item)), gradients and item.requires_grad
        )
        for name, item in module.named_parameters()
    }
    buffers = {
        name: Buffer(buffer_names[name], _type(buffer), name in persistent) for name, buffer in module.named_buffers()
    }
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


class _Placeholders:
    """Reads the placeholders of a graph. `known` has what each stands for in the program; `inputs` and `constants` are
    those of the program."""

    def __init__(
        self, module: nn.Module, traced: Exported, owned: _Owned, builder: GraphWriter, gradients: bool
    ) -> None:
        self.module = module
        self.traced = traced
        self.owned = owned
        self.builder = builder
        self.gradients = gradients
        self.known: dict[torch.fx.Node, object] = {}
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}

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
            self.known[node] = self._constant(f"{target} (constant)", constant)
        elif spec.kind == InputKind.USER_INPUT:
            self.known[node] = self._given(node, spec, *next(leaves))
        else:
            raise CaptureError(f"the model holds {spec.target!r}, an input of the kind {spec.kind.name}")

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
    by_identity: dict[int, list[str]] = {}
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(name)
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
