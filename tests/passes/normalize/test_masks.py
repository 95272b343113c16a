"""Masks of attention become what they say, or stay as they are."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from passes.ir.program import Program
from passes.ops import ATTENTION
from passes.rules.attention_forms import runs_in_blocks
from tests.models import llama, mistral, tokens
from tests.passes.helpers import Apply, normalized
from tests.passes.normalize.running import run

X = torch.ones(2, 3, 8, 4)
LENGTH = 8
SAMPLES = 3
Y = torch.randn(SAMPLES, SAMPLES, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLACES = torch.arange(LENGTH)


def _flags() -> Tensor:
    return torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None]


def _window() -> Tensor:
    places = torch.arange(LENGTH)
    return _flags() & (places[:, None] - places < 3)


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "compared places": _flags,
    "a triangle": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "for every sample and head": lambda: _flags()[None, None].expand(2, 3, LENGTH, LENGTH),
    "minus infinity": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "the least number": lambda: torch.where(_flags(), 0.0, torch.finfo(torch.float32).min),
    "later places": lambda: torch.arange(3, 3 + LENGTH)[:, None] >= torch.arange(3, 3 + LENGTH),
}
# By the window.
WINDOWS: dict[str, tuple[Callable[[], Tensor], tuple[int, int]]] = {
    "a distance": (_window, (2, 0)),
    "a distance the other way": (
        lambda: _flags() & (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None] >= -2),
        (2, 0),
    ),
    "places before": (lambda: _flags() & (torch.arange(LENGTH) > torch.arange(LENGTH)[:, None] - 3), (2, 0)),
    "a window of all": (lambda: _flags() & (torch.arange(LENGTH) > torch.arange(LENGTH)[:, None] - 20), (19, 0)),
    "both sides": (lambda: (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() <= 3, (3, 3)),
    "short of both sides": (lambda: (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3, (2, 2)),
    "by value": (lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1).triu(-2), (2, 1)),
    "minus infinity": (lambda: torch.where(_window(), 0.0, float("-inf")), (2, 0)),
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "shifted by one": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
    "without the own key": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1),
    "compared, without the own key": lambda: torch.arange(LENGTH) < torch.arange(LENGTH)[:, None],
    "every second place": lambda: 2 * torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None],
    "merely small": lambda: torch.where(_flags(), 0.0, -1e4),
    "a bias below": lambda: torch.where(_flags(), 0.5, float("-inf")),
    "a window with a hole": lambda: _window() & (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) != 1),
}


def _attends(mask: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask())


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_left_to_the_op(name: str) -> None:
    """However it is written; nothing of it is left in the program."""
    program = normalized(Apply(_attends(CAUSAL[name])), x=X)
    assert [str(op).split(" = ")[1] for op in program.ops] == ["scaled_dot_product_attention(x, x, x, is_causal=True)"]


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_stay(name: str) -> None:
    """A mask that hides more or less, or adds anything, stays."""
    program = normalized(Apply(_attends(OTHER[name])), x=X)
    assert program.ops[-1].arguments["attn_mask"] is not None
    assert not program.ops[-1].arguments["is_causal"]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_left_to_the_op(name: str) -> None:
    """However they are written, also where they reach all keys."""
    mask, window = WINDOWS[name]
    (op,) = normalized(Apply(_attends(mask)), x=X).ops
    assert (op.target, op.arguments["window"]) == (ATTENTION, window)
    assert op.arguments["is_causal"] == (window[1] == 0)
    assert op.arguments["attn_mask"] is None


def test_a_mask_that_hides_nothing_goes() -> None:
    """It is attention without a mask."""
    program = normalized(Apply(_attends(lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool))), x=X)
    assert [op.kind for op in program.ops] == ["scaled_dot_product_attention"]


def _op(program: Program) -> tuple[bool, bool, object, tuple[int, ...] | None, tuple[int, ...] | None]:
    """Of attention, alike in all layers: whether it runs in blocks, whether it is causal, the window, and the shapes of
    the mask and of the documents of queries."""
    ops = [op for op in program.ops if op.kind == "scaled_dot_product_attention"]
    names = [[op.arguments.get(name) for name in ("attn_mask", "query_documents")] for op in ops]
    shapes = [None if name is None else program.types[str(name)].shape for name in names[0]]
    first = ops[0].arguments
    assert all(own == names[0] for own in names)
    assert all(op.arguments["is_causal"] == first["is_causal"] for op in ops)
    return runs_in_blocks(ops[0]), bool(first["is_causal"]), first.get("window"), shapes[0], shapes[1]


def _no_squares(program: Program, length: int) -> bool:
    return not any(type.shape[-2:] == (length, length) for type in program.types.values())


def test_padding_is_a_row() -> None:
    """With flags of all queries by all keys, and causal."""

    def function(x: Tensor, lengths: Tensor, causal: bool) -> Tensor:
        mask = (torch.arange(LENGTH) < lengths[:, None])[:, None, None].expand(2, 1, LENGTH, LENGTH)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask & _flags() if causal else mask)

    for causal in (True, False):
        program = normalized(Apply(function), x=X, lengths=torch.tensor([8, 5]), causal=causal)
        assert _op(program) == (causal, causal, None, (2, 1, 1, LENGTH), None)
        assert _no_squares(program, LENGTH)


def test_several_rows_are_one() -> None:
    def function(x: Tensor, lengths: Tensor, heads: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH) < lengths[:, None])[:, None, None] & _flags()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask & (torch.arange(LENGTH) > heads[:, None, None]))

    program = normalized(Apply(function), x=X, lengths=torch.tensor([8, 5]), heads=torch.tensor([0, 1, 2]))
    assert _op(program) == (True, True, None, (2, 3, 1, LENGTH), None)


def test_rows_of_queries_stay() -> None:
    """Queries that attend to nothing."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH) < lengths[:, None])[:, None, :, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask & _flags())

    program = normalized(Apply(function), x=X, lengths=torch.tensor([8, 5]))
    assert _op(program) == (False, False, None, (2, 1, LENGTH, LENGTH), None)


