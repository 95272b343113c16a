"""Products of two tensors, however they are written: `matmul`, `bmm`, and `einsum` with the dims in any order."""

from dataclasses import dataclass

from passes.ir.arguments import Ref, listed
from passes.ir.program import Op
from passes.normalize.rewriter import Rewriter
from passes.normalize.views import permuted


@dataclass(frozen=True)
class Weighted:
    """A product of weights [..., queries, keys] and values [..., keys, width]; its result in the order of dims `order`
    is that of `op`."""

    weights: str
    values: str
    order: tuple[int, ...]


def scored(rewriter: Rewriter, op: Op) -> tuple[str, str, bool] | None:
    """Of a product with a result [..., queries, keys] the query and the key, and whether that is of width by keys."""
    if op.kind != "einsum":
        query, key = op.operands
        shapes = [rewriter.types[each].shape for each in (query, key)]
        turn, rank = rewriter.maker(key), len(shapes[0])
        if len(shapes[1]) != rank:
            return None
        return (query, turn.operands[0], False) if turn is not None and _swaps_last(turn, rank) else (query, key, True)
    found = letters_of(op)
    if found is None:
        return None
    (one, other), result = found
    for (first, own), (second, others) in (((0, one), (1, other)), ((1, other), (0, one))):
        batch, queries, keys = result[:-2], result[-2], result[-1]
        width = set(own) - set(result)
        if len(width) == 1 and set(own) == {*batch, queries, *width} and set(others) == {*batch, keys, *width}:
            inner = next(iter(width))
            query = _ordered(rewriter, op, op.operands[first], own, f"{batch}{queries}{inner}")
            return query, _ordered(rewriter, op, op.operands[second], others, f"{batch}{keys}{inner}"), False
    return None


def weighted(rewriter: Rewriter, op: Op, number: int) -> Weighted | None:
    """The product with operand `number` as the weights."""
    if op.kind != "einsum":
        shapes = [rewriter.types[each].shape for each in op.operands]
        is_same = number == 0 and len(shapes[0]) == len(shapes[1])
        return Weighted(op.operands[0], op.operands[1], tuple(range(len(shapes[0])))) if is_same else None
    found = letters_of(op)
    if found is None:
        return None
    terms, result = found
    own, others = terms[number], terms[1 - number]
    batch, queries, keys = own[:-2], own[-2], own[-1]
    width = set(others) - set(own)
    if len(width) != 1 or set(others) != {*batch, keys, *width} or set(result) != {*batch, queries, *width}:
        return None
    inner = next(iter(width))
    values = _ordered(rewriter, op, op.operands[1 - number], others, f"{batch}{keys}{inner}")
    return Weighted(op.operands[number], values, tuple(f"{batch}{queries}{inner}".index(each) for each in result))


def letters_of(op: Op) -> tuple[tuple[str, str], str] | None:
    """The letters of the operands and the result of an einsum of two tensors, no letter twice in one of them, and more
    than two in each; None for any other."""
    left, arrow, result = str(op.arguments["equation"]).replace(" ", "").partition("->")
    terms = left.split(",")
    whole = (*terms, result)
    if not arrow or len(terms) != 2 or "." in left or len(listed(op.arguments["tensors"])) != 2:
        return None
    return ((terms[0], terms[1]), result) if all(len(set(each)) == len(each) > 2 for each in whole) else None


def _ordered(rewriter: Rewriter, op: Op, name: str, letters: str, wanted: str) -> str:
    return permuted(rewriter, op, Ref(name), [letters.index(each) for each in wanted]).name


def _swaps_last(op: Op, rank: int) -> bool:
    if op.kind == "transpose":
        dims = {int(str(op.arguments[name])) % rank for name in ("dim0", "dim1")}
        return dims == {rank - 2, rank - 1}
    order = (*range(rank - 2), rank - 1, rank - 2)
    return op.kind == "permute" and tuple(int(str(dim)) % rank for dim in listed(op.arguments["dims"])) == order
