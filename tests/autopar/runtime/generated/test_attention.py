"""Attention of a part of the queries, and in a ring, against that of all, in float64, outputs and gradients."""

from collections.abc import Callable, Sequence
from math import prod
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autopar.runtime.generated.attention import blockwise_attention
from autopar.runtime.generated.attention_kernels import CPU, EFFICIENT, FLASH, PLAIN, Kernel, Scores, kernel_of
from autopar.runtime.generated.blocks import blocks_of
from autopar.runtime.generated.digits import places
from autopar.runtime.generated.masks import Masks, visible
from autopar.runtime.generated.ring_attention import held_blocks, ring_attention, rounds_of, shifts
from autopar.runtime.state import Axis
from passes._torch import FakeTensorMode
from passes.ir.bands import Band, kernel_width
from tests.autopar.in_process import Threads, axes_at
from tests.autopar.runtime.generated.largest import Largest
from tests.autopar.runtime.generated.splits import SIZE, SPLITS, ranks
from tests.passes.helpers import mesh_of

# What queries attend to: whether it is causal, the window, and whether keys are hidden by a row and by documents.
ATTENDED: dict[str, tuple[bool, tuple[int, int] | None, bool, bool]] = {
    "causal": (True, None, False, False),
    "full": (False, None, False, False),
    "a window": (True, (7, 0), False, False),
    "a short window": (True, (2, 0), False, False),
    "a window on both sides": (False, (4, 4), False, False),
    "padding": (False, None, True, False),
    "causal padding": (True, None, True, False),
    "a window and padding": (True, (4, 0), True, False),
    "documents": (False, None, False, True),
    "causal documents": (True, None, False, True),
    "a window of documents and padding": (True, (5, 0), True, True),
}
HEADS = [(4, 2), *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((4, 4), (3, 1)))]
FEW = ("causal", "full", "a window", "a window and padding", "causal documents")


def _masks(name: str) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """A row of flags, with samples that begin and end with hidden keys, and documents of other lengths in each."""
    _, _, padded, packed = ATTENDED[name]
    row, numbers = torch.ones(2, 1, 1, SIZE, dtype=torch.bool), torch.zeros(2, SIZE, dtype=torch.int64)
    row[0, ..., 20:] = row[1, ..., :9] = row[1, ..., 12] = False
    numbers[0, 5:], numbers[0, 15:], numbers[1, 12:] = 1, 2, 1
    documents = numbers[:, None, :, None], numbers[:, None, None]
    return (row if padded else None), (documents if packed else None)


def _attended(name: str, given: Sequence[Tensor]) -> Tensor:
    """Attention with a mask of all queries by all keys."""
    causal, window, _, _ = ATTENDED[name]
    (row, documents), place = _masks(name), torch.arange(SIZE)
    before, after = window or (SIZE, SIZE)
    mask = (place >= place[:, None] - before) & (place <= place[:, None] + (0 if causal else after))
    mask = mask if row is None else mask & row
    mask = mask if documents is None else mask & (documents[0] == documents[1])
    return scaled_dot_product_attention(*given, mask, enable_gqa=True, scale=0.3)


