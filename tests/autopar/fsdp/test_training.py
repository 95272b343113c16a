"""Training on `fully_shard`: micro-batches, optimizers, errors, and other dtypes."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.autopar.fsdp.shared import are_close, batch_of, calls_in, gradients, made_with
from tests.autopar.without_engine import without_engine
from tests.models import Stack, gpt2, tokens


def _micro_batches() -> dict[str, object]:
    model, batches = Stack().double(), [batch_of(seed) for seed in range(3)]
    dist_model = made_with(model, (2,), batches[0])
    found: dict[str, object] = {}
    for batch in batches:
        model(**batch)["loss"].backward()
    for batch in batches:
        dist_model(**batch)["loss"].backward()
    found["added up"] = are_close(gradients(dist_model), gradients(model))
    dist_model.zero_grad()

    def held() -> None:
        with dist_model.keeping_parameters():
            with dist_model.holding_gradients():
                for batch in batches[:-1]:
                    dist_model(**batch)["loss"].backward()
                # They are there, as sums that are not reduced.
                found["not reduced"] = {item.grad.placements[0] for item in dist_model.parameters()} == {Partial()}
            dist_model(**batches[-1])["loss"].backward()

    calls = calls_in(held)
    found["held back"] = are_close(gradients(dist_model), gradients(model))
    found["calls"] = calls["allgather_base"], calls["reduce_scatter_base"]
    # Several forward passes before the backward passes.
    dist_model.zero_grad()
    outputs = [dist_model(**batch) for batch in batches]
    sum(output["loss"] for output in outputs).backward()
    found["several at once"] = are_close(gradients(dist_model), gradients(model))
    return found


def test_micro_batches() -> None:
    """Gradients add up; they can be reduced once for all backward passes, and parameters be gathered once."""
    for found in run_ranks(_micro_batches, 2):
        assert found == {
            "added up": True,
            "not reduced": True,
            "held back": True,
            "calls": (2, 2),
            "several at once": True,
        }


def _steps() -> dict[str, bool]:
    with LiftFloat32(torch.float64):
        model = gpt2().double()
        inputs, shorter = tokens(), {name: value[:, :8] for name, value in tokens().items()}
        dist_model = made_with(model, (2, 2), inputs)
        optimizers = [torch.optim.AdamW(item.parameters(), lr=1e-2) for item in (dist_model, model)]
        found: dict[str, bool] = {}
        for step, batch in enumerate((inputs, shorter, inputs)):
            losses = []
            for item, optimizer in zip((dist_model, model), optimizers, strict=True):
                optimizer.zero_grad()
                # A forward pass whose gradient nobody wants leaves nothing of old values.
                item(**batch)
                item.eval()
                with torch.no_grad():
                    losses.append(item(**batch).loss)
                item.train()
                item(**batch).loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(item.parameters(), 0.1)
                losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                optimizer.step()
            pairs = zip(losses[:2], losses[2:], strict=True)
            found[f"step {step}"] = all(torch.allclose(ours, theirs, rtol=1e-9) for ours, theirs in pairs)
        own = {name: parameter.full_tensor() for name, parameter in dist_model.named_parameters()}
        found["parameters"] = are_close(own, dict(model.named_parameters()))
        # Other values: copied in, and with other memory.
        start = copy.deepcopy(gpt2(tie_word_embeddings=True).double().state_dict())
        for way in ("copied", "given"):
            model.load_state_dict({name: value * (2.0 if way == "given" else 1.0) for name, value in start.items()})
            values = {
                name: distribute_tensor(model.get_parameter(name).detach(), parameter.device_mesh, parameter.placements)
                for name, parameter in dist_model.named_parameters()
            }
            dist_model.load_state_dict(values, strict=False, assign=way == "given")
            with torch.no_grad():
                found[way] = torch.allclose(dist_model(**inputs).loss, model(**inputs).loss, rtol=1e-9)
        return found


@pytest.mark.slow
def test_steps_of_an_optimizer() -> None:
    """Training with clipping, evaluation in between, batches of other sizes, and other values of parameters."""
    for found in run_ranks(_steps, 4):
        assert all(found.values()), found


def _after_an_error() -> bool:
    model, inputs = Stack().double(), batch_of(0)
    dist_model = made_with(model, (2,), inputs)
    with mock.patch("torch.relu", side_effect=ValueError("torn")), pytest.raises(ValueError, match="torn"):
        dist_model(**inputs)
    with torch.inference_mode():
        evaluated = dist_model(**inputs)["loss"].item()
    output = dist_model(**inputs)
    assert output["loss"].item() == evaluated
    output["loss"].backward()
    model(**inputs)["loss"].backward()
    return are_close(gradients(dist_model), gradients(model))


def test_after_an_error() -> None:
    """A call that raises leaves nothing behind, nor does one in inference mode, even if it is the first."""
    assert all(run_ranks(_after_an_error, 2))


def _mixed(reduce: torch.dtype | None) -> dict[str, object]:
    precision = autopar.Precision(compute=torch.bfloat16, reduce=reduce, master=torch.float32)
    model, inputs = Stack(), {name: value.float() for name, value in batch_of(0).items()}
    found = {}
    for name, way in (("engine", contextlib.nullcontext()), ("generated", without_engine())):
        with way:
            dist_model = made_with(model, (2,), inputs, precision=precision)
        output = dist_model(**inputs)
        output["loss"].backward()
        kind = output["prediction"].dtype
        found[name] = (output["loss"], kind, gradients(dist_model), "gathered(" in dist_model.code)
    (loss, kind, ours, by_engine), (other_loss, other_kind, theirs, otherwise) = found["engine"], found["generated"]
    return {
        "engine": (by_engine, otherwise),
        "loss": torch.equal(loss, other_loss),
        "kind": kind == other_kind == torch.bfloat16,
        "gradients": {item.dtype for item in ours.values()},
        "errors": max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs),
    }


@pytest.mark.long
@pytest.mark.parametrize("reduce", [torch.float32, None])
def test_mixed_precision(reduce: torch.dtype | None) -> None:
    """Computed in bfloat16, the engine gives what the generated code gives without it: gradients of two ranks, which
    are the same however they are added up."""
    for found in run_ranks(_mixed, 2, reduce):
        assert found["engine"] == (True, False)
        assert found["loss"]
        assert found["kind"]
        assert found["gradients"] == {torch.float32}
        assert found["errors"] == 0.0
