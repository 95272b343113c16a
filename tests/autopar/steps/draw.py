"""The state that a step of a random program is drawn with, and the table of steps."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]

# How near a value may be to a place where something jumps.
NEAR = 1e-7
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
    """The state that a step is drawn with: random numbers, the live tensors, and the sizes that new dims may have.

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
        if any(bool(((value - place).abs() < NEAR).any()) for place in places):
            raise UnfitError

    def apart(self, value: Tensor, dim: int) -> None:
        """Refuse values that are near each other along `dim`."""
        ordered = value.sort(dim).values
        if bool((ordered.diff(dim=dim).abs() < NEAR).any()):
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
                return self.flags(lambda value: broadcasts(value.shape, shape))
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
                return self.tensor(fits=lambda value: broadcasts(value.shape, shape))
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


def broadcasts(shape: Sequence[int], wide: Sequence[int]) -> bool:
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


def tuple_text(items: Sequence[int]) -> str:
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"
