"""The head of a plan, about a whole model: parts that add up, rates, idle axes."""

import pytest
import torch

import autopar
from passes.cost.cluster import CLUSTERS
from tests.models import llama

pytestmark = pytest.mark.usefixtures("one_trace")

BATCH, LENGTH = 16, 128


def planned(mesh: int | dict[str, int], batch: int = BATCH, **options: object) -> autopar.Plan:
    """A small llama's plan on H100s."""
    model = llama().to("meta")
    ids = torch.empty(batch, LENGTH, dtype=torch.long, device="meta")
    return autopar.plan(model, mesh, {"input_ids": ids, "labels": ids}, cluster="h100", **options)


def test_parts_add_up() -> None:
    """Blocks, inputs and the optimizer make the step; blocks make the peak, but for what the optimizer allocates. Work
    is that of a formula: 6 FLOPs for each weight of a product and token, and attention."""
    plan = planned({"dp": 4, "tp": 2}, micro_batches=2, recompute="full")
    program = plan.programs["train"]
    (stage,) = program.fullest
    blocks = stage.blocks
    beside = program.seconds["inputs"] + program.seconds["optimizer"]
    assert sum(block.seconds for block in blocks) + beside == pytest.approx(program.step_s)
    assert program.peak_moment != "optimizer step"
    assert sum(block.bytes for block in blocks) == sum(program.memory.values())
    assert all(block.bytes > 0 and block.seconds > 0 for block in blocks)
    assert f"MFU {program.mfu:.1%}" in str(plan)
    config = llama().config
    weights = sum(
        item.numel() for name, item in llama().named_parameters() if item.dim() == 2 and "embed_tokens" not in name
    )
    width = config.num_attention_heads * config.head_dim
    attention = 12 * config.num_hidden_layers * LENGTH * width / 2
    tokens = BATCH * LENGTH
    assert program.work.flops == pytest.approx(tokens * (6 * weights + attention))
    assert (program.work.tokens, program.work.samples, program.work.devices) == (tokens, BATCH, 8)
    assert program.tokens_per_second_per_device == pytest.approx(tokens / 8 / program.step_s)
    peak = CLUSTERS["h100"].device.peak(next(llama().parameters()).dtype)
    assert program.mfu == pytest.approx(program.work.flops / 8 / peak / program.step_s)


@pytest.mark.long
def test_idle_devices_are_said() -> None:
    """A plan names an axis that splits nothing, batches that would divide, and fewer devices that are as fast; a plan
    without an idle axis says nothing. A replay keeps it."""
    plan = planned(6)
    idle = plan.programs["train"].idle
    assert idle is not None
    (axis,) = idle.axes
    assert plan.mesh[axis] == 3
    assert idle.busy == 2
    assert idle.fewer == 4
    fewer = planned(4).programs["train"]
    assert idle.fewer_s == pytest.approx(fewer.step_s)
    assert fewer.idle is None
    assert planned(plan.mesh, plan=plan).programs["train"].idle == idle
    given = planned({"a": 3, "b": 2}).programs["train"].idle
    assert given is not None
    assert (given.axes, given.fewer) == (("a",), 0)
    for batch in given.batches:
        assert planned({"a": 3, "b": 2}, batch).programs["train"].idle is None


@pytest.mark.long
def test_bound_on_all_that_is_offered() -> None:
    """A search that leaves out shapes of a mesh, or parts of them, gives a lower bound on the steps of all shapes."""
    given = planned({"dp": 4}).programs["train"]
    assert given.complete
    assert given.bound_s == pytest.approx(given.step_s * (1 - given.gap))
    plan = planned(8)
    searched = plan.programs["train"]
    assert not searched.complete
    assert 0 < searched.bound_s < searched.step_s
    assert "no mesh or configuration takes less than" in " ".join(str(plan).split())
    every = [planned(sizes).programs["train"] for sizes in ({"a": 8}, {"a": 2, "b": 4})]
    assert searched.bound_s <= min(program.step_s for program in every)
    assert planned(plan.mesh, plan=plan).programs["train"].bound_s == searched.bound_s
