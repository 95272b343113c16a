"""Samples for every registered rule: calls of operators whose sizes divide by 4 and by 6, and are not alike by luck."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from passes.ir.program import find_overload


@dataclass(frozen=True)
class Sample:
    """A call of `target` with `arguments`, in the order of its schema; `random` says that its values mean nothing."""

    target: str
    arguments: tuple[object, ...]
    options: dict[str, object]
    random: bool = False

    @property
    def kind(self) -> str:
        """What the registry calls the operator."""
        return self.target.split(".")[1]

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The results when the tensors among the arguments are `tensors`."""
        rest = iter(tensors)

        def filled(value: object) -> object:
            if isinstance(value, Tensor):
                return next(rest)
            return [filled(item) for item in value] if isinstance(value, (list, tuple)) else value

        arguments = [filled(value) for value in self.arguments]
        options = {name: filled(value) for name, value in self.options.items()}
        result = find_overload(self.target)(*arguments, **options)
        return [result] if isinstance(result, Tensor) else list(result)


class Maker:
    """Makes the tensors of samples."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Any sign."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        """Between 0.5 and 1.5."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.5

    def integers(self, *shape: int, high: int = 7) -> Tensor:
        """0 up to `high`."""
        return torch.randint(0, high, shape, generator=self.generator)

    def flags(self, *shape: int) -> Tensor:
        """True and False."""
        return torch.rand(shape, generator=self.generator) < 0.5


@cache
def samples() -> tuple[Sample, ...]:
    """All of them."""
    return tuple(_samples(Maker()))


def _samples(make: Maker) -> Iterator[Sample]:
    def call(target: str, *arguments: object, random: bool = False, **options: object) -> Sample:
        return Sample(target, arguments, options, random)

    yield from _unary(make, call)
    yield from _binary(make, call)
    yield from _reductions(make, call)
    yield from _products(make, call)
    yield from _views(make, call)
    yield from _losses_and_norms(make, call)
    yield from _attention(make, call)


Call = Callable[..., Sample]

# fmt: off
_ANY_SIGN = (
    "abs", "ceil", "cos", "elu", "erf", "exp", "expm1", "floor", "gelu", "hardsigmoid", "hardswish", "hardtanh",
    "isnan", "leaky_relu", "mish", "neg", "relu", "relu6", "round", "selu", "sigmoid", "sign", "silu", "sin",
    "softplus", "square", "tanh", "log_sigmoid",
)
# fmt: on
_POSITIVE = ("log", "log1p", "reciprocal", "rsqrt", "sqrt")


def _unary(make: Maker, call: Call) -> Iterator[Sample]:
    for kind in _ANY_SIGN:
        yield call(f"aten.{kind}.default", make.normal(12, 24))
    for kind in _POSITIVE:
        yield call(f"aten.{kind}.default", make.positive(12, 24))
    yield call("aten.gelu.default", make.normal(12, 24), approximate="tanh")
    yield call("aten.softplus.default", make.normal(12, 24), 2.0, 1.0)
    yield call("aten.leaky_relu.default", make.normal(12, 24), 0.3)
    for kind in ("logical_not", "bitwise_not"):
        yield call(f"aten.{kind}.default", make.flags(12, 24))
    yield call("aten.clamp.default", make.normal(12, 24), -0.5, 0.5)
    yield call("aten.clamp.Tensor", make.normal(12, 24), make.normal(24), make.normal(12, 1))
    yield call("aten.clamp_min.default", make.normal(12, 24), 0.2)
    yield call("aten.clamp_max.default", make.normal(12, 24), 0.2)
    for kind in ("zeros_like", "ones_like"):
        yield call(f"aten.{kind}.default", make.normal(12, 24))
    yield call("aten.full_like.default", make.normal(12, 24), 3.5)
    yield call("aten.empty_like.default", make.normal(12, 24), random=True)
    yield call("aten.to.dtype", make.normal(12, 24), torch.float32)
    yield call("aten.to.dtype", make.integers(12, 24), torch.float64)
    yield call("aten.to.dtype", make.normal(12, 24), torch.int64)
    yield call("aten.cumsum.default", make.normal(12, 24), 1)
    yield call("aten.cumsum.default", make.normal(12, 24), -2)
    yield call("aten.cumsum.default", make.flags(12, 24), 1)


