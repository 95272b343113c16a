"""Decompositions of ops without a sharding rule into ops with one, nearly all of them those of torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from passes._torch import FakeTensorMode, OpOverload, decomposition_table, is_composite, make_fx, pytree, schema_of
from passes.ir.arguments import Argument, Ref, bound_arguments, rename
from passes.ir.errors import CaptureError
from passes.ir.program import Input, Op, Program, TensorType
from passes.normalize.forms import canonical
from passes.normalize.in_place import functional
from passes.normalize.rewriter import Rewriter, concrete
from passes.rules import written_rule

_DEEPEST = 4

# Operators whose decomposition in torch differs from them: that of margins adds terms for each -1 after the labels, and
# that of embeddings does not scale gradients by the frequency of ids.
_DIFFERENT = frozenset({"embedding", "multilabel_margin_loss", "multilabel_margin_loss_forward"})


def _plus_product(
    product: Callable[[Tensor, Tensor], Tensor],
    added: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """`beta * added + alpha * product(first, second)`; with a beta of 0, `added` is not read."""
    found = product(first, second) if alpha == 1 else product(first, second) * alpha
    if beta == 0:
        return found
    return found + (added if beta == 1 else added * beta)


# Decompositions of our own: torch's bring half precision to single precision first, and multiply in it. Here the
# product is rounded before the sum.
_OWN: Mapping[str, Callable[..., Tensor]] = {
    "aten.baddbmm.default": partial(_plus_product, torch.bmm),
    "aten.addmv.default": partial(_plus_product, torch.mv),
}


def decomposed(program: Program) -> Program:
    """Decompose ops without a sharding rule, where all resulting ops have one; others stay whole.

    torch's own decompositions are used, but for those of `_OWN`, and their ops are written in canonical form.
    """
    rewriter = Rewriter(program)
    for original in program.ops:
        op = rewriter.current(original)
        parts = None
        if op.operands and written_rule(op, rewriter.types) is None:
            parts = _parts(op, rewriter.types)
        if parts is None:
            rewriter.ops.append(op)
            continue
        names: dict[str, Argument] = {item.name: Ref(item.argument) for item in parts.inputs}
        for part in parts.ops:
            results = tuple(rewriter.fresh(f"%{part.kind}_d") for _ in part.results)
            names.update(zip(part.results, map(Ref, results), strict=True))
            rewriter.types.update((new, parts.types[name]) for new, name in zip(results, part.results, strict=True))
            arguments = {key: _under(value, names) for key, value in part.arguments.items()}
            rewriter.ops.append(replace(op, target=part.target, arguments=arguments, results=results))
        rewriter.replaced.update((name, _under(value, names))
                                 for name, value in zip(op.results, parts.outputs, strict=True))  # fmt: skip
    return rewriter.finish()


def _under(argument: Argument, names: Mapping[str, Argument]) -> Argument:
    """`argument` with what it refers to under other names."""
    return rename(argument, lambda name: names.get(name, Ref(name)))


def _parts(op: Op, types: Mapping[str, TensorType]) -> Program | None:
    """The decomposition of `op`, as a program whose inputs are the operands; None if an op in it has no rule."""
    if torch.Tag.nondeterministic_seeded in op.overload.tags or op.kind in {"autograd_function", *_DIFFERENT}:
        # The operators of an autograd function have another backward.
        return None
    whole = _program(op, types)
    for _ in range(_DEEPEST):
        rewriter = Rewriter(whole)
        for number, part in enumerate(whole.ops):
            current = rewriter.current(part)
            if written_rule(current, rewriter.types) is not None or not current.operands:
                rewriter.ops.append(current)
                continue
            traced = _traced(current, rewriter.types, f"{len(whole.ops)}_{number}")
            if traced is None:
                return None
            inner, results, types_inside = traced
            rewriter.ops += inner
            rewriter.types.update(types_inside)
            rewriter.replaced.update(zip(current.results, results, strict=True))
        try:
            whole = canonical(functional(rewriter.finish()))
        except CaptureError:
            return None
        if all(written_rule(part, whole.types) is not None or not part.operands for part in whole.ops):
            return whole
    return None


def _program(op: Op, types: Mapping[str, TensorType]) -> Program:
    """`op` alone, as a program."""
    inputs = tuple(Input(f"operand {name}", name, types[name]) for name in dict.fromkeys(op.operands))
    names: dict[str, Argument] = {item.argument: Ref(item.name) for item in inputs}
    arguments = {key: _under(value, names) for key, value in op.arguments.items()}
    own = {item.name: item.type for item in inputs} | {name: types[name] for name in op.results}
    outputs = tuple(Ref(name) for name in op.results)
    tree = pytree.tree_structure(list(op.results))
    return Program(inputs, (), (), {}, (replace(op, arguments=arguments),), outputs, op.results, tree, own)


_Traced = tuple[list[Op], list[Argument], dict[str, TensorType]]


def _traced(op: Op, types: Mapping[str, TensorType], prefix: str) -> _Traced | None:
    """The ops that torch runs for `op`, what its results are among theirs, and their types."""
    names = list(dict.fromkeys(op.operands))

    def run(*tensors: torch.Tensor) -> object:
        given = dict(zip(names, tensors, strict=True))
        arguments = {key: concrete(value, given) for key, value in op.arguments.items()}
        schema = schema_of(op.overload).arguments
        positional = [arguments[item.name] for item in schema if not item.kwarg_only]
        return op.overload(*positional, **{item.name: arguments[item.name] for item in schema if item.kwarg_only})

    # Operators made of others come apart by themselves.
    decomposition = _OWN.get(op.target) or decomposition_table.get(op.overload)
    table = {} if decomposition is None else {op.overload: decomposition}
    with FakeTensorMode():
        fakes = [torch.empty(types[name].shape, dtype=types[name].dtype) for name in names]
        try:
            with torch.no_grad():
                graph = make_fx(run, decomposition_table=table)(*fakes)
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
        elif isinstance(node.target, OpOverload) and (
            (schema_of(node.target).is_mutable and not is_composite(op.overload)) or not schema_of(node.target).returns
        ):
            # torch often hides from autograd that an operator works in place inside, but for those that are made of
            # others. One without results is a check.
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
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda used: cast(torch.fx.node.Argument, known[used])
            )
            arguments = bound_arguments(node.target, args, kwargs)
            ops.append(Op(str(node.target), arguments, tuple(item.name for item in results), op.module,
                          op.module_class, op.line))  # fmt: skip
            known[node] = results if isinstance(value, (list, tuple)) else results[0]
    return None
