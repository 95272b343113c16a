"""Calls as they stand in programs: traced, and each operator written in its one form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from passes.ir.arguments import Ref, freeze
from passes.ir.errors import CaptureError
from passes.ir.program import Input, Op, Program, TensorType
from passes.normalize.forms import canonical
from passes.normalize.in_place import functional
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample


def traced(function: Callable[..., object], tensors: Sequence[Tensor]) -> tuple[Program, dict[str, Tensor]]:
    """The program of `function(*tensors)`, every operator as it is called, in its one form; and its tensors by name."""
    graph = make_fx(function, pre_dispatch=True, tracing_mode="real")(*tensors).graph
    owner = graph.owning_module
    known: dict[torch.fx.Node, Any] = {}
    values: dict[str, Tensor] = {}
    inputs: list[Input] = []
    constants: dict[str, Tensor] = {}
    types: dict[str, TensorType] = {}
    ops: list[Op] = []
    waiting = iter(tensors)

    def named(name: str, tensor: Tensor) -> Ref:
        values[name], types[name] = tensor, type_of(tensor)
        return Ref(name)

    def concrete(argument: object) -> object:
        return pytree.tree_map(lambda leaf: values[leaf.name] if isinstance(leaf, Ref) else leaf, argument)

    outputs: tuple[Any, ...] = ()
    for node in graph.nodes:
        if node.op == "placeholder":
            tensor = next(waiting)
            inputs.append(Input(node.name, node.name, type_of(tensor), tensor.requires_grad))
            known[node] = named(node.name, tensor)
        elif node.op == "get_attr":
            constants[node.name] = getattr(owner, node.target)
            known[node] = named(node.name, constants[node.name])
        elif node.op == "output":
            leaves = pytree.tree_leaves(torch.fx.node.map_arg(node.args[0], lambda used: known[used]))
            outputs = tuple(leaf for leaf in leaves if isinstance(leaf, Ref))
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: known[used])
            if not isinstance(node.target, torch._ops.OpOverload):
                known[node] = node.target(*args, **kwargs)
                continue
            result = node.target(*concrete(args), **concrete(kwargs))  # type: ignore[misc,arg-type]
            leaves = pytree.tree_leaves(result)
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise CaptureError(f"{node.target} gives what is no tensor")
            names = tuple(f"%{node.name}" if not index else f"%{node.name}.{index}" for index in range(len(leaves)))
            references = [named(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
            known[node] = references[0] if isinstance(result, Tensor) else references
            schema = node.target._schema.arguments
            arguments = {
                item.name: freeze(args[index] if index < len(args) else kwargs.get(item.name, item.default_value))
                for index, item in enumerate(schema)
            }
            ops.append(Op(str(node.target), arguments, names))
    program = Program(
        tuple(inputs), (), (), constants, tuple(ops), outputs, tuple(f"{index}" for index in range(len(outputs))),
        pytree.tree_structure(tuple(map(str, outputs))), types,
    )  # fmt: skip
    given = dict(zip((item.name for item in inputs), tensors, strict=True))
    return canonical(functional(program)), {**constants, **given}


def type_of(tensor: Tensor) -> TensorType:
    """Shape and dtype."""
    return TensorType(tuple(tensor.shape), tensor.dtype)


def calls_in(program: Program, values: Mapping[str, Tensor], kind: str) -> Iterator[Sample]:
    """The calls of operators called `kind` in a program, with the values that they have when it runs on `values`."""
    known = dict(values)

    def concrete(argument: object) -> Any:
        if isinstance(argument, Ref):
            return known[argument.name]
        return [concrete(item) for item in argument] if isinstance(argument, tuple) else argument

    for op in program.ops:
        arguments = {name: concrete(value) for name, value in op.arguments.items()}
        keywords = {item.name for item in op.overload._schema.arguments if item.kwarg_only}
        call = Sample(
            op.target,
            tuple(value for name, value in arguments.items() if name not in keywords),
            {name: value for name, value in arguments.items() if name in keywords},
            random=torch.Tag.nondeterministic_seeded in op.overload.tags or "empty" in op.kind,
        )
        tensors = call.tensors
        if op.kind == kind and tensors and all(_plain(tensor) for tensor in tensors):
            fixed = frozenset(slot for slot, tensor in enumerate(tensors) if not tensor.requires_grad)
            arguments, options = pytree.tree_map_only(Tensor, torch.detach, (call.arguments, call.options))
            yield replace(call, arguments=arguments, options=options, fixed=fixed)
        if op is not program.ops[-1]:
            known.update(zip(op.results, call.run(tensors), strict=True))


def _plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_complex()


def normal_form(sample: Sample) -> list[Sample]:
    """A call as it stands in a program in normal form: nothing if it does not do so under its own name."""
    one = one_op(sample)
    values = {f"x{slot}": tensor for slot, tensor in enumerate(one.operands)}
    return list(calls_in(canonical(functional(one.folded.program)), values, sample.kind))


def differentiates(sample: Sample) -> bool:
    """Whether torch itself gives the gradients of a call: of some forms it does not."""
    one = one_op(sample)
    results = [tensor for tensor in one.results if tensor.requires_grad]
    operands = [tensor for tensor in one.operands if tensor.requires_grad]
    try:
        if results:
            torch.autograd.grad(results, operands, [torch.ones_like(tensor) for tensor in results], allow_unused=True)
    except RuntimeError:
        return False
    return True
