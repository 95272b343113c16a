"""The operator for losses of connectionist temporal classification against torch's own."""

import pytest
import torch
from torch.nn import functional

from passes.ctc import ctc_loss

STEPS, SAMPLES, CLASSES, LABELS = 12, 4, 6, 5
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(STEPS, SAMPLES, CLASSES, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randint(1, CLASSES, (SAMPLES, LABELS), generator=GENERATOR)
# The third sample has no alignment: more labels than steps.
LENGTHS = torch.tensor([12, 10, 2, 7]), torch.tensor([5, 3, 4, 1])


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_equal_to_torch(zero_infinity: bool) -> None:
    """Losses and gradients, from gradients that differ by sample, of scores that are not contiguous too."""
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    found = []
    for own in (True, False):
        leaf = SCORES.clone().requires_grad_()
        given = leaf.transpose(0, 1).log_softmax(-1).transpose(0, 1), TARGETS, *LENGTHS
        losses = (
            ctc_loss(*given, 0, zero_infinity)
            if own
            else functional.ctc_loss(*given, blank=0, reduction="none", zero_infinity=zero_infinity)
        )
        finite = losses[losses != torch.inf]
        (finite * weights[losses != torch.inf]).sum().backward()
        found.append((losses, leaf.grad))
    (ours, of_ours), (theirs, of_theirs) = found
    assert torch.equal(ours, theirs)
    assert of_ours is not None
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_what_torch_asks_of_operators() -> None:
    """Schema, sizes without values, and gradients."""
    given = SCORES.log_softmax(-1).requires_grad_(), TARGETS, *LENGTHS, 0, True
    torch.library.opcheck(ctc_loss, given)
