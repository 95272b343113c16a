"""Calls of operators that PyTorch's op database has none of, or not in this form: see `database.py` for all others.

Their sizes divide by 4 and by 6, and are not alike by luck. What the database lacks are operators that the normal form
or a decomposition writes, those that work in place, recurrent layers, experts and our own; and of others mixed dtypes,
Scalar overloads, broadcasts of both operands, units inside a dim, heads in groups, ignored labels.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import transformers.integrations.moe  # noqa: F401  (registers an operator)
from torch import Tensor

from autopar.discover.calls import Call
from passes.rules.linalg import MATRIX_FUNCTIONS


@dataclass(frozen=True)
class Sample(Call):
    """A call of an operator.

    `random` says that its values mean nothing; `fixed` are operands that have no gradient though they are no integers.
    """

    random: bool = False
    fixed: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        """The operator's name."""
        return self.target.split(".")[1]


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
    def call(
        target: str, *arguments: object, random: bool = False, fixed: Iterable[int] = (), **options: object
    ) -> Sample:
        return Sample(target, arguments, options, random, frozenset(fixed))

    yield from _pointwise(make, call)
    yield from _reductions(make, call)
    yield from _products(make, call)
    yield from _matrices(make, call)
    yield from _views(make, call)
    yield from _losses_and_norms(make, call)
    yield from _attention(make, call)
    yield from _recurrent(make, call)
    yield from _random(make, call)
    yield from _functions(make, call)
    yield from _pictures(make, call)


Make = Callable[..., Sample]


def _pictures(make: Maker, call: Make) -> Iterator[Sample]:
    """Transforms as decompositions write them, and pictures made larger."""
    waves = torch.complex(make.normal(12, 24, 7), make.normal(12, 24, 7))
    yield call("aten._fft_c2c.default", waves, [1, 2], 0, True)
    yield call("aten._fft_c2r.default", waves, [2], 0, 12)
    yield call("aten._fft_r2c.default", make.normal(12, 24, 12), [2], 0, True)
    for kind in ("upsample_nearest", "_upsample_nearest_exact"):
        for rank in (1, 2, 3):
            picture = make.normal(12, 24, *(2, 3, 2)[:rank])
            yield call(f"aten.{kind}{rank}d.vec", picture, None, [2.0] * rank)
    # A causal convolution of each channel by itself, one with holes, and one that is padded more after than before.
    x, bias = make.normal(12, 12, 24), make.normal(12)
    yield call("autopar.padded_conv1d.default", x, make.normal(12, 1, 4), bias, padding=[3, 0], groups=12)
    yield call("autopar.padded_conv1d.default", x, make.normal(36, 12, 2), None, padding=[2, 0], dilation=[2])
    yield call("autopar.padded_conv1d.default", x, make.normal(12, 6, 4), bias, padding=[1, 2], groups=2)


def _pointwise(make: Maker, call: Make) -> Iterator[Sample]:
    yield call("aten.clamp.Tensor", make.normal(12, 24), make.normal(24), make.normal(12, 1))
    yield call("aten.to.dtype", make.normal(12, 24), torch.float32)
    yield call("aten.to.dtype", make.integers(12, 24), torch.float64)
    for kind in ("add", "sub", "mul", "div"):
        yield call(f"aten.{kind}.Tensor", make.normal(12, 1), make.positive(1, 24))
        yield call(f"aten.{kind}.Tensor", make.normal(12, 24), make.integers(12, 24) + 1)
    yield call("aten.sub.Tensor", make.normal(12, 24), make.normal(24), alpha=2)
    yield call("aten.mul.Tensor", make.flags(12, 24), make.normal(12, 24))
    yield call("aten.mul.Scalar", make.normal(12, 24), 2.5)
    yield call("aten.rsub.Scalar", make.normal(12, 24), 1.0)
    yield call("aten.pow.Tensor_Scalar", make.normal(12, 24), 3)
    yield call("aten.pow.Scalar", 1.5, make.normal(12, 24))
    yield call("aten.remainder.Scalar", make.normal(12, 24), 0.7)
    for kind in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield call(f"aten.{kind}.Scalar", make.normal(12, 24), 0.5)
    for kind in ("__and__", "__or__", "__xor__"):
        yield call(f"aten.{kind}.Tensor", make.flags(12, 24), make.flags(12, 1))
    yield call("aten.masked_fill.Tensor", make.normal(12, 24), make.flags(12, 1), make.normal())
    yield call("aten.where.ScalarOther", make.flags(12, 24), make.normal(12, 24), 1.0)
    yield call("aten.where.self", make.flags(12, 1), make.normal(24), make.normal())
    yield call("aten.detach.default", make.normal(12, 24))
    for kind in ("conj", "_conj", "imag", "view_as_real"):
        yield call(f"aten.{kind}.default", torch.complex(make.normal(12, 24), make.normal(12, 24)))


