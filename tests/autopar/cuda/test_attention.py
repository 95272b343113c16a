"""The kernels of attention on a CUDA device: which one torch runs, what it keeps, and what those in blocks compute."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from autopar.runtime.generated.attention import blockwise_attention
from autopar.runtime.generated.attention_kernels import (
    EFFICIENT,
    FLASH,
    PLAIN,
    Kernel,
    Scores,
    Three,
    kernel_of,
)
from autopar.runtime.generated.digits import places
from passes.rules import attention_forms
from passes.rules.attention_forms import attention_kernel, attention_workspace
from tests.autopar.runtime.generated.splits import SPLITS, ranks

BATCH, LENGTH = 2, 96
# What torch calls the kernels of `attention_kernel`. There is cuDNN's besides.
KERNELS = {
    attention_forms.Kernel.MATH: SDPBackend.MATH,
    attention_forms.Kernel.FLASH: SDPBackend.FLASH_ATTENTION,
    attention_forms.Kernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cuda")


def _three(heads: tuple[int, int], width: int, length: int = LENGTH) -> Three:
    torch.manual_seed(0)
    return (
        _random(BATCH, heads[0], length, width),
        _random(BATCH, heads[1], length, width),
        _random(BATCH, heads[1], length, width),
    )


def _error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of a tensor, relative to its norm."""
    return max(float((one.double() - other).norm() / other.norm()) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("kernel", "dtype", "added", "tolerance"),
    [
        (FLASH, torch.bfloat16, False, 1e-2),
        (FLASH, torch.float16, False, 2e-3),
        (EFFICIENT, torch.bfloat16, True, 1e-2),
        (EFFICIENT, torch.float32, False, 1e-5),
        (EFFICIENT, torch.float32, True, 1e-5),
    ],
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [8, 64, 96, 128])
def test_kernels(
    kernel: Kernel, dtype: torch.dtype, added: bool, tolerance: float, heads: tuple[int, int], causal: bool, width: int
) -> None:
    """Results, log-sum-exps and gradients against float64."""
    given = _three(heads, width)
    mask = _random(BATCH, 1, 1, LENGTH) if added else None
    scores, gradient = Scores(0.3, causal, mask), _random(*given[0].shape)
    result, statistics = PLAIN.forward(given, scores)
    expected = result, statistics, *PLAIN.backward(given, (gradient, result, statistics), scores)
    query, key, value, cotangent = (each.to(dtype) for each in (*given, gradient))
    assert kernel_of(query, adds=added) is kernel
    cast = scores._replace(added=None if mask is None else mask.to(dtype))
    made, sums = kernel.forward((query, key, value), cast)
    assert sums.dtype == torch.float32
    found = made, sums, *kernel.backward((query, key, value), (cotangent, made, sums), cast)
    assert _error(found, expected) < tolerance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_kernels_take_statistics_of_more_keys(heads: tuple[int, int], causal: bool) -> None:
    """Gradients of a part of the keys, by the log-sum-exps of all: two parts add up to the whole."""
    given, scores = _three(heads, 64), Scores(0.3)
    gradient = _random(*given[0].shape)
    result, statistics = PLAIN.forward(given, scores)
    expected = PLAIN.backward(given, (gradient, result, statistics), scores)
    half = LENGTH // 2
    for kernel, dtype, tolerance in ((FLASH, torch.bfloat16, 1e-2), (EFFICIENT, torch.float32, 1e-5)):
        rows = (gradient.to(dtype), result.to(dtype), statistics.float())
        parts = [
            kernel.backward((given[0].to(dtype), *(each[:, :, part].to(dtype) for each in given[1:])), rows, scores)
            for part in (slice(0, half), slice(half, None))
        ]
        queries = parts[0][0].double() + parts[1][0].double()
        keys, values = (torch.cat([parts[0][place], parts[1][place]], 2) for place in (1, 2))
        assert _error((queries, keys, values), expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["plain", "stripes", "two axes"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "window": (30, 0)},
        {"causal": True, "mask": True},
        {"causal": True, "documents": True},
    ],
    ids=["causal", "full", "a window", "padding", "documents"],
)
def test_parts_equal_the_whole(options: dict[str, object], split: str, dtype: torch.dtype) -> None:
    """A part of the queries after the other, in blocks, against all queries with a mask in float64."""
    given = tuple(each.requires_grad_() for each in _three((4, 2), 64))
    cotangent = _random(*given[0].shape)
    place = torch.arange(LENGTH, device="cuda")
    mask = (place[:, None] >= place) if options["causal"] else torch.ones(LENGTH, LENGTH, device="cuda").bool()
    mask = mask[None, None]
    if "window" in options:
        mask = mask & (place[:, None] - place <= 30)
    given_options = dict(options)
    if options.get("mask"):
        row = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool, device="cuda")
        row[0, ..., 80:] = False
        mask, given_options["mask"] = mask & row, row
    numbers = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda")
    numbers[0, 50:], numbers[1, 20:] = 1, 1
    if options.get("documents"):
        mask = mask & (numbers[:, None, :, None] == numbers[:, None, None])
    whole = scaled_dot_product_attention(*given, mask, enable_gqa=True, scale=0.3)
    expected = [whole.detach(), *torch.autograd.grad(whole, given, cotangent)]
    own = [each.detach().to(dtype).requires_grad_() for each in given]
    found = [torch.zeros_like(each) for each in expected]
    every = ranks(SPLITS[split])
    for digits in every:
        there = torch.from_numpy(places(LENGTH // len(every), LENGTH, digits)).cuda()
        if options.get("documents"):
            given_options["documents"] = numbers[:, None, there, None], numbers[:, None, None]
        part = blockwise_attention(own[0][:, :, there], *own[1:], digits=digits, scale=0.3, **given_options)
        found[0][:, :, there] = part.detach().double()
        gradients = torch.autograd.grad(part, own, cotangent[:, :, there].to(dtype))
        for gradient, more in zip(found[1:], gradients, strict=True):
            gradient += more.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype]
    assert _error(found, expected) < tolerance


CHOICES = pytest.mark.parametrize(
    ("dtype", "heads", "widths", "masked", "dropout"),
    list(
        product(
            DTYPES,
            [(4, 4), (4, 2)],
            [(64, 64), (128, 128), (256, 256), (264, 264), (64, 32)],
            [False, True],
            [0.0, 0.1],
        )
    ),
)


def _operands(
    dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], masked: bool
) -> tuple[Three, Tensor | None]:
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    query, key, value = (
        torch.randn(2, count, 256, width, dtype=dtype, device="cuda", requires_grad=True) for count, width in shapes
    )
    mask = torch.randn(2, 1, 256, 256, dtype=dtype, device="cuda") if masked else None
    return (query, key, value), mask


