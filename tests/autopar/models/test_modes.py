"""Models with parts that are in evaluation mode while the model trains, as frozen batch norms are."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import compare_on_mesh, run_ranks
from passes.capture import evaluated_parts


class _Classifier(nn.Module):
    """A convolution, batch norms, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        # Before a batch norm that trains, a bias has no gradient but rounding errors.
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        features = self.inner(self.norm(self.first(images)).relu()).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def _made(*evaluated: str) -> nn.Module:
    torch.manual_seed(0)
    model = _Classifier().double().train()
    for part in (model.norm, model.inner[1]):
        part.running_mean.uniform_(-1, 1)
        part.running_var.uniform_(1, 2)
    for path in evaluated:
        model.get_submodule(path).eval()
    return model


def _batch(size: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, 4, 4, generator=generator, dtype=torch.float64)
    return {"images": images, "labels": torch.arange(size) % 4}


def _steps(evaluated: tuple[str, ...]) -> float:
    """The largest error of losses, gradients and buffers, with another size and an evaluation in between."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    worst = max(compare_on_mesh(_made(*evaluated), mesh, _batch(), cluster="ideal").errors.values())
    model = _made(*evaluated)
    dist_model = autopar.parallelize(copy.deepcopy(model), mesh, _batch(), cluster="ideal")
    stays = {path: not part.training for path, part in model.named_modules()}
    for size, training in ((8, True), (6, True), (8, False), (8, True), (4, True)):
        dist_model.train(training)
        model.train(training)
        for path, part in model.named_modules():
            part.training = training and not stays[path]
        assert all(part.training == model.get_submodule(path).training for path, part in dist_model.named_modules())
        with torch.set_grad_enabled(training):
            ours, theirs = dist_model(**_batch(size)), model(**_batch(size))
        worst = max(worst, (ours - theirs).abs().item())
    buffers = dict(model.named_buffers())
    return max(worst, *((item - buffers[name]).abs().max().item() for name, item in dist_model.named_buffers()))


@pytest.mark.long
@pytest.mark.parametrize("evaluated", [("norm", "inner"), ("inner",)])
def test_parts_in_evaluation_stay_so(evaluated: tuple[str, ...]) -> None:
    """All dropout is among them, because dropout that trains draws other numbers than on one device."""
    assert max(run_ranks(_steps, 2, evaluated)) <= 1e-12


def test_parts_that_have_two_names() -> None:
    """They are in evaluation under both."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).eval())
    model.append(model[1])
    assert evaluated_parts(model) == ("1", "2")
    assert evaluated_parts(model.eval()) == ()


def _refused() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist_model = autopar.parallelize(_made("norm"), mesh, _batch(), cluster="ideal")
    dist_model.norm.eval()
    dist_model.inner.train()
    with pytest.raises(autopar.UnsupportedError) as raised:
        dist_model.inner[1].eval()
    assert dist_model.eval().inner.eval().training is False
    return str(raised.value)


def test_parts_have_no_mode_of_their_own() -> None:
    """A call that changes nothing is allowed."""
    first, second = run_ranks(_refused, 2)
    assert first == second
    assert first.startswith(
        "a part of a distributed module has no mode of its own: call train() or eval() on the whole"
    )


def test_plans_are_for_certain_modes(caplog: pytest.LogCaptureFixture) -> None:
    """A model in evaluation is trained as a whole; a warning names the parts of others that are not."""
    mesh = {"dp": 2}
    plan = autopar.plan(_made(), mesh, _batch(), cluster="ideal")
    assert autopar.plan(_made().eval(), mesh, _batch(), cluster="ideal").to_json() == plan.to_json()
    with pytest.raises(autopar.PlanMismatchError, match="the plan was made for another _Classifier"):
        autopar.plan(_made("norm"), mesh, _batch(), cluster="ideal", plan=plan)
    caplog.set_level(logging.WARNING, "autopar")
    autopar.plan(_made("norm"), mesh, _batch(), cluster="ideal", objective="infer")
    assert "evaluation mode" not in caplog.text
    autopar.plan(_made("first", "norm", "head", "inner"), mesh, _batch(), cluster="ideal")
    assert "parts of the model are in evaluation mode (first, norm, inner and 1 more) and stay so" in caplog.text
