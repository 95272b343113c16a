"""normalize: a traced program in, the same function in normal form out.

Normal form: no assertions, no in-place ops, no ops that do nothing, no op that only repacks another one's results;
every size is written out, views are `reshape`, casts are `to.dtype`, splits are slices, a mean loss is a sum and a
count. What nothing uses is gone. Every op has its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import cast

import torch

from passes.ir.errors import CaptureError
from passes.ir.program import (
    Argument,
    Buffer,
    Input,
    Op,
    Parameter,
    Program,
    Ref,
    TensorType,
    Update,
    find_overload,
    flow,
    references,
    rename,
)


def normalize(program: Program) -> Program:
    """The program in normal form.

    Raises CaptureError for dropout that is switched on, for changes of the model's inputs, and for in-place changes
    of tensors that are seen through other views.
    """
    program = functional(program)
    program = canonical(program)
    program = without_unused(program)
    return with_keys(program)


class Rewriter:
    """Copies the ops of a program one after the other; what a result is replaced by is followed from then on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.types = dict(program.types)
        self.ops: list[Op] = []
        self.replaced: dict[str, Argument] = {}
        self.count = 0

    def follow(self, argument: Argument) -> Argument:
        """`argument` with the replacements made so far."""
        return rename(argument, lambda name: self.replaced.get(name, Ref(name)))

    def current(self, op: Op) -> Op:
        """`op` with the replacements made so far."""
        return replace(op, arguments={name: self.follow(value) for name, value in op.arguments.items()})

    def type(self, argument: Argument) -> TensorType:
        """The type of a referred tensor."""
        assert isinstance(argument, Ref)
        return self.types[argument.name]

    def keep(self, op: Op) -> None:
        """Write `op` as it is."""
        self.ops.append(op)

    def write(self, like: Op, target: str, type: TensorType, /, *args: Argument, **kwargs: Argument) -> Ref:
        """Write a new op where `like` stands, with one result of `type`."""
        schema = find_overload(target)._schema.arguments
        arguments: dict[str, Argument] = {}
        for position, parameter in enumerate(schema):
            if position < len(args):
                arguments[parameter.name] = args[position]
            elif parameter.name in kwargs:
                arguments[parameter.name] = kwargs[parameter.name]
            else:
                arguments[parameter.name] = cast(Argument, parameter.default_value)
        name = f"%{target.split('.')[1]}_n{self.count}"
        self.count += 1
        self.types[name] = type
        self.ops.append(replace(like, target=target, arguments=arguments, results=(name,)))
        return Ref(name)

    def finish(self, updates: tuple[Update, ...] | None = None) -> Program:
        """The rewritten program."""
        kept = self.program.updates if updates is None else updates
        return replace(
            self.program,
            ops=tuple(self.ops),
            types=self.types,
            outputs=tuple(self.follow(value) for value in self.program.outputs),
            updates=tuple(Update(update.buffer, next(references(self.follow(Ref(update.value))))) for update in kept),
        )


# --- no in-place ops ---------------------------------------------------------------------------------------------


