"""Outputs as users get them: whole plain tensors where they ask for that, else `DTensor`s, which say how to go on."""

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.models import gpt2, llama, tokens

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "llama": lambda: llama(num_hidden_layers=1),
    "tied llama": lambda: llama(tie_word_embeddings=True),
}


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def difference(dist_model: nn.Module, model: nn.Module) -> float:
    """The largest relative error of a gradient."""
    own = dict(dist_model.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        gradient = own[name].grad
        assert isinstance(gradient, DTensor), name
        assert parameter.grad is not None
        errors.append((gradient.full_tensor() - parameter.grad).abs().max() / parameter.grad.abs().max())
    return float(max(errors))


def own_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A loss outside of the model, as it is written for one device, and what is counted besides."""
    logits = model(input_ids=ids).logits
    loss = (
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * logits.logsumexp(-1).pow(2).mean()
    )
    loss.backward()
    return loss.detach(), (logits.argmax(-1) == labels).sum()


def _full(cases: list[tuple[str, tuple[int, ...]]]) -> None:
    with LiftFloat32(torch.float64):
        for name, sizes in cases:
            model, ids = MODELS[name]().double(), tokens(labels=False)["input_ids"]
            labels = ids.roll(-1, 1)
            dist_model = autopar.parallelize(model, mesh_of(sizes), {"input_ids": ids}, cluster="ideal", outputs="full")
            assert "outputs are whole on every rank" in str(dist_model.plan)
            again = autopar.plan(model, dict(dist_model.plan.mesh), {"input_ids": ids}, plan=dist_model.plan)
            assert again.programs == dist_model.plan.programs
            for batch in (4, 8):
                # The second batch is of another size than planned.
                given = ids.repeat(batch // 4, 1), labels.repeat(batch // 4, 1)
                own, expected = own_loss(dist_model, *given), own_loss(model, *given)
                assert type(own[0]) is Tensor
                assert torch.allclose(own[0], expected[0], rtol=1e-12), name
                assert torch.equal(own[1], expected[1]), name
                assert difference(dist_model, model) < 1e-9, (name, sizes)
            dist_model.eval()
            with torch.no_grad():
                logits = dist_model(input_ids=ids).logits
                assert type(logits) is Tensor
                assert torch.allclose(logits, model.eval()(input_ids=ids).logits, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_losses_outside_of_models() -> None:
    """Other meshes, and tied parameters."""
    run_ranks(_full, 4, [("llama", (4,)), ("tied llama", (2, 2)), ("tied llama", (4,))])


def _in_micro_batches() -> None:
    with LiftFloat32(torch.float64):
        model, inputs = gpt2(n_layer=1).double(), tokens()
        options = {"cluster": "ideal", "outputs": "full", "micro_batches": 2}
        dist_model = autopar.parallelize(model, mesh_of((2, 2)), inputs, **options)
        output = dist_model.forward_backward(**inputs)
        expected = model(**inputs, use_cache=False)
        expected.loss.backward()
        assert type(output.logits) is Tensor
        assert torch.allclose(output.logits, expected.logits, rtol=1e-9, atol=1e-12)
        assert difference(dist_model, model) < 1e-9


@pytest.mark.long
def test_full_outputs_are_counted() -> None:
    """As many bytes more as the whole logits take."""
    inputs, sizes = tokens(labels=False), {"dp": 2, "tp": 2}
    planned = autopar.plan(llama(), sizes, inputs, cluster="ideal")
    full = autopar.plan(llama(), sizes, inputs, cluster="ideal", outputs="full")
    assert full.programs["train"].stages[0].decisions["output logits"] == ("I", "I")
    assert full.programs["train"].memory["outputs"] == 4 * 16 * 64 * 4
    assert planned.programs["train"].memory["outputs"] < full.programs["train"].memory["outputs"]


def _scalars() -> None:
    with LiftFloat32(torch.float64):
        model, inputs = llama(num_hidden_layers=1).double(), tokens()
        options = {"cluster": "ideal", "outputs": "scalars", "micro_batches": 2}
        dist_model = autopar.parallelize(model, mesh_of((2, 1)), inputs, **options)
        output = dist_model.forward_backward(**inputs)
        expected = model(**inputs, use_cache=False)
        expected.loss.backward()
        assert output.get("logits") is None
        assert torch.allclose(output.loss, expected.loss, rtol=1e-12)
        assert difference(dist_model, model) < 1e-9


@pytest.mark.long
def test_scalars_alone() -> None:
    """No logits are returned or kept; the loss and all gradients are those of the model."""
    run_ranks(_scalars, 2)
    plans = {
        outputs: autopar.plan(llama(), {"dp": 2}, tokens(), cluster="cpu", outputs=outputs, micro_batches=2)
        for outputs in ("planned", "scalars")
    }
    peaks = {outputs: sum(plan.programs["train"].memory.values()) for outputs, plan in plans.items()}
    assert peaks["scalars"] < peaks["planned"]
    assert plans["scalars"].programs["train"].memory["outputs"] < 64
    assert "scalars are the only outputs" in str(plans["scalars"])
    ids = {"input_ids": tokens()["input_ids"]}
    with pytest.raises(autopar.InputError, match="the model returns no scalar"):
        autopar.plan(llama(), {"dp": 2}, ids, cluster="cpu", outputs="scalars", objective="infer")


def test_other_kinds_of_outputs_are_refused() -> None:
    """By the argument."""
    with pytest.raises(autopar.InputError, match=r"^outputs is 'whole': it must be 'planned', 'full' or 'scalars'"):
        autopar.plan(llama(), {"dp": 2}, tokens(), cluster="ideal", outputs="whole")


def _mixed() -> None:
    model, ids = llama(num_hidden_layers=1).double(), tokens(labels=False)["input_ids"]
    with LiftFloat32(torch.float64):
        dist_model = autopar.parallelize(model, mesh_of((2, 2)), {"input_ids": ids}, cluster="ideal")
        expected = model(ids).logits
    logits = dist_model(input_ids=ids).logits
    assert isinstance(logits, DTensor)
    labels = ids.flatten()
    for use in (
        lambda: nn.functional.cross_entropy(logits.flatten(0, 1), labels),
        lambda: torch.zeros(4, 16, 64) + logits,
        lambda: (logits.argmax(-1) == ids).sum(),
        lambda: logits.softmax(-1).log().mul_(torch.zeros(4, 16, 64)),
    ):
        with pytest.raises(
            autopar.InputError, match=r"meets a plain tensor: plan the loss .*outputs='full'.*full_tensor"
        ):
            use()
    mean = logits.mean()
    for read in (
        lambda: mean.item(),
        lambda: float(mean),
        lambda: bool(mean),
        lambda: torch.is_nonzero(mean),
        lambda: f"{mean:.3f}",
        lambda: logits.tolist(),
        lambda: logits.detach().numpy(),
    ):
        with pytest.raises(autopar.InputError, match=r"so this rank has a part of its values: call .full_tensor\(\)"):
            read()
    assert "Partial(avg)" in f"{mean}"
    assert abs(mean.full_tensor().item() - expected.mean().item()) < 1e-12
    assert (mean > expected.mean().item() - 1e-6).item() is True
    # All else is as on a DTensor, gradients included; nothing else becomes an output.
    loss = logits.float().log_softmax(-1).sum()
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    assert torch.allclose(whole, expected.float().log_softmax(-1).sum())
    logits.pow(2).full_tensor().sum().backward()
    expected.pow(2).sum().backward()
    assert difference(dist_model, model) < 1e-9
    with torch.no_grad():
        evaluated = dist_model(input_ids=ids).logits
    for same in (copy.deepcopy(evaluated), _saved(evaluated)):
        assert type(same) is DTensor
        assert torch.equal(same.full_tensor(), evaluated.full_tensor())
    head = dist_model.lm_head.weight
    with torch.no_grad():
        head.add_(head.detach())
    assert type(head) is DTensor


def _saved(tensor: Tensor) -> Any:
    """The object that `torch.load` reads from the bytes of `torch.save`."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def _each() -> None:
    _full([("llama", (2, 2))])
    _in_micro_batches()
    _mixed()


@pytest.mark.long
def test_outputs() -> None:
    """Whole outputs serve a loss and metrics written as for one device: they and every gradient are those of one
    device, at other sizes, too, and micro-batches give the outputs of the whole batch.

    Outputs in the plan's layout say in one sentence, wherever they meet plain tensors, what to do; they are copied,
    saved and differentiated as `DTensor`s.
    """
    run_ranks(_each, 4)


class _Viewed(nn.Module):
    """Its output is a view, of what a unit of gathered parameters computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, rows, 8]."""
        return self.outer(self.inner(x).tanh().flatten(0, 1)).view(x.shape)


def _changed_in_place() -> None:
    model, inputs = _Viewed(), {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dist_model = autopar.parallelize(model, mesh_of((2, 1)), inputs, cluster="ideal", zero=3)
        got, expected = dist_model(**inputs), model(**inputs)
        for output in (got, expected):
            output.mul_(2.0).add_(1.0).square().sum().backward()
    assert difference(dist_model, model) < 1e-5
    whole = autopar.parallelize(model, mesh_of((2, 1)), inputs, cluster="ideal", zero=3, outputs="full")
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        whole(**inputs).mul_(2.0)


def test_outputs_may_be_changed_in_place() -> None:
    """In the plan's layout, also where they are views; torch refuses it for whole outputs."""
    run_ranks(_changed_in_place, 2)
