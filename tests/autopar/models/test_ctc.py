"""Losses of connectionist temporal classification are traced, and equal those of torch and `transformers`."""

import importlib

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.models.ctc import transformers_loss, with_padded_labels
from autopar.testing import compare
from tests.autopar.comparing import TOLERANCE

SAMPLES, STEPS, CLASSES = 4, 12, 6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equal_to_the_loss_transformers_loss(reduction: str) -> None:
    """With ignored labels before, between and behind the others, no label at all, and blanks among them."""
    theirs = importlib.import_module("transformers.loss.loss_ctc").ForCTCLoss
    logits = torch.randn(SAMPLES, STEPS, CLASSES, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, -100], [-100, 4, -100, 5], [-100, -100, -100, -100], [2, 0, 2, 1]])
    lengths = torch.tensor([12, 9, 5, 11])
    found = []
    for loss in (transformers_loss, theirs):
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, labels, lengths, 0, reduction)
        value.sum().backward()
        found += [value, leaf.grad]
    torch.testing.assert_close(found[:2], found[2:])


class Recognizer(nn.Module):
    """A layer and its loss; lengths are numbers, or tensors."""

    def __init__(self, numbers: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.loss = nn.CTCLoss(zero_infinity=True)
        self.numbers = numbers

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """x: [samples, steps, 8]; labels: [samples, labels]; lengths: [samples]."""
        scores = self.layers(x).log_softmax(-1).transpose(0, 1)
        steps = torch.full_like(lengths, x.shape[1])
        given = ((x.shape[1],) * x.shape[0], (3, 2, 2, 1)) if self.numbers else (steps, lengths)
        loss: Tensor = self.loss(scores, labels, *given)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("numbers", "mesh", "options"),
    [
        (True, {"dp": 2, "tp": 2}, {}),
        (False, {"dp": 2}, {"micro_batches": 2}),
        (False, {"pp": 2}, {"micro_batches": 2}),
    ],
    ids=["numbers", "micro-batches", "stages"],
)
def test_padded_labels_equal_one_device(numbers: bool, mesh: dict[str, int], options: dict[str, object]) -> None:
    """The loss and all gradients."""
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, 3], [4, 5, 0], [2, 2, 0], [1, 0, 0]])
    inputs = {"x": torch.randn(SAMPLES, STEPS, 8), "labels": labels, "lengths": torch.tensor([3, 2, 2, 1])}
    found = compare(Recognizer(numbers), mesh, inputs, cluster="ideal", **options)
    assert found.worst[1] <= TOLERANCE, str(found)


def test_samples_are_split() -> None:
    """Each rank has the losses of its samples."""
    inputs = {"x": torch.randn(64, 50, 8), "labels": torch.ones(64, 3).long(), "lengths": torch.full((64,), 3)}
    found = autopar.plan(Recognizer(False), {"dp": 2}, inputs, cluster="ideal")
    (row,) = (
        row for block in found.programs["train"].stages[0].blocks for row in block.rows if row.name == "loss/ctc_loss"
    )
    assert row.how == "dp samples"


def test_concatenated_labels_stay_with_torch() -> None:
    """Their sizes are not those of a batch."""
    scores = torch.randn(STEPS, 2, CLASSES).log_softmax(-1)
    given = scores, torch.tensor([1, 2, 3]), (STEPS, STEPS), (1, 2)
    expected = nn.functional.ctc_loss(*given)
    with with_padded_labels():
        assert torch.equal(nn.functional.ctc_loss(*given), expected)
