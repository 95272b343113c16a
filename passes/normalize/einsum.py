"""einsum of two tensors as a matrix product, where torch would copy an operand to compute it as one.

The copy is then an op of the program: products of the same tensor share it, its time is counted, and selective
recompute can make it again instead of saving it.
"""

from dataclasses import dataclass

from passes.ir.arguments import Argument, Ref
from passes.ir.program import Op, Program, TensorType
from passes.normalize.products import letters_of
from passes.normalize.rewriter import KEEP, Rewriter
from passes.normalize.views import permuted


def with_einsum_copies(program: Program) -> Program:
    """The program with `matmul` in place of each `einsum` of two tensors that have one summed dim, one more dim each,
    and the others in common, unless these come first in both, in one order. Operands in another order are permuted and
    copied by `contiguous`."""
    rewriter = Rewriter(program)
    for original in program.ops:
        op = rewriter.current(original)
        rewriter.put(op, _multiplied(rewriter, op) if op.kind == "einsum" else KEEP)
    return rewriter.finish()


@dataclass(frozen=True)
class _Operand:
    """An operand of a product: its name, the letters of its dims, and the letter that the other operand lacks."""

    name: str
    letters: str
    own: str

    def begins_with(self, order: str) -> bool:
        """Whether the first dims are those of `order`."""
        return self.letters.startswith(order)


def _multiplied(rewriter: Rewriter, op: Op) -> Argument:
    """The result of an einsum by `matmul`, or KEEP."""
    found = letters_of(op)
    if found is None:
        return KEEP
    terms, result = found
    others = terms[::-1]
    operands = [
        _Operand(name, term, "".join(each for each in term if each not in other))
        for name, term, other in zip(op.operands, terms, others, strict=True)
    ]
    batch = "".join(each for each in result if all(each in term for term in terms))
    summed = "".join(each for each in terms[0] if each in terms[1] and each not in result)
    if len(summed) != 1 or any(len(each.own) != 1 or each.own not in result for each in operands):
        return KEEP
    sizes = [dict(zip(each.letters, rewriter.types[each.name].shape, strict=True)) for each in operands]
    if any(sizes[0][each] != sizes[1][each] for each in batch + summed):
        return KEEP
    orders = [batch, *("".join(each for each in term if each in batch) for term in terms)]
    batch = min(orders, key=lambda order: sum(not each.begins_with(order) for each in operands))
    if all(each.begins_with(batch) for each in operands):
        return KEEP
    # The operand whose own dim is the first in the result is on the left.
    left, right = sorted(operands, key=lambda each: result.index(each.own))
    first = _ordered(rewriter, op, left, batch, left.own + summed)
    second = _ordered(rewriter, op, right, batch, summed + right.own)
    type = TensorType((*rewriter.type(first).shape[:-1], rewriter.type(second).shape[-1]), rewriter.type(first).dtype)
    made = rewriter.write(op, "aten.matmul.default", type, first, second)
    return permuted(rewriter, op, made, [(batch + left.own + right.own).index(each) for each in result])


def _ordered(rewriter: Rewriter, op: Op, operand: _Operand, batch: str, last: str) -> Ref:
    """An operand with the dims `batch` first, and then `last`: if they are not first, in a copy, which keeps the order
    of the other two, so that rows are copied whole."""
    source, letters = Ref(operand.name), operand.letters
    if not operand.begins_with(batch):
        letters = batch + "".join(each for each in letters if each not in batch)
        source = permuted(rewriter, op, source, [operand.letters.index(each) for each in letters])
        source = rewriter.write(op, "aten.contiguous.default", rewriter.type(source), source)
    return permuted(rewriter, op, source, [letters.index(each) for each in batch + last])
