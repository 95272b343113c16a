"""Products."""

import math
from collections.abc import Sequence

from tests.autopar.steps.draw import Code, Draw, UnfitError, step


@step(12)
def linear(draw: Draw) -> Code:
    """A linear layer."""
    x = draw.tensor(least=1)
    width = draw.shape(x)[-1]
    out = draw.size(width)
    bias = f", {draw.parameter(out)}" if draw.chance() else ""
    return f"F.linear({x}, {draw.weight(out, width, inner=width)}{bias})"


@step(7)
def matmul(draw: Draw) -> Code:
    """A product of what lives with what lives, or with a parameter."""
    x = draw.tensor(least=1, most=4)
    shape = draw.shape(x)
    scale = round(1 / math.sqrt(shape[-1]), 3)
    try:
        y = draw.tensor(
            least=1,
            fits=lambda value: (
                value.shape[-2 if value.dim() > 1 else 0] == shape[-1]
                and (value.dim() < 3 or len(shape) < 3 or _fit(value.shape[:-2], shape[:-2]))
            ),
        )
        if draw.chance(0.7):
            return f"({x} @ {y}) * {scale}"
    except UnfitError:
        pass
    if len(shape) == 3 and draw.chance(0.6):
        weight = draw.parameter(shape[0], shape[2], draw.size(), scale=1 / math.sqrt(shape[2]))
        text = f"torch.bmm({x}, {weight})"
        extra = f"torch.baddbmm({draw.parameter(shape[0], shape[1], 1)}, {x}, {weight})"
        return text if draw.chance(0.7) else extra
    if len(shape) == 2 and draw.chance(0.7):
        out = draw.size()
        weight = draw.weight(shape[1], out, inner=shape[1])
        beta = draw.choose.choice(("", "", ", beta=0.5", ", beta=0.7, alpha=1.3"))
        added = draw.parameter(*draw.choose.choice(((out,), (shape[0], out), (1, out), (shape[0], 1))))
        return draw.choose.choice((f"torch.mm({x}, {weight})", f"torch.addmm({added}, {x}, {weight}{beta})"))
    if len(shape) == 1:
        return f"torch.mv({draw.weight(draw.size(), shape[0], inner=shape[0])}, {x})"
    batch = draw.narrower(shape[:-2])
    return f"{x} @ {draw.parameter(*batch, shape[-1], draw.size(), scale=1 / math.sqrt(shape[-1]))}"


def _fit(one: Sequence[int], two: Sequence[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(two), strict=False))


@step(2)
def squares(draw: Draw) -> Code:
    """All products of rows with each other, or of two vectors."""
    x = draw.tensor(least=1, most=3)
    shape = draw.shape(x)
    if len(shape) > 1:
        return f"{x} @ {x}.transpose(-1, -2) / {shape[-1]}"
    y = draw.other(shape)
    same = draw.value(y).shape == shape
    texts = [f"torch.outer({x}, {draw.parameter(draw.size())})"]
    texts += [f"torch.dot({x}, {y}) * 0.1"] if same else []
    return draw.choose.choice(texts)


@step(6)
def einsum(draw: Draw) -> Code:
    """A product after Einstein."""
    x = draw.tensor(least=1, most=4)
    shape = draw.shape(x)
    placements = "abcd"[: len(shape)]
    sizes = dict(zip(placements, shape, strict=True))
    if draw.chance(0.2):
        kept = draw.choose.sample(placements, draw.choose.randint(1, len(placements)))
        scale = math.prod(size for placement, size in sizes.items() if placement not in kept)
        return f"torch.einsum('{placements} -> {''.join(kept)}', {x}) * {round(1 / math.sqrt(scale), 3)}"
    shared = draw.choose.sample(placements, draw.choose.randint(1, len(placements)))
    second = shared + (["z"] if draw.chance(0.7) else [])
    draw.choose.shuffle(second)
    sizes["z"] = draw.size()
    union = [*placements, *(["z"] if "z" in second else [])]
    result = draw.choose.sample(union, draw.choose.randint(max(1, len(union) - 2), len(union)))
    summed = math.prod(sizes[placement] for placement in union if placement not in result)
    weight = draw.parameter(*(sizes[placement] for placement in second), scale=1 / math.sqrt(summed))
    terms, operands = [placements, "".join(second)], [x, weight]
    if draw.chance(0.2):
        placement = draw.choose.choice(result)
        terms.append(placement)
        operands.append(draw.parameter(sizes[placement]))
    if draw.chance(0.3):
        terms[:2], operands[:2] = terms[1::-1], operands[1::-1]
    return f"torch.einsum('{', '.join(terms)} -> {''.join(result)}', {', '.join(operands)})"