def _reductions(make: Maker, call: Make) -> Iterator[Sample]:
    for kind, overload in (("sum", "dim_IntList"), ("mean", "dim")):
        yield call(f"aten.{kind}.{overload}", make.normal(12, 24, 36), [0, 2], False)
    yield call("aten.norm.ScalarOpt_dim", make.normal(12, 24), 2, [1], True)
    yield call("aten.norm.Scalar", make.normal(12, 24))


def _products(make: Maker, call: Make) -> Iterator[Sample]:
    yield call("aten.addmm.default", make.normal(18), make.normal(6, 12), make.normal(12, 18))
    yield call("aten.addmm.default", make.normal(6, 1), make.normal(6, 12), make.normal(12, 18))
    yield call("aten.matmul.default", make.normal(4, 1, 6, 8), make.normal(12, 8, 3))
    # Rows are sorted by expert; this is where the rows of each end. On CPU torch's own operator is for float32 alone.
    ends = torch.tensor([4, 4, 9, 12], dtype=torch.int32)
    rows, experts = make.normal(12, 48), make.normal(4, 48, 96)
    yield call("aten._grouped_mm.default", rows.float(), experts.float(), ends)
    yield call("transformers.grouped_mm_fallback.default", rows, experts, ends)
    product = "transformers.grouped_mm_fallback.default"
    yield call("autopar.routed_mm.default", rows, experts, make.integers(12, high=4), product=product)


def _matrices(make: Maker, call: Make) -> Iterator[Sample]:
    several = make.normal(4, 6, 8, 8)
    positive = several @ several.mT + 8.0 * torch.eye(8, dtype=several.dtype)
    for kind in MATRIX_FUNCTIONS:
        rcond = [1e-15] if kind == "linalg_pinv" else []
        yield call(f"aten.{kind}.default", positive, *rcond)
    for kind in ("linalg_qr", "linalg_svd"):
        yield call(f"aten.{kind}.default", make.normal(4, 6, 8, 3))
    yield call("aten.linalg_solve.default", positive, make.normal(6, 8, 12))
    yield call("aten.linalg_solve.default", positive[:, :1], make.normal(6, 12, 8), left=False)
    # On its diagonal are ones, whatever is there.
    system = make.normal(4, 6, 8, 8)
    yield call(
        "aten.linalg_solve_triangular.default", system, make.normal(4, 6, 8, 12), upper=False, unitriangular=True
    )
    yield call(
        "aten.linalg_solve_triangular.default",
        system[:, :1] / 8,
        make.normal(6, 12, 8),
        upper=True,
        left=False,
        unitriangular=True,
    )


