"""Sums, means, and what else makes a dim smaller."""

import math

import torch

from tests.autopar.steps.draw import Code, Draw, UnfitError, step, tuple_text


@step(6)
def reduced(draw: Draw) -> Code:
    """A sum or mean over some dims."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dims = [draw.either_way(dim, rank) for dim in draw.subset(range(rank))]
    count = math.prod(draw.shape(x)[dim] for dim in dims)
    keep = ", keepdim=True" if draw.chance(0.4) else ""
    shown = str(dims[0]) if len(dims) == 1 and draw.chance() else tuple_text(dims)
    texts = [f"{x}.sum({shown}{keep}) * {round(1 / math.sqrt(count), 3)}", f"{x}.mean({shown}{keep})"] * 2
    texts += [f"{x}.nansum({shown}{keep}) * {round(1 / count, 4)}", f"{x}.mean()", f"{x}.sum() * 0.1"]
    return draw.choose.choice(texts)


@step(4)
def spread_of(draw: Draw) -> Code:
    """The differences and the sizes of values."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dims = draw.subset([dim for dim in range(rank) if draw.shape(x)[dim] > 1])
    keep = ", keepdim=True" if draw.chance(0.4) else ""
    if bool((draw.values[x].std(dims) < 0.05).any()):
        raise UnfitError
    if bool((draw.values[x].norm(dim=dims[0]) < 0.05).any()):
        raise UnfitError
    texts = [
        f"{x}.var({tuple_text(dims)}{keep})",
        f"{x}.var({tuple_text(dims)}, correction=0{keep})",
        f"{x}.std({tuple_text(dims)}{keep})",
        f"torch.linalg.vector_norm({x} + 0.1, 2, {tuple_text(dims)}{keep})",
        f"({x}.square() + 0.1).norm(dim={dims[0]}{keep})",
        f"torch.dist({x}, {x}.sin() + 0.3)",
        f"torch.std_mean({x}, {tuple_text(dims)}{keep})[0]",
        f"torch.logsumexp({x}, {dims[0]}{keep})",
        f"torch.logsumexp({x}, {tuple_text(dims)}{keep})",
        f"F.normalize({x}, dim={dims[0]})",
        f"torch.sum(torch.stack(torch.var_mean({x}, {tuple_text(dims)}{keep})), 0)",
        f"F.cosine_similarity({x}, {draw.other(draw.shape(x))} + 2.0, dim={dims[0]})",
        f"({x}.tanh() * 0.2 + 1.0).prod({dims[0]}{keep})",
    ]
    return draw.choose.choice(texts)


@step(3)
def largest(draw: Draw) -> Code:
    """The largest or smallest along a dim, and where it is."""
    x = draw.tensor(least=1)
    dim = draw.dim(x, 2)
    draw.apart(draw.values[x], dim)
    keep = ", keepdim=True" if draw.chance(0.4) else ""
    way = draw.choose.randrange(4)
    if way == 0:
        return f"{x}.{draw.choose.choice(('amax', 'amin'))}({dim}{keep})"
    if way == 1:
        return f"{x}.{draw.choose.choice(('argmax', 'argmin'))}({dim}{keep})"
    if way == 2:
        return [f"{draw.result()}, {draw.result()} = {x}.{draw.choose.choice(('max', 'min'))}({dim}{keep})"]
    return [f"{draw.result()}, {draw.result()} = torch.aminmax({x}, dim={dim}{keep})"]


@step(1)
def counted(draw: Draw) -> Code:
    """The number of flags that are set; any; all."""
    known = [name for name, value in draw.values.items() if value.dtype == torch.bool and value.dim() > 0]
    made = torch.rand([draw.size(), draw.size()], generator=draw.generator) < 0.6
    flags = draw.late(known) if known and draw.chance(0.7) else draw.given(made)
    dim = draw.choose.randrange(draw.value(flags).dim())
    texts = (
        f"{flags}.any({dim})",
        f"{flags}.all({dim}, keepdim=True)",
        f"{flags}.sum({dim})",
        f"{flags}.sum()",
        f"{flags}.to(torch.float64).mean({dim})",
        f"torch.count_nonzero({flags}, dim={dim})",
        f"{flags}.long().cumsum({dim})",
        f"{flags}.any()",
    )
    return draw.choose.choice(texts)


@step(4)
def running(draw: Draw) -> Code:
    """A cumulative op along a dim."""
    x = draw.tensor(least=1)
    dim = draw.choose.randrange(len(draw.shape(x)))
    shown = draw.either_way(dim, len(draw.shape(x)))
    texts = [f"{x}.cumsum({shown}) * 0.3"] * 4
    texts += [f"torch.logcumsumexp({x}, {dim})", f"({x}.tanh() * 0.2 + 1.0).cumprod({dim})"]
    if draw.chance(0.2):
        draw.apart(draw.values[x], dim)
        texts = [f"{x}.cummax({dim}).values", f"{x}.cummin({dim}).values"]
    return draw.choose.choice(texts)
