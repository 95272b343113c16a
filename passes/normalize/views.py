"""Ops that only move elements, each written as one of few: reshape, expand, permute, slice, select, cat."""

from collections.abc import Callable
from math import prod
from typing import cast

import torch

from passes.ir.arguments import Argument, Ref, integer, listed
from passes.ir.program import Op, TensorType
from passes.normalize.in_place import moved_dims
from passes.normalize.rewriter import KEEP, Rewrite, Rewriter, constant
from passes.rules.parts import dim_argument


def only(op: Op) -> Argument:
    """The tensor that a one-operand op reads."""
    return op.arguments.get("self", op.arguments.get("input"))


def integers(value: Argument) -> tuple[int, ...]:
    """An argument that is a list of integers."""
    return tuple(map(integer, listed(value)))


def cast_(rewriter: Rewriter, op: Op) -> Argument:
    """A change of dtype, if it is one."""
    source, type = only(op), rewriter.types[op.results[0]]
    if rewriter.type(source) == type:
        return source
    return rewriter.write(op, "aten.to.dtype", type, source, type.dtype)


def reshaped(rewriter: Rewriter, op: Op, source: Argument, shape: tuple[int, ...]) -> Ref:
    """`source` in another shape."""
    type = rewriter.type(source)
    if type.shape == shape:
        return cast(Ref, source)
    return rewriter.write(op, "aten.reshape.default", TensorType(shape, type.dtype), source, shape)


def expanded(rewriter: Rewriter, op: Op, source: Argument, shape: tuple[int, ...]) -> Ref:
    """`source` repeated along dims of size 1."""
    type = rewriter.type(source)
    if type.shape == shape:
        return cast(Ref, source)
    return rewriter.write(op, "aten.expand.default", TensorType(shape, type.dtype), source, shape)


def taken(rewriter: Rewriter, op: Op, source: Argument, dim: int, start: int, stop: int) -> Ref:
    """The part [start, stop) of `source` along `dim`. A part of one of the tensors that `source` was joined from is
    taken from that one, so that the others, memory that is still to be filled among them, need not be there."""
    type = rewriter.type(source)
    if (start, stop) == (0, type.shape[dim]):
        return cast(Ref, source)
    parts = _parts(rewriter, source, dim, start, stop)
    if len(parts) == 1 and parts[0][0] != source:
        return taken(rewriter, op, parts[0][0], dim, *parts[0][1:])
    shape = (*type.shape[:dim], stop - start, *type.shape[dim + 1 :])
    return rewriter.write(op, "aten.slice.Tensor", TensorType(shape, type.dtype), source, dim, start, stop, 1)


def _parts(rewriter: Rewriter, source: Argument, dim: int, start: int, stop: int) -> list[tuple[Ref, int, int]]:
    """The tensors, and the part of each along `dim`, that make up [start, stop) of `source`: several where it was
    joined along `dim` from several."""
    own, type = cast(Ref, source), rewriter.type(source)
    op = rewriter.maker(own.name)
    if op is None or op.kind != "cat" or dim_argument(op.arguments["dim"], len(type.shape)) != dim:
        return [(own, start, stop)]
    found, left, at = [], list[Ref](), 0
    for part in listed(op.arguments["tensors"]):
        given = rewriter.type(part)
        if len(given.shape) != len(type.shape) or given.dtype != type.dtype:
            return [(own, start, stop)]
        size = given.shape[dim]
        if max(start, at) < min(stop, at + size):
            found.append((cast(Ref, part), max(start - at, 0), min(stop - at, size)))
        else:
            left.append(cast(Ref, part))
        at += size
    needed = bool(rewriter.kept) and any(rewriter.depends(part.name, rewriter.kept) for part in left)
    return [(own, start, stop)] if needed else found


def permuted(rewriter: Rewriter, op: Op, source: Argument, order: list[int]) -> Ref:
    """`source` with its dims in another order."""
    type = rewriter.type(source)
    if order == sorted(order):
        return cast(Ref, source)
    shape = tuple(type.shape[dim] for dim in order)
    return rewriter.write(op, "aten.permute.default", TensorType(shape, type.dtype), source, tuple(order))


def joined(rewriter: Rewriter, op: Op, parts: list[Ref], dim: int) -> Ref:
    """`parts` one after the other along `dim`; empty ones are left out."""
    full = [part for part in parts if rewriter.type(part).shape[dim]]
    if len(full) == 1:
        return full[0]
    types = [rewriter.type(part) for part in full]
    first = types[0]
    shape = (*first.shape[:dim], sum(type.shape[dim] for type in types), *first.shape[dim + 1 :])
    return rewriter.write(op, "aten.cat.default", TensorType(shape, first.dtype), tuple(full), dim)


def _reshape(rewriter: Rewriter, op: Op) -> Argument:
    """A reshape of one tensor, or of each of a list."""
    sources = op.arguments.get("tensors", (only(op),))
    shapes = [rewriter.types[name].shape for name in op.results]
    return tuple(reshaped(rewriter, op, source, shape) for source, shape in zip(listed(sources), shapes, strict=True))


def _expand(rewriter: Rewriter, op: Op) -> Argument:
    return expanded(rewriter, op, only(op), rewriter.types[op.results[0]].shape)


def _dim(rewriter: Rewriter, op: Op) -> int:
    return dim_argument(op.arguments["dim"], len(rewriter.type(only(op)).shape))


def _slice(rewriter: Rewriter, op: Op) -> Argument:
    """A slice with a step is the first of every `step` elements, where the size is a multiple of it."""
    source, dim, step = only(op), _dim(rewriter, op), integer(op.arguments["step"])
    shape = rewriter.type(source).shape
    size = shape[dim]
    start, stop, _ = slice(*(cast("int | None", op.arguments[name]) for name in ("start", "end"))).indices(size)
    if step == 1:
        return taken(rewriter, op, source, dim, start, max(start, stop))
    if size % step:
        return KEEP
    type = rewriter.types[op.results[0]]
    rows = reshaped(rewriter, op, source, (*shape[:dim], size // step, step, *shape[dim + 1 :]))
    every = TensorType((*shape[:dim], size // step, *shape[dim + 1 :]), type.dtype)
    picked = rewriter.write(op, "aten.select.int", every, rows, dim + 1, start % step)
    first = start // step
    return taken(rewriter, op, picked, dim, first, first + type.shape[dim])


def _narrow(rewriter: Rewriter, op: Op) -> Argument:
    if not isinstance(op.arguments["start"], int):
        return KEEP
    dim = _dim(rewriter, op)
    start = dim_argument(op.arguments["start"], rewriter.type(only(op)).shape[dim])
    return taken(rewriter, op, only(op), dim, start, start + integer(op.arguments["length"]))


def _split(rewriter: Rewriter, op: Op) -> Argument:
    """split, chunk, split_with_sizes: the parts as slices."""
    dim = _dim(rewriter, op)
    parts: list[Argument] = []
    start = 0
    for name in op.results:
        size = rewriter.types[name].shape[dim]
        parts.append(taken(rewriter, op, only(op), dim, start, start + size))
        start += size
    return tuple(parts)


def _unbind(rewriter: Rewriter, op: Op) -> Argument:
    dim = _dim(rewriter, op)
    return tuple(
        rewriter.write(op, "aten.select.int", rewriter.types[name], only(op), dim, index)
        for index, name in enumerate(op.results)
    )


def _move(rewriter: Rewriter, op: Op) -> Argument:
    return permuted(rewriter, op, only(op), moved_dims(op, len(rewriter.type(only(op)).shape)))


def _index(rewriter: Rewriter, op: Op) -> Argument:
    """Indexing with the whole range of every dim, in order, is a reshape (so masks read their padding)."""
    indices = listed(op.arguments["indices"])
    source = rewriter.type(op.arguments["self"])
    if len(indices) != len(source.shape):
        return KEEP
    last = -1
    for size, index in zip(source.shape, indices, strict=True):
        if not isinstance(index, Ref):
            return KEEP
        shape = rewriter.types[index.name].shape
        rank = len(rewriter.types[op.results[0]].shape)
        wide = [dim + rank - len(shape) for dim, extent in enumerate(shape) if extent != 1]
        if len(wide) > 1 or prod(shape) != size or (wide and wide[0] <= last):
            return KEEP
        values = constant(rewriter, index.name)
        if values is None or not torch.equal(values.flatten(), torch.arange(size)):
            return KEEP
        last = wide[0] if wide else last
    return _reshape(rewriter, op)


def _cat(rewriter: Rewriter, op: Op) -> Argument:
    """cat without empty tensors, as a cache holds before the first tokens."""
    tensors = listed(op.arguments["tensors"])
    full = tuple(tensor for tensor in tensors if 0 not in rewriter.type(tensor).shape)
    type = rewriter.types[op.results[0]]
    if len(full) == 1 and rewriter.type(full[0]) == type:
        return full[0]
    if not full or (len(full) == len(tensors) and op.kind == "cat"):
        return KEEP
    return rewriter.write(op, "aten.cat.default", type, full, op.arguments["dim"])


def _repeat(rewriter: Rewriter, op: Op) -> Argument:
    """repeat, tile: a new dim before each repeated one, expanded and merged into it."""
    source, type = only(op), rewriter.types[op.results[0]]
    shape = rewriter.type(source).shape
    times = integers(op.arguments["repeats" if "repeats" in op.arguments else "dims"])
    times = (1,) * (len(shape) - len(times)) + times
    shape = (1,) * (len(times) - len(shape)) + shape
    apart = tuple(size for count, extent in zip(times, shape, strict=True) for size in (1, extent))
    wide = tuple(size for pair in zip(times, shape, strict=True) for size in pair)
    if 0 in wide:
        return KEEP
    spread = expanded(rewriter, op, reshaped(rewriter, op, source, apart), wide)
    return reshaped(rewriter, op, spread, type.shape)


def _slice_scatter(rewriter: Rewriter, op: Op) -> Argument:
    if op.arguments["step"] != 1:
        return KEEP
    dim = _dim(rewriter, op)
    start, stop = (cast("int | None", op.arguments[name]) for name in ("start", "end"))
    start, stop, _ = slice(start, stop).indices(rewriter.type(op.arguments["self"]).shape[dim])
    return _replaced(rewriter, op, cast(Ref, op.arguments["src"]), dim, start, stop)


def _select_scatter(rewriter: Rewriter, op: Op) -> Argument:
    dim = _dim(rewriter, op)
    shape = rewriter.type(op.arguments["self"]).shape
    index = dim_argument(op.arguments["index"], shape[dim])
    row = reshaped(rewriter, op, op.arguments["src"], (*shape[:dim], 1, *shape[dim + 1 :]))
    return _replaced(rewriter, op, row, dim, index, index + 1)


def _replaced(rewriter: Rewriter, op: Op, part: Ref, dim: int, start: int, stop: int) -> Ref:
    """The part of the operand before [start, stop) along `dim`, the new `part`, and the part after it."""
    source = op.arguments["self"]
    size = rewriter.type(source).shape[dim]
    before = _parts(rewriter, source, dim, 0, start) if start else []
    after = _parts(rewriter, source, dim, stop, size) if stop < size else []
    kept, left = ([taken(rewriter, op, own, dim, *span) for own, *span in each] for each in (before, after))
    return joined(rewriter, op, [*kept, part, *left], dim)


def _filled(name: str) -> Rewrite:
    """new_zeros and the like need nothing of the tensor that they are called on."""

    def rewrite(rewriter: Rewriter, op: Op) -> Argument:
        type = rewriter.types[op.results[0]]
        value = (op.arguments["fill_value"],) if name == "full" else ()
        target = "aten.empty.memory_format" if name == "empty" else f"aten.{name}.default"
        device = torch.device("cpu") if op.arguments["device"] is None else op.arguments["device"]
        return rewriter.write(op, target, type, type.shape, *value, dtype=type.dtype, device=device)

    return rewrite


def _filling(rewriter: Rewriter, op: Op) -> Argument:
    """fill, zero: a new tensor, independent of the old values."""
    type, value = rewriter.types[op.results[0]], op.arguments.get("value", 0)
    if not isinstance(value, Ref):
        here = torch.device("cpu")
        return rewriter.write(op, "aten.full.default", type, type.shape, value, dtype=type.dtype, device=here)
    if rewriter.type(value).dtype != type.dtype:
        value = rewriter.write(op, "aten.to.dtype", TensorType((), type.dtype), value, type.dtype)
    return expanded(rewriter, op, value, type.shape)


def _view_dtype(rewriter: Rewriter, op: Op) -> Argument:
    """view to another dtype keeps the bytes: it is no reshape."""
    is_same = rewriter.type(only(op)).dtype == rewriter.types[op.results[0]].dtype
    return _reshape(rewriter, op) if is_same else KEEP


VIEWS: dict[str, Callable[[Rewriter, Op], Argument]] = {
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "positive", "resolve_conj"),
        lambda _, op: only(op),
    ),
    **dict.fromkeys(("to", "type_as", "_to_copy"), cast_),
    **dict.fromkeys(("_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel"), _reshape),
    **dict.fromkeys(("squeeze", "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d", "_reshape_alias"), _reshape),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"), _split),
    "unsafe_split_with_sizes": _split,
    **dict.fromkeys(("permute", "t", "numpy_T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims"), _move),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("fill", "zero"), _filling),
    "view": _view_dtype,
    "slice": _slice,
    "narrow": _narrow,
    "unbind": _unbind,
    "index": _index,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    **{f"new_{name}": _filled(name) for name in ("zeros", "ones", "full", "empty")},
}
