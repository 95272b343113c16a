"""Attention in chunks against the operator that makes all scores, in float64, outputs and gradients."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from autopar.runtime.generated.chunked_attention import chunked_attention, largest_chunk
from autopar.runtime.generated.digits import places
from passes._torch import FakeTensorMode
from passes.ir.arguments import find_overload
from passes.ops import CHUNKED_ATTENTION
from tests.autopar.comparing import marked
from tests.autopar.runtime.generated.largest import Largest
from tests.autopar.runtime.generated.splits import SIZE, SPLITS, ranks

HEADS = 4
# What it has besides query, key and value; documents and a mask with samples that begin and end with hidden keys.
FORMS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "a soft cap": {"is_causal": True, "soft_cap": 0.7, "scale": 1.0},
    "a soft cap in a window": {"is_causal": True, "soft_cap": 2.0, "window": (5, 0)},
    "a window on both sides": {"window": (3, 2)},
    "a sink": {"is_causal": True, "sink": (1, HEADS, 1, 1)},
    "a sink in a window of padding": {"is_causal": True, "sink": (1, HEADS, 1, 1), "window": (4, 0), "mask": "row"},
    "a bias": {"bias": (1, HEADS, SIZE, SIZE)},
    "a causal bias of samples": {"bias": (2, 1, SIZE, SIZE), "is_causal": True},
    "a bias of keys": {"bias": (1, HEADS, 1, SIZE), "is_causal": True, "scale": 0.3},
    "a bias of queries": {"bias": (2, HEADS, SIZE, 1), "window": (4, 0), "is_causal": True},
    "padding": {"is_causal": True, "mask": "row"},
    "padding that fills a bias": {"bias": (1, HEADS, SIZE, SIZE), "mask": "row", "fills": "bias", "is_causal": True},
    "padding that fills scores": {"bias": (1, HEADS, 1, SIZE), "mask": "row", "fills": "scores", "window": (4, 1)},
    "padding that fills scores with a number": {
        "bias": (1, HEADS, SIZE, SIZE), "mask": "row", "fills": "scores", "least": -2.0, "dtype": torch.float64,
    },
    "flags": {"mask": "flags", "is_causal": True, "soft_cap": 1.0},
    "documents": {"documents": True, "is_causal": True, "bias": (1, HEADS, 1, SIZE)},
    "all": {
        "bias": (1, HEADS, SIZE, SIZE), "sink": (1, HEADS, 1, 1), "soft_cap": 1.5, "mask": "row", "documents": True,
        "window": (9, 0), "is_causal": True, "scale": 0.4, "dtype": torch.float64,
    },
}  # fmt: skip


def _given(name: str, heads: int) -> dict[str, object]:
    """The arguments of the operator."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    form = dict(FORMS[name])
    found: dict[str, object] = {
        "query": normal(2, HEADS, SIZE, 8), "key": normal(2, heads, SIZE, 8), "value": normal(2, heads, SIZE, 6),
    }  # fmt: skip
    found.update({each: normal(*form.pop(each)) for each in ("bias", "sink") if each in form})  # type: ignore[misc]
    numbers = torch.zeros(2, SIZE, dtype=torch.int64)
    numbers[0, 5:], numbers[0, 15:], numbers[1, 12:] = 1, 2, 1
    if form.pop("documents", False):
        found.update(query_documents=numbers[:, None, :, None], key_documents=numbers[:, None, None])
    row, flags = torch.ones(2, 1, 1, SIZE, dtype=torch.bool), torch.rand(2, 1, SIZE, SIZE, generator=generator) < 0.6
    row[0, ..., 20:] = row[1, ..., :9] = row[1, ..., 12] = False
    mask = form.pop("mask", None)
    if mask:
        found["attn_mask"] = row if mask == "row" else flags
    return {**found, **form, "enable_gqa": True}


def _part(given: Mapping[str, object], there: Tensor) -> dict[str, object]:
    """The arguments of the runtime, for the queries at `there`."""
    found = {name: value for name, value in given.items() if name != "enable_gqa"}
    for name in ("query", "bias", "attn_mask", "query_documents"):
        value = found.get(name)
        if isinstance(value, Tensor) and value.shape[2] != 1:
            found[name] = value[:, :, there]
    documents = found.pop("query_documents", None), found.pop("key_documents", None)
    mask, causal = found.pop("attn_mask", None), found.pop("is_causal", False)
    return {**found, "documents": None if documents[0] is None else documents, "mask": mask, "causal": causal}


@pytest.mark.parametrize("heads", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("split", marked(SPLITS, ("plain, four", "stripes of three", "two axes")))
def test_parts_equal_the_whole(split: str, name: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few queries."""
    monkeypatch.setattr("autopar.runtime.generated.chunked_attention.CHUNK", 5)
    given = _given(name, heads)
    whole = find_overload(CHUNKED_ATTENTION)(**given)
    tensors = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    cotangent = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(whole, tensors, cotangent)
    gradients = [torch.zeros_like(each) for each in expected]
    for digits in ranks(SPLITS[split]):
        there = torch.from_numpy(places(SIZE // len(ranks(SPLITS[split])), SIZE, digits))
        part = chunked_attention(**_part(given, there), digits=digits)  # type: ignore[arg-type]
        torch.testing.assert_close(part, whole[:, :, there], rtol=1e-12, atol=1e-12)
        for gradient, more in zip(gradients, torch.autograd.grad(part, tensors, cotangent[:, :, there]), strict=True):
            gradient += more
    for gradient, each in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, each, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_is_in_its_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those of the operator to its rounding, and gradients are as near to those in float64 as its."""
    monkeypatch.setattr("autopar.runtime.generated.chunked_attention.CHUNK", 5)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, SIZE, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    cotangent = torch.randn(given[0].shape, generator=generator).to(dtype)
    options = {"soft_cap": 1.0, "scale": 0.3}
    whole = find_overload(CHUNKED_ATTENTION)(*given, is_causal=True, dtype=torch.float32, **options)
    part = chunked_attention(*given, causal=True, dtype=torch.float32, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-6)
    wide = [each.detach().double().requires_grad_() for each in given]
    truth = find_overload(CHUNKED_ATTENTION)(*wide, is_causal=True, **options)
    exact, expected, found = (
        torch.autograd.grad(result, operands, cotangent.to(result.dtype))
        for result, operands in ((truth, wide), (whole, given), (part, given))
    )
    for right, one, other in zip(exact, expected, found, strict=True):
        assert (other - right).norm() <= 1.25 * (one - right).norm() + 1e-12


def test_no_scores_are_made() -> None:
    """Of many queries nothing is as large as the scores of a head, forward and backward."""
    length = 2048
    given = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        chunked_attention(*given, causal=True, soft_cap=1.0).sum().backward()
    assert 0 < largest.bytes <= 128 * length * 4


def test_the_largest_chunk_is_measured() -> None:
    """It stands for all of them, so that long sequences are planned as fast as short ones."""
    length = 2**20
    with FakeTensorMode():
        given = [torch.empty(1, 1, length, 8, requires_grad=True) for _ in range(3)]
        with Largest() as largest:
            largest_chunk(*given, causal=True).sum().backward()
    assert largest.bytes == 128 * length * 4
