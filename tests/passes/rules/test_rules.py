"""Every rule against its operator: shards in, local form, shards together; forward and backward, in float64."""

import pytest
import torch

from passes.ir.mesh import Mesh
from passes.rules import registered
from passes.rules.bodies import BODIES
from passes.rules.rule import Role, split, starts
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import OneOp, check, make_case, one_op, run_here, run_on_ranks
from tests.passes.rules.samples import Sample, samples

MESHES = [mesh_of(a=2), mesh_of(a=3), mesh_of(a=2, b=2), mesh_of(a=2, b=3)]


def _name(item: object) -> str:
    return item.target.removeprefix("aten.") if isinstance(item, Sample) else str(item)


def test_every_rule_has_a_sample() -> None:
    """A rule that is not checked here does not exist, and no sample is for an operator without one."""
    assert {sample.kind for sample in samples()} == set(registered())


def _check(one: OneOp, mesh: Mesh) -> None:
    """Every strategy of an op on a mesh: in this process, or on gloo ranks where its local form communicates."""
    generator = torch.Generator().manual_seed(0)
    communicating = []
    for strategy in one.strategies(mesh):
        case = make_case(one, strategy, mesh, generator)
        if case.body and BODIES[case.body].inside(0, ((1,), (1,))):
            communicating.append(case)
            continue
        run_here(case, mesh)
        check(one, case, mesh)
    if communicating:
        run_on_ranks(communicating, mesh)
        for case in communicating:
            check(one, case, mesh)


@pytest.mark.parametrize("sample", samples(), ids=_name)
def test_every_strategy_computes_what_the_op_does(sample: Sample) -> None:
    """For every strategy on four meshes: operands cut (pending sums as random addends), the generated local form run on
    every rank, results put together, and gradients of all operands likewise."""
    one = one_op(sample)
    for mesh in MESHES:
        _check(one, mesh)


def _floating(sample: Sample) -> list[int]:
    return [slot for slot, tensor in enumerate(one_op(sample).operands) if tensor.is_floating_point()]


@pytest.mark.parametrize("sample", samples(), ids=_name)
def test_operands_without_gradient(sample: Sample) -> None:
    """The same where only one operand has a gradient, whichever it is, and where none has."""
    floating = _floating(sample)
    for trainable in [{slot} for slot in floating if len(floating) > 1] + [set[int]()]:
        _check(one_op(sample, trainable), MESHES[0])


@pytest.mark.parametrize("sample", samples(), ids=_name)
def test_sizes_let_every_factor_be_split(sample: Sample) -> None:
    """The check above means something: each factor that may be split is split on an axis of 2 or of 3, and pending sums
    pass wherever the rule says so."""
    one = one_op(sample)
    rule = one.rule
    if rule is None:
        return
    methods = {strategy.methods[0] for mesh in MESHES[:2] for strategy in one.strategies(mesh)}
    for factor, start in starts(rule):
        possible = any(split(rule, factor, start, size) for size in (2, 3))
        name = factor if start == 1 else f"{factor}@{start}"
        assert not possible or name in methods
    splittable = {name for name, factor in rule.factors.items() if factor.role is not Role.WHOLE}
    assert splittable <= {method.partition("@")[0] for method in methods}
    assert sum(method.startswith("P(") for method in methods) == len(set(rule.linear))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_local_form_is_used(mesh: Mesh) -> None:
    """Each body of the table runs in some strategy of some sample."""
    used = set()
    for sample in samples():
        one = one_op(sample)
        if one.rule is None or not one.rule.bodies:
            continue
        for strategy in one.strategies(mesh):
            used |= {one.rule.bodies.get(method.partition("@")[0]) for method in strategy.methods}
    assert used - {None} == set(BODIES)
