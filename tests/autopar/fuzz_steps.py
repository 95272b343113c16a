"""The steps that random programs are made of: for each what it takes, how its arguments are drawn, what it gives.

A step reads tensors that live, and returns an expression, or statements that define names of its own. What it gives is
found out by running it. Arguments keep values away from where a gradient jumps (relu at 0, ties of a maximum), so that
in float64 all errors are those of rounding.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]

# How near a value may be to a place where something jumps.
_NEAR = 1e-7
# How many elements a tensor may have.
MOST = 4000


class UnfitError(Exception):
    """The tensors that live do not fit the step; another one is drawn."""


@dataclass(frozen=True)
class Held:
    """A tensor that a module holds: `kind` is "parameter", "frozen" (a parameter that does not train) or "buffer"."""

    kind: str
    value: Tensor


@dataclass
class Draw:
    """What a step is drawn with: random numbers, the tensors that live, and the sizes that new dims may have.

    What the step makes besides is collected: `held`, `inputs`, and the names of its results.
    """

    choose: random.Random
    generator: torch.Generator
    values: Mapping[str, Tensor]
    holding: Mapping[str, Held]
    sizes: Sequence[int]
    inner: bool
    count: int
    held: dict[str, Held] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)

    # --- random numbers ---

    def chance(self, probability: float = 0.5) -> bool:
        """True with `probability`."""
        return self.choose.random() < probability

    def size(self, *also: int) -> int:
        """A size for a new dim."""
        return self.choose.choice([*self.sizes, *also])

    def number(self, low: float, high: float) -> float:
        """A number with two digits."""
        return round(self.choose.uniform(low, high), 2)

    def subset(self, items: Sequence[int], least: int = 1) -> list[int]:
        """At least `least` of `items`, in their order."""
        if len(items) < least:
            raise UnfitError
        count = self.choose.randint(least, len(items))
        return sorted(self.choose.sample(list(items), count))

    def normal(self, *shape: int) -> Tensor:
        """Normal values."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    # --- operands ---

    def tensor(self, least: int = 0, most: int = 5, fits: Callable[[Tensor], bool] | None = None) -> str:
        """A floating tensor that lives, of `least` to `most` dims; late ones more often."""
        found = [
            name
            for name, value in self.values.items()
            if value.is_floating_point() and least <= value.dim() <= most and (fits is None or fits(value))
        ]
        return self.late(found)

    def flags(self, fits: Callable[[Tensor], bool]) -> str:
        """A tensor of flags that lives."""
        return self.late([name for name, value in self.values.items() if value.dtype == torch.bool and fits(value)])

    def late(self, found: Sequence[str]) -> str:
        """One of `found`; late ones more often."""
        if not found:
            raise UnfitError
        return found[int(len(found) * math.sqrt(self.choose.random()))]

    def shape(self, name: str) -> Shape:
        """The shape of a tensor that lives."""
        return tuple(self.values[name].shape)

    def dim(self, name: str, least: int = 1) -> int:
        """A dim of at least `least` elements."""
        found = [dim for dim, size in enumerate(self.shape(name)) if size >= least]
        if not found:
            raise UnfitError
        return self.choose.choice(found)

    def either_way(self, dim: int, rank: int) -> int:
        """The same dim, counted from the front or from the end."""
        return dim - rank if self.chance(0.3) else dim

    def away(self, value: Tensor, *places: float) -> None:
        """Refuse values that are near one of `places`."""
        if any(bool(((value - place).abs() < _NEAR).any()) for place in places):
            raise UnfitError

    def apart(self, value: Tensor, dim: int) -> None:
        """Refuse values that are near each other along `dim`."""
        ordered = value.sort(dim).values
        if bool((ordered.diff(dim=dim).abs() < _NEAR).any()):
            raise UnfitError

    def all_apart(self, value: Tensor) -> None:
        """Refuse values that are near each other anywhere."""
        self.apart(value.flatten(), 0)

    # --- what a step makes besides ---

    def fresh(self, prefix: str) -> str:
        """A new name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def result(self) -> str:
        """The name of a result of statements."""
        name = self.fresh("v")
        self.results.append(name)
        return name

    def local(self) -> str:
        """A name of statements that nobody else reads."""
        return self.fresh("t")

    def hold(self, kind: str, value: Tensor) -> str:
        """A tensor of the module."""
        name = self.fresh({"parameter": "w", "frozen": "f", "buffer": "b"}[kind])
        self.held[name] = Held(kind, value)
        return f"self.{name}"

    def parameter(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> str:
        """A parameter; sometimes one that is used already, sometimes one that does not train."""
        plain = scale == 1.0 and shift == 0.0
        known = [name for name, held in self.holding.items() if held.kind != "buffer" and held.value.shape == shape]
        if known and plain and self.chance():
            return f"self.{self.choose.choice(known)}"
        kind = "frozen" if self.chance(0.1) else "parameter"
        return self.hold(kind, self.normal(*shape) * scale + shift)

    def weight(self, *shape: int, inner: int) -> str:
        """A parameter of a product over `inner` elements; sometimes one that is used already."""
        known = [
            name
            for name, held in self.holding.items()
            if held.kind == "parameter" and held.value.shape == shape and held.value.abs().max() < 5 / math.sqrt(inner)
        ]
        if known and self.chance(0.4):
            return f"self.{self.choose.choice(known)}"
        return self.parameter(*shape, scale=1 / math.sqrt(inner))

    def integers(self, shape: Sequence[int], high: int, ignored: bool = False) -> str:
        """Whole numbers below `high`, from the batch or held; some of them -100 if they may be `ignored`."""
        value = torch.randint(0, high, tuple(shape), generator=self.generator)
        if ignored and value.dim():
            value[torch.rand(tuple(shape), generator=self.generator) < 0.2] = -100
        return self.given(value)

    def places(self, count: int, high: int) -> str:
        """`count` different whole numbers below `high`."""
        if count > high:
            raise UnfitError
        return self.given(torch.randperm(high, generator=self.generator)[:count])

    def given(self, value: Tensor) -> str:
        """A tensor that is no parameter: from the batch, or held."""
        if self.inner or self.chance(0.4):
            return self.hold("buffer", value)
        name = self.fresh("x")
        self.inputs[name] = value
        return name

    def mask(self, shape: Sequence[int]) -> str:
        """Flags that broadcast to `shape`: what lives, from the batch, or held."""
        try:
            if self.chance(0.6):
                return self.flags(lambda value: _broadcasts(value.shape, shape))
        except UnfitError:
            pass
        return self.given(torch.rand(self.narrower(shape), generator=self.generator) < 0.6)

    def narrower(self, shape: Sequence[int]) -> Shape:
        """A shape that broadcasts to `shape`."""
        kept = list(shape[self.choose.randint(0, len(shape)) :]) if self.chance(0.4) else list(shape)
        return tuple(1 if self.chance(0.2) else size for size in kept)

    def other(self, shape: Sequence[int]) -> str:
        """An operand that broadcasts to `shape`: what lives, a parameter, or a buffer."""
        if self.chance(0.65):
            try:
                return self.tensor(fits=lambda value: _broadcasts(value.shape, shape))
            except UnfitError:
                pass
        if self.chance(0.8):
            return self.parameter(*self.narrower(shape))
        return self.hold("buffer", self.normal(*self.narrower(shape)))

    def value(self, text: str) -> Tensor:
        """The value of what `other` and the like return."""
        if text.startswith("self."):
            name = text.removeprefix("self.")
            return (self.held.get(name) or self.holding[name]).value
        return self.inputs[text] if text in self.inputs else self.values[text]


def _broadcasts(shape: Sequence[int], wide: Sequence[int]) -> bool:
    """Whether `shape` broadcasts to `wide` as it is."""
    return len(shape) <= len(wide) and all(
        size in (1, other) for size, other in zip(reversed(shape), reversed(wide), strict=False)
    )


class Tripled(torch.autograd.Function):
    """Three times what is given, but twice its gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """Forward."""
        return x * 3

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        """Backward."""
        return gradients[0] * 2