def _views(make: Maker, call: Make) -> Iterator[Sample]:
    yield call("aten.reshape.default", make.normal(4, 12, 24), [48, 6, 4])
    yield call("aten.reshape.default", make.normal(1, 12, 24), [12, 1, 24, 1])
    yield call("aten.reshape.default", make.normal(12, 10), [15, 8])
    yield call("aten.contiguous.default", make.normal(4, 12, 24).transpose(0, 1))
    yield call("aten.slice.Tensor", make.normal(12, 48), 1, 0, 24)
    yield call("aten.slice.Tensor", make.normal(12, 72), 1, 24, 48)
    yield call("aten.slice.Tensor", make.normal(12, 48), -1, 36, 48)
    yield call("aten.slice.Tensor", make.normal(12, 24), 1, 6, 18)
    yield call("aten.cat.default", [make.normal(12, 24), make.normal(12, 24), make.normal(24, 24)])
    yield call("aten.cat.default", [make.flags(12, 24), make.flags(12, 24)], -1)
    yield call("aten.stack.default", [make.integers(12, 24), make.integers(12, 24), make.integers(12, 24)])
    yield call("aten.constant_pad_nd.default", make.normal(12, 24), [0, 1, 2, 0], value=1.5)
    for rank in (1, 2, 3):
        tensor = make.normal(4, 6, *(12, 24, 36)[:rank]) if rank < 3 else make.normal(4, 6, 3, 4, 2)
        for kind in ("reflection", "replication"):
            yield call(f"aten.{kind}_pad{rank}d.default", tensor, [1] * 2 * rank)


def _losses_and_norms(make: Maker, call: Make) -> Iterator[Sample]:
    for kind in ("_softmax", "_log_softmax"):
        yield call(f"aten.{kind}.default", make.normal(12, 24), 1, False)
        yield call(f"aten.{kind}.default", make.normal(12, 24, 6), 1, False)
    yield call("aten.embedding.default", make.normal(36, 24), make.integers(12, 48, high=36), 3)
    labels = make.integers(12, high=24)
    labels[3] = labels[7] = -100
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), labels, None, 2)
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), make.integers(12, high=24), None, 2, 5)
    yield call("aten.cross_entropy_loss.default", make.normal(12, 24), labels, None, 2, -100, 0.1)
    # Of 24 tokens of width 4, in chunks of 4 tokens or less on every mesh; whole chunks of ignored labels.
    states, head, many = make.normal(24, 4), make.normal(12, 4), make.integers(24, high=12)
    many[[1, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 23]] = -100
    yield call("autopar.linear_cross_entropy.default", states, head, many)
    options = {"ignore_index": 3, "scale": 0.5, "soft_cap": 2.0}
    yield call("autopar.linear_cross_entropy.default", states, head, many.clamp_min(0), make.normal(12), **options)
    for reduction in (0, 2):
        yield call("aten.nll_loss.default", make.normal(12, 24), labels, None, reduction)
    lengths, scores = make.integers(12, high=6) + 1, make.normal(13, 12, 6).log_softmax(-1)
    yield call(
        "autopar.ctc_loss.default", scores, make.integers(12, 6, high=5) + 1, torch.full((12,), 13), lengths, 0, False
    )
    statistics = make.normal(24), make.positive(24)
    weights = make.normal(24), make.normal(24)
    target = "aten._native_batch_norm_legit_functional.default"
    yield call(target, make.normal(12, 24, 6), *weights, *statistics, True, 0.1, 1e-5, fixed=(3, 4))


def _attention(make: Maker, call: Make) -> Iterator[Sample]:
    target = "aten.scaled_dot_product_attention.default"

    def heads(count: int, length: int, width: int) -> Tensor:
        return make.normal(4, count, length, width)

    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), is_causal=True, scale=0.3)
    yield call(target, heads(12, 6, 8), heads(2, 6, 8), heads(2, 6, 8), is_causal=True, enable_gqa=True)
    yield call(target, heads(6, 12, 8), heads(2, 24, 8), heads(2, 24, 8), enable_gqa=True)
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.normal(4, 1, 12, 24))
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.flags(1, 6, 1, 24))
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.flags(4, 1, 1, 24))
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 8), make.flags(4, 6, 12, 1))
    yield call(target, heads(6, 24, 8), heads(6, 24, 8), heads(6, 24, 8), make.normal(4, 1, 24, 1))
    target = "autopar.scaled_dot_product_attention.default"
    given = heads(6, 24, 8), heads(2, 24, 8), heads(2, 24, 8)
    row, numbers = make.flags(4, 1, 1, 24), make.integers(4, 24, high=3).sort(-1).values
    documents = {"query_documents": numbers[:, None, :, None], "key_documents": numbers[:, None, None]}
    yield call(target, *given, is_causal=True, enable_gqa=True, window=(6, 0), scale=0.3)
    yield call(target, *given, enable_gqa=True, window=(5, 3))
    yield call(target, *given, row, is_causal=True, enable_gqa=True)
    yield call(target, *given, row, is_causal=True, enable_gqa=True, window=(9, 0), **documents)
    yield call(target, *given, enable_gqa=True, **documents)
    target = "autopar.chunked_attention.default"
    bias, sink = make.normal(1, 6, 24, 24), make.normal(1, 6, 1, 1)
    yield call(target, *given, bias, is_causal=True, enable_gqa=True, window=(6, 0), scale=0.3)
    yield call(target, *given, None, sink, row, is_causal=True, enable_gqa=True, soft_cap=2.0)
    yield call(target, *given, make.normal(4, 1, 1, 24), enable_gqa=True, soft_cap=3.0, **documents)
    yield call(target, heads(6, 12, 8), heads(6, 24, 8), heads(6, 24, 6), make.normal(1, 6, 12, 24), fills="bias")


