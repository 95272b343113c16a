"""The tensors that rules say autograd keeps, against those that it keeps."""

import pytest
import torch
from torch import Tensor

from tests.passes.rules.database import FAST, forms, kinds
from tests.passes.rules.one_op import OneOp, one_op
from tests.passes.rules.samples import Sample, samples
from tests.passes.rules.sizes import redrawn, wide

# On CPU these run as other operators than on the devices that plans are for, and keep what those need.
ELSEWHERE = {"scaled_dot_product_attention", "rms_norm", "matmul", "linear_cross_entropy"}


def _kept(one: OneOp) -> set[str]:
    """The operands and results that autograd keeps, as "x0" and "y0"; small ones are left out."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = one.sample.run(one.operands)
    known = {f"x{slot}": tensor for slot, tensor in enumerate(one.operands)}
    known.update({f"y{index}": tensor for index, tensor in enumerate(results)})
    places = {tensor.untyped_storage().data_ptr() for tensor in kept}
    return {name for name, tensor in known.items() if tensor.untyped_storage().data_ptr() in places} - _small(one)


def _small(one: OneOp) -> set[str]:
    """Tensors that are much smaller than the largest: weights of norms, bounds."""
    sizes = {f"x{slot}": tensor.numel() for slot, tensor in enumerate(one.operands)}
    sizes.update({f"y{index}": tensor.numel() for index, tensor in enumerate(one.results)})
    return {name for name, size in sizes.items() if size * 8 < max(sizes.values())}


def _named(sample: Sample) -> str:
    return sample.target.removeprefix("aten.")


@pytest.mark.parametrize("sample", [sample for sample in samples() if sample.kind not in ELSEWHERE], ids=_named)
def test_nothing_is_kept_that_the_rule_does_not_say(sample: Sample) -> None:
    """Each operand and result of some size that autograd keeps is among what the rule says, or the memory of a plan
    would be too low."""
    one = one_op(sample)
    if one.rule is None or not any(tensor.requires_grad for tensor in one.results):
        return
    said = {f"{'y' if item.result else 'x'}{item.index}" for item in one.rule.saved}
    assert _kept(one) <= said


@pytest.mark.parametrize("kind", kinds(ELSEWHERE))
def test_nothing_more_is_kept_in_forms_of_the_database(kind: str) -> None:
    """The same in some forms of the database, where weights of norms may be as large as what they scale."""
    for sample in forms(kind, FAST):
        for drawn in redrawn(sample, 6)[:1] if wide(sample) else ():
            one = one_op(drawn)
            if one.rule is not None and any(tensor.requires_grad for tensor in one.results):
                said = {f"{'y' if item.result else 'x'}{item.index}" for item in one.rule.saved}
                said |= {"x1", "x2"} if kind.endswith("_norm") else set()
                assert _kept(one) <= said, f"{one.op} keeps {sorted(_kept(one) - said)} too"


@pytest.mark.parametrize("kind", ["linear", "mul", "silu", "relu", "softmax", "layer_norm", "div", "embedding"])
def test_what_the_rule_says_is_kept(kind: str) -> None:
    """The other way round for the ops that fill memory: nothing is counted that is not kept."""
    for sample in samples():
        one = one_op(sample)
        if sample.kind != kind or one.rule is None:
            continue
        flowing = [tensor.requires_grad for tensor in one.operands]
        said = {
            f"{'y' if item.result else 'x'}{item.index}"
            for item in one.rule.saved
            if not item.copy and (not item.needed_by or any(flowing[slot] for slot in item.needed_by))
        }
        assert said - _small(one) == _kept(one), sample.target
