"""Norms and softmax."""

import math
from collections.abc import Sequence

from torch import Tensor

from tests.autopar.steps.draw import Code, Draw, UnfitError, step, tuple_text


def _lively(draw: Draw, value: Tensor, dims: Sequence[int]) -> None:
    """Refuse what hardly differs along dims: a norm would blow up rounding."""
    if math.prod(value.shape[dim] for dim in dims) < 2 or bool((value.std(list(dims)) < 0.05).any()):
        raise UnfitError


@step(5)
def layer_norm(draw: Draw) -> Code:
    """Layer norm, or root mean square norm."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    count = draw.choose.choice([count for count in (1, 1, 2) if count <= len(shape)])
    _lively(draw, draw.values[x], range(len(shape) - count, len(shape)))
    inner = shape[-count:]
    weight = f", {draw.parameter(*inner)}" if draw.chance(0.7) else ""
    if draw.chance(0.4):
        return f"F.rms_norm({x}, {tuple_text(inner)}{weight}{draw.choose.choice(('', ', eps=1e-4'))})"
    bias = f", {draw.parameter(*inner)}" if weight and draw.chance(0.7) else ""
    return f"F.layer_norm({x}, {tuple_text(inner)}{weight}{bias})"


@step(3)
def group_norm(draw: Draw) -> Code:
    """Group norm, or instance norm."""
    x = draw.tensor(least=2, most=4)
    shape = draw.shape(x)
    groups = draw.choose.choice([item for item in range(1, shape[1] + 1) if shape[1] % item == 0])
    value = draw.values[x].reshape(shape[0], groups, -1)
    _lively(draw, value, [2])
    affine = f", {draw.parameter(shape[1])}, {draw.parameter(shape[1])}" if draw.chance(0.6) else ""
    if len(shape) > 2 and draw.chance(0.2):
        _lively(draw, draw.values[x].flatten(2), [2])
        return f"F.instance_norm({x})"
    return f"F.group_norm({x}, {groups}{affine})"


@step(3)
def batch_norm(draw: Draw) -> Code:
    """Batch norm: with running statistics, or without."""
    x = draw.tensor(least=2, most=4)
    shape = draw.shape(x)
    _lively(draw, draw.values[x], [dim for dim in range(len(shape)) if dim != 1])
    affine = f", {draw.parameter(shape[1])}, {draw.parameter(shape[1])}" if draw.chance(0.6) else ", None, None"
    if draw.chance(0.3):
        return f"F.batch_norm({x}, None, None{affine}, training=True)"
    mean = draw.hold("buffer", draw.normal(shape[1]))
    variance = draw.hold("buffer", draw.normal(shape[1]).abs() + 0.5)
    mode = draw.choose.choice(("self.training", "self.training", "False"))
    return f"F.batch_norm({x}, {mean}, {variance}{affine}, training={mode}, momentum={draw.number(0.05, 0.3)})"


@step(5)
def softmax(draw: Draw) -> Code:
    """Softmax and its like along any dim."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dim = draw.either_way(draw.dim(x, 2), rank)
    texts = (
        f"{x}.softmax({dim})", f"{x}.log_softmax({dim})", f"F.softmin({x}, dim={dim})", f"(2 * {x}).softmax({dim})",
        f"{x}.logsumexp({dim})", f"{x}.logsumexp({dim}, keepdim=True)",
    )  # fmt: skip
    if draw.shape(x)[dim] % 2 == 0 and draw.chance(0.2):
        return f"F.glu({x}, {dim})"
    return draw.choose.choice(texts)
