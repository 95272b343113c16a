"""A model that is called several times in one forward pass, as by losses that compare two answers."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.autopar.comparing import TOLERANCE
from tests.autopar.test_training import error, gradients
from tests.models import llama


class Preference(nn.Module):
    """A preference of chosen over rejected answers, whose lengths may differ (Rafailov et al. 2023)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _scores(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logits.gather(2, ids[:, 1:, None]).sum((1, 2))

    def forward(self, chosen: Tensor, rejected: Tensor, reference: Tensor) -> dict[str, Tensor]:
        """chosen and rejected: [batch, tokens]; reference: the difference of the reference model, [batch]."""
        margin = self._scores(chosen) - self._scores(rejected)
        return {"loss": -nn.functional.logsigmoid(0.1 * (margin - reference)).mean(), "margin": margin.detach().mean()}


def preferences(rows: int, lengths: tuple[int, int] = (16, 12)) -> dict[str, Tensor]:
    """A batch for `Preference`."""
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randint(3, 64, (rows, length), generator=generator) for length in lengths)
    return {"chosen": chosen, "rejected": rejected, "reference": torch.randn(rows, generator=generator).double()}


def _errors(axes: dict[str, int], options: dict[str, Any]) -> tuple[float, int]:
    with LiftFloat32(torch.float64):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = Preference(llama(num_hidden_layers=4).double())
        ours = autopar.parallelize(model, mesh, preferences(8), cluster="ideal", memory_limit=1e12, **options)
        worst = 0.0
        for batch in (preferences(8), preferences(4), preferences(8, (12, 16))):
            loss: Any = ours.forward_backward(**batch)
            expected = model(**batch)
            expected["loss"].backward()
            worst = max(worst, *(float((loss[name] - item).abs()) for name, item in expected.items()))
        own = gradients(ours)
        theirs = gradients(model)
        return max(worst, error(own, {name: theirs[name] for name in own})), len(ours.plan.programs["train"].stages)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"zero": 3, "micro_batches": 2}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full"}),
        ({"pp": 2}, {"micro_batches": 4}),
    ],
)
def test_two_calls_of_a_model(axes: dict[str, int], options: dict[str, Any]) -> None:
    """Gradients, loss and margin are those of one device, also with a pipeline, whose stages run layers of both."""
    for worst, stages in run_ranks(_errors, prod(axes.values()), axes, options):
        assert worst <= TOLERANCE
        assert (stages > 1) == ("pp" in axes)


def test_layers_are_planned_once_and_gathered_once() -> None:
    """Both calls of a layer are one copy of its region, in which each parameter is gathered once."""
    ids = torch.zeros(8, 16, dtype=torch.int64)
    gathers = []
    for calls in (1, 2):
        model = llama(num_hidden_layers=4)
        wrapped = Preference(model) if calls == 2 else model
        inputs = preferences(8) if calls == 2 else {"input_ids": ids, "labels": ids}
        plan = autopar.plan(wrapped, {"dp": 2}, inputs, cluster="ideal", zero=3, micro_batches=1, recompute="none")
        (region,) = (block for block in plan.programs["train"].stages[0].blocks if block.count > 1)
        assert region.count == 4
        gathers.append([row.name.rpartition("layers")[2] for row in region.rows if row.name.endswith("weight")])
    assert gathers[0] == gathers[1]
    assert len(gathers[0]) == 9
