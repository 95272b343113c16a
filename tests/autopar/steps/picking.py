"""Picking and putting by index."""

import math

import torch

from tests.autopar.steps.draw import Code, Draw, UnfitError, step


@step(3)
def gather(draw: Draw) -> Code:
    """Picks along a dim, one for each element of an index."""
    x = draw.tensor(least=1, most=3)
    shape = list(draw.shape(x))
    dim = draw.choose.randrange(len(shape))
    picked = [size if draw.chance(0.8) else draw.choose.randint(1, size) for size in shape]
    picked[dim] = draw.size()
    index = draw.integers(picked, shape[dim])
    if picked[:dim] + picked[dim + 1 :] == shape[:dim] + shape[dim + 1 :] and draw.chance(0.2):
        return f"torch.take_along_dim({x}, {index}, {dim})"
    return f"{x}.gather({dim}, {index})"


@step(3)
def scatter(draw: Draw) -> Code:
    """Elements to places along a dim."""
    x = draw.tensor(least=1, most=3)
    shape = list(draw.shape(x))
    dim = draw.choose.randrange(len(shape))
    order = torch.rand(shape, generator=draw.generator).argsort(dim)
    wide = [size if draw.chance(0.8) else draw.choose.randint(1, size) for size in shape]
    wide[dim] = draw.choose.randint(1, shape[dim])
    part = order
    for place, size in enumerate(wide):
        part = part.narrow(place, 0, size)
    index = draw.given(part.contiguous())
    source = draw.parameter(*wide)
    if wide == shape:
        source = draw.choose.choice((source, draw.other(shape)))
        if tuple(draw.value(source).shape) != tuple(wide):
            raise UnfitError
    texts = (
        f"{x}.scatter({dim}, {index}, {source})",
        f"{x}.scatter({dim}, {index}, {draw.number(-1, 1)})",
        f"{x}.scatter_add({dim}, {index}, {source})",
        f"{x}.scatter_add({dim}, {draw.integers(wide, shape[dim])}, {source})",
        f"{x}.scatter_reduce({dim}, {index}, {source}, 'sum')",
        f"{x}.scatter_reduce({dim}, {draw.integers(wide, shape[dim])}, {source}, 'mean')",
        f"{x}.scatter_reduce({dim}, {index}, {source}, 'amax', include_self=False)",
    )
    return draw.choose.choice(texts)


@step(4)
def index(draw: Draw) -> Code:
    """Picks by tensors of places."""
    x = draw.tensor(least=1, most=4)
    shape = draw.shape(x)
    rank = len(shape)
    dim = draw.choose.randrange(rank)
    count = draw.size()
    place = draw.integers((count,), shape[dim])
    before = ":, " * dim
    texts = [
        f"{x}[{before}{place}]",
        f"{x}.index_select({dim}, {place})",
        f"{x}[{before}{draw.integers((count, 2), shape[dim])}]",
        f"F.embedding({draw.integers((count, 3), shape[0])}, {x}.flatten(1))" if rank > 1 else f"{x}[{place}]",
    ]
    if dim + 1 < rank:
        texts += [
            f"{x}[{before}{place}, {draw.integers((count,), shape[dim + 1])}]",
            f"{x}[{before}{draw.integers((count, 1), shape[dim])}, {draw.integers((1, 3), shape[dim + 1])}]",
        ]
    if rank > 2:
        texts.append(f"{x}[{draw.integers((count,), shape[0])}, :, {draw.integers((count,), shape[2])}]")
    return draw.choose.choice(texts)


