"""Scaled dot-product attention."""

from collections.abc import Mapping
from math import prod

from passes.ir.program import Op, TensorType
from passes.rules.parts import factors, is_tensor
from passes.rules.registry import rule_for
from passes.rules.rule import Dims, Part, Role, Rule, Saved

_WHOLE = dict.fromkeys(("keys", "width", "value_width"), Role.WHOLE)


@rule_for("scaled_dot_product_attention")
def attention(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch heads queries width, batch heads keys width, batch heads keys value_width.

    With fewer key heads than query heads, a query head is (heads, groups) and keys and values have no groups. Split
    queries attend to all keys; where attention is causal the local form knows which queries it has.
    """
    query, key, value = (types[name].shape for name in op.operands[:3])
    if len(query) != 4 or prod(query) == 0:
        return None
    heads, groups = key[1], query[1] // key[1]
    if heads * groups != query[1] or (groups != 1 and not op.arguments["enable_gqa"]) or query[0] != key[0]:
        return None
    batch = (Part("batch", query[0]),)
    shared = (Part("heads", heads),)
    own = (*shared, Part("groups", groups)) if groups != 1 else shared
    queries, keys = (Part("queries", query[2]),), (Part("keys", key[2]),)
    width, value_width = (Part("width", query[3]),), (Part("value_width", value[3]),)
    result: Dims = (batch, own, queries, value_width)
    operands: list[Dims] = [
        (batch, own, queries, width),
        (batch, shared, keys, width),
        (batch, shared, keys, value_width),
    ]
    causal = bool(op.arguments["is_causal"])
    if is_tensor(op, "attn_mask"):
        scores = (batch, own, queries, keys)
        mask = types[op.operands[3]].shape
        operands.append(tuple(scores[4 - len(mask) + dim] if size != 1 else () for dim, size in enumerate(mask)))
    return Rule(
        factors(*operands, result, roles=_WHOLE),
        tuple(operands),
        (result,),
        bodies={"queries": "causal_attention"} if causal else {},
        multiplications=2.0 * prod(query[:3]) * key[2] * (query[3] + value[3]) / (2 if causal else 1),
        backward=(2.5 / 3,) * 3 + (0.0,) * (len(operands) - 3),
        saved=(Saved(0), Saved(1), Saved(2), Saved(0, result=True)),
    )
