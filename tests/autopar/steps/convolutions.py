"""Convolutions and pools."""

import math

from tests.autopar.steps.draw import Code, Draw, step, tuple_text


def _image(draw: Draw, rank: int) -> str:
    """A batch of images with `rank` dims of space."""
    return draw.tensor(least=rank + 2, most=rank + 2, fits=lambda value: min(value.shape[2:]) >= 3)


@step(6)
def convolution(draw: Draw) -> Code:
    """A convolution over one or two dims."""
    rank = draw.choose.choice((1, 1, 2))
    x = _image(draw, rank)
    shape = draw.shape(x)
    groups = draw.choose.choice([item for item in (1, 1, 2, 3, shape[1]) if shape[1] % item == 0])
    out = groups * draw.choose.choice((1, 2, 3, 4))
    kernel = [draw.choose.choice((1, 2, 3)) for _ in range(rank)]
    inner = shape[1] // groups * math.prod(kernel)
    weight = draw.parameter(out, shape[1] // groups, *kernel, scale=1 / math.sqrt(inner))
    bias = draw.parameter(out) if draw.chance() else "None"
    numbers = [draw.choose.choice((1, 1, 2)), draw.choose.choice((0, 1, 1, 2)), draw.choose.choice((1, 1, 2))]
    if draw.chance(0.4):
        # As many windows as strides.
        numbers = [1, (kernel[0] - 1) // 2, 1] if kernel[0] % 2 else [kernel[0], 0, 1]
    stride, padding, dilation = numbers
    shown = f"'{draw.choose.choice(('same', 'valid'))}'" if stride == 1 and draw.chance(0.2) else str(padding)
    return (
        f"F.conv{rank}d({x}, {weight}, {bias}, stride={stride}, padding={shown}, dilation={dilation}, groups={groups})"
    )


@step(2)
def convolution_back(draw: Draw) -> Code:
    """A transposed convolution."""
    rank = draw.choose.choice((1, 1, 2))
    x = _image(draw, rank)
    shape = draw.shape(x)
    groups = draw.choose.choice([item for item in (1, 1, 2) if shape[1] % item == 0])
    out = draw.choose.choice((1, 2, 3))
    kernel = [draw.choose.choice((1, 2, 3))] * rank
    weight = draw.parameter(shape[1], out, *kernel, scale=1 / math.sqrt(shape[1]))
    bias = draw.parameter(out * groups) if draw.chance() else "None"
    stride = kernel[0] if draw.chance(0.6) else draw.choose.choice((1, 2))
    padding = draw.choose.choice((0, 0, 0, 1)) if kernel[0] > 1 else 0
    return f"F.conv_transpose{rank}d({x}, {weight}, {bias}, stride={stride}, padding={padding}, groups={groups})"


@step(4)
def pool(draw: Draw) -> Code:
    """A mean or maximum over windows."""
    rank = draw.choose.choice((1, 1, 2))
    x = _image(draw, rank)
    kernel = draw.choose.choice((2, 2, 3))
    stride = draw.choose.choice((kernel, kernel, 1, 2))
    padding = draw.choose.choice((0, 0, 1))
    ceil = ", ceil_mode=True" if draw.chance(0.15) else ""
    way = draw.choose.randrange(4)
    if way == 0:
        draw.all_apart(draw.values[x])
        dilation = draw.choose.choice((1, 1, 2)) if min(draw.shape(x)[2:]) >= 5 else 1
        if draw.chance(0.2):
            results = f"{draw.result()}, {draw.result()}"
            return [f"{results} = F.max_pool{rank}d({x}, {kernel}, {stride}, return_indices=True)"]
        return f"F.max_pool{rank}d({x}, {kernel}, {stride}, padding={padding}, dilation={dilation}{ceil})"
    if way == 1:
        made = [draw.choose.randint(1, size) for size in draw.shape(x)[2:]]
        shown = made[0] if rank == 1 else tuple_text(made)
        if draw.chance(0.2):
            draw.all_apart(draw.values[x])
            return f"F.adaptive_max_pool{rank}d({x}, {shown})"
        return f"F.adaptive_avg_pool{rank}d({x}, {shown})"
    counted = f", count_include_pad={draw.chance()}" if padding else ""
    return f"F.avg_pool{rank}d({x}, {kernel}, {stride}, padding={padding}{ceil}{counted})"


@step(1)
def interpolate(draw: Draw) -> Code:
    """Images in other sizes."""
    rank = draw.choose.choice((1, 2))
    x = _image(draw, rank)
    mode = draw.choose.choice(("nearest", "nearest-exact", *(("linear",) if rank == 1 else ("bilinear", "bicubic"))))
    return f"F.interpolate({x}, scale_factor=2, mode='{mode}')"