def _planned(given: Three, masked: bool, dropout: float) -> attention_forms.Kernel:
    shapes = tuple(tuple(each.shape) for each in given)
    return attention_kernel("cuda", given[0].dtype, shapes, masked=masked, dropout=dropout > 0)


def _choice(given: Three, mask: Tensor | None, dropout: float) -> SDPBackend:
    """The kernel that torch runs."""
    grouped = given[0].shape[1] != given[1].shape[1]
    return SDPBackend(
        torch._fused_sdp_choice(*given, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped)
    )


def _kept(backend: SDPBackend, given: Three, mask: Tensor | None, dropout: float) -> int:
    """Bytes for the backward pass besides query, key, value, mask and result."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    grouped = given[0].shape[1] != given[1].shape[1]
    with sdpa_kernel(backend), saved_tensors_hooks(keep, lambda tensor: tensor):
        result = scaled_dot_product_attention(*given, mask, dropout, mask is None, enable_gqa=grouped)
    if mask is not None:
        kept.pop(mask.untyped_storage().data_ptr(), None)
    return sum(kept.values()) - sum(each.numel() * each.element_size() for each in (*given, result))


def _planned_bytes(given: Three, masked: bool, dropout: float) -> float:
    shapes = tuple(tuple(each.shape) for each in given)
    kernel = _planned(given, masked, dropout)
    return attention_workspace(kernel, given[0].dtype, shapes, "cuda", mask=0, dropout=dropout > 0)[0]


@CHOICES
def test_torch_runs_the_kernel_that_is_planned(
    dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], masked: bool, dropout: float
) -> None:
    """Among those that every device has."""
    given, mask = _operands(dtype, heads, widths, masked)
    with sdpa_kernel(list(KERNELS.values())):
        run = _choice(given, mask, dropout)
    assert KERNELS[_planned(given, masked, dropout)] == run


@CHOICES
def test_kernels_keep_what_is_planned(
    dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], masked: bool, dropout: float
) -> None:
    """A mask, which layers share, is not counted here."""
    given, mask = _operands(dtype, heads, widths, masked)
    measured = _kept(KERNELS[_planned(given, masked, dropout)], given, mask, dropout)
    # Seeds of dropout are a few bytes; a statistic per query is kept for multiples of 32 queries.
    assert _planned_bytes(given, masked, dropout) == pytest.approx(measured, rel=0.02, abs=64)


@CHOICES
def test_cudnn_keeps_no_more_than_planned(
    dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], masked: bool, dropout: float
) -> None:
    """Where torch prefers cuDNN's kernel, which plans do not assume."""
    given, mask = _operands(dtype, heads, widths, masked)
    if _choice(given, mask, dropout) != SDPBackend.CUDNN_ATTENTION:
        pytest.skip("torch runs another kernel")
    measured = _kept(SDPBackend.CUDNN_ATTENTION, given, mask, dropout)
    assert measured <= 1.02 * _planned_bytes(given, masked, dropout) + 64