def _recurrent(make: Maker, call: Make) -> Iterator[Sample]:
    for kind, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        for first in (False, True):
            batch = make.normal(12, 5, 7) if first else make.normal(5, 12, 7)
            weights = [
                make.normal(gates * 3, 7),
                make.normal(gates * 3, 3),
                make.normal(gates * 3),
                make.normal(gates * 3),
            ]
            state = make.normal(1, 12, 3)
            given = [state, make.normal(1, 12, 3)] if kind == "lstm" else state
            yield call(f"aten.{kind}.input", batch, given, weights, True, 1, 0.0, True, False, first)
    places = make.normal(12, 6, 6, 3, 8)
    scanned = (places, make.normal(12, 6, 6, 3, 8), make.normal(12, 6, 6, 3, 24), make.normal(12, 6, 6, 3, 8))
    within = make.normal(12, 6, 6, 3, 3)
    yield call("autopar.delta_scan.default", *scanned, within, make.positive(12, 6, 6, 1), None)
    yield call("autopar.delta_scan.default", *scanned, within, make.positive(12, 6, 6, 8), make.normal(12, 6, 8, 24))
    given = make.normal(12, 6, 24), make.positive(12, 6, 24), -make.positive(6, 3)
    yield call("autopar.selective_scan.default", *given, make.normal(12, 3, 24), make.normal(12, 3, 24))


def _random(make: Maker, call: Make) -> Iterator[Sample]:
    yield call("aten.rand_like.default", make.normal(12, 24), random=True)
    yield call("aten.exponential.default", make.normal(12, 24), random=True)
    yield call("aten.uniform.default", make.normal(12, 24), random=True)
    yield call("aten.uniform.default", make.normal(12, 24), -2.0, 3.0, random=True)
    yield call("aten.bernoulli.p", make.normal(12, 24), 0.25, random=True, fixed=(0,))
    yield call("aten.random.from", make.normal(12, 24), 1, 4, random=True)
    yield call("aten.geometric.default", make.normal(12, 24), 0.5, random=True)
    yield call("aten.log_normal.default", make.normal(12, 24), random=True)
    yield call("aten.cauchy.default", make.normal(12, 24), random=True)
    yield call("aten.normal_functional.default", make.normal(12, 24), random=True, fixed=(0,))


def _functions(make: Maker, call: Make) -> Iterator[Sample]:
    x, known = make.normal(12, 24), {"pointwise": True, "linear": True}
    for function, arguments, operands in (
        ("StraightThrough", "(x0)", [x]),
        ("Reversal", "(x0, 0.5)", [x]),
        ("Scaled", "(x0, x1, {'weight': 2.0})", [x, make.normal(12, 24)]),
    ):
        yield call("autopar.autograd_function.one", operands, f"tests.passes.custom:{function}", arguments, **known)
    clipped = "tests.passes.custom:Clipped", "(x0, 0.5)"
    yield call("autopar.autograd_function.one", [x], *clipped, pointwise=True, linear=False)
    noisy = "tests.passes.custom:Noisy", "(x0)"
    yield call("autopar.autograd_function.one_drawn", [x], *noisy, **known, random=True)