class Turned(torch.autograd.Function):
    """A sine that keeps what it needs."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, speed: float) -> Tensor:
        """Forward."""
        ctx.save_for_backward(x)
        ctx.speed = speed  # type: ignore[attr-defined]
        return (x * speed).sin()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        """Backward."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        speed: float = ctx.speed  # type: ignore[attr-defined]
        return gradients[0] * (x * speed).cos() * speed, None


# What the code of programs may refer to.
NAMES = {"torch": torch, "nn": nn, "F": functional, "Tripled": Tripled, "Turned": Turned}

Code = str | list[str]
Step = Callable[[Draw], Code]

STEPS: dict[str, tuple[int, Step]] = {}


def step(weight: int = 2) -> Callable[[Step], Step]:
    """Put a step in the table; one with twice the weight is drawn twice as often."""

    def register(function: Step) -> Step:
        STEPS[function.__name__.strip("_")] = (weight, function)
        return function

    return register


def _tuple(items: Sequence[int]) -> str:
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"


# --- pointwise --------------------------------------------------------------------------------------------------------

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
    """What flags choose."""
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


# --- views ------------------------------------------------------------------------------------------------------------


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
        return f"{x}.unflatten({draw.either_way(dim, len(shape))}, {_tuple(parts)})"
    if way == 2 and len(shape) > 1:
        first = draw.choose.randrange(len(shape) - 1)
        parts = _factors(draw, shape[first] * shape[first + 1], 2)
        return f"{x}.reshape{_tuple((*shape[:first], *parts, *shape[first + 2 :]))}"
    if way == 3:
        dim = draw.choose.randrange(len(shape) + 1)
        return f"{x}.unsqueeze({dim})"
    sizes = _factors(draw, math.prod(shape), draw.choose.randint(1, 4))
    if draw.chance(0.3):
        sizes[draw.choose.randrange(len(sizes))] = -1
    return f"{x}.reshape{_tuple(sizes)}"