def test_dropout_keeps_its_mask() -> None:
    """No kernel of blocks has dropout."""

    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=_window(), dropout_p=0.1)

    assert _op(normalized(Apply(function), x=X))[3] == (LENGTH, LENGTH)


def test_documents_are_numbers() -> None:
    """Any whole numbers that queries and keys have in common, as chunks."""

    def function(x: Tensor, numbers: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=numbers[:, None, :, None] == numbers[:, None, None])

    program = normalized(Apply(function), x=X, numbers=torch.zeros(2, LENGTH, dtype=torch.int64))
    assert _op(program) == (True, False, None, None, (2, 1, LENGTH, 1))
    chunks = normalized(Apply(_attends(lambda: (PLACES // 3)[:, None] == PLACES // 3)), x=X)
    assert _op(chunks) == (True, False, None, None, (1, 1, LENGTH, 1))


def test_positions_are_places_in_documents_that_begin_where_they_restart() -> None:
    """Other positions may come in any order."""

    def function(x: Tensor, positions: Tensor, restarts: bool, other: Tensor) -> Tensor:
        counted = positions if restarts else other
        numbers = (torch.diff(counted, prepend=counted[:, :1] - 1) != 1).cumsum(-1)
        mask = numbers[:, None, :, None] == numbers[:, None, None]
        return F.scaled_dot_product_attention(
            x, x, x, attn_mask=mask & (positions[:, None, None] <= positions[:, None, :, None])
        )

    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])
    given = {"x": X, "positions": positions, "other": torch.zeros_like(positions)}
    packed = normalized(Apply(function), **given, restarts=True)
    assert _op(packed) == (True, True, None, None, (2, 1, LENGTH, 1))
    assert _op(normalized(Apply(function), **given, restarts=False))[3] == (2, 1, LENGTH, LENGTH)


def test_grouped_heads_are_not_repeated() -> None:
    """Models repeat keys and values for kernels that take masks; blocks need it not."""

    def function(x: Tensor) -> Tensor:
        key = x[:, :, None].expand(2, 3, 2, LENGTH, 4).reshape(2, 6, LENGTH, 4)
        return F.scaled_dot_product_attention(torch.cat([x, x], 1), key, key, attn_mask=_window())

    program = normalized(Apply(function), x=X)
    assert program.ops[-1].operands[1:] == ("x", "x")
    assert program.ops[-1].arguments["enable_gqa"]
    assert [op.kind for op in program.ops] == ["cat", "scaled_dot_product_attention"]


def test_a_long_window_makes_no_mask() -> None:
    """No flags of queries by keys are computed to know it: they would be 64 GiB."""
    length = 2**18
    x = torch.empty(1, 1, length, 8, device="meta")

    def function(x: Tensor) -> Tensor:
        places = torch.arange(length)
        mask = (places[:, None] >= places) & (places[:, None] - 4096 < places)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[None, None])

    program = normalized(Apply(function), x=x)
    assert _op(program) == (True, True, (4095, 0), None, None)


def _triangle(length: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(length, length, dtype=dtype).tril()


# By the window; None: all keys before.
TRIANGLES: dict[str, tuple[Callable[[int], Tensor], tuple[int, int] | None]] = {
    "flags": (_triangle, None),
    "not those beyond": (lambda length: ~torch.ones(length, length, dtype=torch.bool).triu(1), None),
    "minus infinity": (lambda length: torch.full((length, length), float("-inf")).triu(1), None),
    "chosen": (lambda length: torch.where(_triangle(length), 0.0, torch.finfo(torch.float32).min), None),
    "filled": (lambda length: torch.zeros(length, length).masked_fill(~_triangle(length), float("-inf")), None),
    "compared": (lambda length: _triangle(length, torch.float32) == 1, None),
    "one minus it": (lambda length: (1 - _triangle(length, torch.int64)) == 0, None),
    "with leading dims": (lambda length: _triangle(length)[None, None], None),
    "two triangles": (lambda length: _triangle(length).triu(-5), (5, 0)),
    "one without another": (lambda length: _triangle(length) & ~_triangle(length).tril(-3), (2, 0)),
    "beyond the first key": (lambda length: _triangle(length).triu(-3 * length), None),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_triangles_are_known_at_any_length(name: str) -> None:
    """As long as 2^18: they are not made. Short ones hide the same keys."""
    mask, window = TRIANGLES[name]

    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x.shape[2]))

    (op,) = normalized(Apply(function), x=torch.empty(1, 1, 2**18, 8, device="meta")).ops
    assert op.arguments["is_causal"]
    assert op.arguments["attn_mask"] is None
    assert op.arguments.get("window") == window
    x = Y[:1, :1]
    (found,) = run(normalized(Apply(function), x=x), {"x": x})[0].values()
    # torch's kernel reads masks in the dtype of the queries, whatever theirs.
    own = mask(x.shape[2])
    own = own.to(x.dtype) if own.is_floating_point() else own
    expected = F.scaled_dot_product_attention(x, x, x, attn_mask=own)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("windowed", "packed", "padding"),
    [
        (False, True, False),
        (True, False, True),
        *(
            pytest.param(windowed, packed, padding, marks=pytest.mark.slow)
            for windowed, packed, padding in product((False, True), repeat=3)
            if (windowed, packed, padding) not in ((False, True, False), (True, False, True))
        ),
    ],
)
def test_stock_models_make_no_squares(windowed: bool, packed: bool, padding: bool) -> None:
    """With and without windows, padding, and positions that restart."""
    inputs = tokens(length=20, padding=padding)
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(12), torch.arange(8)]).expand(4, 20)
    model = mistral() if windowed else llama()
    program = normalized(model, **inputs, use_cache=False)
    row = (4, 1, 1, 20) if padding else None
    # A model that is given a mask does not look for restarts of positions.
    documents = (4, 1, 20, 1) if packed and not padding else None
    blocks = windowed or padding or documents is not None
    assert _op(program) == (blocks, True, (7, 0) if windowed else None, row, documents)
    assert _no_squares(program, 20)


