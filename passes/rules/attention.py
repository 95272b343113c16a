"""Scaled dot-product attention."""

from collections.abc import Mapping
from math import prod

from passes.ir.program import Dims, Op, Part, Role, Rule, Saved, TensorType
from passes.rules.parts import factors, is_tensor, one, rule_for

_WHOLE = dict.fromkeys(("keys", "width"), Role.WHOLE)


@rule_for("scaled_dot_product_attention")
def attention(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch heads queries width, batch heads keys width, batch heads keys value_width.

    There may be no heads, no batch, or several of it. With fewer key heads than query heads, a query head is (heads,
    groups) and keys and values have no groups. Split queries attend to all keys; where attention is causal the local
    form knows which queries it has.
    """
    query, key, value = (types[name].shape for name in op.operands[:3])
    if len(query) < 2 or len({len(query), len(key), len(value)}) > 1 or prod(query) == 0:
        return None
    if query[:-3] != key[:-3] or key[:-2] != value[:-2]:
        return None
    names = ["batch", *(f"batch{dim}" for dim in range(1, len(query)))]
    batch = tuple(one(name, size) for name, size in zip(names, query[:-3], strict=False))
    shared: tuple[Part, ...] = ()
    own: tuple[Part, ...] = ()
    if len(query) > 2:
        heads, groups = key[-3], query[-3] // key[-3]
        if heads * groups != query[-3] or (groups != 1 != heads and not op.arguments["enable_gqa"]):
            return None
        shared = one("heads", heads)
        own = (*shared, *one("groups", groups))
    above = (*batch, own) if len(query) > 2 else batch
    below = (*batch, shared) if len(query) > 2 else batch
    queries, keys = one("queries", query[-2]), one("keys", key[-2])
    width, value_width = one("width", query[-1]), one("value_width", value[-1])
    result: Dims = (*above, queries, value_width)
    operands: list[Dims] = [(*above, queries, width), (*below, keys, width), (*below, keys, value_width)]
    causal = bool(op.arguments["is_causal"])
    if is_tensor(op, "attn_mask"):
        scores = (*above, queries, keys)
        mask = types[op.operands[3]].shape
        offset = len(scores) - len(mask)
        operands.append(tuple(scores[offset + dim] if size != 1 else () for dim, size in enumerate(mask)))
    roles = dict(_WHOLE)
    if causal and len(query) != 4:
        roles["queries"] = Role.WHOLE
    # Of the products of the forward pass one is over the width and makes scores, the other reads them; of the backward
    # pass, in which fused kernels make the scores again, three and two.
    inner, outer = query[-1], value[-1]
    forward, back = inner + outer, 3 * inner + 2 * outer
    return Rule(
        factors(*operands, result, roles=roles),
        tuple(operands),
        (result,),
        linear=(frozenset({2}),),
        forms={"queries": "causal_attention"} if causal and len(query) == 4 else {},
        multiplications=2.0 * prod(query[:-1]) * key[-2] * forward / (2 if causal else 1),
        backward=(back / forward / 3,) * 3 + (0.0,) * (len(operands) - 3),
        divided={"value_width": (outer / forward, 2 * outer / back)},
        saved=(Saved(0), Saved(1), Saved(2), Saved(0, result=True)),
    )
