"""Every rule against its operator in the forms of PyTorch's op database (`database.py`); sizes: `sizes.py`."""

from collections.abc import Iterator

import pytest

from passes.normalize import normalize
from passes.rules import registered, written_rule
from tests.passes.rules.checking import MESHES, Checking, assert_all_is_tried, splits
from tests.passes.rules.database import ALL, FAST, Effort, calls, forms, kinds
from tests.passes.rules.one_op import OneOp, one_op
from tests.passes.rules.refused import REFUSED
from tests.passes.rules.samples import Sample, samples
from tests.passes.rules.sizes import redrawn, wide


def problems(sample: Sample, effort: Effort, checking: Checking) -> Iterator[str]:
    """The errors of the rule for one form; forms that communicate are left to `checking`."""
    split: set[str] = set()
    for mesh in MESHES if wide(sample) else MESHES[:1]:
        some = len(mesh.sizes) > 1 and not effort.thorough
        for drawn in redrawn(sample, mesh.size)[: 1 if some else None]:
            one = one_op(drawn)
            try:
                split |= splits(one, mesh)
                assert_all_is_tried(one, mesh)
                checking.check(one, mesh)
                for trainable in _some(one) if effort.thorough and mesh == MESHES[0] else ():
                    checking.check(one_op(drawn, trainable), mesh)
            except Exception as error:
                yield f"{one.op} of {_types(one)} on {mesh}: {type(error).__name__}: {error}"
                return
    one = one_op(sample)
    if wide(sample) and not split and not _listed(sample) and not (one.rule is None and _decomposed(one)):
        yield f"{one.op} of {_types(one)} is not split: let the rule do so, or list it in refused.py and say why"


def _types(one: OneOp) -> str:
    return ", ".join(str(one.folded.types[name]) for name in one.op.operands)


def _some(one: OneOp) -> Iterator[set[int]]:
    """Sets of operands that have a gradient where others have none."""
    able = [slot for slot, tensor in enumerate(one.operands) if tensor.requires_grad]
    if len(able) > 1:
        yield from ({slot} for slot in able)
    yield set()


def _decomposed(one: OneOp) -> bool:
    """Whether a program has something else in place of the op, all of it with rules."""
    program = normalize(one.folded.program)
    return all(written_rule(op, program.types) is not None for op in program.ops)


def _listed(sample: Sample) -> bool:
    return any(refused.holds(sample) for refused in REFUSED if sample.kind in refused.kinds)


def check_kind(kind: str, effort: Effort) -> list[str]:
    """The errors of the rule of a kind, in all its forms."""
    checking = Checking(effort.strategies)
    found = [line for sample in forms(kind, effort) for line in problems(sample, effort, checking)]
    return found + checking.finish()


@pytest.mark.parametrize("kind", kinds())
def test_rule_in_some_forms(kind: str) -> None:
    """A few forms of each kind, spread over overloads and ranks. A kind that the database lacks must have samples."""
    assert forms(kind, FAST) or any(sample.kind == kind for sample in samples()), f"nothing checks the rule of {kind}"
    found = check_kind(kind, FAST)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", registered())
def test_rule_in_every_form(kind: str) -> None:
    """All forms and strategies."""
    found = check_kind(kind, ALL)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_what_is_listed_as_refused_is_refused() -> None:
    """No entry of the list is out of date: of what it holds for, something is not split."""
    for refused in REFUSED:
        for kind in refused.kinds:
            found = [sample for sample in calls(kind, None) if wide(sample) and refused.holds(sample)]
            assert not all(_is_split(sample) for sample in found), (kind, refused.reason)


def _is_split(sample: Sample) -> bool:
    return any(splits(one_op(call), mesh) for mesh in MESHES[:2] for call in redrawn(sample, mesh.size))