def _random(heads: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(2, heads, SIZE, width, dtype=torch.float64, generator=generator).requires_grad_()


def _given(heads: tuple[int, int], widths: tuple[int, int]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Query, key and value, and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    query = _random(heads[0], widths[0], generator)
    key, value = (_random(heads[1], width, generator) for width in widths)
    return (query, key, value), torch.randn(2, heads[0], SIZE, widths[1], dtype=query.dtype, generator=generator)


def _equal_in_parts(split: str, name: str, heads: tuple[int, int], widths: tuple[int, int]) -> None:
    given, cotangent = _given(heads, widths)
    whole = _attended(name, given)
    expected = torch.autograd.grad(whole, given, cotangent)
    gradients = [torch.zeros_like(each) for each in expected]
    causal, window, *_ = ATTENDED[name]
    row, documents = _masks(name)
    for digits in ranks(SPLITS[split]):
        there = torch.from_numpy(places(SIZE // len(ranks(SPLITS[split])), SIZE, digits))
        own = None if documents is None else (documents[0][:, :, there], documents[1])
        options = {"causal": causal, "window": window, "mask": row, "documents": own, "scale": 0.3}
        part = blockwise_attention(given[0][:, :, there], *given[1:], digits=digits, **options)
        torch.testing.assert_close(part, whole[:, :, there], rtol=1e-12, atol=1e-12)
        for gradient, more in zip(gradients, torch.autograd.grad(part, given, cotangent[:, :, there]), strict=True):
            gradient += more
    for gradient, each in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, each, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ATTENDED)
@pytest.mark.parametrize("split", SPLITS)
def test_parts_equal_the_whole(split: str, name: str, heads: tuple[int, int]) -> None:
    _equal_in_parts(split, name, heads, (8, 8))


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", FEW)
def test_parts_of_unequal_widths_equal_the_whole(name: str, widths: tuple[int, int]) -> None:
    _equal_in_parts("two axes", name, (4, 2), widths)


@pytest.mark.parametrize("name", ["documents", "causal documents", "a window of documents and padding"])
def test_tiles_equal_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of documents that are smaller than blocks, of which those between documents are left out."""
    monkeypatch.setattr("autopar.runtime.generated.blocks.TILE", 3)
    for split in ("plain", "stripes of three", "blocks"):
        _equal_in_parts(split, name, (4, 2), (8, 8))


def test_gradients_of_many_blocks_are_as_exact_as_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, relative to those of one kernel, against double precision."""
    monkeypatch.setattr("autopar.runtime.generated.blocks.TILE", 8)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 1, 512, 16, generator=generator).bfloat16() for _ in range(4)]
    *given, cotangent = [each + 1 for each in drawn]
    one = torch.zeros(1, 1, 512, dtype=torch.int64)

    def gradients(dtype: torch.dtype, attend: Callable[..., Tensor], **options: object) -> Sequence[Tensor]:
        inputs = [each.to(dtype).requires_grad_() for each in given]
        return torch.autograd.grad(attend(*inputs, **options), inputs, cotangent.to(dtype))

    expected = gradients(torch.float64, scaled_dot_product_attention, is_causal=True)
    fused = gradients(torch.bfloat16, scaled_dot_product_attention, is_causal=True)
    documents = one[..., None], one[:, :, None]
    blocks = gradients(torch.bfloat16, blockwise_attention, causal=True, documents=documents)
    for exact, own, other in zip(expected, blocks, fused, strict=True):
        found, least = ((each - exact).norm() / exact.norm() for each in (own.double(), other.double()))
        assert found <= 1.5 * least, (found, least)


@pytest.mark.parametrize("name", ATTENDED)
def test_no_scores_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many queries nothing is as large as flags of queries by keys would be, forward and backward."""
    monkeypatch.setattr("autopar.runtime.generated.blocks.TILE", 64)
    causal, window, padded, packed = ATTENDED[name]
    length = 2048
    query = torch.randn(1, 1, length, 8, requires_grad=True)
    numbers = torch.arange(length) // 300
    masks = {
        "mask": torch.arange(length)[None, None, None] < 1900 if padded else None,
        "documents": (numbers[None, None, :, None], numbers[None, None, None]) if packed else None,
    }
    with Largest() as largest:
        blockwise_attention(query, query, query, causal=causal, window=window, **masks).sum().backward()
    assert 0 < largest.bytes < length * length // 8


def test_tiles_between_documents_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of causal attention in four documents of six, the tiles on the diagonal are left."""
    monkeypatch.setattr("autopar.runtime.generated.blocks.TILE", 6)
    numbers = torch.arange(SIZE) // 6
    masks = Masks(None, numbers[None, None, :, None], numbers[None, None, None])
    (tiles,) = visible([(blocks_of(np.arange(SIZE), np.arange(SIZE), Band(None, 0)), masks)])
    assert [(tile.queries, tile.causal) for tile in tiles] == [
        (slice(start, start + 6, 1), True) for start in range(0, SIZE, 6)
    ]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_plain_products_equal_the_kernel(heads: tuple[int, int], causal: bool, adds: bool) -> None:
    """Forward, and backward with the result and the log-sum-exps of other keys."""
    generator = torch.Generator().manual_seed(1)
    query = _random(heads[0], 8, generator).detach()
    key, value = (_random(heads[1], 8, generator).detach() for _ in range(2))
    given, gradient = (query, key, value), torch.randn(query.shape, dtype=query.dtype, generator=generator)
    added = torch.randn(2, 1, 1, SIZE, dtype=query.dtype, generator=generator) if adds else None
    scores = Scores(0.3, causal, added)
    (result, statistics), own = CPU.forward(given, scores), PLAIN.forward(given, scores)
    torch.testing.assert_close((result, statistics), own, rtol=1e-12, atol=1e-12)
    rows = gradient, result * 0.9, statistics + 0.1
    expected, found = (kernel.backward(given, rows, scores) for kernel in (CPU, PLAIN))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_widths_are_those_that_kernels_take() -> None:
    """Multiples of 8 on CUDA, where flash attention takes up to 256; any on the CPU."""
    assert [kernel_width(*widths, "cuda") for widths in ((64, 64), (20, 20), (96, 100), (1, 3))] == [64, 24, 104, 8]
    assert kernel_width(20, 12, "cpu") == 20
    for width, kernel in ((256, FLASH), (264, EFFICIENT)):
        with FakeTensorMode():
            assert kernel_of(torch.empty(1, 1, 8, width, dtype=torch.bfloat16, device="cuda")) is kernel


@pytest.mark.parametrize(
    ("kernel", "dtype", "adds"),
    [(FLASH, torch.bfloat16, False), (EFFICIENT, torch.float32, False), (EFFICIENT, torch.bfloat16, True)],
)
def test_kernels_of_cuda_take_what_they_are_given(kernel: Kernel, dtype: torch.dtype, adds: bool) -> None:
    """On tensors without values."""
    query = torch.empty(2, 4, 24, 16, dtype=dtype, device="meta")
    key = value = torch.empty(2, 2, 40, 16, dtype=dtype, device="meta")
    scores = Scores(0.3, added=torch.empty(2, 1, 1, 40, dtype=dtype, device="meta") if adds else None)
    result, statistics = kernel.forward((query, key, value), scores)
    assert (result.shape, statistics.shape) == (query.shape, query.shape[:3])
    found = kernel.backward((query, key, value), (result, result, statistics), scores)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]


