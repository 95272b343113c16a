"""The declarations of local forms. `one_op.py` compares their collectives with those that run, and
`tests/autopar/test_workspace.py` their workspace with allocations."""

from itertools import product
from math import prod

import pytest
import torch

from passes.ir.layout import P, R
from passes.ir.program import Op
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Factor
from passes.ops import ATTENTION
from passes.rules.form_context import FormContext, FormStep, Split
from passes.rules.local_forms import LOCAL_FORMS, LocalForm, form_that_runs
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample


@pytest.mark.parametrize("reach", [(511, 0), (63, 0), (7, 0), (7, 7), (0, 0)])
@pytest.mark.parametrize(
    "splits", [(Split(2, 1),), (Split(8, 1),), (Split(2, 1), Split(2, 2)), (Split(4, 1), Split(8, 4)), (Split(2, 8),)]
)
def test_the_busiest_rank_of_attention(splits: tuple[Split, ...], reach: tuple[int, int]) -> None:
    """The rank with most of all scores, counted position by position, of causal attention, windows, and full
    attention."""
    length = 512
    places = torch.arange(length)
    before, after = reach if any(reach) else (length, length)
    scores = places.clamp(max=before) + (length - 1 - places).clamp(max=after) + 1
    most = 0
    for ranks in product(*(range(split.ways) for split in splits)):
        own = torch.ones(length, dtype=torch.bool)
        for split, rank in zip(splits, ranks, strict=True):
            own &= places // (length // (split.major * split.ways)) % split.ways == rank
        most = max(most, int(scores[own].sum()))
    factor = Factor(length, reach=reach)
    assert LOCAL_FORMS["ring_attention"].share(splits, factor) == pytest.approx(most / int(scores.sum()), rel=0.02)
    assert LOCAL_FORMS["mean"].share(splits, factor) == 1 / prod(split.ways for split in splits)


@pytest.mark.parametrize("sides", [(1, 0), (1, 1)])
def test_longer_windows_cost_no_more(sides: tuple[int, int]) -> None:
    """Those that reach beyond the sequence are as full attention is, or causal."""
    length = 16

    def cost(reach: int) -> tuple[float, float]:
        x = torch.ones(2, 4, length, 8)
        window = [side * reach for side in sides]
        one = one_op(Sample(ATTENTION, (x, x, x), {"is_causal": sides[1] == 0, "window": window}))
        assert one.rule is not None
        share = LOCAL_FORMS["blockwise_attention"].share([Split(2, 1)], one.rule.factors["queries"])
        return one.rule.multiplications, share

    costs = [cost(reach) for reach in (1, 5, length - 1, length, 60, 10_000)]
    assert costs[2:] == [costs[2]] * 4
    assert 0 < costs[0][0] < costs[1][0] < costs[2][0]
    assert all(0.5 <= share <= 1 for _, share in costs)


def test_shifts_end_where_windows_do() -> None:
    """Of eight ranks in order with 16 keys each, and of those on two axes; in stripes all come around."""

    def count(reach: int, **axes: int | bool) -> tuple[float, float]:
        shape = (1, 2, 16, 8)
        given = {"span": 0, "ways": 8, **axes}
        about = FormContext(
            Op("op", "", {}, ("y",)), operands=(shape,) * 3, dtype=torch.float32, rows=0, reach=(reach, 0), **given
        )
        shifts = LOCAL_FORMS["ring_attention"].shifts
        assert shifts is not None
        forward, backward = shifts(about)
        return sum(count for count, _ in forward), sum(count for count, _ in backward)

    assert [count(reach) for reach in (1, 16, 17, 127)] == [(1, 3), (1, 3), (2, 5), (7, 15)]
    assert count(17, in_order=False) == (7, 15)
    # The outer axis of two, then the inner one.
    assert [count(reach, ways=2, before=4) for reach in (16, 127)] == [(1, 3), (1, 3)]
    assert count(16, ways=4, before=4) == (1, 3)
    assert [count(reach, ways=4, after=2) for reach in (16, 127)] == [(6, 13), (6, 13)]
    assert count(16, ways=2, after=4) == (2, 4)


def test_the_form_that_runs() -> None:
    """The one that axes have, or the one that does what others do, too."""
    assert form_that_runs(["", ""]) == ""
    assert form_that_runs(["blockwise_attention", "", "blockwise_attention"]) == "blockwise_attention"
    assert form_that_runs(["blockwise_attention", "ring_attention"]) == "ring_attention"
    assert form_that_runs(["ring_attention", "softmax"]) is None


def test_the_backward_pass_of_a_form() -> None:
    """The conjugates of its steps with a gradient in reverse order, or what it says itself."""
    step = RedistributionStep(0, P, R, (4,), (4,))
    other = RedistributionStep(1, P, R, (8,), (8,))
    about = FormContext(Op("op", "softmax", {}, ("y",)), 0, 2, ((4, 2),), torch.float32, 4)
    form = LocalForm(lambda context: (FormStep(step, False), FormStep(other), FormStep(step)))
    assert form.steps(about) == (step, other, step)
    assert form.backward_steps(about) == (step.backward, other.backward)
    assert LocalForm(backward=lambda context: (other,)).backward_steps(about) == (other,)
