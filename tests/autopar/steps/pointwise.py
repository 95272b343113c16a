"""Steps on every element by itself."""

import math

import torch

from tests.autopar.steps.draw import MOST, Code, Draw, UnfitError, step

_SMOOTH = (
    "{x}.sin()", "{x}.cos()", "{x}.tanh()", "{x}.sigmoid()", "{x}.tanh().exp()", "{x}.erf()", "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')", "F.silu({x})", "F.softplus({x})", "{x}.atan()", "-{x}", "{x}.asinh()",
    "({x} * {x} + 0.5).log()", "({x} * {x} + 0.5).rsqrt()", "({x}.square() + 0.5).sqrt()", "torch.log1p({x}.square())",
    "({x}.square() + 0.5).reciprocal()", "{x}.tanh().expm1()", "F.mish({x})", "F.logsigmoid({x})", "{x}.square() * 0.3",
    "{x}.sigmoid().logit(eps=1e-3)", "torch.lgamma({x}.square() + 1.0)", "torch.erfinv({x}.tanh() * 0.9)",
    "({x}.square() + 0.5) ** 1.5", "1.5 ** {x}.tanh()", "{x} * 0.7 + 0.2", "0.3 - {x}", "2.0 / ({x}.square() + 1.0)",
    "torch.deg2rad({x} * 30.0)", "torch.nan_to_num({x})", "({x}.tanh() * 0.8).asin()", "({x}.tanh() * 0.8).atanh()",
    "({x}.square() + 1.1).acosh()", "{x}.tanh().sinh()", "{x}.tanh().cosh()", "{x}.sinc()", "{x}.tanh().exp2()",
    "({x}.square() + 0.5).log2()", "({x}.square() + 0.5).log10()", "({x}.tanh() * 0.8).tan()", "torch.erfc({x})",
    "torch.digamma({x}.square() + 1.0)", "{x}.pow(2)", "{x}.tanh().pow(3)", "torch.i0({x}.tanh())",
    "torch.rsub({x}, 1.5, alpha=0.5)", "{x}.add(0.3, alpha=2)", "{x}.clone()", "{x}.contiguous()", "{x}.positive()",
    "{x}.detach()", "({x}.tanh() * 0.8).acos()", "torch.rad2deg({x} * 0.01)", "torch.full_like({x}, 0.7) + {x}",
    "{x} * {x}", "{x} / 3", "torch.true_divide({x}, 1.7)", "{x}.sub(1, alpha=0.3)",
)  # fmt: skip

# Where each has a bend or a jump.
_BENT = {
    "F.relu({x})": (0.0,),
    "{x}.abs()": (0.0,),
    "F.leaky_relu({x}, 0.1)": (0.0,),
    "F.elu({x}, alpha=0.7)": (0.0,),
    "F.selu({x})": (0.0,),
    "F.celu({x}, alpha=1.3)": (0.0,),
    "F.relu6({x})": (0.0, 6.0),
    "F.hardtanh({x}, -0.8, 0.9)": (-0.8, 0.9),
    "F.hardswish({x})": (-3.0, 0.0, 3.0),
    "F.hardsigmoid({x})": (-3.0, 3.0),
    "{x}.clamp(-0.7, 1.1)": (-0.7, 1.1),
    "{x}.clamp(min=-0.3)": (-0.3,),
    "{x}.clamp_max(0.6)": (0.6,),
    "F.softshrink({x}, 0.3)": (-0.3, 0.3),
    "F.hardshrink({x}, 0.3)": (-0.3, 0.3),
    "F.threshold({x}, 0.1, -0.4)": (0.1,),
    "{x}.sign() * 0.5 + {x}": (0.0,),
    "{x} * {x}.sgn()": (0.0,),
    "torch.heaviside({x}.detach(), torch.ones_like({x})) - {x}": (0.0,),
    "torch.copysign({x}, {x}.sin())": (0.0, -math.pi, math.pi),
    "{x}.norm(1)": (0.0,),
    "{x} - {x}.floor()": tuple(map(float, range(-9, 10))),
    "{x} * {x}.ceil()": tuple(map(float, range(-9, 10))),
    "{x}.frac()": tuple(map(float, range(-9, 10))),
    "{x} + {x}.trunc()": tuple(map(float, range(-9, 10))),
    "{x} - {x}.round()": tuple(item / 2 for item in range(-19, 20)),
    "torch.fmod({x}, 1.5)": tuple(item * 1.5 for item in range(-6, 7)),
    "torch.remainder({x}, 2)": tuple(item * 2.0 for item in range(-6, 7)),
}

