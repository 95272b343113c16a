"""Changes in place."""

import math

from tests.autopar.steps.draw import Code, Draw, step


@step(5)
def in_place(draw: Draw) -> Code:
    """A fresh tensor that is changed."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    fresh = draw.result()
    lines = [f"{fresh} = {draw.choose.choice((f'{x} * 0.5', f'{x}.clone()', f'{x} + 0.1'))}"]
    for _ in range(draw.choose.randint(1, 2)):
        y = draw.other(shape)
        texts = (
            f"{fresh} += {y}", f"{fresh}.mul_({y})", f"{fresh}.add_({y}, alpha=0.5)", f"{fresh}.tanh_()",
            f"{fresh}.sub_({y})", f"{fresh}.div_({y}.square() + 0.5)", f"{fresh}.sigmoid_()", f"{fresh}.neg_()",
            f"{fresh}.masked_fill_({draw.mask(shape)}, 0.3)", f"{fresh}.copy_({y})", f"{fresh}.addcmul_({y}, {y})",
            f"{fresh}.lerp_({y}.expand_as({fresh}), 0.3)", f"{fresh}.mul_(0.7)",
        )  # fmt: skip
        lines.append(draw.choose.choice(texts))
    return lines


@step(5)
def in_place_view(draw: Draw) -> Code:
    """A view that is changed, and what it is a view of."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    dim = draw.dim(x, 2)
    size = shape[dim]
    stop = draw.choose.randint(1, size)
    fresh, view = draw.result(), draw.result()
    before = ":, " * dim
    part = (*shape[:dim], stop, *shape[dim + 1 :])
    row = (*shape[:dim], *shape[dim + 1 :])
    views = [
        (f"{fresh}[{before}:{stop}]", part),
        (f"{fresh}.narrow({dim}, {size - stop}, {stop})", part),
        (f"{fresh}.select({dim}, {draw.choose.randrange(size)})", row),
        (f"{fresh}.flatten()", (math.prod(shape),)),
        (f"{fresh}.unsqueeze({dim})", (*shape[:dim], 1, *shape[dim:])),
        (f"{fresh}.transpose(0, -1)", (shape[-1], *shape[1:-1], shape[0]) if len(shape) > 1 else shape),
    ]
    if size % 2 == 0:
        views.append((f"{fresh}.chunk(2, {dim})[1]", (*shape[:dim], size // 2, *shape[dim + 1 :])))
    text, seen = draw.choose.choice(views)
    y = draw.other(seen)
    changes = (
        f"{view}.add_({y})",
        f"{view}.mul_({y})",
        f"{view}.copy_({y})",
        f"{view}.mul_(0.5)",
        f"{view}.zero_()",
        f"{view}.fill_(0.4)",
        f"{view}.tanh_()",
        f"{view}[:1] = 0.3" if seen else f"{view}.sin_()",
        f"{view}[..., 0].mul_(0.2)" if seen else f"{view}.cos_()",
    )
    lines = [f"{fresh} = {x} * 0.8", f"{view} = {text}", draw.choose.choice(changes)]
    if draw.chance(0.3):
        lines.append(f"{fresh}.add_(0.1)")
    return lines


@step(2)
def assigned(draw: Draw) -> Code:
    """Parts of a new tensor, filled in one after the other."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    dim = draw.dim(x, 2)
    stop = draw.choose.randrange(1, shape[dim])
    before = ":, " * dim
    fresh = draw.result()
    y = draw.other((*shape[:dim], shape[dim] - stop, *shape[dim + 1 :]))
    return [
        f"{fresh} = torch.zeros_like({x})",
        f"{fresh}[{before}:{stop}] = {x}[{before}:{stop}]",
        f"{fresh}[{before}{stop}:] = {y}",
    ]
