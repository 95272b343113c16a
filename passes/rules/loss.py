"""Losses over classes; elementwise ones are pointwise."""

from collections.abc import Mapping

from passes.ir.linear_loss import AT_ONCE, SPLIT, SPLIT_AT_ONCE
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Method, Role, Rule, Saved, parts_of
from passes.rules.parts import factors, is_tensor, one, rule_for

_NONE, _SUM = 0, 2


@rule_for("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def cross_entropy(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """tokens classes space, tokens space -> a sum over tokens and space, or one loss for each.

    Split classes are reduced inside the local form (largest logit, sum, target).
    """
    arguments = op.arguments
    logits, target = (types[name] for name in op.operands[:2])
    if arguments["reduction"] not in (_NONE, _SUM) or not logits.shape:
        return None
    batched = len(logits.shape) > 1
    tokens = (one("tokens", logits.shape[0]),) if batched else ()
    space = tuple(one(f"space{dim}", size) for dim, size in enumerate(logits.shape[2:]))
    each = (*tokens, *space)
    classes = one("classes", logits.shape[1 if batched else 0])
    dims: Dims = (*tokens, classes, *space)
    probabilities = target.dtype.is_floating_point
    operands: list[Dims] = [dims, dims if probabilities else each]
    if is_tensor(op, "weight"):
        operands.append((classes,))
    plain = op.kind == "cross_entropy_loss" and len(logits.shape) == 2 and len(operands) == 2
    plain = plain and not arguments["label_smoothing"] and not probabilities
    summed = arguments["reduction"] == _SUM
    names = ["tokens", *(f"space{dim}" for dim in range(len(space)))]
    roles = {**dict.fromkeys(names, Role.SUM if summed else Role.FREE), "classes": Role.INSIDE if plain else Role.WHOLE}
    saved: tuple[Saved, ...] = (Saved(0, copy=True), Saved(1))
    if op.kind != "cross_entropy_loss":
        saved = (Saved(0), Saved(1))
    if len(operands) == 3:
        saved = (*saved, Saved(2))
    return Rule(
        factors(*operands, roles=roles),
        tuple(operands),
        ((() if summed else each),),
        linear=() if op.kind == "cross_entropy_loss" else (frozenset({0}),),
        forms={"classes": "vocabulary_cross_entropy"} if plain and logits.shape[1] != 1 else {},
        saved=saved,
    )


@rule_for("ctc_loss")
def ctc(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """steps samples classes, samples labels, samples, samples -> samples, for `autopar::ctc_loss` (torch's own reduces
    what it computes, and takes labels that are not by sample)."""
    if "reduction" in op.arguments:
        return None
    steps, samples, classes = types[op.operands[0]].shape
    labels = types[op.operands[1]].shape[1]
    each = one("samples", samples)
    operands: tuple[Dims, ...] = (
        (one("steps", steps), each, one("classes", classes)),
        (each, one("labels", labels)),
        (each,),
        (each,),
    )
    # Each label is blank or not, with three ways to get there; the backward pass goes forward first.
    return Rule(
        factors(*operands, roles=dict.fromkeys(("steps", "classes", "labels"), Role.WHOLE)),
        operands,
        ((each,),),
        multiplications=2.0 * 3 * steps * samples * (2 * labels + 1),
        backward=(3.0, 0.0, 0.0, 0.0),
        saved=tuple(Saved(slot) for slot in range(len(operands))),
    )


@rule_for("linear_cross_entropy")
def linear_cross_entropy(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """tokens width, classes width, tokens, classes -> a sum over tokens.

    It runs in chunks of tokens, unless an axis has a method "at once". The logits of split classes are reduced inside
    the local form, and gradients of hidden states are pending sums over them. The width stays whole. What is saved is
    not among the operands, or depends on the form: it is workspace.
    """
    hidden, weight = (types[name].shape for name in op.operands[:2])
    tokens, classes, width = one("tokens", hidden[0]), one("classes", weight[0]), one("width", hidden[1])
    operands: tuple[Dims, ...] = ((tokens, width), (classes, width), (tokens,))
    if is_tensor(op, "bias"):
        operands = (*operands, (classes,))
    at_once = {"tokens_at_once": Method(("tokens",), AT_ONCE), "classes_at_once": Method(("classes",), SPLIT_AT_ONCE)}
    return Rule(
        factors(*operands, roles={"tokens": Role.SUM, "classes": Role.INSIDE, "width": Role.WHOLE}),
        operands,
        ((),),
        forms={"classes": SPLIT},
        joint={name: method for name, method in at_once.items() if method.factors[0] in _names(*operands)},
        multiplications=2.0 * hidden[0] * hidden[1] * weight[0],
        backward=(1.0, 1.0, *(0.0,) * (len(operands) - 2)),
    )


def _names(*tensors: Dims) -> set[str]:
    return {part.factor for part in parts_of(*tensors)}