_TWO = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{y} - {x}", "{x} / ({y}.square() + 0.5)", "{y} / ({x} * {x} + 1.0)",
    "torch.atan2({x}, {y}.square() + 0.5)", "torch.logaddexp({x}, {y})", "torch.add({x}, {y}, alpha=0.5)",
    "torch.sub({x}, {y}, alpha=2)", "torch.hypot({x}, {y}.square() + 0.5)", "torch.logaddexp2({y}, {x})",
    "torch.rsub({x}, {y}, alpha=0.3)", "torch.xlogy({x}, {y}.square() + 0.5)",
    "torch.float_power({x}.square() + 0.5, {y}.tanh())", "({x}.square() + 0.5).pow({y}.tanh())", "{x} + {y} * 2.0",
    "torch.lerp({x}, {y}, 0.3)", "torch.true_divide({x}, {y}.exp() + 0.5)",
)  # fmt: skip

_TWO_BENT = ("torch.maximum({x}, {y})", "torch.minimum({y}, {x})", "torch.fmax({x}, {y})", "torch.fmin({x}, {y})",
             "torch.max({x}, {y})", "torch.min({x}, {y})")  # fmt: skip


@step(8)
def smooth(draw: Draw) -> Code:
    """A pointwise function."""
    return draw.choose.choice(_SMOOTH).format(x=draw.tensor())


@step(6)
def bent(draw: Draw) -> Code:
    """A pointwise function with bends or jumps."""
    x = draw.tensor()
    text = draw.choose.choice(list(_BENT))
    draw.away(draw.values[x], *_BENT[text])
    if _BENT[text][-1] >= 9.0 and bool((draw.values[x].abs() > 9).any()):
        raise UnfitError
    return text.format(x=x)


@step(14)
def two(draw: Draw) -> Code:
    """A pointwise function of two."""
    x = draw.tensor()
    return draw.choose.choice(_TWO).format(x=x, y=draw.other(draw.shape(x)))


@step(3)
def two_bent(draw: Draw) -> Code:
    """The larger or smaller of two."""
    x = draw.tensor()
    y = draw.other(draw.shape(x))
    draw.away(draw.values[x] - draw.value(y), 0.0)
    return draw.choose.choice(_TWO_BENT).format(x=x, y=y)


@step(3)
def three(draw: Draw) -> Code:
    """A pointwise function of three."""
    x = draw.tensor()
    y, z = draw.other(draw.shape(x)), draw.other(draw.shape(x))
    texts = (
        "torch.addcmul({x}, {y}, {z}, value=0.5)",
        "torch.addcdiv({x}, {y}, {z}.square() + 0.5, value=0.5)",
        "torch.lerp({x}, {y}, {z}.sigmoid())",
        "torch.where({x} > 0.1, {y}, {z})",
    )
    draw.away(draw.values[x], 0.1)
    return draw.choose.choice(texts).format(x=x, y=y, z=z)


@step(3)
def flagged(draw: Draw) -> Code:
    """A choice between tensors by a mask."""
    x = draw.tensor()
    mask = draw.mask(draw.shape(x))
    texts = (
        f"torch.where({mask}, {x}, {draw.number(-1, 1)})",
        f"{x}.masked_fill({mask}, {draw.number(-1, 1)})",
        f"{x} * {mask}",
        f"{x} * {mask}.to({x}.dtype)",
        f"torch.where({mask}, {x}, {draw.other(draw.shape(x))})",
        f"torch.where({mask}, {draw.other(draw.shape(x))}, {x})",
        f"{x}.masked_fill({mask}, {draw.parameter()})",
        f"{x}.where({mask}, torch.zeros_like({x}))",
    )
    return draw.choose.choice(texts)


@step(3)
def comparison(draw: Draw) -> Code:
    """Flags of what is larger."""
    x = draw.tensor()
    place = draw.number(-0.5, 0.5)
    draw.away(draw.values[x], place, -place)
    texts = (
        f"{x} > {place}", f"{x} <= {place}", f"{x}.abs() < {abs(place)}", f"{x}.ne({place})", f"torch.signbit({x} + 9)",
        f"torch.isfinite({x})", f"({x} > {place}).logical_not()", f"({x} > {place}) & ({x}.detach() < {place + 2.0})",
        f"({x} < {place}) | ({x} > {place + 1.0})", f"torch.logical_xor({x} < {place}, {x} > {-place})",
        f"torch.logical_and({x} >= {place}, {x} < {place + 2.0})", f"{x} >= {place}",
        f"torch.logical_or({x} < {place}, {x} > {place + 1.0})",
        f"~({x} > {place})", f"({x} > {place}) ^ ({x} > {place + 1.0})", f"torch.isnan({x})",
        f"torch.bitwise_and({x} > {place}, {x} < {place + 2.0})", f"torch.isinf({x}) | ({x} < {place})",
    )  # fmt: skip
    draw.away(draw.values[x], place + 1.0, place + 2.0)
    return draw.choose.choice(texts)


