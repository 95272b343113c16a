"""Decompositions of ops without a sharding rule into ops with one, by torch's own decompositions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import cast

import torch

from passes._torch import FakeTensorMode, OpOverload, decomposition_table, make_fx, pytree, schema_of
from passes.ir.program import Argument, Input, Op, Program, Ref, TensorType, freeze, references, rename

# Whether an op has a sharding rule, given the types of its tensors.
Known = Callable[[Op, Mapping[str, TensorType]], bool]

_DEEPEST = 4


def decomposed(program: Program, known: Known, canonical: Callable[[Program], Program]) -> Program:
    """Decompose ops that are not `known`, where all resulting ops are known; others stay whole.

    torch's own decompositions are used; `canonical` writes their ops in normal form.
    """
    ops: list[Op] = []
    types = dict(program.types)
    replaced: dict[str, Argument] = {}
    count = 0
    for original in program.ops:
        op = replace(original, arguments={key: _under(value, replaced)
                                          for key, value in original.arguments.items()})  # fmt: skip
        parts = None if known(op, types) or not op.operands else _parts(op, types, known, canonical)
        if parts is None:
            ops.append(op)
            continue
        names: dict[str, Argument] = {item.name: Ref(item.argument) for item in parts.inputs}
        for part in parts.ops:
            results = []
            for name in part.results:
                results.append(f"%{part.kind}_d{count}")
                count += 1
                names[name] = Ref(results[-1])
                types[results[-1]] = parts.types[name]
            arguments = {key: _under(value, names) for key, value in part.arguments.items()}
            ops.append(replace(op, target=part.target, arguments=arguments, results=tuple(results)))
        for result, value in zip(op.results, parts.outputs, strict=True):
            replaced[result] = _under(value, names)
    if not replaced:
        return program

    def follow(value: Argument) -> Argument:
        return _under(value, replaced)

    updates = tuple(
        replace(update, value=next(references(follow(Ref(update.value))))) for update in program.updates
    )  # fmt: skip
    outputs = tuple(follow(value) for value in program.outputs)
    return replace(program, ops=tuple(ops), types=types, outputs=outputs, updates=updates)


def _under(argument: Argument, names: Mapping[str, Argument]) -> Argument:
    """`argument` with what it refers to under other names."""
    return rename(argument, lambda name: names.get(name, Ref(name)))


def _parts(
    op: Op, types: Mapping[str, TensorType], known: Known, canonical: Callable[[Program], Program]
) -> Program | None:
    """The decomposition of `op`, as a program whose inputs are the operands; None if an op in it is not known."""
    if torch.Tag.nondeterministic_seeded in op.overload.tags or op.kind == "autograd_function":
        # The operators of an autograd function have another backward.
        return None
    whole = _program(op, types)
    for _ in range(_DEEPEST):
        ops: list[Op] = []
        found = dict(whole.types)
        replaced: dict[str, Argument] = {}
        for number, part in enumerate(whole.ops):
            current = replace(part, arguments={key: _under(value, replaced)
                                               for key, value in part.arguments.items()})  # fmt: skip
            if known(current, found) or not current.operands:
                ops.append(current)
                continue
            traced = _traced(current, found, f"{len(whole.ops)}_{number}")
            if traced is None:
                return None
            inner, results, inner_types = traced
            ops += inner
            found.update(inner_types)
            replaced.update(zip(current.results, results, strict=True))
        outputs = tuple(_under(value, replaced) for value in whole.outputs)
        whole = canonical(replace(whole, ops=tuple(ops), types=found, outputs=outputs))
        if all(known(part, whole.types) or not part.operands for part in whole.ops):
            return whole
    return None


def _program(op: Op, types: Mapping[str, TensorType]) -> Program:
    """`op` alone, as a program."""
    operands = dict.fromkeys(op.operands)
    inputs = tuple(Input(f"operand {name}", name, types[name]) for name in operands)
    names: dict[str, Argument] = {item.argument: Ref(item.name) for item in inputs}
    arguments = {key: _under(value, names) for key, value in op.arguments.items()}
    own = {item.name: item.type for item in inputs}
    own.update({name: types[name] for name in op.results})
    outputs = tuple(Ref(name) for name in op.results)
    tree = pytree.tree_structure(list(op.results))
    return Program(inputs, (), (), {}, (replace(op, arguments=arguments),), outputs, op.results, tree, own)


_Traced = tuple[list[Op], list[Argument], dict[str, TensorType]]


def _traced(op: Op, types: Mapping[str, TensorType], prefix: str) -> _Traced | None:
    """The ops that torch runs for `op`, what its results are among theirs, and their types."""
    names = list(dict.fromkeys(op.operands))

    def run(*tensors: torch.Tensor) -> object:
        given = dict(zip(names, tensors, strict=True))
        arguments = {key: _filled(value, given) for key, value in op.arguments.items()}
        schema = schema_of(op.overload).arguments
        positional = [arguments[item.name] for item in schema if not item.kwarg_only]
        return op.overload(*positional, **{item.name: arguments[item.name] for item in schema if item.kwarg_only})

    with FakeTensorMode():
        fakes = [torch.empty(types[name].shape, dtype=types[name].dtype) for name in names]
        try:
            with torch.no_grad():
                graph = make_fx(run, decomposition_table=_table(op.overload))(*fakes)
        except Exception:
            # Whatever it is that keeps torch from taking it apart: it stays whole.
            return None
    known: dict[torch.fx.Node, object] = {}
    ops: list[Op] = []
    found: dict[str, TensorType] = {}
    inputs = iter(names)
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "placeholder":
            known[node] = Ref(next(inputs))
        elif node.op == "output":
            results = node.args[0]
            returned = results if isinstance(results, (list, tuple)) else [results]
            return ops, [cast(Argument, known[item]) for item in returned if isinstance(item, torch.fx.Node)], found
        elif node.op != "call_function":
            return None
        elif isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            # What torch does in place within an operator it often hides from autograd.
            return None
        elif not isinstance(node.target, OpOverload):
            sequence, index = node.args
            known[node] = cast("list[Ref]", known[cast(torch.fx.Node, sequence)])[cast(int, index)]
        elif node.target is op.overload and len(ops) == 0 and [*known.values()] == [Ref(name) for name in names]:
            return None
        else:
            value = node.meta["val"]
            results = []
            for index, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                name = f"%part_{prefix}_{number}_{index}"
                found[name] = TensorType(tuple(tensor.shape), tensor.dtype)
                results.append(Ref(name))
            arguments: dict[str, Argument] = {}
            for position, item in enumerate(schema_of(node.target).arguments):
                given = node.args[position] if position < len(node.args) else node.kwargs.get(
                    item.name, item.default_value)  # fmt: skip
                arguments[item.name] = freeze(
                    torch.fx.node.map_arg(given, lambda used: cast(torch.fx.node.Argument, known[used]))
                )
            ops.append(Op(str(node.target), arguments, tuple(item.name for item in results), op.module,
                          op.module_class, op.line))  # fmt: skip
            known[node] = results if isinstance(value, (list, tuple)) else results[0]
    return None


def _filled(argument: Argument, given: Mapping[str, torch.Tensor]) -> object:
    if isinstance(argument, Ref):
        return given[argument.name]
    if isinstance(argument, tuple):
        return [_filled(item, given) for item in argument]
    return argument


@cache
def _table(overload: OpOverload) -> dict[OpOverload, Callable[..., object]]:
    """The decomposition of one operator, if torch has one; operators made of others come apart by themselves."""
    return {overload: decomposition_table[overload]} if overload in decomposition_table else {}
