"""The known properties of custom autograd functions."""

import pytest
import torch
import torch.distributed as dist

from passes.capture.functions import Properties, properties_of
from passes.ir.errors import CaptureError
from passes.ir.program import TensorType
from tests.passes import custom

WIDE = TensorType((4, 6), torch.float32)
LONG = TensorType((4, 6), torch.int64)


def _known(cls: type, arguments: str, *operands: TensorType) -> Properties:
    return properties_of(f"{cls.__module__}:{cls.__qualname__}", arguments, operands, ())


@pytest.mark.parametrize(
    ("cls", "arguments", "operands", "pointwise", "linear"),
    [
        (custom.StraightThrough, "(x0)", (WIDE,), True, True),
        (custom.Reversal, "(x0, 0.5)", (WIDE,), True, True),
        (custom.Scaled, "(x0, x1, {'weight': 2.0})", (WIDE, WIDE), True, True),
        # Every element for itself, but a gradient that is cut off is no sum of gradients that are.
        (custom.Clipped, "(x0, 1.0)", (WIDE,), True, False),
        (custom.Normed, "(x0)", (WIDE,), False, False),
        # The forward looks at rows.
        (custom.Centered, "(x0)", (WIDE,), False, True),
        # The forward looks at a size, which no value of one size would show.
        (custom.Sized, "(x0)", (WIDE,), False, True),
        # Operands that are broadcast have gradients that are summed.
        (custom.Scaled, "(x0, x1, {'weight': 2.0})", (WIDE, TensorType((1, 6), torch.float32)), False, True),
    ],
)
def test_what_is_found(
    cls: type, arguments: str, operands: tuple[TensorType, ...], pointwise: bool, linear: bool
) -> None:
    """By following the operators of forward and backward."""
    assert _known(cls, arguments, *operands) == Properties(pointwise, linear, False)


def test_tensors_without_elements() -> None:
    """There is nothing to try, and nothing that could be wrong."""
    assert _known(custom.StraightThrough, "(x0)", TensorType((0, 4), torch.float32)) == Properties(True, True, False)


def test_what_cannot_be_followed_is_not_claimed() -> None:
    """A backward that looks at values, on which it would depend how it goes on."""
    assert _known(custom.Deciding, "(x0)", WIDE) == Properties(False, False, False)


def test_random_numbers_are_noticed() -> None:
    """And drawn alike when a function is tried."""
    assert _known(custom.Noisy, "(x0)", WIDE) == Properties(True, True, True)


def test_what_is_no_function_of_its_arguments_is_refused() -> None:
    """Its results would be others in a program."""
    with pytest.raises(CaptureError, match="Counting does not give the same twice"):
        _known(custom.Counting, "(x0)", WIDE)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (custom.Gathering, r"communicates between ranks by itself \(allreduce\)"),
        (custom.Sharing, r"asks for ranks \(get_world_size\)"),
    ],
)
def test_what_looks_at_ranks_is_refused(cls: type, reason: str) -> None:
    """It runs on all ranks of a program, as it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match=rf"custom:{cls.__name__} at .*custom.py:\d+ {reason}, but"):
            _known(cls, "(x0)", WIDE)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_run_is_refused() -> None:
    """Then nothing shows that its backward is kept."""
    with pytest.raises(CaptureError, match=r"Reversal cannot be run on fresh data, .*: TypeError"):
        _known(custom.Reversal, "(x0)", WIDE)


class Linear(torch.autograd.Function):
    """Backwards of many kinds, by name; all are linear but for the last ones."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x: [n, n]."""
        ctx.save_for_backward(x)
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """By `kind`."""
        (x,) = ctx.saved_tensors
        return _BACKWARDS[ctx.kind](gradients[0], x), None


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0].zero_()
    return tensor


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0].fill_(1.0)
    return tensor