def _binary(make: Maker, call: Call) -> Iterator[Sample]:
    for kind in ("add", "sub", "mul", "div"):
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), make.positive(12, 24))
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), make.positive(24))
        yield call(f"aten.{kind}.Tensor", make.normal(12, 1), make.positive(1, 24))
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), make.positive())
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), 1.5)
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), make.integers(12, 24) + 1)
    yield call("aten.add.Tensor", make.normal(12, 24), make.normal(24), alpha=0.5)
    yield call("aten.sub.Tensor", make.normal(12, 24), make.normal(24), alpha=2)
    yield call("aten.mul.Tensor", make.flags(12, 24), make.normal(12, 24))
    yield call("aten.add.Tensor", make.integers(12, 24), make.integers(24))
    yield call("aten.mul.Scalar", make.normal(12, 24), 2.5)
    yield call("aten.rsub.Scalar", make.normal(12, 24), 1.0)
    yield call("aten.rsub.Tensor", make.normal(12, 24), make.normal(24))
    yield call("aten.div.Tensor_mode", make.normal(12, 24), make.positive(24), rounding_mode="floor")
    yield call("aten.pow.Tensor_Scalar", make.normal(12, 24), 3)
    yield call("aten.pow.Tensor_Tensor", make.positive(12, 24), make.normal(24))
    yield call("aten.pow.Scalar", 1.5, make.normal(12, 24))
    for kind in ("maximum", "minimum"):
        yield call(f"aten.{kind}.default", make.normal(12, 24), make.normal(24))
    yield call("aten.floor_divide.default", make.integers(12, 24, high=50), make.integers(24) + 1)
    yield call("aten.remainder.Scalar", make.normal(12, 24), 0.7)
    yield call("aten.remainder.Tensor", make.integers(12, 24, high=50), make.integers(12, 1) + 1)
    for kind in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield call(f"aten.{kind}.Tensor", make.integers(12, 24), make.integers(24))
        yield call(f"aten.{kind}.Scalar", make.normal(12, 24), 0.5)
    for kind in ("logical_and", "logical_or", "logical_xor"):
        yield call(f"aten.{kind}.default", make.flags(12, 24), make.flags(24))
    for kind in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"):
        yield call(f"aten.{kind}.Tensor", make.flags(12, 24), make.flags(12, 1))
    yield call("aten.masked_fill.Scalar", make.normal(12, 24), make.flags(12, 24), -2.0)
    yield call("aten.masked_fill.Scalar", make.normal(12, 24), make.flags(24), 0.0)
    yield call("aten.masked_fill.Tensor", make.normal(12, 24), make.flags(12, 1), make.normal())
    yield call("aten.where.self", make.flags(12, 24), make.normal(12, 24), make.normal(24))
    yield call("aten.where.self", make.flags(12, 1), make.normal(24), make.normal())
    yield call("aten.where.ScalarOther", make.flags(12, 24), make.normal(12, 24), 1.0)


def _reductions(make: Maker, call: Call) -> Iterator[Sample]:
    for kind, overload in (("sum", "dim_IntList"), ("mean", "dim")):
        yield call(f"aten.{kind}.default", make.normal(12, 24))
        yield call(f"aten.{kind}.{overload}", make.normal(12, 24, 36), [-1], True)
        yield call(f"aten.{kind}.{overload}", make.normal(12, 24, 36), [0, 2], False)
        yield call(f"aten.{kind}.{overload}", make.normal(12, 24), [1])
    yield call("aten.sum.default", make.flags(12, 24))
    for kind in ("amax", "amin"):
        yield call(f"aten.{kind}.default", make.normal(12, 24), [1])
        yield call(f"aten.{kind}.default", make.normal(12, 24))
    for kind in ("argmax", "argmin"):
        yield call(f"aten.{kind}.default", make.normal(12, 24), 1)
        yield call(f"aten.{kind}.default", make.normal(12, 24), 0, True)
    for kind in ("any", "all"):
        yield call(f"aten.{kind}.dim", make.flags(12, 24), 1)
        yield call(f"aten.{kind}.default", make.flags(12, 24))
    for kind in ("max", "min"):
        yield call(f"aten.{kind}.dim", make.normal(12, 24), 1)
        yield call(f"aten.{kind}.dim", make.normal(12, 24), -2, True)
        yield call(f"aten.{kind}.default", make.normal(12, 24))
    yield call("aten.logsumexp.default", make.normal(12, 24), [1])
    yield call("aten.prod.dim_int", make.positive(12, 24), 1)
    yield call("aten.prod.default", make.positive(12, 24))
    for kind in ("std", "var"):
        yield call(f"aten.{kind}.correction", make.normal(12, 24), [1])
        yield call(f"aten.{kind}.dim", make.normal(12, 24), [-1], True, True)


