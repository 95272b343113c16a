"""Losses."""

from collections.abc import Mapping

from passes.ir.program import Op, TensorType
from passes.rules.parts import factors, named
from passes.rules.registry import rule_for
from passes.rules.rule import Part, Role, Rule, Saved

_SUM = 2


@rule_for("cross_entropy_loss")
def cross_entropy(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """tokens classes, tokens -> a sum over tokens. Split classes are reduced inside (largest logit, sum, target)."""
    arguments = op.arguments
    logits, target = (types[name] for name in op.operands[:2])
    if arguments["reduction"] != _SUM or arguments["weight"] is not None or target.dtype.is_floating_point:
        return None
    if len(logits.shape) != 2 or len(target.shape) != 1:
        return None
    tokens, classes = named(logits.shape[:1], "tokens"), ((Part("classes", logits.shape[1]),),)
    splittable = Role.INSIDE if not arguments["label_smoothing"] else Role.WHOLE
    roles = {"tokens0": Role.SUM, "classes": splittable}
    return Rule(
        factors((*tokens, *classes), roles=roles),
        ((*tokens, *classes), tokens),
        ((),),
        bodies={"classes": "vocabulary_cross_entropy"},
        saved=(Saved(0, copy=True), Saved(1)),
    )
