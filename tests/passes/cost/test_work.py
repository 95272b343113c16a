"""The work of a model: FLOPs counted by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from passes.cost.cluster import CLUSTERS
from passes.cost.walk import Optimizer, walk
from passes.cost.work import seconds_by_op, work_of
from passes.ir.configuration import Configuration
from tests.passes.helpers import mesh_of
from tests.passes.planning import planning

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 16, 8
PRODUCT = 2 * BATCH * LENGTH * (HEADS * WIDTH) ** 2
# Scores and their product with the values, half of each.
ATTENTION = 2 * (2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH) / 2


class Attending(nn.Module):
    """Embedding, one projection, causal attention to itself, and another projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, HEADS * WIDTH)
        self.first = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.last = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)

    def forward(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        """A number of tokens [batch, length]."""
        x = self.first(self.embed(input_ids)).unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
        x = scaled_dot_product_attention(x, x, x, is_causal=True)
        return (self.last(x.transpose(1, 2).flatten(2)) * mask.unsqueeze(2)).sum()


def test_model_flops_are_those_of_products_and_attention() -> None:
    """Backward twice the forward, causal attention half, and nothing for what is frozen before the first gradient."""
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    inputs = {"mask": tokens, "input_ids": tokens}
    cluster = CLUSTERS["h100"]
    configuration = Configuration(mesh_of(a=2), micro_batches=3)
    case = planning(Attending(), inputs, configuration.mesh, cluster)
    work = work_of(case.folded.program, case.folded, 6, configuration, cluster)
    assert work.flops == 3 * 3 * (2 * PRODUCT + ATTENTION)
    assert work.peak_s == pytest.approx(work.flops / cluster.device.peak(torch.float32))
    assert (work.samples, work.tokens, work.devices) == (6, BATCH * LENGTH, 2)
    module = Attending()
    module.embed.requires_grad_(False)
    module.first.requires_grad_(False)
    frozen = planning(module, inputs, configuration.mesh, cluster)
    work = work_of(frozen.folded.program, frozen.folded, 6, configuration, cluster)
    assert work.flops == 3 * (PRODUCT + ATTENTION + 2 * PRODUCT)


def test_seconds_of_ops_are_those_of_one_device() -> None:
    """On a mesh of one device, the ops take what the step computes."""
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mesh = mesh_of(a=1)
    case = planning(Attending(), {"mask": tokens, "input_ids": tokens}, mesh, "h100")
    step = walk(case.lowered(case.with_picks([0] * len(case.problem.nodes))), case.folded, case.cluster, Optimizer(2),
                Configuration(mesh))  # fmt: skip
    seconds = seconds_by_op(case.folded, case.cluster)
    assert set(seconds) == {op.key for op in case.folded.ops}
    assert abs(sum(seconds.values()) / (step.forward_compute + step.backward_compute) - 1) < 1e-9
