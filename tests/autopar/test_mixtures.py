"""Mixtures of experts in micro-batches: the balance of experts is that of each micro-batch, averaged over them."""

import copy
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar
from autopar.testing import LiftFloat32, run_ranks

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def mixtral(balanced: bool) -> nn.Module:
    """Two layers of four experts, of which two are active."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=balanced, router_aux_loss_coef=0.5)
    return _batched(MixtralForCausalLM(config))


def qwen3_moe(balanced: bool) -> nn.Module:
    """Two layers of six experts, of which three are active."""
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3}
    config = Qwen3MoeConfig(**sizes, output_router_logits=balanced, router_aux_loss_coef=0.5)
    return _batched(Qwen3MoeForCausalLM(config))


def _batched(model: nn.Module) -> nn.Module:
    model.set_experts_implementation("batched_mm")
    return model.double()


def inputs(masked: bool) -> dict[str, Tensor]:
    """Eight samples; where they are `masked`, of different lengths."""
    ids = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    if not masked:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(12) < torch.tensor([12, 3, 7, 12, 5, 2, 12, 9])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def one_by_one(model: nn.Module, batch: dict[str, Tensor], count: int, groups: int) -> Tensor:
    """The loss on one device that runs micro-batches one after the other: the cross entropy is divided by the labels of
    the batch, the balance of experts is the mean of those of the micro-batches. Each has equal shares of the `groups`
    that ranks hold of the batch. Gradients are added to the model's."""
    labels = batch["labels"]
    # The first token has no prediction.
    total = (labels[:, 1:] != -100).sum()
    whole = torch.zeros((), dtype=torch.float64)
    for number in range(count):
        part = {name: item.unflatten(0, (groups, count, -1))[:, number].flatten(0, 1) for name, item in batch.items()}
        output = model(**part, num_items_in_batch=total)
        loss = output.loss
        if model.config.output_router_logits:
            loss = loss - (1 - 1 / count) * model.router_aux_loss_coef * output.aux_loss
        loss.backward()
        whole += loss.detach()
    return whole


def _train(make: Callable[[bool], nn.Module], sizes: dict[str, int], balanced: bool, masked: bool) -> dict[str, float]:
    """The errors of this rank's loss and gradients."""
    stock, batch = make(balanced), inputs(masked)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    options = {"outputs": "scalars", **({"aux_loss": "micro_batch"} if balanced else {})}
    with LiftFloat32(torch.float64):
        module = autopar.parallelize(copy.deepcopy(stock), mesh, batch, cluster="ideal", micro_batches=4, **options)
        split = {axis for layout in module.input_layouts.values() for axis, text in layout.items() if text == "S(0)"}
        expected = one_by_one(stock, batch, 4, prod(sizes[axis] for axis in split))
    found = module.forward_backward(**batch)
    errors = {"loss": float((found.loss - expected).abs() / expected)}
    largest = max(float(item.grad.abs().max()) for item in stock.parameters())
    for name, parameter in module.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        errors[name] = float((gradient - stock.get_parameter(name).grad).abs().max()) / largest
    coupled = module.plan.programs["train"].coupled
    assert bool(coupled) == balanced
    assert ("computed for each micro-batch and averaged over them: " in str(module.plan)) == balanced
    return errors


SLOW = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "sizes", "balanced", "masked"),
    [
        pytest.param(mixtral, {"pp": 2}, True, True, id="mixtral in stages"),
        pytest.param(qwen3_moe, {"dp": 2}, True, True, id="qwen3_moe", marks=SLOW),
        pytest.param(qwen3_moe, {"pp": 2, "dp": 2}, True, False, id="qwen3_moe in stages", marks=SLOW),
        pytest.param(qwen3_moe, {"pp": 2}, False, True, id="without the balance", marks=SLOW),
        pytest.param(mixtral, {"tp": 2}, True, False, id="mixtral", marks=SLOW),
    ],
)
def test_micro_batches_equal_those_on_one_device(make, sizes, balanced, masked):
    """Loss and all gradients."""
    for errors in run_ranks(_train, prod(sizes.values()), make, sizes, balanced, masked):
        worst = max(errors.items(), key=lambda item: item[1])
        assert worst[1] < 1e-9, worst


@pytest.mark.long
def test_the_option_is_checked_planned_and_replayed(tmp_path):
    """It is part of the plan, without which the batch is not cut."""
    given = {"input_ids": inputs(False)["input_ids"], "labels": inputs(False)["labels"]}
    options = {"cluster": "ideal", "micro_batches": 2}
    with pytest.raises(autopar.InputError, match="aux_loss is 'step': it must be 'batch' or 'micro_batch'"):
        autopar.plan(mixtral(True), {"dp": 2}, given, aux_loss="step", **options)
    with pytest.raises(autopar.MicroBatchError, match="aux_loss='micro_batch' computes that in each micro-batch"):
        autopar.plan(mixtral(True), {"dp": 2}, given, **options)
    plan = autopar.plan(mixtral(True), {"dp": 2}, given, aux_loss="micro_batch", **options)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = autopar.plan(mixtral(True), {"dp": 2}, given, cluster="ideal", plan=loaded)
    assert again.programs["train"].coupled == plan.programs["train"].coupled != ()
    with pytest.raises(autopar.PlanMismatchError, match="aux_loss='batch' is asked for, but the plan was made with"):
        autopar.plan(mixtral(True), {"dp": 2}, given, cluster="ideal", plan=loaded, aux_loss="batch")
