"""Convolutions whose result has the length of the operand are one op, however models pad: causal ones, which pad both
sides and cut the end off, or pad one side first, and those of even kernels.

Such an op can be split along its length, with a halo of what its windows cover. As it is written, the padded operand or
the result is longer than the sequence, by a number that no ranks divide.
"""

from collections import Counter
from typing import cast

from passes.ir.arguments import Argument, Ref, integer, references
from passes.ir.program import Op, Program, TensorType
from passes.normalize.rewriter import KEEP, Rewriter
from passes.normalize.views import integers
from passes.ops import PADDED_CONVOLUTION


def with_padded_convolutions(program: Program) -> Program:
    """The program with `autopar::padded_conv1d` in place of convolutions of stride 1 whose operand is padded by an op
    of its own, or whose result is cut, where the result is as long as the operand."""
    rewriter = Rewriter(program)
    reads = Counter(name for op in program.ops for name in op.operands)
    reads.update(name for value in program.outputs for name in references(value))
    reads.update(update.value for update in program.updates)
    for original in program.ops:
        op = rewriter.current(original)
        made = KEEP
        if op.kind == "conv1d":
            made = _padded(rewriter, op, op, 0)
        elif op.kind == "slice" and integer(op.arguments["dim"]) == 2 and reads[op.operands[0]] == 1:
            convolution = rewriter.maker(op.operands[0])
            if convolution is not None and convolution.kind == "conv1d":
                made = _padded(rewriter, op, convolution, integer(op.arguments["start"]))
        rewriter.put(op, made)
    return rewriter.finish()


def _padded(rewriter: Rewriter, op: Op, convolution: Op, start: int) -> Argument:
    """The result of `op`, which is `convolution` from its place `start` on: the padded convolution that computes it, or
    KEEP where it has another length than the operand, or is an ordinary one."""
    given, type = convolution.arguments, rewriter.types[op.results[0]]
    source, padding = given["input"], integers(given["padding"])
    before = after = padding[0]
    made = rewriter.maker(cast(Ref, source).name)
    if made is not None and _pads_with_zeros(made):
        left, right = integers(made.arguments["pad"])
        source, before, after = made.arguments["self"], before + left, after + right
    reach = integers(given["dilation"])[0] * (rewriter.type(given["weight"]).shape[-1] - 1)
    before, length = before - start, type.shape[-1]
    if integers(given["stride"]) != (1,) or length != rewriter.type(source).shape[-1]:
        return KEEP
    # What follows the operand fills the window of the last place.
    after = reach - before
    if min(before, after) < 0 or before == after:
        return KEEP
    shape = TensorType(type.shape, type.dtype)
    options = {"padding": (before, after), "dilation": given["dilation"], "groups": given["groups"]}
    return rewriter.write(convolution, PADDED_CONVOLUTION, shape, source, given["weight"], given["bias"], **options)


def _pads_with_zeros(op: Op) -> bool:
    """Whether an op pads the last dim alone, with zeros."""
    if op.kind != "pad" or op.arguments["mode"] != "constant" or op.arguments["value"] not in (None, 0):
        return False
    around = integers(op.arguments["pad"])
    return len(around) == 2 and min(around) >= 0