@step(3)
def made(draw: Draw) -> Code:
    """Something with what is made of sizes alone: positions, masks, constants."""
    x = draw.tensor(least=1, fits=lambda value: value.shape[-1] > 1)
    width = draw.shape(x)[-1]
    rows = draw.shape(x)[-2] if len(draw.shape(x)) > 1 else 1
    texts = (
        f"{x} + torch.arange({width}, dtype=torch.float64) * 0.1",
        f"{x}.masked_fill(torch.ones({rows}, {width}, dtype=torch.bool).triu(1), 0.3)",
        f"{x}.masked_fill(torch.arange({width}) > torch.arange({rows}).unsqueeze(1), -0.5)",
        f"{x} * torch.full(({width},), 0.5, dtype={x}.dtype)",
        f"{x} + torch.eye({rows}, {width}, dtype=torch.float64)",
        f"{x} * torch.linspace(0.2, 1.0, {width}, dtype=torch.float64)",
        f"{x} + torch.tensor({[draw.number(-1, 1) for _ in range(width)]}, dtype=torch.float64)",
        f"{x}.index_select(-1, torch.arange({width} - 1, -1, -1))",
        f"{x} + {x}.new_ones({width}) * 0.3",
    )
    return draw.choose.choice(texts)


@step(2)
def taken(draw: Draw) -> Code:
    """A parameter or a buffer as it is, or a view of one."""
    shape = [draw.size() for _ in range(draw.choose.choice((1, 2, 2, 3)))]
    if math.prod(shape) > MOST:
        raise UnfitError
    held = draw.parameter(*shape) if draw.chance(0.8) else draw.hold("buffer", draw.normal(*shape))
    return held + draw.choose.choice(("", "[0]", "[:1]", ".flatten()", ".unsqueeze(0)", ".transpose(0, -1)", ".mT"))


@step(3)
def whole_numbers(draw: Draw) -> Code:
    """Whole numbers reckoned with."""
    known = [name for name, value in draw.values.items() if value.dtype == torch.int64]
    x = draw.late(known) if known and draw.chance(0.7) else draw.integers([draw.size(), draw.size()], 12)
    shape = tuple(draw.value(x).shape)
    y = draw.integers(draw.narrower(shape), 9)
    texts = (
        f"{x} + {y}", f"{x} * 2 - {y}", f"{x} // 2", f"{x} % 3", f"torch.bitwise_xor({x}, {y})", f"{x} & {y}",
        f"{x} | 5", f"torch.bitwise_left_shift({x}, 1)", f"{x} >> 1", f"~{x}", f"torch.maximum({x}, {y})",
        f"{x} >= {y}", f"{x} == {y}", f"{x}.to(torch.float64) * 0.1", f"{x}.sum()", f"{x}.abs().clamp(max=7)",
        f"torch.div({x}, 2, rounding_mode='floor')", f"-{x}", f"{x}.flatten()", f"{x} ** 2",
        f"{x}.cumsum(-1)" if shape else f"{x} - 1",
        f"F.embedding({x}.remainder(6), {draw.parameter(6, 2)})" if len(shape) < 3 else f"{x} + 2",
    )  # fmt: skip
    return draw.choose.choice(texts)


@step(1)
def function(draw: Draw) -> Code:
    """A function with a gradient of its own."""
    x = draw.tensor()
    return draw.choose.choice((f"Tripled.apply({x})", f"Turned.apply({x}, {draw.number(0.2, 0.9)})"))


@step(2)
def prelu(draw: Draw) -> Code:
    """A slope for each channel, or one for all."""
    x = draw.tensor(least=2)
    draw.away(draw.values[x], 0.0)
    channels = draw.shape(x)[1] if draw.chance(0.7) else 1
    return f"F.prelu({x}, {draw.parameter(channels, scale=0.3)})"


@step(2)
def complex_numbers(draw: Draw) -> Code:
    """Pairs as complex numbers, turned, and back."""
    x = draw.tensor(least=2, fits=lambda value: value.shape[-1] % 2 == 0)
    shape = draw.shape(x)
    angle = draw.parameter(*draw.narrower((*shape[:-1], shape[-1] // 2)))
    a, b, result = draw.local(), draw.local(), draw.result()
    return [
        f"{a} = torch.view_as_complex({x}.unflatten(-1, (-1, 2)).contiguous())",
        f"{b} = torch.polar(torch.ones_like({angle}), {angle})",
        draw.choose.choice(
            (
                f"{result} = torch.view_as_real({a} * {b}).flatten(-2)",
                f"{result} = ({a} * {b}).real",
                f"{result} = torch.complex({a}.imag, {b}.real).conj_physical().imag",
                f"{result} = torch.view_as_real({a}.conj() + {b}).select(-1, 1)",
            )
        ),
    ]


@step(1)
def fourier(draw: Draw) -> Code:
    """Frequencies along a dim, and back."""
    x = draw.tensor(least=1, most=4)
    dim = draw.dim(x, 2)
    size = draw.shape(x)[dim]
    texts = (
        f"torch.fft.fft({x}, dim={dim}, norm='ortho').real",
        f"torch.fft.rfft({x}, dim={dim}, norm='ortho').imag",
        f"torch.fft.irfft(torch.fft.rfft({x}, dim={dim}) * 0.5, n={size}, dim={dim})",
        f"torch.fft.ifft({x} * 2.0, dim={dim}).abs()",
    )
    return draw.choose.choice(texts)
