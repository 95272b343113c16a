"""Table look-ups, and ops that gather, scatter or sort elements by index: the dims that they index stay whole."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from passes.ir.arguments import Ref, integer, listed
from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Part, Role, Rule, Saved
from passes.rules.parts import broadcast, dim_argument, dims_argument, factors, linear_in, named, one, rule_for, without

_FIRST = (frozenset({0}),)


@rule_for("gather")
def gather(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """`dim` is indexed; the other dims can be split where the index has all of them."""
    source, index = (types[name].shape for name in op.operands)
    if not source or not index:
        return None
    dim = dim_argument(op.arguments["dim"], len(source))
    apart = [place for place in range(len(source)) if place == dim or source[place] != index[place]]
    dims, roles = without(named(source), apart)
    picked, more = without(named(index), [place for place in apart if place != dim], "part")
    picked = (*picked[:dim], one("picks", index[dim]), *picked[dim + 1 :])
    return Rule(
        factors(dims, picked, roles={**roles, **more}),
        (dims, picked),
        (picked,),
        linear=linear_in(op, types, 0),
        saved=(Saved(0), Saved(1)),
    )


@rule_for("scatter", "scatter_add", "scatter_reduce")
def scatter(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """`dim` is indexed; the other dims can be split where index and source have all of them.

    If elements are added, each rank can add a part of them.
    """
    shapes = [types[name].shape for name in op.operands]
    if not all(shapes):
        return None
    dim = dim_argument(op.arguments["dim"], len(shapes[0]))
    apart = [place for place in range(len(shapes[0])) if place == dim or len({shape[place] for shape in shapes}) > 1]
    tensors: list[Dims] = []
    roles: dict[str, Role] = {}
    for number, shape in enumerate(shapes):
        dims, more = without(named(shape), apart, f"whole{number}_")
        tensors.append(dims)
        roles.update(more)
    rows = one("rows", shapes[1][dim])
    flags = types[op.results[0]].dtype == torch.bool
    if op.kind == "scatter_add" and shapes[1][dim] == shapes[2][dim] and not flags:
        tensors[1:] = [(*dims[:dim], rows, *dims[dim + 1 :]) for dims in tensors[1:]]
        roles["rows"] = Role.SUM
    summed = frozenset({0}) if "rows" in roles else frozenset[int]()
    added = op.kind == "scatter_add" or (op.kind == "scatter" and "reduce" not in op.arguments and len(shapes) == 3)
    linear = linear_in(op, types, 0, 2) if added else ()
    saved = [Saved(1)]
    if op.kind == "scatter_reduce":
        saved += [Saved(0), Saved(2), Saved(0, result=True)]
    return Rule(
        factors(*tensors, roles=roles), tuple(tensors), (tensors[0],), added=summed, linear=linear, saved=tuple(saved)
    )


@dataclass(frozen=True)
class _Indexed:
    """The operand of an op that is indexed by tensors: its `dims`, of which those that are indexed stay whole, and the
    `picked` dims that result. `shape` is the one that the indices broadcast to."""

    dims: Dims
    picked: Dims
    shape: Shape
    roles: dict[str, Role]


def _indexed(op: Op, types: Mapping[str, TensorType]) -> _Indexed | None:
    indices = listed(op.arguments["indices"])
    places = [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]
    picked = [types[index.name] for index in indices if isinstance(index, Ref)]
    if not places or any(type.dtype.itemsize == 1 for type in picked):
        return None
    rank = max(len(type.shape) for type in picked)
    padded = [(1,) * (rank - len(type.shape)) + type.shape for type in picked]
    wide = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    dims, roles = without(named(types[op.operands[0]].shape), places)
    rest = [parts for dim, parts in enumerate(dims) if dim not in places]
    return _Indexed(dims, (*rest[:start], *named(wide, "pick"), *rest[start:]), wide, roles)


@rule_for("index")
def index(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Indexed dims stay whole; the dims of the index and those that are not indexed are free."""
    given = _indexed(op, types)
    if given is None:
        return None
    operands = [given.dims, *(broadcast(types[name].shape, given.shape, "pick") for name in op.operands[1:])]
    return Rule(
        factors(*operands, given.picked, roles=given.roles),
        tuple(operands),
        (given.picked,),
        linear=linear_in(op, types, 0),
        saved=tuple(Saved(slot) for slot in range(1, len(operands))),
    )


