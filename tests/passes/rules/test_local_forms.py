"""The declarations of local forms. `one_op.py` compares their collectives with those that run, and
`tests/autopar/test_workspace.py` their workspace with allocations."""

from itertools import product
from math import prod

import pytest
import torch

from passes.ir.layout import P, R
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep
from passes.rules.local_forms import LOCAL_FORMS, FormContext, FormStep, LocalForm, Split


@pytest.mark.parametrize(
    "splits", [(Split(2, 1),), (Split(8, 1),), (Split(2, 1), Split(2, 2)), (Split(4, 1), Split(8, 4)), (Split(2, 8),)]
)
def test_the_busiest_rank_of_causal_attention(splits: tuple[Split, ...]) -> None:
    """The rank with most of all scores up to the diagonal, counted position by position."""
    length = 512
    places = torch.arange(length)
    most = 0
    for ranks in product(*(range(split.ways) for split in splits)):
        own = torch.ones(length, dtype=torch.bool)
        for split, rank in zip(splits, ranks, strict=True):
            own &= places // (length // (split.major * split.ways)) % split.ways == rank
        most = max(most, int((places[own] + 1).sum()))
    exact = most / int((places + 1).sum())
    assert LOCAL_FORMS["causal_attention"].share(splits) == pytest.approx(exact, rel=0.01)
    assert LOCAL_FORMS["mean"].share(splits) == 1 / prod(split.ways for split in splits)


def test_the_backward_pass_of_a_form() -> None:
    """The conjugates of its steps with a gradient in reverse order, or what it says itself."""
    step = RedistributionStep(0, P, R, (4,), (4,))
    other = RedistributionStep(1, P, R, (8,), (8,))
    about = FormContext(Op("op", "softmax", {}, ("y",)), 0, 2, ((4, 2),), torch.float32, 4)
    form = LocalForm(lambda context: (FormStep(step, False), FormStep(other), FormStep(step)))
    assert form.steps(about) == (step, other, step)
    assert form.backward_steps(about) == (step.backward, other.backward)
    assert LocalForm(backward=lambda context: (other,)).backward_steps(about) == (other,)
