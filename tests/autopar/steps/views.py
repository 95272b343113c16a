"""Views, and steps that move elements."""

import math

from torch import Tensor

from tests.autopar.steps.draw import Code, Draw, UnfitError, step, tuple_text


def _factors(draw: Draw, count: int, ranks: int) -> list[int]:
    """`ranks` sizes whose product is `count`."""
    sizes = []
    for _ in range(ranks - 1):
        size = draw.choose.choice([item for item in range(1, count + 1) if count % item == 0])
        sizes.append(size)
        count //= size
    return [*sizes, count]


@step(6)
def reshape(draw: Draw) -> Code:
    """Dims merged, split, or both."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    way = draw.choose.randrange(5)
    if way == 0 and len(shape) > 1:
        first = draw.choose.randrange(len(shape) - 1)
        last = draw.choose.randrange(first + 1, len(shape))
        return f"{x}.flatten({first}, {last})"
    if way == 1:
        dim = draw.dim(x, 2)
        parts = _factors(draw, shape[dim], draw.choose.choice((2, 2, 3)))
        return f"{x}.unflatten({draw.either_way(dim, len(shape))}, {tuple_text(parts)})"
    if way == 2 and len(shape) > 1:
        first = draw.choose.randrange(len(shape) - 1)
        parts = _factors(draw, shape[first] * shape[first + 1], 2)
        return f"{x}.reshape{tuple_text((*shape[:first], *parts, *shape[first + 2 :]))}"
    if way == 3:
        dim = draw.choose.randrange(len(shape) + 1)
        return f"{x}.unsqueeze({dim})"
    sizes = _factors(draw, math.prod(shape), draw.choose.randint(1, 4))
    if draw.chance(0.3):
        sizes[draw.choose.randrange(len(sizes))] = -1
    return f"{x}.reshape{tuple_text(sizes)}"


@step(5)
def permute(draw: Draw) -> Code:
    """Dims in another order."""
    x = draw.tensor(least=2)
    rank = len(draw.shape(x))
    order = draw.choose.sample(range(rank), rank)
    first, second = draw.choose.sample(range(rank), 2)
    texts = (
        f"{x}.permute{tuple_text(order)}",
        f"{x}.transpose({draw.either_way(first, rank)}, {draw.either_way(second, rank)})",
        f"{x}.movedim({first}, {second})",
        f"{x}.mT",
        f"{x}.swapaxes({first}, {second}).contiguous()",
    )
    return draw.choose.choice(texts)


@step(3)
def squeeze(draw: Draw) -> Code:
    """Dims of size 1 come and go."""
    x = draw.tensor(fits=lambda value: 1 in value.shape or value.dim() < 4)
    shape = draw.shape(x)
    if 1 in shape:
        dims = [dim for dim, size in enumerate(shape) if size == 1]
        return f"{x}.squeeze()" if draw.chance(0.3) else f"{x}.squeeze({draw.choose.choice(dims)})"
    return f"{x}.unsqueeze({draw.choose.choice((0, -1))})"


@step(4)
def expand(draw: Draw) -> Code:
    """Dims of size 1 repeated, and new ones in front."""
    x = draw.tensor(fits=lambda value: value.dim() < 4)
    shape = list(draw.shape(x))
    wide = [draw.size() if size == 1 and draw.chance(0.7) else size for size in shape]
    wide = [draw.size(), *wide] if draw.chance(0.4) or wide == shape else wide
    same = [-1 if size in shape and draw.chance(0.2) and wide == shape else size for size in wide]
    text = f"{x}.expand{tuple_text(same)}"
    return text if draw.chance(0.6) else f"torch.broadcast_to({x}, {tuple_text(wide)})"


@step(6)
def slice_(draw: Draw) -> Code:
    """A part of a dim."""
    x = draw.tensor(least=1)
    dim = draw.dim(x, 2)
    size = draw.shape(x)[dim]
    start = draw.choose.randrange(size)
    stop = draw.choose.randrange(start + 1, size + 1)
    if draw.chance():
        unit = draw.choose.choice([item for item in range(1, size + 1) if size % item == 0])
        start = draw.choose.randrange(size // unit) * unit
        stop = min(size, start + unit * draw.choose.randint(1, 2))
    before = ":, " * dim
    texts = (
        f"{x}[{before}{start}:{stop}]",
        f"{x}.narrow({dim}, {start}, {stop - start})",
        f"{x}[{before}{start - size}:]",
        f"{x}[{before}{draw.choose.randrange(2)}::2]",
        f"{x}[..., :-1]" if draw.shape(x)[-1] > 1 else f"{x}[{before}{start}:{stop}]",
    )
    return draw.choose.choice(texts)


@step(3)
def select(draw: Draw) -> Code:
    """One of a dim."""
    x = draw.tensor(least=1)
    dim = draw.choose.randrange(len(draw.shape(x)))
    place = draw.choose.randrange(-draw.shape(x)[dim], draw.shape(x)[dim])
    return f"{x}.select({dim}, {place})" if draw.chance() else f"{x}[{':, ' * dim}{place}]"


@step(3)
def split(draw: Draw) -> Code:
    """Parts of a dim."""
    x = draw.tensor(least=1)
    dim = draw.dim(x, 2)
    size = draw.shape(x)[dim]
    first = draw.choose.randrange(1, size)
    names = [draw.result(), draw.result()]
    texts = [f"{x}.split([{first}, {size - first}], {dim})", f"torch.tensor_split({x}, [{first}], {dim})"]
    if size % 2 == 0:
        texts += [f"{x}.chunk(2, {dim})", f"{x}.split({size // 2}, {dim})"] * 2
    if size == 2:
        texts = [f"{x}.unbind({dim})"]
    return [f"{', '.join(names)} = {draw.choose.choice(texts)}"]


@step(5)
def cat(draw: Draw) -> Code:
    """Tensors one after the other."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    dim = draw.choose.randrange(len(shape))

    def fits(value: Tensor) -> bool:
        return value.dim() == len(shape) and all(
            place == dim or size == shape[place] for place, size in enumerate(value.shape)
        )

    others = [draw.tensor(fits=fits) for _ in range(draw.choose.randint(1, 2))]
    if draw.chance(0.3):
        others.append(draw.parameter(*shape[:dim], draw.size(), *shape[dim + 1 :]))
    parts = draw.choose.sample([x, *others], len(others) + 1)
    return f"torch.cat([{', '.join(parts)}], dim={draw.either_way(dim, len(shape))})"