def _products(make: Maker, call: Call) -> Iterator[Sample]:
    yield call("aten.linear.default", make.normal(12, 24), make.normal(36, 24))
    yield call("aten.linear.default", make.normal(12, 24), make.normal(36, 24), make.normal(36))
    yield call("aten.linear.default", make.normal(4, 6, 12), make.normal(8, 12), make.normal(8))
    yield call("aten.addmm.default", make.normal(18), make.normal(6, 12), make.normal(12, 18))
    yield call("aten.addmm.default", make.normal(6, 1), make.normal(6, 12), make.normal(12, 18))
    yield call("aten.addmm.default", make.normal(6, 18), make.normal(6, 12), make.normal(12, 18))
    yield call("aten.mm.default", make.normal(12, 24), make.normal(24, 36))
    yield call("aten.bmm.default", make.normal(4, 6, 12), make.normal(4, 12, 8))
    yield call("aten.matmul.default", make.normal(12, 24), make.normal(24, 36))
    yield call("aten.matmul.default", make.normal(4, 6, 12), make.normal(12, 8))
    yield call("aten.matmul.default", make.normal(4, 1, 6, 8), make.normal(12, 8, 3))


def _views(make: Maker, call: Call) -> Iterator[Sample]:
    yield call("aten.reshape.default", make.normal(12, 24), [288])
    yield call("aten.reshape.default", make.normal(12, 24), [4, 3, 24])
    yield call("aten.reshape.default", make.normal(4, 12, 24), [48, 6, 4])
    yield call("aten.reshape.default", make.normal(1, 12, 24), [12, 1, 24, 1])
    yield call("aten.reshape.default", make.normal(12, 10), [15, 8])
    yield call("aten.transpose.int", make.normal(12, 24, 36), 0, -1)
    yield call("aten.permute.default", make.normal(12, 24, 36), [2, 0, 1])
    yield call("aten.permute.default", make.normal(12, 24, 36), [-1, -2, -3])
    yield call("aten.expand.default", make.normal(12, 1), [12, 24])
    yield call("aten.expand.default", make.normal(1, 24), [36, 12, 24])
    yield call("aten.slice.Tensor", make.normal(12, 48), 1, 0, 24)
    yield call("aten.slice.Tensor", make.normal(12, 72), 1, 24, 48)
    yield call("aten.slice.Tensor", make.normal(12, 48), -1, 36, 48)
    yield call("aten.slice.Tensor", make.normal(12, 24), 1, 6, 18)
    yield call("aten.slice.Tensor", make.normal(12, 24), 1, 0, 23)
    yield call("aten.slice.Tensor", make.normal(12, 24), 1, 0, 24, 2)
    yield call("aten.select.int", make.normal(12, 24, 36), 1, 5)
    yield call("aten.select.int", make.normal(12, 24, 36), -1, -2)
    yield call("aten.cat.default", [make.normal(12, 24), make.normal(12, 48)], 1)
    yield call("aten.cat.default", [make.normal(12, 24), make.normal(12, 24), make.normal(24, 24)])
    yield call("aten.cat.default", [make.flags(12, 24), make.flags(12, 24)], -1)
    yield call("aten.stack.default", [make.normal(12, 24), make.normal(12, 24)], 1)
    yield call("aten.stack.default", [make.integers(12, 24), make.integers(12, 24), make.integers(12, 24)])
    for kind in ("pad", "constant_pad_nd"):
        yield call(f"aten.{kind}.default", make.normal(12, 24, 6), [2, 3])
        yield call(f"aten.{kind}.default", make.normal(12, 24), [0, 1, 2, 0], value=1.5)


def _losses_and_norms(make: Maker, call: Call) -> Iterator[Sample]:
    yield call("aten.layer_norm.default", make.normal(12, 36, 24), [24], make.normal(24), make.normal(24))
    yield call("aten.layer_norm.default", make.normal(12, 36, 24), [36, 24])
    yield call("aten.rms_norm.default", make.normal(12, 24), [24], make.normal(24), 1e-6)
    for kind in ("softmax", "log_softmax"):
        yield call(f"aten.{kind}.int", make.normal(12, 24, 36), -1)
        yield call(f"aten.{kind}.int", make.normal(12, 24), 0)
        yield call(f"aten._{kind}.default", make.normal(12, 24), 1, False)
    yield call("aten.embedding.default", make.normal(36, 24), make.integers(12, high=36))
    yield call("aten.embedding.default", make.normal(36, 24), make.integers(12, 48, high=36), 3)
    labels = make.integers(12, high=24)
    labels[3] = labels[7] = -100
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), labels, None, 2)
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), make.integers(12, high=24), None, 2, 5)
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), labels, None, 2, -100, 0.1)


def _attention(make: Maker, call: Call) -> Iterator[Sample]:
    target = "aten.scaled_dot_product_attention.default"

    def heads(count: int, length: int, width: int) -> Tensor:
        return make.normal(4, count, length, width)

    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 5))
    yield call(target, heads(6, 12, 8), heads(6, 12, 8), heads(6, 12, 8), is_causal=True)
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), is_causal=True, scale=0.3)
    yield call(target, heads(12, 6, 8), heads(2, 6, 8), heads(2, 6, 8), is_causal=True, enable_gqa=True)
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.normal(12, 24))
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.normal(4, 1, 12, 24))
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.flags(1, 6, 1, 24))