LENGTHS = torch.tensor([8, 5, 1])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5], [4, 5, 6, 0, 1, 2, 0, 1]])
NUMBERS = torch.tensor([[1] * 3 + [2] * 5, [3] * 8, [1] * 7 + [0]])


def _documents(positions: Tensor) -> Tensor:
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def _same(own: Tensor, other: Tensor) -> Tensor:
    return own[:, None, :, None] == other[:, None, None, :]


def _before(own: Tensor, other: Tensor) -> Tensor:
    return own[:, None, :, None] >= other[:, None, None, :]


# By the lengths, numbers and positions of samples.
Masking = Callable[[Tensor, Tensor, Tensor], Tensor]
MASKS: dict[str, Masking] = {
    "documents": lambda lengths, numbers, positions: _same(numbers, numbers),
    "documents before": lambda lengths, numbers, positions: _same(numbers, numbers) & _flags(),
    "documents of others": lambda lengths, numbers, positions: _same(numbers, positions),
    "restarts": lambda lengths, numbers, positions: (
        _same(_documents(positions), _documents(positions)) & _before(positions, positions)
    ),
    "restarts and a window": lambda lengths, numbers, positions: (
        _same(_documents(positions), _documents(positions))
        & _before(positions, positions)
        & ~_before(positions - 2, positions)
    ),
    "restarts of queries alone": lambda lengths, numbers, positions: (
        _same(_documents(positions), numbers) & _before(positions, positions)
    ),
    "shifted restarts": lambda lengths, numbers, positions: (
        _same(_documents(positions), _documents(positions) - 1) & _before(positions, positions)
    ),
    "samples in place of heads": lambda lengths, numbers, positions: (
        _same(_documents(positions), _documents(positions))
        & (positions[:, None, :, None] >= positions.reshape(1, SAMPLES, LENGTH)[:, :, None, :])
    ),
    "restarts in place of heads": lambda lengths, numbers, positions: (
        (_documents(positions)[:, None, :, None] == _documents(positions).reshape(1, SAMPLES, 1, LENGTH))
        & (positions[:, None, :, None] >= positions.reshape(1, SAMPLES, 1, LENGTH))
    ),
    "any of two": lambda lengths, numbers, positions: _same(numbers, numbers) | _flags(),
    "not unlike": lambda lengths, numbers, positions: ~(numbers[:, None, :, None] != numbers[:, None, None, :]),
    "padding": lambda lengths, numbers, positions: (torch.arange(LENGTH) < lengths[:, None])[:, None, None] & _flags(),
    "padding on the left": lambda lengths, numbers, positions: (
        (torch.arange(LENGTH) >= lengths[:, None])[:, None, None] & _flags()
    ),
    "numbers as flags": lambda lengths, numbers, positions: torch.logical_and(
        torch.ones(LENGTH, LENGTH, dtype=torch.int64).tril(), positions[:, None, None, :]
    ),
    "numbers that are added as flags": lambda lengths, numbers, positions: torch.logical_and(
        torch.where(_flags(), 0.0, float("-inf")), positions[:, None, None, :]
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rank", [4, 3])
def test_masks_hide_the_same(name: str, rank: int) -> None:
    """The program in normal form computes what the function does, however its mask was read; with heads and without."""

    def function(x: Tensor, **given: Tensor) -> Tensor:
        mask = MASKS[name](*given.values())
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask if rank == 4 else mask[:, 0])

    x = Y if rank == 4 else Y[0]
    given = {"lengths": LENGTHS, "numbers": NUMBERS, "positions": POSITIONS}
    (found,) = run(normalized(Apply(function), x=x, **given), {"x": x, **given})[0].values()
    torch.testing.assert_close(found, function(x, **given), rtol=1e-12, atol=1e-12)