def _copied(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    tensor[0].copy_(source[0])
    return tensor


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([tensor], 1.0)
    return tensor


_BACKWARDS = {
    "product": lambda g, x: (g @ x).t() * x.sign() / 3,
    "masked": lambda g, x: torch.where(x > 0, g, torch.zeros_like(g)),
    "filled": lambda g, x: g.masked_fill(x > 0, 0.0),
    "sum": lambda g, x: g.sum(0, keepdim=True).expand_as(g) - g.mean(),
    "scattered": lambda g, x: torch.zeros_like(g).scatter_add_(0, (x > 0).long(), 2 * g),
    "in place": lambda g, x: g.clone().mul_(x).add_(g).neg_(),
    "softmax": lambda g, x: torch._softmax_backward_data(g, x.softmax(-1), -1, g.dtype),
    "joined": lambda g, x: torch.cat([g[:2] * 2, torch.zeros_like(g[2:])]),
    "zeroed in part": lambda g, x: _zeroed(g.clone()),
    "added to zero": lambda g, x: g + torch.zeros_like(x).view(4, 4),
    # From here on not.
    "square": lambda g, x: g * g,
    "quotient": lambda g, x: x / (g + 2),
    "affine": lambda g, x: g + x,
    "number": lambda g, x: g + 1.0,
    "other mask": lambda g, x: torch.where(g > 0, g, torch.zeros_like(g)),
    "other filling": lambda g, x: g.masked_fill(x > 0, 1.0),
    "other branch": lambda g, x: torch.where(x > 0, g, x),
    "rounded": lambda g, x: torch.div(g, 3.0, rounding_mode="floor"),
    "cast": lambda g, x: g.long().to(g.dtype),
    "constant": lambda g, x: x * 2,
    "written over": lambda g, x: torch.zeros_like(g).add_(x).add(g),
    "added to zero in part": lambda g, x: g + _zeroed(x.clone()),
    "filled in part": lambda g, x: _filled(g.clone()),
    "copied in part": lambda g, x: _copied(x.clone(), g),
    "changed in a list": lambda g, x: _raised(g.clone()),
    "clipped in place": lambda g, x: g.clone().clamp_(max=1.0),
}


@pytest.mark.parametrize("kind", _BACKWARDS)
def test_linear_gradients(kind: str) -> None:
    """Each is held against the definition, on numbers for which sums are exact."""
    linear = _known(Linear, f"(x0, '{kind}')", TensorType((4, 4), torch.float64)).linear
    generator = torch.Generator().manual_seed(0)
    g, h, x = (torch.randint(-8, 9, (4, 4), generator=generator).double() for _ in range(3))
    g, h = g / 4, h / 4
    backward = _BACKWARDS[kind]
    together, apart = backward(g + h, x), backward(g, x) + backward(h, x)
    assert linear == (list(_BACKWARDS).index(kind) < list(_BACKWARDS).index("square"))
    assert torch.allclose(together, apart, 1e-12, 1e-12) == linear


@pytest.mark.parametrize(
    ("path", "arguments", "operands", "known"),
    [
        ("bloom.modeling_bloom:GeLUFunction", "(x0)", (WIDE,), Properties(True, True, False)),
        (
            "recurrent_gemma.modeling_recurrent_gemma:SqrtBoundDerivative", "(x0)", (WIDE,),
            Properties(True, True, False),
        ),
        (
            "phimoe.modeling_phimoe:PhimoeMultiplier", "(x0, x1, x2, x3, x4)",
            (WIDE, *(TensorType((4, 1), dtype) for dtype in (torch.float32, torch.int64)), WIDE,
             TensorType((4, 1), torch.float32)), Properties(False, True, False),
        ),
        ("sew_d.modeling_sew_d:XSoftmax", "(x0, x1, -1)", (WIDE, LONG), Properties(False, True, False)),
        ("sew_d.modeling_sew_d:XDropout", "(x0, 0.1)", (WIDE,), Properties(True, True, True)),
        (
            "yoso.modeling_yoso:YosoCumulation", "(x0, x1, x2, x3, x4, {'hash_code_len': 9})",
            (WIDE, WIDE, *[TensorType((4, 6, 8), torch.float32)] * 3), Properties(False, True, False),
        ),
    ],
    ids=lambda item: item.partition(":")[2] if isinstance(item, str) else "",
)  # fmt: skip
def test_the_functions_of_transformers(
    path: str, arguments: str, operands: tuple[TensorType, ...], known: Properties
) -> None:
    """All functions that need no kernels for GPUs."""
    assert properties_of(f"transformers.models.{path}", arguments, operands, ()) == known


def test_large_calls_are_tried_in_small() -> None:
    """A call that is planned for many devices does not fit on one."""
    large = TensorType((2**20, 2**16), torch.bfloat16)
    assert _known(custom.StraightThrough, "(x0)", large) == Properties(True, True, False)


def test_random_numbers_of_the_user_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's are put back; those of accelerators are not touched at all."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    properties_of.cache_clear()
    _known(custom.StraightThrough, "(x0)", WIDE)
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []
