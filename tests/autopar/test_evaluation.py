"""A model in evaluation mode, whose training draws dropout: its gradients, and its pipeline stages."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertForSequenceClassification

import autopar
from autopar.runtime import DistributedModule
from autopar.testing import run_ranks
from tests.autopar.test_training import gradients, made, whole
from tests.models import gpt2, tokens

Batch = Mapping[str, torch.Tensor]


def _bert() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=4, **small)).double()


def _batch(size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (size, 8), generator=torch.Generator().manual_seed(size))
    return {"input_ids": ids, "labels": torch.arange(size) % 4}


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((whole(ours.detach()) - theirs.detach()).abs().max() / theirs.detach().abs().max()).item()


def _backward_error(dist_model: nn.Module, model: nn.Module, batch: Batch) -> float:
    """The largest error of the loss and the gradients of one step, which are dropped."""
    losses = [each(**batch)["loss"] for each in (dist_model, model)]
    for each, loss in zip((dist_model, model), losses, strict=True):
        loss.backward()
        assert all(item.grad is not None for item in each.parameters() if item.requires_grad)
    ours, theirs = gradients(dist_model), gradients(model)
    # A bias of keys has no gradient but rounding errors.
    worst = max(_error(ours[name], theirs[name]) for name in theirs if theirs[name].abs().max() > 1e-12)
    for each in (dist_model, model):
        each.zero_grad()
    return max(worst, _error(*losses))


def _made(model: nn.Module, sizes: tuple[int, ...], batch: Batch, options: Mapping[str, object]) -> DistributedModule:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    return autopar.parallelize(copy.deepcopy(model), mesh, batch, cluster="ideal", **options)  # type: ignore[arg-type]


def _steps(sizes: tuple[int, ...], options: Mapping[str, object]) -> float:
    model = _bert()
    dist_model = _made(model, sizes, _batch(8), options)
    worst = 0.0
    for size in (8, 8, 6):
        for each in (dist_model, model):
            each.eval()
        worst = max(worst, _backward_error(dist_model, model, _batch(size)))
        with torch.no_grad():
            loss = dist_model(**_batch(size))["loss"]
            assert not loss.requires_grad
            worst = max(worst, _error(loss, model(**_batch(size))["loss"]))
        # Training draws dropout as ever.
        losses = [dist_model.train()(**_batch(size))["loss"] for _ in range(2)]
        assert losses[0] != losses[1]
        assert losses[0].requires_grad
        losses[0].backward()
        dist_model.zero_grad()
    return worst


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 2), {}, id="on 2 x 2", marks=pytest.mark.slow),
        pytest.param((2,), {"micro_batches": 2}, id="micro-batches"),
        pytest.param((2,), {"recompute": "full"}, id="recompute", marks=pytest.mark.slow),
    ],
)
def test_gradients_in_evaluation(sizes: tuple[int, ...], options: Mapping[str, object]) -> None:
    """Equal to one device, at other sizes, too, and between evaluations without gradients and training."""
    assert max(run_ranks(_steps, 2 ** len(sizes), sizes, options)) <= 1e-12


def _in_units() -> float:
    model, batch = gpt2(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).double(), tokens(4)
    dist_model = made(copy.deepcopy(model), (2,), batch).eval()
    worst = _backward_error(dist_model, model.eval(), batch)
    dist_model.train()(**batch)["loss"].backward()
    dist_model.zero_grad()
    return max(worst, _backward_error(dist_model.eval(), model, batch))


@pytest.mark.long
def test_gradients_of_parameters_in_units() -> None:
    """They are gathered and reduced as in training."""
    assert max(run_ranks(_in_units, 2)) <= 1e-12


def _of_inputs() -> float:
    model = _bert().requires_grad_(False)
    labels = _batch(4)["labels"]
    given = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = {"inputs_embeds": given.clone().requires_grad_(), "labels": labels}
    dist_model = _made(model, (2,), batch, {}).eval()
    model.eval()
    found = []
    for each in (dist_model, model):
        leaf = given.clone().requires_grad_()
        each(inputs_embeds=leaf, labels=labels)["loss"].backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    return _error(*found)


@pytest.mark.long
def test_gradients_of_inputs() -> None:
    """Of a frozen model, as attributions are computed."""
    assert max(run_ranks(_of_inputs, 2)) <= 1e-12


def _in_stages(cut: str) -> list[float]:
    """Errors of the loss in evaluation, as planned and replayed, at other sizes too, with training in between."""
    model = _bert()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    options = {"cluster": "ideal", "micro_batches": 2, "pipeline": autopar.Pipeline(cuts=(cut,))}
    planned = autopar.plan(model, {"pp": 2}, _batch(8), **options)  # type: ignore[arg-type]
    again = autopar.Plan.from_json(planned.to_json())
    found = []
    for given in (options, {"plan": again}):
        dist_model = autopar.parallelize(copy.deepcopy(model), mesh, _batch(8), **given)  # type: ignore[arg-type]
        assert dist_model.plan.programs["infer"].cuts == planned.programs["train"].cuts == (cut,)
        for size in (8, 6):
            with torch.no_grad():
                ours = dist_model.eval()(**_batch(size))["loss"]
                found.append(_error(ours, model.eval()(**_batch(size))["loss"]))
            dist_model.train().forward_backward(**_batch(size))
            dist_model.zero_grad()
    return found


@pytest.mark.parametrize(
    "cut",
    [
        "bert.embeddings.dropout/dropout",
        "bert.encoder.layer.0.intermediate.dense",
        "/cross_entropy_loss",
        "dropout/dropout",
    ],
)
@pytest.mark.slow
def test_evaluation_is_cut_where_training_is(cut: str) -> None:
    """Also at a module that evaluation has no op of."""
    assert max(error for own in run_ranks(_in_stages, 2, cut) for error in own) <= 1e-12
