"""Attention and recurrent layers."""

import torch

from tests.autopar.steps.draw import Code, Draw, UnfitError, step


@step(6)
def attention(draw: Draw) -> Code:
    """Attention of a sequence to itself or to another."""
    x = draw.tensor(least=3, most=3, fits=lambda value: value.numel() < 1500)
    batch, length, width = draw.shape(x)
    heads = draw.choose.choice((2, 2, 4, 3, 1))
    shared = draw.choose.choice([item for item in range(1, heads + 1) if heads % item == 0])
    depth = draw.choose.choice((2, 3, 4))
    try:
        y = draw.tensor(fits=lambda value: value.dim() == 3 and value.shape[0] == batch) if draw.chance(0.3) else x
    except UnfitError:
        y = x
    keys, inner = draw.shape(y)[1:]
    q, k, v, result = draw.local(), draw.local(), draw.local(), draw.result()

    def projected(source: str, size: int, count: int) -> str:
        weight = draw.weight(count * depth, size, inner=size)
        return f"F.linear({source}, {weight}).unflatten(-1, ({count}, {depth})).transpose(1, 2)"

    options = []
    way = draw.choose.randrange(5)
    scores = (batch, heads, length, keys)
    if way in (0, 1):
        options.append("is_causal=True")
    elif way == 2:
        flags = torch.rand(draw.narrower(scores), generator=draw.generator) < 0.7
        flags[..., 0] = True
        options.append(f"attn_mask={draw.given(flags)}")
    elif way == 3:
        options.append(f"attn_mask={draw.given(draw.normal(*draw.narrower(scores)))}")
    if shared != heads:
        options.append("enable_gqa=True")
    if draw.chance(0.3):
        options.append(f"scale={draw.number(0.2, 0.8)}")
    shown = "".join(f", {option}" for option in options)
    end = draw.choose.choice(("", ".transpose(1, 2).flatten(2)", ".transpose(1, 2).flatten(2)"))
    return [
        f"{q} = {projected(x, width, heads)}",
        f"{k} = {projected(y, inner, shared)}",
        f"{v} = {projected(y, inner, shared)}",
        f"{result} = F.scaled_dot_product_attention({q}, {k}, {v}{shown}){end}",
    ]


@step(2)
def fused_attention(draw: Draw) -> Code:
    """Queries, keys and values from one projection, heads in pairs of halves that are turned."""
    x = draw.tensor(least=3, most=3, fits=lambda value: value.numel() < 1500)
    batch, length, width = draw.shape(x)
    heads, depth = draw.choose.choice((2, 4, 3)), draw.choose.choice((2, 4))
    q, k, v, result = draw.local(), draw.local(), draw.local(), draw.result()
    weight = draw.weight(3 * heads * depth, width, inner=width)
    angles = draw.given(draw.normal(length, depth))
    turned = "torch.cat([-{x}[..., {half}:], {x}[..., :{half}]], -1)"
    return [
        f"{q}, {k}, {v} = F.linear({x}, {weight}).split({heads * depth}, dim=-1)",
        *(f"{t} = {t}.reshape({batch}, {length}, {heads}, {depth}).transpose(1, 2)" for t in (q, k, v)),
        *(
            f"{t} = {t} * {angles}.cos() + {turned.format(x=t, half=depth // 2)} * {angles}.sin()"
            for t in (q, k)
        ),
        f"{result} = F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)",
        f"{result} = {result}.transpose(1, 2).reshape({batch}, {length}, {heads * depth})",
    ]  # fmt: skip


@step(1)
def recurrent(draw: Draw) -> Code:
    """A recurrent layer."""
    x = draw.tensor(least=3, most=3, fits=lambda value: value.numel() < 600)
    first = draw.chance()
    batch = draw.shape(x)[0 if first else 1]
    width, hidden = draw.shape(x)[2], draw.choose.choice((2, 3))
    kind = draw.choose.choice(("lstm", "gru", "rnn_tanh"))
    gates = {"lstm": 4, "gru": 3}.get(kind, 1) * hidden
    weights = [
        draw.parameter(gates, width, scale=0.3), draw.parameter(gates, hidden, scale=0.3), draw.parameter(gates),
        draw.parameter(gates),
    ]  # fmt: skip
    state = f"{x}.new_zeros(1, {batch}, {hidden})"
    given = f"({state}, {state})" if kind == "lstm" else state
    call = f"torch.{kind}({x}, {given}, [{', '.join(weights)}], True, 1, 0.0, True, False, {first})"
    return f"{call}[0]"