@rule_for("index_put")
def index_put(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Indexed dims stay whole, as do those of the index unless the values are accumulated; the other dims are free."""
    given = _indexed(op, types)
    if given is None:
        return None
    *indices, last = op.operands[1:]
    summed = bool(op.arguments["accumulate"] and linear_in(op, types, 0))
    role = Role.SUM if summed else Role.WHOLE
    roles = {**given.roles, **{f"pick{dim}": role for dim in range(len(given.shape))}}
    shape = types[last].shape
    front = len(given.picked) - len(shape)
    values = tuple(parts if size != 1 else () for parts, size in zip(given.picked[front:], shape, strict=True))
    operands = (given.dims, *(broadcast(types[name].shape, given.shape, "pick") for name in indices), values)
    return Rule(
        factors(*operands, roles=roles),
        operands,
        (given.dims,),
        frozenset({0} if summed else ()),
        linear_in(op, types, 0, len(operands) - 1),
        saved=tuple(Saved(slot) for slot in range(1, len(operands) - 1)),
    )


@rule_for("index_select")
def index_select(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """`dim` is indexed."""
    source, index = (types[name].shape for name in op.operands)
    if not source or not index:
        return None
    dim = dim_argument(op.arguments["dim"], len(source))
    dims, roles = without(named(source), [dim])
    picks = one("picks", index[0])
    result = (*dims[:dim], picks, *dims[dim + 1 :])
    return Rule(
        factors(dims, result, roles=roles),
        (dims, (picks,)),
        (result,),
        linear=linear_in(op, types, 0),
        saved=(Saved(1),),
    )


@rule_for("index_add", "index_copy", "index_fill")
def index_add(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Rows are added along `dim`; the rows of each rank make a pending sum."""
    shape = types[op.operands[0]].shape
    if not shape:
        return None
    dim = dim_argument(op.arguments["dim"], len(shape))
    dims, roles = without(named(shape), [dim])
    operands: list[Dims] = [dims, *((one("rows", size),) for size in types[op.operands[1]].shape)]
    # A sum of flags is no flag.
    summed = op.kind == "index_add" and types[op.operands[0]].dtype != torch.bool
    roles["rows"] = Role.SUM if summed else Role.WHOLE
    linear: tuple[frozenset[int], ...] = ()
    if not types[op.operands[1]].shape:
        operands.append(())
    if len(op.operands) == 3:
        source = types[op.operands[2]].shape
        if source and len(source) != len(shape):
            return None
        operands.append((*dims[:dim], one("rows", source[dim]), *dims[dim + 1 :]) if source else ())
        linear = linear_in(op, types, 0, 2) if op.kind != "index_fill" else ()
    saved = (Saved(1), Saved(2)) if len(operands) == 3 else (Saved(1),)
    added = frozenset({0} if summed else ())
    return Rule(factors(*operands, roles=roles), tuple(operands), (dims,), added=added, linear=linear, saved=saved)


_ALONG: dict[str, tuple[Saved, ...]] = {
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "mode"), (Saved(1, result=True),)),
    **dict.fromkeys(("cummax", "cummin"), (Saved(0), Saved(1, result=True))),
    **dict.fromkeys(("argsort", "msort"), ()),
    "cumprod": (Saved(0), Saved(0, result=True)),
    "logcumsumexp": (Saved(0), Saved(0, result=True)),
}