@step(3)
def index_put(draw: Draw) -> Code:
    """Values put to places."""
    x = draw.tensor(least=1, most=3)
    shape = draw.shape(x)
    dim = draw.choose.randrange(len(shape))
    count = draw.choose.randint(1, shape[dim])
    different = draw.places(count, shape[dim])
    any_place = draw.integers((count,), shape[dim])
    rows = draw.parameter(*shape[:dim], count, *shape[dim + 1 :])
    texts = [
        f"{x}.index_add({dim}, {any_place}, {rows})",
        f"{x}.index_add({dim}, {any_place}, {rows}, alpha=0.5)",
        f"{x}.index_copy({dim}, {different}, {rows})",
        f"{x}.index_fill({dim}, {different}, {draw.number(-1, 1)})",
        f"{x}.index_fill({dim}, {different}, {draw.parameter()})",
    ]
    if dim == 0:
        texts += [
            f"{x}.index_put(({different},), {rows})",
            f"{x}.index_put(({any_place},), {rows}, accumulate=True)",
            f"{x}.index_put(({any_place},), {draw.parameter(*draw.narrower(shape[1:]))}, accumulate=True)",
        ]
    if dim == 1:
        either = draw.integers((count,), shape[0])
        texts += [f"{x}.index_put(({either}, {different}), {draw.parameter(count, *shape[2:])})"]
    return draw.choose.choice(texts)


@step(4)
def embedding(draw: Draw) -> Code:
    """Rows of a table."""
    rows, width = draw.size(), draw.size()
    ids = draw.integers([draw.size() for _ in range(draw.choose.randint(1, 2))], rows)
    padding = f", padding_idx={draw.choose.randrange(rows)}" if draw.chance(0.3) else ""
    return f"F.embedding({ids}, {draw.parameter(rows, width)}{padding})"


@step(2)
def language(draw: Draw) -> Code:
    """Words, a layer, and how well the same table tells the next ones."""
    words, width = draw.size(), draw.size()
    if words < 2 or width < 2:
        raise UnfitError
    batch, length = draw.size(), draw.size()
    table = draw.weight(words, width, inner=width)
    ids = draw.integers((batch, length), words)
    labels = draw.integers((batch, length), words, ignored=True)
    if bool((draw.value(labels) == -100).all()):
        raise UnfitError
    hidden, loss = draw.result(), draw.result()
    return [
        f"{hidden} = F.embedding({ids}, {table}) * {round(math.sqrt(width), 3)}",
        f"{hidden} = {hidden} + F.linear({hidden}.tanh(), {draw.weight(width, width, inner=width)})",
        f"{loss} = F.cross_entropy(F.linear({hidden}, {table}).flatten(0, 1), {labels}.flatten())",
    ]


@step(2)
def one_hot(draw: Draw) -> Code:
    """Flags of classes, as numbers."""
    classes = draw.size()
    ids = draw.integers((draw.size(), 2), classes)
    return f"F.one_hot({ids}, {classes}).to(torch.float64) @ {draw.parameter(classes, draw.size())}"


@step(3)
def ordered(draw: Draw) -> Code:
    """Elements in order."""
    x = draw.tensor(least=1)
    dim = draw.dim(x, 2)
    draw.apart(draw.values[x], dim)
    draw.apart(draw.values[x], 0)
    count = draw.choose.randint(1, draw.shape(x)[dim])
    shown = draw.either_way(dim, len(draw.shape(x)))
    way = draw.choose.randrange(5)
    if way == 4:
        return draw.choose.choice((f"torch.msort({x})", f"{x}.median({dim}).values"))
    if way == 0:
        return [f"{draw.result()}, {draw.result()} = {x}.sort({shown}, descending={draw.chance()})"]
    if way == 1:
        return [f"{draw.result()}, {draw.result()} = {x}.topk({count}, {shown})"]
    if way == 2:
        return f"{x}.argsort({shown})"
    return [f"{draw.result()}, {draw.result()} = {x}.kthvalue({count}, {shown})"]


@step(2)
def picked_again(draw: Draw) -> Code:
    """A selection by an order that was computed."""
    x = draw.tensor(least=1, most=3)
    dim = draw.dim(x, 2)
    draw.apart(draw.values[x], dim)
    y = draw.tensor(fits=lambda value: tuple(value.shape) == draw.shape(x))
    return f"{y}.gather({dim}, {x}.topk({draw.choose.randint(1, draw.shape(x)[dim])}, {dim}).indices)"
