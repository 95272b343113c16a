"""Rows of experts that are sorted for grouped products are left in their order, and nothing else is changed."""

from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (it registers a grouped product of any dtype)
from torch import Tensor, nn

from passes.ir.program import Program
from passes.micro_batches import micro_batches
from passes.normalize.routing import without_sorting
from tests.passes.helpers import normalized
from tests.passes.normalize.running import run

TOKENS, TOP, WIDTH, INNER, EXPERTS = 12, 2, 8, 16, 4

# What is computed of the sorted rows and the keys that they were sorted by.
Between = Callable[["Experts", Tensor, Tensor], Tensor]


def _gated(experts: "Experts", rows: Tensor, keys: Tensor) -> Tensor:
    rows = rows + experts.bias[keys]
    gate, up = rows[..., ::2], rows[..., 1::2]
    return gate.clamp(max=1.0) * torch.sigmoid(gate) * up


def _mixed(experts: "Experts", rows: Tensor, keys: Tensor) -> Tensor:
    return rows[:, : INNER // 2] - rows[:, INNER // 2 :].mean(0)


def _scanned(experts: "Experts", rows: Tensor, keys: Tensor) -> Tensor:
    return rows[:, : INNER // 2].cumsum(0)


class Experts(nn.Module):
    """Experts that compute on rows sorted by expert, as those of `transformers` do, and a router."""

    def __init__(self, between: Between, largest: int = EXPERTS - 1) -> None:
        super().__init__()
        self.between, self.largest = between, largest
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER // 2))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of some samples."""
        product = torch.ops.transformers.grouped_mm_fallback
        tokens = x.reshape(-1, WIDTH)
        weights, ids = torch.topk(self.router(tokens).softmax(-1), TOP)
        keys, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=self.largest)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = product(tokens[order // TOP], self.up, ends)
        rows = product(self.between(self, rows, keys), self.down.transpose(-2, -1), ends)
        rows = rows * weights.reshape(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return rows[inverse].view(tokens.shape[0], TOP, WIDTH).sum(1).square().sum()


def _program(model: Experts) -> Program:
    return normalized(model, x=_samples())


def _samples() -> Tensor:
    return torch.randn(4, TOKENS // 4, WIDTH, dtype=torch.float64)


def test_rows_stay_in_their_order() -> None:
    """The same loss and gradients, without a sort; the split of the batch reaches the experts."""
    torch.manual_seed(0)
    model = Experts(_gated).double()
    program = _program(model)
    kinds = [op.kind for op in program.ops]
    assert kinds.count("routed_mm") == 2
    assert {"sort", "index_put", "histc", "cumsum", "grouped_mm_fallback"}.isdisjoint(kinds)
    x = _samples()
    parameters = dict(model.named_parameters())
    (found,) = run(program, {"x": x, **parameters})[0].values()
    assert isinstance(found, Tensor)
    expected = model(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, list(parameters.values())), torch.autograd.grad(expected, list(parameters.values()))
    )
    part = micro_batches(program, 4)
    assert {op.kind for op in part.program.ops} == set(kinds)


@pytest.mark.parametrize(("between", "largest"), [(_mixed, EXPERTS - 1), (_scanned, EXPERTS - 1), (_gated, EXPERTS)])
def test_a_sort_stays_where_its_order_counts(between: Between, largest: int) -> None:
    """Ops over several rows need the rows as they are, and so do groups that are not counted one by one."""
    program = _program(Experts(between, largest).double())
    kinds = [op.kind for op in program.ops]
    assert kinds.count("grouped_mm_fallback") == 2
    assert "routed_mm" not in kinds
    assert without_sorting(program) is program