@rule_for(*_ALONG)
def along(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Sort, top-k and scans along `dim`, which stays whole."""
    shape, made = types[op.operands[0]].shape, types[op.results[0]].shape
    if "dim" not in op.arguments and op.kind != "msort":
        return None
    dim = dim_argument(op.arguments.get("dim", 0), len(shape))
    if not shape:
        return Rule({}, ((),), ((),) * len(op.results), saved=_ALONG[op.kind])
    dims, roles = without(named(shape), [dim])
    rest = (dims[:dim], dims[dim + 1 :])
    result = (*rest[0], *rest[1]) if len(made) < len(shape) else (*rest[0], one("kept", made[dim]), *rest[1])
    roles["kept"] = Role.WHOLE
    return Rule(factors(dims, result, roles=roles), (dims,), (result,) * len(op.results), saved=_ALONG[op.kind])


@rule_for("flip", "roll", "tril", "triu")
def positioned(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Dims in which an element depends on its position, or takes another's, stay whole."""
    shape = types[op.operands[0]].shape
    given = op.arguments.get("dims", (-2, -1))
    whole = () if given == () and op.kind == "flip" else dims_argument(given, len(shape))
    dims, roles = without(named(shape), whole)
    return Rule(factors(dims, roles=roles), (dims,), (dims,), linear=linear_in(op, types, 0))


@rule_for("diagonal")
def diagonal(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The two dims of the diagonal stay whole, as does the diagonal, which is the last dim."""
    shape, made = types[op.operands[0]].shape, types[op.results[0]].shape
    places = [dim_argument(op.arguments[name], len(shape)) for name in ("dim1", "dim2")]
    dims, roles = without(named(shape), places)
    rest = tuple(parts for dim, parts in enumerate(dims) if dim not in places)
    result = (*rest, one("diagonal", made[-1]))
    return Rule(
        factors(dims, result, roles={**roles, "diagonal": Role.WHOLE}),
        (dims,),
        (result,),
        linear=linear_in(op, types, 0),
        moves=False,
    )


@rule_for("unfold")
def unfold(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Windows along `dim`, which stays whole unless they are adjacent; their elements are the last dim."""
    shape, made = types[op.operands[0]].shape, types[op.results[0]].shape
    if not shape:
        return None
    dim = dim_argument(op.arguments["dimension"], len(shape))
    step = integer(op.arguments["step"])
    dims, roles = without(named(shape), [dim])
    if made[-1] <= step and made[dim] * step == shape[dim]:
        dims = (*dims[:dim], (*one("windows", made[dim]), *one("each", step)), *dims[dim + 1 :])
        roles = {"each": Role.WHOLE}
    else:
        roles = {**roles, "windows": Role.WHOLE}
    result = (*dims[:dim], one("windows", made[dim]), *dims[dim + 1 :], one("window", made[-1]))
    return Rule(
        factors(dims, result, roles={**roles, "window": Role.WHOLE}),
        (dims,),
        (result,),
        linear=linear_in(op, types, 0),
        moves=False,
    )


@rule_for("view_as_complex", "view_as_real")
def complex_view(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The pair of real numbers stays whole."""
    shape = types[op.operands[0]].shape
    pair = (one("pair", 2),)
    short = named(shape[:-1] if op.kind == "view_as_complex" else shape)
    before, after = ((*short, *pair), short) if op.kind == "view_as_complex" else (short, (*short, *pair))
    return Rule(factors(before, after, roles={"pair": Role.WHOLE}), (before,), (after,), linear=_FIRST, moves=False)


@rule_for("embedding")
def embedding(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """vocab features, ids -> ids features. If the table's rows are split, each rank looks up the ids of its rows."""
    if op.arguments["scale_grad_by_freq"] or op.arguments["sparse"]:
        return None
    table, ids = (types[name].shape for name in op.operands)
    rows, features = (Part("vocab", table[0]),), (Part("features", table[1]),)
    tokens = named(ids)
    return Rule(
        factors((rows, features), tokens, roles={"vocab": Role.SUM}),
        ((rows, features), tokens),
        ((*tokens, features),),
        linear=(frozenset({0}),),
        forms={"vocab": "vocabulary_embedding"},
        saved=(Saved(1),),
    )
