"""A linear layer whose result only a cross entropy reads: one op, `autopar::linear_cross_entropy`, whose logits need
not be whole.

Between both may stand views, a cast to a wider dtype, factors and a soft cap, and slices that drop tokens. Labels of
dropped tokens are ignored instead, so that the number of tokens stays that of the sequence, which mesh axes divide.
Both stay as they are written where anything else reads logits, classes have weights, labels are smoothed or
probabilities, losses are not summed, or there are no more classes than a token has elements; and in float16, whose
range gradients of sums can exceed.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from passes.ir.arguments import Argument, Ref, integer, references
from passes.ir.layout import Shape
from passes.ir.program import Op, Program, TensorType, without_unused
from passes.normalize import with_keys
from passes.normalize.rewriter import Rewriter
from passes.normalize.views import reshaped
from passes.ops import LINEAR_LOSS

_SUM = 2
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Dropped:
    """Tokens that a slice drops: of the dim `dim` of tokens, of `shape` after it, so many `before` and `after`."""

    shape: Shape
    dim: int
    before: int
    after: int


@dataclass(frozen=True)
class _Logits:
    """The ops between a linear layer and its loss, read from the end: a soft cap; factors before that, or without one
    all, as a quotient; and the tokens that are dropped."""

    times: float = 1.0
    divided: float = 1.0
    cap: float | None = None
    dropped: tuple[_Dropped, ...] = ()

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return self.times * (1.0 if self.cap is None else self.cap) / self.divided


@dataclass(frozen=True)
class _Head:
    """A linear layer: hidden states [..., width], the weight, [width, classes] if it is `turned`, and the bias."""

    hidden: Ref
    weight: Ref
    bias: Ref | None
    turned: bool = False


def with_linear_losses(program: Program, is_kept: Callable[[Op], bool] = lambda op: False) -> Program:
    """The program with linear layers and their cross entropies as one op, unless an op of these `is_kept`."""
    rewriter = Rewriter(program)
    uses = Counter(name for op in program.ops for name in op.operands)
    uses.update(name for value in program.outputs for name in references(value))
    uses.update(update.value for update in program.updates)
    for original in program.ops:
        op = rewriter.current(original)
        made = _joined(rewriter, op, uses, is_kept) if op.kind == "cross_entropy_loss" else None
        if made is None:
            rewriter.ops.append(op)
        else:
            rewriter.replaced[op.results[0]] = made
    return with_keys(without_unused(rewriter.finish())) if rewriter.replaced else program


def _joined(rewriter: Rewriter, op: Op, uses: Mapping[str, int], is_kept: Callable[[Op], bool]) -> Ref | None:
    """The op that computes the loss `op` and the linear layer before it; None where these stay."""
    given = op.arguments
    logits, target = (rewriter.type(given[name]) for name in ("self", "target"))
    is_plain = given["weight"] is None and given["reduction"] == _SUM and not given["label_smoothing"]
    if not is_plain or len(logits.shape) != 2 or target.dtype.is_floating_point or is_kept(op):
        return None
    assert isinstance(given["self"], Ref)
    found, name = _Logits(), given["self"].name
    while True:
        made = rewriter.maker(name)
        if made is None or uses[name] != 1 or is_kept(made):
            return None
        head = _head(rewriter, made)
        if head is not None:
            break
        step = _STEPS.get(made.kind)
        following = None if step is None else step(rewriter, made, found)
        if following is None:
            return None
        found, name = following, made.operands[0]
    if found.cap is not None and found.cap <= 0:
        return None
    return _written(rewriter, op, found, head)


def _written(rewriter: Rewriter, op: Op, found: _Logits, head: _Head) -> Ref | None:
    """The op in place of the loss `op`, over all tokens of the linear layer."""
    hidden, weight = rewriter.type(head.hidden), rewriter.type(head.weight)
    classes, width = weight.shape[::-1] if head.turned else weight.shape
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype or classes <= width:
        return None
    tokens = prod(hidden.shape[:-1])
    labels = op.arguments["target"]
    for each in found.dropped:
        labels = _padded(rewriter, op, reshaped(rewriter, op, labels, each.shape), each)
    labels = reshaped(rewriter, op, labels, (tokens,))
    states = reshaped(rewriter, op, head.hidden, (tokens, width))
    rows: Argument = head.weight
    if head.turned:
        turned = TensorType((classes, width), weight.dtype)
        rows = rewriter.write(op, "aten.transpose.int", turned, head.weight, 0, 1)
    type = rewriter.types[op.results[0]]
    return rewriter.write(
        op,
        LINEAR_LOSS,
        type,
        states,
        rows,
        labels,
        head.bias,
        ignore_index=op.arguments["ignore_index"],
        scale=found.scale,
        soft_cap=found.cap,
        dtype=None if type.dtype == hidden.dtype else type.dtype,
    )


def _padded(rewriter: Rewriter, op: Op, labels: Argument, dropped: _Dropped) -> Ref:
    """Labels with ignored ones for the tokens that were dropped."""
    shape = list(dropped.shape)
    shape[dropped.dim] += dropped.before + dropped.after
    around = (*(0,) * (2 * (len(shape) - 1 - dropped.dim)), dropped.before, dropped.after)
    type = TensorType(tuple(shape), rewriter.type(labels).dtype)
    ignored = float(integer(op.arguments["ignore_index"]))
    return rewriter.write(op, "aten.pad.default", type, labels, around, "constant", ignored)


def _head(rewriter: Rewriter, op: Op) -> _Head | None:
    """The linear layer that `op` is; None for other ops."""
    given = op.arguments
    if op.kind == "linear":
        hidden, weight, bias = given["input"], given["weight"], given["bias"]
    elif op.kind in ("matmul", "mm"):
        hidden, weight, bias = given["self"], given["other" if op.kind == "matmul" else "mat2"], None
    elif op.kind == "addmm" and (given["beta"], given["alpha"]) == (1, 1):
        hidden, weight, bias = given["mat1"], given["mat2"], given["self"]
    else:
        return None
    assert isinstance(hidden, Ref)
    assert isinstance(weight, Ref)
    if len(rewriter.type(weight).shape) != 2 or (bias is not None and not isinstance(bias, Ref)):
        return None
    if op.kind == "linear":
        return _Head(hidden, weight, bias)
    if bias is not None and rewriter.type(bias).shape != rewriter.type(weight).shape[1:]:
        return None
    made = rewriter.maker(weight.name)
    if made is not None and _is_turned(made):
        return _Head(hidden, Ref(made.operands[0]), bias)
    return _Head(hidden, weight, bias, turned=True)


def _is_turned(op: Op) -> bool:
    """Whether an op swaps the dims of a matrix."""
    if op.kind == "permute":
        return op.arguments["dims"] in ((1, 0), (-1, 0), (1, -2), (-1, -2))
    return op.kind == "transpose" and {integer(op.arguments[name]) % 2 for name in ("dim0", "dim1")} == {0, 1}


# --- what may be between ---------------------------------------------------------------------------------------------


def _cast(rewriter: Rewriter, op: Op, found: _Logits) -> _Logits | None:
    """A cast to a wider dtype."""
    before, after = (rewriter.types[name].dtype for name in (op.operands[0], op.results[0]))
    return found if torch.promote_types(before, after) == after else None


def _viewed(rewriter: Rewriter, op: Op, found: _Logits) -> _Logits | None:
    """Other dims of tokens."""
    before, after = (rewriter.types[name].shape for name in (op.operands[0], op.results[0]))
    return found if before[-1:] == after[-1:] and len(before) > 1 else None


def _sliced(rewriter: Rewriter, op: Op, found: _Logits) -> _Logits | None:
    """Fewer tokens, those of one interval of a dim."""
    before, after = (rewriter.types[name].shape for name in (op.operands[0], op.results[0]))
    dim = integer(op.arguments["dim"]) % len(before)
    start = integer(op.arguments["start"] or 0)
    if dim == len(before) - 1 or op.arguments["step"] != 1 or start < 0:
        return None
    dropped = _Dropped(after[:-1], dim, start, before[dim] - start - after[dim])
    return replace(found, dropped=(*found.dropped, dropped))


def _scaled(rewriter: Rewriter, op: Op, found: _Logits) -> _Logits | None:
    """Times a number, or divided by one."""
    number = op.arguments["other"]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return None
    if op.kind == "mul":
        return replace(found, times=found.times * number)
    return None if op.arguments.get("rounding_mode") else replace(found, divided=found.divided * number)


def _capped(rewriter: Rewriter, op: Op, found: _Logits) -> _Logits | None:
    """The hyperbolic tangent, which is multiplied with the cap after it."""
    if found.cap is not None:
        return None
    return replace(found, cap=found.times / found.divided, times=1.0, divided=1.0)


_STEPS: Mapping[str, Callable[[Rewriter, Op, _Logits], _Logits | None]] = {
    "to": _cast,
    "reshape": _viewed,
    "slice": _sliced,
    "mul": _scaled,
    "div": _scaled,
    "tanh": _capped,
}