def functional(program: Program) -> Program:
    """Replace every in-place op by one that gives a new tensor; buffers that change are the program's updates."""
    rewriter = Rewriter(program)
    buffers = {buffer.name for buffer in program.buffers}
    inputs = {item.name for item in program.inputs}
    parameters = {item.name for item in program.parameters}
    last_use = {name: position for position, op in enumerate(program.ops) for name in op.operands}
    last_use.update(dict.fromkeys((name for value in program.outputs for name in references(value)), len(program.ops)))
    base: dict[str, str] = {}
    same: dict[str, str] = {}
    changed: dict[str, str] = {}
    for position, original in enumerate(program.ops):
        op = rewriter.current(original)
        if original.kind.startswith(("_assert", "sym_constrain")):
            continue
        if op.kind == "batch_norm" and op.arguments["training"] and op.arguments["running_mean"] is not None:
            _batch_norm(rewriter, op, original, changed)
            continue
        written = [
            (argument.name, op.arguments[argument.name])
            for argument in op.overload._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written:
            rewriter.keep(op)
            aliased = [argument for argument in op.overload._schema.arguments if argument.alias_info is not None]
            for argument in aliased:
                for name in references(original.arguments[argument.name]):
                    owner = same.get(name, name)
                    base.update(dict.fromkeys(original.results, base.get(owner, owner)))
            continue
        target = next(references(original.arguments[written[0][0]]))
        target = same.get(target, target)
        root = base.get(target, target)
        if root in inputs or root in parameters:
            kind = "input" if root in inputs else "parameter"
            raise CaptureError(f"{op.kind} at {op.line} changes the {kind} {root!r} in place: work on a copy of it")
        others = {name for name, owner in base.items() if owner == root} | {root}
        seen = [name for name in others - {target} if last_use.get(name, -1) > position]
        if seen or (target != root and root in buffers):
            raise CaptureError(
                f"{op.kind} at {op.line} changes a view of a tensor that is used elsewhere: write it without in-place"
            )
        value = _out_of_place(rewriter, op)
        # The op's result is the target itself, under one more name.
        same.update(dict.fromkeys(original.results, target))
        for name in (target, *(alias for alias, owner in same.items() if owner == target)):
            rewriter.replaced[name] = value
        if target in buffers:
            changed[target] = value.name
    return rewriter.finish(tuple(Update(buffer, value) for buffer, value in changed.items()))


def _out_of_place(rewriter: Rewriter, op: Op) -> Ref:
    """Write what an in-place op computes as a new tensor."""
    type = rewriter.types[op.results[0]]
    if op.kind == "copy_":
        source = op.arguments["src"]
        given = rewriter.type(source)
        if given.dtype != type.dtype:
            given = TensorType(given.shape, type.dtype)
            source = rewriter.write(op, "aten.to.dtype", given, source, type.dtype)
        if given.shape != type.shape:
            source = rewriter.write(op, "aten.expand.default", type, source, type.shape)
        assert isinstance(source, Ref)
        return source
    namespace, name, overload = op.target.split(".")
    target = f"{namespace}.{name.rstrip('_')}.{overload}"
    try:
        find_overload(target)
    except AttributeError:
        raise CaptureError(f"{op.kind} at {op.line} works in place and has no other form: write it without") from None
    return rewriter.write(op, target, type, **dict(op.arguments))


def _batch_norm(rewriter: Rewriter, op: Op, original: Op, changed: dict[str, str]) -> None:
    """Batch statistics, and the running ones as updates of their buffers."""
    arguments = op.arguments
    channels = rewriter.type(arguments["running_mean"])
    results = tuple(f"{op.results[0]}{suffix}" for suffix in ("", "_mean", "_invstd", "_running_mean", "_running_var"))
    for name in results[1:]:
        rewriter.types[name] = channels
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    target = "aten._native_batch_norm_legit_functional.default"
    rewriter.keep(replace(op, target=target, arguments={name: arguments[name] for name in names}, results=results))
    for position, statistic in enumerate(("running_mean", "running_var"), start=3):
        buffer = next(references(original.arguments[statistic]))
        changed[buffer] = results[position]
        rewriter.replaced[buffer] = Ref(results[position])


# --- one way to write each thing ---------------------------------------------------------------------------------

Rewrite = Callable[[Rewriter, Op], Argument]


def canonical(program: Program) -> Program:
    """Write every op in its one form; drop those that do nothing."""
    rewriter = Rewriter(program)
    differentiable = gradients(program)
    for original in program.ops:
        op = rewriter.current(original)
        if op.kind == "detach" and not any(name in differentiable for name in original.operands):
            rewriter.replaced[op.results[0]] = op.arguments["self"]
            continue
        rewrite = _REWRITES.get(op.kind)
        value = rewrite(rewriter, op) if rewrite else _KEEP
        if value is _KEEP:
            rewriter.keep(op)
        elif len(op.results) == 1:
            rewriter.replaced[op.results[0]] = value
        else:
            assert isinstance(value, tuple)
            rewriter.replaced.update(zip(op.results, value, strict=True))
    return rewriter.finish()


_KEEP: Argument = "<keep>"


def _only(op: Op) -> Argument:
    """The tensor that a one-operand op reads."""
    return op.arguments.get("self", op.arguments.get("input"))


def _size(value: Argument) -> int:
    assert isinstance(value, int)
    return value


def _same(rewriter: Rewriter, op: Op) -> Argument:
    return _only(op)


def _cast(rewriter: Rewriter, op: Op) -> Argument:
    source, type = _only(op), rewriter.types[op.results[0]]
    if rewriter.type(source) == type:
        return source
    return rewriter.write(op, "aten.to.dtype", type, source, type.dtype)


def _reshape(rewriter: Rewriter, op: Op) -> Argument:
    source, type = _only(op), rewriter.types[op.results[0]]
    if rewriter.type(source) == type:
        return source
    return rewriter.write(op, "aten.reshape.default", type, source, type.shape)


def _expand(rewriter: Rewriter, op: Op) -> Argument:
    source, type = _only(op), rewriter.types[op.results[0]]
    if rewriter.type(source) == type:
        return source
    return rewriter.write(op, "aten.expand.default", type, source, type.shape)


def _dropout(rewriter: Rewriter, op: Op) -> Argument:
    if op.arguments["train"] and op.arguments["p"]:
        raise CaptureError(
            f"{op.module or 'the model'} ({op.line}) uses dropout with p = {op.arguments['p']} in training, "
            "which is not supported yet: set it to 0"
        )
    return _only(op)


def _attention(rewriter: Rewriter, op: Op) -> Argument:
    if op.arguments["dropout_p"]:
        raise CaptureError(
            f"{op.module or 'the model'} ({op.line}) uses attention dropout with p = {op.arguments['dropout_p']} in "
            "training, which is not supported yet: set it to 0"
        )
    return _KEEP


def _take(rewriter: Rewriter, op: Op, dim: int, start: int, stop: int) -> Argument:
    """The part [start, stop) of the only operand's `dim`."""
    source = _only(op)
    type = rewriter.type(source)
    if (start, stop) == (0, type.shape[dim]):
        return source
    shape = (*type.shape[:dim], stop - start, *type.shape[dim + 1 :])
    return rewriter.write(op, "aten.slice.Tensor", TensorType(shape, type.dtype), source, dim, start, stop, 1)


def _dim(rewriter: Rewriter, op: Op) -> int:
    return _size(op.arguments["dim"]) % max(len(rewriter.type(_only(op)).shape), 1)


def _slice(rewriter: Rewriter, op: Op) -> Argument:
    if op.arguments["step"] != 1:
        return _KEEP
    dim = _dim(rewriter, op)
    size = rewriter.type(_only(op)).shape[dim]
    start, stop, _ = slice(*(cast("int | None", op.arguments[name]) for name in ("start", "end"))).indices(size)
    return _take(rewriter, op, dim, start, stop)


def _split(rewriter: Rewriter, op: Op) -> Argument:
    """split, chunk, split_with_sizes: the parts as slices."""
    dim = _dim(rewriter, op)
    parts: list[Argument] = []
    start = 0
    for name in op.results:
        size = rewriter.types[name].shape[dim]
        parts.append(_take(rewriter, op, dim, start, start + size))
        start += size
    return tuple(parts)


def _unbind(rewriter: Rewriter, op: Op) -> Argument:
    dim = _dim(rewriter, op)
    return tuple(
        rewriter.write(op, "aten.select.int", rewriter.types[name], _only(op), dim, index)
        for index, name in enumerate(op.results)
    )


def _permute(order: Callable[[Op, int], list[int]]) -> Rewrite:
    def rewrite(rewriter: Rewriter, op: Op) -> Argument:
        source = _only(op)
        dims = order(op, len(rewriter.type(source).shape))
        if dims == sorted(dims):
            return source
        return rewriter.write(op, "aten.permute.default", rewriter.types[op.results[0]], source, tuple(dims))

    return rewrite


def _given_order(op: Op, rank: int) -> list[int]:
    dims = op.arguments["dims"]
    assert isinstance(dims, tuple)
    return [_size(dim) % rank for dim in dims]


def _reversed_order(op: Op, rank: int) -> list[int]:
    return list(reversed(range(rank)))


def _cross_entropy(rewriter: Rewriter, op: Op) -> Argument:
    """A mean over the labels that count is their sum by their number: exact however the labels are spread."""
    arguments = op.arguments
    logits, target, ignored = arguments["self"], arguments["target"], arguments["ignore_index"]
    labels = rewriter.type(target)
    mean, total = 1, 2
    if arguments["reduction"] != mean or arguments["weight"] is not None or labels.dtype.is_floating_point:
        return _KEEP
    loss = rewriter.types[op.results[0]]
    flag = TensorType(labels.shape, torch.bool)
    count = TensorType((), torch.int64)
    summed = rewriter.write(
        op,
        "aten.cross_entropy_loss.default",
        loss,
        logits,
        target,
        None,
        total,
        ignored,
        arguments["label_smoothing"],
    )
    counted = rewriter.write(op, "aten.ne.Scalar", flag, target, ignored)
    counted = rewriter.write(op, "aten.sum.default", count, counted)
    return rewriter.write(op, "aten.div.Tensor", loss, summed, counted)


def _index(rewriter: Rewriter, op: Op) -> Argument:
    """Indexing with the whole range of every dim, in order, is a reshape (so masks read their padding)."""
    indices = op.arguments["indices"]
    source = rewriter.type(op.arguments["self"])
    assert isinstance(indices, tuple)
    if len(indices) != len(source.shape):
        return _KEEP
    last = -1
    for size, index in zip(source.shape, indices, strict=True):
        if not isinstance(index, Ref):
            return _KEEP
        shape = rewriter.types[index.name].shape
        rank = len(rewriter.types[op.results[0]].shape)
        wide = [dim + rank - len(shape) for dim, extent in enumerate(shape) if extent != 1]
        if len(wide) > 1 or prod(shape) != size or (wide and wide[0] <= last):
            return _KEEP
        values = constant(rewriter, index.name)
        if values is None or not torch.equal(values.flatten(), torch.arange(size)):
            return _KEEP
        last = wide[0] if wide else last
    return _reshape(rewriter, op)


def constant(rewriter: Rewriter, name: str) -> torch.Tensor | None:
    """The value of a result that depends on no input, parameter or buffer, computed here; None for any other."""
    producers = {result: op for op in rewriter.ops for result in op.results}
    needed: list[Op] = []
    waiting, found = [name], set[str]()
    while waiting:
        wanted = waiting.pop()
        if wanted in found:
            continue
        found.add(wanted)
        if wanted not in producers:
            return None
        needed.append(producers[wanted])
        waiting.extend(producers[wanted].operands)
    order = {id(op): position for position, op in enumerate(rewriter.ops)}
    values: dict[str, torch.Tensor] = {}
    for op in sorted(needed, key=lambda op: order[id(op)]):
        arguments = {key: _concrete(value, values) for key, value in op.arguments.items()}
        if "device" in arguments:
            arguments["device"] = torch.device("cpu")
        result = op.overload(**{("self" if key == "self" else key): value for key, value in arguments.items()})
        values.update(zip(op.results, [result] if isinstance(result, torch.Tensor) else result, strict=True))
    return values[name]


def _concrete(argument: Argument, values: Mapping[str, torch.Tensor]) -> object:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [_concrete(item, values) for item in argument]
    return argument


def _without_empty(rewriter: Rewriter, op: Op) -> Argument:
    """Nothing is put together with an empty tensor: what a cache holds before the first tokens, for instance."""
    tensors = op.arguments["tensors"]
    assert isinstance(tensors, tuple)
    full = tuple(tensor for tensor in tensors if 0 not in rewriter.type(tensor).shape)
    (result,) = op.results
    if len(full) == 1 and rewriter.type(full[0]) == rewriter.types[result]:
        return full[0]
    if not full or len(full) == len(tensors):
        return _KEEP
    return rewriter.write(op, op.target, rewriter.types[result], full, op.arguments["dim"])


_REWRITES: dict[str, Rewrite] = {
    "cat": _without_empty,
    "alias": _same,
    "clone": _same,
    "contiguous": _same,
    "lift_fresh_copy": _same,
    "to": _cast,
    "type_as": _cast,
    "_to_copy": _cast,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "reshape": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "reshape_as": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _reshape,
    "expand": _expand,
    "expand_as": _expand,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "tensor_split": _split,
    "unbind": _unbind,
    "permute": _permute(_given_order),
    "t": _permute(_reversed_order),
    "numpy_T": _permute(_reversed_order),
    "cross_entropy_loss": _cross_entropy,
    "index": _index,
}


# --- what is used, and what it is called ---------------------------------------------------------------------------


def gradients(program: Program) -> frozenset[str]:
    """Names of the tensors that a gradient flows through: they depend on something trainable."""
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    flowing = {item.name for item in sources if item.trainable}
    flow(program.ops, flowing, program.types)
    return frozenset(flowing)


def without_unused(program: Program) -> Program:
    """Drop ops whose results nobody reads, and the types of what is gone."""
    used = {name for value in program.outputs for name in references(value)}
    used.update(update.value for update in program.updates)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(name in used for name in op.results):
            kept.append(op)
            used.update(op.operands)
    given: tuple[Input | Parameter | Buffer, ...] = (*program.inputs, *program.parameters, *program.buffers)
    named = {item.name for item in given}
    constants = {name: value for name, value in program.constants.items() if name in used}
    typed = {*named, *constants, *(name for op in kept for name in op.results)}
    types = {name: type for name, type in program.types.items() if name in typed}
    return replace(program, ops=tuple(reversed(kept)), constants=constants, types=types)


def with_keys(program: Program) -> Program:
    """Give every op its key: module path, operator, and its number where the module calls the operator again."""
    counts: dict[str, int] = {}
    ops = []
    for op in program.ops:
        name = f"{op.module}/{op.kind}"
        count = counts.get(name, 0)
        counts[name] = count + 1
        ops.append(replace(op, key=f"{name}.{count}" if count else name))
    return replace(program, ops=tuple(ops))