@step(3)
def stack(draw: Draw) -> Code:
    """Tensors along a new dim."""
    x = draw.tensor(most=3)
    shape = draw.shape(x)
    others = [draw.tensor(fits=lambda value: tuple(value.shape) == shape) for _ in range(draw.choose.randint(1, 3))]
    dim = draw.choose.randrange(len(shape) + 1)
    name = "stack" if not shape or draw.chance(0.8) else draw.choose.choice(("hstack", "vstack"))
    return f"torch.{name}([{', '.join([x, *others])}]{f', dim={dim}' if name == 'stack' else ''})"


@step(3)
def pad(draw: Draw) -> Code:
    """Numbers around, or fewer."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    amounts: list[int] = []
    for size in list(reversed(shape))[: draw.choose.randint(1, len(shape))]:
        amounts += [draw.choose.choice((0, 1, 2, -1 if size > 3 else 0)), draw.choose.choice((0, 0, 1, 3))]
    value = draw.choose.choice(("", "", f", value={draw.number(-1, 1)}"))
    return f"F.pad({x}, {tuple_text(amounts)}{value})"


@step(2)
def pad_inside(draw: Draw) -> Code:
    """Elements of the tensor around it."""
    x = draw.tensor(least=2, most=4, fits=lambda value: min(value.shape[-1:]) > 2)
    rank = len(draw.shape(x))
    amounts = [draw.choose.randrange(3), draw.choose.randrange(3)]
    if rank == 4 and draw.shape(x)[-2] > 2:
        amounts += [draw.choose.randrange(2), draw.choose.randrange(2)]
    elif rank == 4:
        raise UnfitError
    mode = draw.choose.choice(("reflect", "replicate", "circular"))
    return f"F.pad({x}, {tuple_text(amounts)}, mode='{mode}')"


@step(3)
def repeat(draw: Draw) -> Code:
    """Everything several times."""
    x = draw.tensor(least=1, most=3, fits=lambda value: value.numel() < 300)
    rank = len(draw.shape(x))
    times = [draw.choose.choice((1, 2, 3)) for _ in range(rank)]
    dim = draw.choose.randrange(rank)
    texts = (
        f"{x}.repeat{tuple_text(times)}",
        f"{x}.tile{tuple_text(times[:1])}",
        f"{x}.repeat_interleave({draw.choose.choice((2, 3))}, dim={dim})",
        f"{x}.repeat{tuple_text([2, *times])}",
    )
    return draw.choose.choice(texts)


@step(2)
def unfold(draw: Draw) -> Code:
    """Windows along a dim."""
    x = draw.tensor(least=1, most=3)
    dim = draw.dim(x, 3)
    size = draw.choose.randint(2, min(4, draw.shape(x)[dim]))
    return f"{x}.unfold({dim}, {size}, {draw.choose.randint(1, 3)})"


@step(3)
def turn(draw: Draw) -> Code:
    """Elements of dims in another order."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dims = draw.subset(range(rank))
    texts = (
        f"{x}.flip({tuple_text(dims)})",
        f"{x}.roll({tuple_text([draw.choose.randint(-3, 3) for _ in dims])}, {tuple_text(dims)})",
        f"{x}.roll({draw.choose.randint(1, 4)}, {dims[0]})",
        f"{x}.roll({draw.choose.randint(1, 4)})",
    )
    return draw.choose.choice(texts)


@step(2)
def triangle(draw: Draw) -> Code:
    """Half of matrices, or their diagonal."""
    x = draw.tensor(least=2)
    offset = draw.choose.randint(-1, 1)
    if min(draw.shape(x)[-2:]) < 2:
        raise UnfitError
    texts = (f"{x}.tril({offset})", f"{x}.triu({offset})", f"{x}.diagonal({offset}, -2, -1)")
    return draw.choose.choice(texts)


@step(1)
def shuffle(draw: Draw) -> Code:
    """Channels to space, and back."""
    x = draw.tensor(least=3, most=4)
    shape = draw.shape(x)
    texts = []
    if shape[-3] % 4 == 0:
        texts.append(f"F.pixel_shuffle({x}, 2)")
    if shape[-1] % 2 == 0 and shape[-2] % 2 == 0:
        texts.append(f"F.pixel_unshuffle({x}, 2)")
    if not texts:
        raise UnfitError
    return draw.choose.choice(texts)
