"""Ops without a rule become ops with one, or stay whole."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from passes.ir.program import Program
from passes.rules import written_rule
from tests.passes.helpers import Apply, normalized
from tests.passes.normalize.running import run

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNS = torch.where(torch.arange(6) % 2 == 0, 1.0, -1.0).double()


def _equal(program: Program, function: Callable[..., Tensor], **given: Tensor) -> bool:
    """Whether a program computes the function and the gradient of its first input."""
    first, *others = given
    results = []
    for call in (function, lambda **tensors: run(program, tensors)[0][program.output_names[0]]):
        leaf = given[first].clone().requires_grad_()
        value = call(**{first: leaf, **{name: given[name] for name in others}})
        assert isinstance(value, Tensor)
        results.append((value, *torch.autograd.grad(value, leaf)))
    return all(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.hinge_embedding_loss(x, torch.where(y > 0, 1.0, -1.0).double()),
        lambda x, y: F.cosine_embedding_loss(x, y, SIGNS, margin=0.1),
        lambda x, y: F.margin_ranking_loss(x, y, torch.where(x > y, 1.0, -1.0).double(), margin=0.2),
        lambda x, y: F.poisson_nll_loss(x, (4 * y.abs()).round(), full=True),
    ],
    ids=["hinge embedding", "cosine embedding", "margin ranking", "full poisson"],
)
def test_ops_that_work_in_place_inside(function: Callable[..., Tensor]) -> None:
    """Those that are made of others come apart, as autograd sees them: nothing of them stays whole."""
    program = normalized(Apply(function), x=X.clone().requires_grad_(), y=Y)
    assert all(written_rule(op, program.types) is not None for op in program.ops if op.operands)
    assert _equal(program, function, x=X, y=Y)


def test_ops_whose_decomposition_differs_stay() -> None:
    """torch's decomposition of multi-label margins adds terms for places after the last label."""
    labels = torch.tensor([[row % 8, (row + 3) % 8, *[-1] * 6] for row in range(6)])
    program = normalized(Apply(F.multilabel_margin_loss), input=X.clone().requires_grad_(), target=labels)
    assert [op.kind for op in program.ops] == ["multilabel_margin_loss"]
    assert _equal(program, F.multilabel_margin_loss, input=X, target=labels)


@pytest.mark.parametrize("numbers", [{}, {"beta": 0.5, "alpha": 2.0}, {"beta": 0}], ids=str)
@pytest.mark.parametrize("op", [torch.baddbmm, torch.addmv])
def test_products_with_a_sum(op: Callable[..., Tensor], numbers: dict[str, float]) -> None:
    """They are multiplied in the dtype that they have, which torch's decompositions do not in half precision."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        left, right = (x, y[0]) if op is torch.addmv else (x.reshape(2, 3, 8), y.reshape(2, 3, 8).mT)
        return op(y[:, 0] if op is torch.addmv else x.reshape(2, 3, 8)[:, :, :3], left, right, **numbers).sin().sum()

    program = normalized(Apply(function), x=X.clone().requires_grad_(), y=Y)
    assert _equal(program, function, x=X, y=Y)
    half = normalized(Apply(function), x=X.bfloat16().requires_grad_(), y=Y.bfloat16())
    assert {type.dtype for type in half.types.values()} == {torch.bfloat16}
    kinds = [op.kind for op in half.ops]
    assert "bmm" in kinds or "matmul" in kinds


def test_ops_with_checks_stay() -> None:
    """That a matrix has an inverse is checked by an operator without results, which no program has."""
    matrices = X.reshape(6, 8)[:, :4].reshape(6, 2, 2) + 3 * torch.eye(2, dtype=torch.float64)
    program = normalized(Apply(lambda x: torch.linalg.lu_factor(x)[0].sum()), x=matrices.clone().requires_grad_())
    assert [op.kind for op in program.ops] == ["linalg_lu_factor", "sum"]


def test_gradients_are_scaled_by_the_frequency_of_ids() -> None:
    """torch's decomposition of embeddings has no frequencies, so that they stay, and are not split."""
    ids = torch.tensor([[1, 1, 2], [1, 0, 2]])
    program = normalized(
        Apply(lambda x: F.embedding(ids, x, scale_grad_by_freq=True).square().sum()), x=X.clone().requires_grad_()
    )
    (op,) = (op for op in program.ops if op.kind == "embedding")
    assert written_rule(op, program.types) is None
    assert _equal(program, lambda x: F.embedding(ids, x, scale_grad_by_freq=True).square().sum(), x=X)


def test_gradients_of_tables_are_dense() -> None:
    """So that they are split and reduced like all others."""
    ids = torch.tensor([[1, 1, 2], [1, 0, 2]])
    program = normalized(Apply(lambda x: F.embedding(ids, x, sparse=True).square().sum()), x=X.clone().requires_grad_())
    (op,) = (op for op in program.ops if op.kind == "embedding")
    assert op.arguments["sparse"] is False
    assert written_rule(op, program.types) is not None