def _ring_of(
    split: str, name: str, given: Sequence[Tensor], cotangent: Tensor, around: Sequence[int] = (0, 1)
) -> list[Tensor]:
    """The result of a ring and the gradients, put together. The axes `around` are those that keys are split on; on
    others they are whole."""
    mesh = mesh_of(**{f"axis{place}": ways for place, (ways, _) in enumerate(SPLITS[split])})
    coordinates = list(mesh.coordinates())
    found = [torch.zeros_like(each) for each in (cotangent, *given)]
    causal, window, *_ = ATTENDED[name]
    row, documents = _masks(name)
    adding = Lock()

    def work(rank: int) -> None:
        axes = axes_at(coordinates[rank], mesh)
        digits = tuple((axis, major) for axis, (_, major) in zip(axes, SPLITS[split], strict=True))
        ring = tuple(digit for place, digit in enumerate(digits) if place in around)
        there = torch.from_numpy(places(SIZE // len(coordinates), SIZE, digits))
        keys = torch.from_numpy(places(SIZE // prod(axis.size for axis, _ in ring), SIZE, ring))
        wheres = there, there, keys, keys
        own = [each.detach()[:, :, where].requires_grad_() for each, where in zip(given, wheres[1:], strict=True)]
        numbers = None if documents is None else (documents[0][:, :, there], documents[1])
        options = {"causal": causal, "window": window, "mask": row, "documents": numbers, "scale": 0.3}
        further = {"queries": digits} if len(ring) < len(digits) else {}
        result = ring_attention(*own, digits=ring, **further, **options)
        gradients = torch.autograd.grad(result, own, cotangent[:, :, there])
        with adding:
            for whole, part, where in zip(found, (result, *gradients), wheres, strict=True):
                whole[:, :, where] += part.detach()

    Threads(len(coordinates)).run(work)
    return found


def _equal_in_rings(
    split: str, name: str, heads: tuple[int, int], widths: tuple[int, int], around: Sequence[int] = (0, 1)
) -> None:
    given, cotangent = _given(heads, widths)
    whole = _attended(name, given)
    expected = [whole, *torch.autograd.grad(whole, given, cotangent)]
    found = _ring_of(split, name, given, cotangent, around)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ATTENDED)
@pytest.mark.parametrize("split", [split for split in SPLITS if split != "one query"])
def test_rings_equal_the_whole(split: str, name: str, heads: tuple[int, int]) -> None:
    _equal_in_rings(split, name, heads, (8, 8))


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", FEW)
def test_rings_of_unequal_widths_equal_the_whole(name: str, widths: tuple[int, int]) -> None:
    _equal_in_rings("two axes", name, (4, 2), widths)


@pytest.mark.parametrize("around", [0, 1])
@pytest.mark.parametrize("name", ATTENDED)
@pytest.mark.parametrize("split", [split for split in SPLITS if len(SPLITS[split]) == 2])
def test_rings_of_parts_of_the_queries_equal_the_whole(split: str, name: str, around: int) -> None:
    """Keys go around one axis, and are whole on the other, which splits queries alone."""
    _equal_in_rings(split, name, (4, 2), (8, 8), (around,))


@pytest.mark.parametrize("widths", [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", FEW)
def test_rings_of_parts_of_the_queries_with_unequal_widths_equal_the_whole(name: str, widths: tuple[int, int]) -> None:
    _equal_in_rings("two axes", name, (3, 1), widths, (1,))


@pytest.mark.parametrize("before", [0, 1, 2, 3, 6, 7, 20])
@pytest.mark.parametrize("split", ["plain, four", "plain, eight", "two axes", "stripes"])
def test_rings_go_as_far_as_windows(split: str, before: int) -> None:
    """In order to all ranks that any keys are needed of, and on one axis to no others."""
    band, every = Band(before, 0), ranks(SPLITS[split])
    count = SIZE // len(every)
    needed = [
        [bool(held_blocks(count, count, digits, source, band)) for source in every[rank::-1]]
        for rank, digits in enumerate(every)
    ]
    most = max(max(np.flatnonzero(row)) for row in needed)
    rounds = rounds_of(count, every[0], band)
    if split == "stripes":
        assert rounds is None
    else:
        inner = len(every) // SPLITS[split][0][0]
        assert rounds is not None
        assert most < rounds * inner if inner == 1 else rounds == min(SPLITS[split][0][0], 1 - (-most // inner))
        assert inner > 1 or rounds == min(len(every), most + 1)


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 3), (4, 2), (2, 2, 2)])
def test_what_is_held_was_every_rank_s_and_comes_home(sizes: tuple[int, ...]) -> None:
    every, home = shifts(sizes)
    ranks = list(np.ndindex(*sizes))
    held = {rank: rank for rank in ranks}
    seen = {rank: [rank] for rank in ranks}

    def move(place: int, by: int) -> None:
        before = dict(held)
        for rank in ranks:
            source = list(rank)
            source[place] = (source[place] - by) % sizes[place]
            held[rank] = before[tuple(source)]

    for place, by in every:
        move(place, by)
        for rank in ranks:
            seen[rank].append(held[rank])
    assert all(sorted(found) == ranks for found in seen.values())
    for place, by in home:
        move(place, by)
    assert held == {rank: rank for rank in ranks}


def test_shifts_are_issued_before_the_blocks_that_they_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward."""
    order: list[str] = []

    def start(tensor: Tensor, axis: Axis, distance: int) -> Callable[[], Tensor]:
        order.append("send")

        def wait() -> Tensor:
            order.append("wait")
            return tensor

        return wait

    def forward(*given: object) -> tuple[Tensor, Tensor]:
        order.append("block")
        return CPU.forward(*given)  # type: ignore[arg-type]

    def backward(*given: object) -> tuple[Tensor, Tensor, Tensor]:
        order.append("block")
        return CPU.backward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.runtime.generated.ring_attention.start_shift", start)
    monkeypatch.setattr("autopar.runtime.generated.attention.kernel_of", lambda *_, **__: Kernel(forward, backward))
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    result = ring_attention(query, query, query, digits=((Axis("cp", 3, 0, ""), 1),))
    assert order == ["send", "block", "wait", "send", "block", "wait", "block"]
    order.clear()
    result.sum().backward()
    # Keys and values, then the gradients of the block before, which come while the next block is computed.
    middle = ["send", "block", "wait", "send", "wait"]
    assert order == ["send", "block", "send", "wait", *middle, "block", "wait", "send", "wait"]
