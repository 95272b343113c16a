"""Every rule against its operator in the calls of `samples.py`, as `test_database.py` does in those of the database."""

import pytest

from passes.rules import registered
from tests.passes.rules.checking import MESHES, Checking, assert_all_is_tried
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample, samples


def _name(sample: Sample) -> str:
    return sample.target.removeprefix("aten.")


def test_every_sample_has_a_rule() -> None:
    """No sample is for an operator without one: nothing would be checked."""
    assert {sample.kind for sample in samples()} <= set(registered())


# Strategies on a mesh of two axes that are fast: each method on each axis is among them.
_MOST = 15
# Operators with so many strategies that a sample takes seconds.
_MANY = ("scaled_dot_product_attention", "selective_scan", "delta_scan", "linear_cross_entropy")
_SAMPLES = [
    pytest.param(sample, marks=pytest.mark.long if sample.kind in _MANY else [], id=_name(sample))
    for sample in samples()
]


@pytest.mark.parametrize("most", [pytest.param(None, marks=pytest.mark.slow), _MOST], ids=["all", "most"])
@pytest.mark.parametrize("sample", _SAMPLES)
def test_every_strategy_computes_what_the_op_does(sample: Sample, most: int | None) -> None:
    """For every strategy on four meshes: operands cut (pending sums as random addends), the generated local form run on
    every rank, results put together, and gradients of all operands likewise. Of attention, which has hundreds on two
    axes, a part is fast."""
    checking = Checking(most)
    one = one_op(sample)
    assert one.rule is not None
    for mesh in MESHES:
        assert_all_is_tried(one, mesh)
        checking.check(one, mesh)
    assert checking.finish() == []


@pytest.mark.parametrize("sample", _SAMPLES)
def test_operands_without_gradient(sample: Sample) -> None:
    """The same where only one operand has a gradient, whichever it is, and where none has."""
    able = [slot for slot, tensor in enumerate(one_op(sample).operands) if tensor.requires_grad]
    checking = Checking()
    for trainable in [{slot} for slot in able if len(able) > 1] + [set[int]()]:
        checking.check(one_op(sample, trainable), MESHES[0])
    assert checking.finish() == []