@step(5)
def permute(draw: Draw) -> Code:
    """Dims in another order."""
    x = draw.tensor(least=2)
    rank = len(draw.shape(x))
    order = draw.choose.sample(range(rank), rank)
    first, second = draw.choose.sample(range(rank), 2)
    texts = (
        f"{x}.permute{_tuple(order)}",
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
    text = (
        f"{x}.expand{_tuple([-1 if size in shape and draw.chance(0.2) and wide == shape else size for size in wide])}"
    )
    return text if draw.chance(0.6) else f"torch.broadcast_to({x}, {_tuple(wide)})"


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
    return f"F.pad({x}, {_tuple(amounts)}{value})"


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
    return f"F.pad({x}, {_tuple(amounts)}, mode='{mode}')"


@step(3)
def repeat(draw: Draw) -> Code:
    """Everything several times."""
    x = draw.tensor(least=1, most=3, fits=lambda value: value.numel() < 300)
    rank = len(draw.shape(x))
    times = [draw.choose.choice((1, 2, 3)) for _ in range(rank)]
    dim = draw.choose.randrange(rank)
    texts = (
        f"{x}.repeat{_tuple(times)}",
        f"{x}.tile{_tuple(times[:1])}",
        f"{x}.repeat_interleave({draw.choose.choice((2, 3))}, dim={dim})",
        f"{x}.repeat{_tuple([2, *times])}",
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
        f"{x}.flip({_tuple(dims)})",
        f"{x}.roll({_tuple([draw.choose.randint(-3, 3) for _ in dims])}, {_tuple(dims)})",
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


# --- products ---------------------------------------------------------------------------------------------------------


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
    letters = "abcd"[: len(shape)]
    sizes = dict(zip(letters, shape, strict=True))
    if draw.chance(0.2):
        kept = draw.choose.sample(letters, draw.choose.randint(1, len(letters)))
        scale = math.prod(size for letter, size in sizes.items() if letter not in kept)
        return f"torch.einsum('{letters} -> {''.join(kept)}', {x}) * {round(1 / math.sqrt(scale), 3)}"
    shared = draw.choose.sample(letters, draw.choose.randint(1, len(letters)))
    second = shared + (["z"] if draw.chance(0.7) else [])
    draw.choose.shuffle(second)
    sizes["z"] = draw.size()
    union = [*letters, *(["z"] if "z" in second else [])]
    result = draw.choose.sample(union, draw.choose.randint(max(1, len(union) - 2), len(union)))
    summed = math.prod(sizes[letter] for letter in union if letter not in result)
    weight = draw.parameter(*(sizes[letter] for letter in second), scale=1 / math.sqrt(summed))
    terms, operands = [letters, "".join(second)], [x, weight]
    if draw.chance(0.2):
        letter = draw.choose.choice(result)
        terms.append(letter)
        operands.append(draw.parameter(sizes[letter]))
    if draw.chance(0.3):
        terms[:2], operands[:2] = terms[1::-1], operands[1::-1]
    return f"torch.einsum('{', '.join(terms)} -> {''.join(result)}', {', '.join(operands)})"


# --- reductions -------------------------------------------------------------------------------------------------------


@step(6)
def reduced(draw: Draw) -> Code:
    """A sum or mean over some dims."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dims = [draw.either_way(dim, rank) for dim in draw.subset(range(rank))]
    count = math.prod(draw.shape(x)[dim] for dim in dims)
    keep = ", keepdim=True" if draw.chance(0.4) else ""
    shown = str(dims[0]) if len(dims) == 1 and draw.chance() else _tuple(dims)
    texts = [f"{x}.sum({shown}{keep}) * {round(1 / math.sqrt(count), 3)}", f"{x}.mean({shown}{keep})"] * 2
    texts += [f"{x}.nansum({shown}{keep}) * {round(1 / count, 4)}", f"{x}.mean()", f"{x}.sum() * 0.1"]
    return draw.choose.choice(texts)


@step(4)
def spread_of(draw: Draw) -> Code:
    """How much values differ, and how large they are."""
    x = draw.tensor(least=1)
    rank = len(draw.shape(x))
    dims = draw.subset([dim for dim in range(rank) if draw.shape(x)[dim] > 1])
    keep = ", keepdim=True" if draw.chance(0.4) else ""
    if bool((draw.values[x].std(dims) < 0.05).any()):
        raise UnfitError
    if bool((draw.values[x].norm(dim=dims[0]) < 0.05).any()):
        raise UnfitError
    texts = [
        f"{x}.var({_tuple(dims)}{keep})",
        f"{x}.var({_tuple(dims)}, correction=0{keep})",
        f"{x}.std({_tuple(dims)}{keep})",
        f"torch.linalg.vector_norm({x} + 0.1, 2, {_tuple(dims)}{keep})",
        f"({x}.square() + 0.1).norm(dim={dims[0]}{keep})",
        f"torch.dist({x}, {x}.sin() + 0.3)",
        f"torch.std_mean({x}, {_tuple(dims)}{keep})[0]",
        f"torch.logsumexp({x}, {dims[0]}{keep})",
        f"torch.logsumexp({x}, {_tuple(dims)}{keep})",
        f"F.normalize({x}, dim={dims[0]})",
        f"torch.sum(torch.stack(torch.var_mean({x}, {_tuple(dims)}{keep})), 0)",
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
    """How many flags are set, whether any, whether all."""
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
    """What runs along a dim."""
    x = draw.tensor(least=1)
    dim = draw.choose.randrange(len(draw.shape(x)))
    shown = draw.either_way(dim, len(draw.shape(x)))
    texts = [f"{x}.cumsum({shown}) * 0.3"] * 4
    texts += [f"torch.logcumsumexp({x}, {dim})", f"({x}.tanh() * 0.2 + 1.0).cumprod({dim})"]
    if draw.chance(0.2):
        draw.apart(draw.values[x], dim)
        texts = [f"{x}.cummax({dim}).values", f"{x}.cummin({dim}).values"]
    return draw.choose.choice(texts)


# --- norms and softmax ------------------------------------------------------------------------------------------------


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
        return f"F.rms_norm({x}, {_tuple(inner)}{weight}{draw.choose.choice(('', ', eps=1e-4'))})"
    bias = f", {draw.parameter(*inner)}" if weight and draw.chance(0.7) else ""
    return f"F.layer_norm({x}, {_tuple(inner)}{weight}{bias})"


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


# --- picking by index -------------------------------------------------------------------------------------------------


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
    """What an order that was found picks."""
    x = draw.tensor(least=1, most=3)
    dim = draw.dim(x, 2)
    draw.apart(draw.values[x], dim)
    y = draw.tensor(fits=lambda value: tuple(value.shape) == draw.shape(x))
    return f"{y}.gather({dim}, {x}.topk({draw.choose.randint(1, draw.shape(x)[dim])}, {dim}).indices)"


# --- convolutions -----------------------------------------------------------------------------------------------------


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
        shown = made[0] if rank == 1 else _tuple(made)
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


# --- attention, recurrence --------------------------------------------------------------------------------------------


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


# --- losses -----------------------------------------------------------------------------------------------------------


@step(4)
def classes_loss(draw: Draw) -> Code:
    """A loss over classes."""
    x = draw.tensor(least=1, most=3, fits=lambda value: value.shape[1 if value.dim() > 1 else 0] > 1)
    shape = draw.shape(x)
    rank = len(shape)
    if rank == 3 and draw.chance():
        x, shape, rank = f"{x}.flatten(0, 1)", (shape[0] * shape[1], shape[2]), 2
        if shape[1] < 2:
            raise UnfitError
    classes = shape[1 if rank > 1 else 0]
    each = (shape[0], *shape[2:]) if rank > 1 else ()
    options = f"reduction='{draw.choose.choice(('mean', 'mean', 'sum', 'none'))}'"
    if draw.chance(0.2):
        options += f", weight={draw.hold('buffer', draw.normal(classes).abs() + 0.2)}"
    way = draw.choose.randrange(6)
    scale = " * 0.2"
    if way == 0:
        target = draw.given(draw.normal(*shape).softmax(1 if rank > 1 else 0))
        return f"F.cross_entropy({x}, {target}, {options}){scale}"
    if way == 1:
        labels = draw.integers(each, classes, ignored=True)
        return f"F.nll_loss(F.log_softmax({x}, {1 if rank > 1 else 0}), {labels}, {options}){scale}"
    if way == 2:
        options += ", label_smoothing=0.1"
    if way == 3:
        options += f", ignore_index={draw.choose.randrange(classes)}"
        labels = draw.integers(each, classes)
        if not each or bool((draw.value(labels) == int(options.rsplit("=", 1)[1])).all()):
            raise UnfitError
        return f"F.cross_entropy({x}, {labels}, {options}){scale}"
    labels = draw.integers(each, classes, ignored=True)
    if bool((draw.value(labels) == -100).all()):
        raise UnfitError
    return f"F.cross_entropy({x}, {labels}, {options}){scale}"


@step(3)
def elementwise_loss(draw: Draw) -> Code:
    """A loss of each element, or their sum or mean."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    y = draw.given(draw.normal(*shape)) if draw.chance() else draw.other(shape)
    if tuple(draw.value(y).shape) != shape:
        raise UnfitError
    difference = draw.values[x] - draw.value(y)
    draw.away(difference, 0.0, 0.7, -0.7)
    reduction = f"reduction='{draw.choose.choice(('mean', 'mean', 'none', 'sum'))}'"
    scale = " * 0.1" if "sum" in reduction else ""
    texts = (
        f"F.mse_loss({x}, {y}, {reduction})",
        f"F.l1_loss({x}, {y}, {reduction})",
        f"F.smooth_l1_loss({x}, {y}, {reduction}, beta=0.7)",
        f"F.huber_loss({x}, {y}, {reduction}, delta=0.7)",
        f"F.binary_cross_entropy({x}.sigmoid(), {y}.sigmoid(), {reduction})",
        f"F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), {reduction})",
        f"F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), {reduction.replace('mean', 'batchmean')})",
        f"F.soft_margin_loss({x}, {y}.detach().sign(), {reduction})",
    )
    draw.away(draw.value(y), 0.0)
    return draw.choose.choice(texts) + scale


# --- in place ---------------------------------------------------------------------------------------------------------


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
