"""Masks of attention that say no more than "not what follows" are left to the op; all others stay as they are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.passes.helpers import Apply, normalized

X = torch.ones(2, 3, 8, 4)
LENGTH = 8


def _flags() -> Tensor:
    return torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None]


def _window() -> Tensor:
    places = torch.arange(LENGTH)
    return _flags() & (places[:, None] - places[None, :] < 3)


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "compared places": _flags,
    "a triangle": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "for every sample and head": lambda: _flags()[None, None].expand(2, 3, LENGTH, LENGTH),
    "minus infinity": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "the least number": lambda: torch.where(_flags(), 0.0, torch.finfo(torch.float32).min),
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "a window": _window,
    "shifted by one": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
    "merely small": lambda: torch.where(_flags(), 0.0, -1e4),
    "a bias below": lambda: torch.where(_flags(), 0.5, float("-inf")),
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


def test_a_mask_that_hides_nothing_goes() -> None:
    """It is attention without a mask."""
    program = normalized(Apply(_attends(lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool))), x=X)
    assert [op.kind for op in program.ops] == ["scaled_dot_product_attention"]


def test_masks_that_depend_on_the_batch_stay() -> None:
    """A padding mask is exact."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) < lengths[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None])

    program = normalized(Apply(function), x=X, lengths=torch.tensor([8, 5]))
    assert program.ops[-1].arguments["attn_mask"] is not None
