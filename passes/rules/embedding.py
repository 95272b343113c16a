"""Table look-ups."""

from collections.abc import Mapping

from passes.ir.program import Op, Part, Role, Rule, Saved, TensorType
from passes.rules.parts import factors, named, rule_for


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
