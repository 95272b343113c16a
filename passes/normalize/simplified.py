"""Fewer ops for the same: padding by nothing, reshapes of reshapes, pieces of a tensor that are put together again, and
ops that compute what another one did.

Only ops of one entry of a module list are put together: layers that repeat stay equal to each other.
"""

from dataclasses import replace

from passes.ir.arguments import Argument, Ref, bound_arguments, find_overload, listed
from passes.ir.program import Op, Program, draws
from passes.normalize.rewriter import Rewriter
from passes.normalize.views import integers
from passes.rules.parts import dim_argument


def simplified(program: Program) -> Program:
    """The program without ops that do nothing, and without those that repeat an earlier one."""
    rewriter, returned = Rewriter(program), set(program.returned)
    entries: dict[str, str] = {}
    earlier: dict[object, Op] = {}
    for original in program.ops:
        op = rewriter.current(original)
        op = _of_whole(rewriter, entries, _of_pieces(rewriter, entries, op))
        entry = _entry(op.module)
        entries.update(dict.fromkeys(op.results, entry))
        if _does_nothing(rewriter, op):
            rewriter.replaced[op.results[0]] = op.arguments["self"]
            continue
        if _is_pure(op) and returned.isdisjoint(op.results):
            first = earlier.setdefault((entry, op.target, _typed(tuple(op.arguments.items()))), op)
            if first is not op:
                rewriter.replaced.update(zip(op.results, map(Ref, first.results), strict=True))
                continue
        rewriter.ops.append(op)
    return rewriter.finish()


def _entry(module: str) -> str:
    """The entry of the innermost module list that a module stands in; "" for none."""
    parts = module.split(".")
    depth = max((number for number, part in enumerate(parts, 1) if part.isdigit()), default=0)
    return ".".join(parts[:depth])


def _of_whole(rewriter: Rewriter, entries: dict[str, str], op: Op) -> Op:
    """A reshape of a reshape as one of the tensor below."""
    source = op.arguments.get("self")
    if op.kind != "reshape" or not isinstance(source, Ref) or entries.get(source.name) != _entry(op.module):
        return op
    made = rewriter.maker(source.name)
    if made is None or made.kind != "reshape":
        return op
    return replace(op, arguments={**op.arguments, "self": made.arguments["self"]})


def _of_pieces(rewriter: Rewriter, entries: dict[str, str], op: Op) -> Op:
    """All pieces of a tensor along a dim, concatenated along it in their order, as a reshape of the tensor."""
    if op.kind != "cat":
        return op
    made = [
        rewriter.maker(part.name) if isinstance(part, Ref) and entries.get(part.name) == _entry(op.module) else None
        for part in listed(op.arguments["tensors"])
    ]
    kinds = {None if piece is None else (piece.kind, piece.arguments.get("self")) for piece in made}
    type, (kind, source), *others = rewriter.types[op.results[0]], *(item or ("", None) for item in kinds)
    if others or kind not in ("select", "slice") or not isinstance(source, Ref):
        return op
    given = rewriter.type(source)
    dim, at = dim_argument(op.arguments["dim"], len(type.shape)), 0
    for piece in made:
        assert piece is not None
        arguments = piece.arguments
        own = dim_argument(arguments["dim"], len(given.shape))
        start, step = arguments.get("start", arguments.get("index")), arguments.get("step", 1)
        if own != dim or start != at or step != 1:
            return op
        at += 1 if kind == "select" else rewriter.types[piece.results[0]].shape[dim]
    if at != given.shape[dim]:
        return op
    reshape = bound_arguments(find_overload("aten.reshape.default"), (source, type.shape), {})
    return replace(op, target="aten.reshape.default", arguments=reshape)


def _does_nothing(rewriter: Rewriter, op: Op) -> bool:
    source = op.arguments.get("self")
    if op.kind == "pad":
        return not any(integers(op.arguments["pad"]))
    return op.kind == "reshape" and rewriter.type(source) == rewriter.types[op.results[0]]


def _is_pure(op: Op) -> bool:
    """Whether an op gives the same again. Calls of a user's function are left as they are."""
    return op.target.startswith("aten.") and not draws(op)


def _typed(argument: Argument) -> object:
    """A key that is equal for equal arguments: for Python 1, 1.0 and True are equal, too, and so are 0.0 and -0.0."""
    if isinstance(argument, tuple):
        return tuple(map(_typed, argument))
    return type(argument), repr(argument) if isinstance(argument, float) else argument
