"""Strides, and the views that copy, are those of torch."""

from random import Random

import pytest
import torch
from torch import Tensor

from passes.ir.arguments import Ref
from passes.regions import fold
from passes.rules.memory_order import memory_order
from tests.passes.helpers import Apply, normalized

VIEWS = {
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 2, 0),
    "transpose twice": lambda x: x.transpose(0, 1).transpose(0, 1),
    "slice": lambda x: x[:, 1:3],
    "first rows": lambda x: x[:2],
    "select": lambda x: x[:, 1],
    "select a row": lambda x: x[1],
    "expand": lambda x: x[:1].expand(4, 6, 8),
    "pointwise": lambda x: x.transpose(0, 1) * 2,
    "pointwise of two orders": lambda x: x.transpose(0, 1) + x.reshape(6, 4, 8),
    "pointwise of two orders, in order": lambda x: x.reshape(6, 4, 8) + x.transpose(0, 1),
    "pointwise of an expanded operand": lambda x: x[:1].expand(4, 6, 8) * 2,
    "pointwise with a small operand": lambda x: x * x[0, :1].transpose(0, 1)[:, :1].transpose(0, 1),
    "cast of a part": lambda x: x[:, 1:3].to(torch.float64),
    "reshape": lambda x: x.reshape(24, 8),
    "reshape that copies": lambda x: x.transpose(0, 1).reshape(24, 8),
    "reshape of a part": lambda x: x[..., 2:6].reshape(4, 6, 2, 2),
    "reshape of a part that copies": lambda x: x[:, 1:3].reshape(8, 8),
    "reshape of an expanded dim of one": lambda x: x[:, :, None].expand(4, 6, 3, 8).reshape(4, 18, 8),
    "reshape of repeated rows": lambda x: x[:, :1, None].expand(4, 1, 3, 8).reshape(4, 3, 8),
    "reshape of a permuted product": lambda x: (x.transpose(0, 1) * 2).permute(1, 0, 2).reshape(24, 8),
    "product": lambda x: x.transpose(1, 2) @ x,
    "softmax": lambda x: x.softmax(-1),
}


def _orders(function: object, x: Tensor) -> tuple[bool, bool, Tensor]:
    """Whether the result is strided, and whether it is a copy; and the result of torch. `x` is the operand."""
    program = normalized(Apply(function), x=x)  # type: ignore[arg-type]
    (result,) = program.outputs
    assert isinstance(result, Ref)
    order = memory_order(fold(program))
    return result.name in order.strided, result.name in order.copied, function(x)  # type: ignore[operator]


@pytest.mark.parametrize("name", VIEWS)
def test_strided_are_those_whose_elements_are_in_another_order(name: str) -> None:
    strided, _, eager = _orders(VIEWS[name], torch.ones(4, 6, 8))
    assert strided == (not eager.is_contiguous())


def _random_views(random: Random, x: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """Names and arguments of some views, one after the other, of `x`."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(random.randint(1, 4)):
        kind = random.choice(("permute", "narrow", "expand", "merge", "part"))
        rank = x.dim()
        dim = random.randrange(rank)
        step: tuple[str, tuple[int, ...]]
        if kind == "permute":
            step = "permute", tuple(random.sample(range(rank), rank))
        elif kind == "narrow":
            step = "narrow", (dim, 0, random.randint(1, x.shape[dim]))
        elif kind == "expand":
            step = "expand", (*x.shape[:dim], 2, *x.shape[dim:])
            x = x.unsqueeze(dim)
            found.append(("unsqueeze", (dim,)))
        elif kind == "merge" and rank > 1:
            dim = min(dim, rank - 2)
            step = "reshape", (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
        elif x.shape[dim] % 2 == 0:
            step = "reshape", (*x.shape[:dim], 2, x.shape[dim] // 2, *x.shape[dim + 1 :])
        else:
            continue
        found.append(step)
        x = getattr(x, step[0])(*step[1])
    return found


@pytest.mark.parametrize("seed", range(40))
def test_reshapes_that_copy_are_those_of_torch(seed: int) -> None:
    """Random views of random views: whether the last reshape copies, and whether its result is in order."""
    random = Random(seed)
    x = torch.ones(4, 3, 8)
    views = _random_views(random, x)

    def function(x: Tensor) -> Tensor:
        for name, arguments in views:
            x = getattr(x, name)(*arguments)
        return x.reshape(-1, 2) if x.numel() % 2 == 0 else x.reshape(-1)

    strided, copied, eager = _orders(function, x)
    before = x
    for name, arguments in views:
        before = getattr(before, name)(*arguments)
    last = [name for name, _ in views][-1]
    assert strided == (not eager.is_contiguous()), views
    if last != "reshape" and before.shape != eager.shape:
        assert copied == (eager.untyped_storage().data_ptr() != before.untyped_storage().data_ptr()), views
