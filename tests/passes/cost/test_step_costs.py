"""Seconds of the steps of redistributions."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import sympy

from passes.cost.cluster import CLUSTERS, Cluster, Link
from passes.cost.communication import collective_lines
from passes.cost.step_costs import StepCosts
from passes.ir.exchanges import Sharing
from passes.ir.figures import Figure, formula, size_of
from passes.ir.layout import I, P, Placement, R, S
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep, as_steps, redistribution
from tests.passes.helpers import mesh_of

MESH = mesh_of(a=4)
DEVICE = replace(CLUSTERS["h100"].device, bandwidth=1e12, streaming=1.0, launch=5e-6)
CLUSTER = Cluster("c", DEVICE, 8, Link(100e9, 2e-6), Link(100e9, 2e-6))
SIZE = 4096 * 64 * 4


def seconds(source: Placement, target: Placement) -> float:
    """Forward seconds for float32[4096, 64] on four ranks."""
    (step,) = redistribution((source,), (target,), (4096, 64), MESH)
    return StepCosts(CLUSTER, MESH).total([step], 4)


def test_rings() -> None:
    """(n - 1) hops and (n - 1)/n of the whole for a gather or scatter, both for an all-reduce."""
    once = 3 * 2e-6 + SIZE * 3 / 4 / 100e9
    assert seconds(S(0), R) == pytest.approx(once)
    assert seconds(P, S(0)) == pytest.approx(once)
    assert seconds(P, R) == seconds(P, I) == pytest.approx(2 * once)


def test_tensors_that_are_sent_together_share_the_start() -> None:
    """The seconds per byte and the copies stay."""
    numbers = [Sharing(), Sharing(all_reduce=8, other=6)]
    for before, hops, others in ((S(1), 3, 5 / 6), (P, 6, 7 / 8)):
        (step,) = redistribution((before,), (R,), (4096, 64), MESH)
        alone, shared = (StepCosts(CLUSTER, MESH).total([step], 4, joined) for joined in numbers)
        assert alone - shared == pytest.approx(hops * 2e-6 * others)


def test_all_to_all_sends_a_rank_its_own_part() -> None:
    """(n - 1)/n of a quarter; from dim 1 to dim 0 the received parts are copied together, and from 0 to 1 the sent ones
    cut."""
    sent = 3 * 2e-6 + SIZE / 4 * 3 / 4 / 100e9
    copy = 5e-6 + 2 * SIZE / 4 / 1e12
    assert seconds(S(0), S(1)) == pytest.approx(sent + copy)
    assert seconds(S(1), S(0)) == pytest.approx(sent + copy)


def test_scattered_parts_are_copied() -> None:
    """Gathering dim 1, or strided parts of dim 0, copies what arrived."""
    once = 3 * 2e-6 + SIZE * 3 / 4 / 100e9
    copy = 5e-6 + 2 * SIZE / 1e12
    assert seconds(S(1), R) == pytest.approx(once + copy)
    assert seconds(S(0, 2), R) == pytest.approx(once + copy)
    assert seconds(P, S(1)) == pytest.approx(once + copy)


def test_local_conversions_read_and_write() -> None:
    """A slice reads and writes a part, zeros write the whole, and R <-> I does nothing."""
    assert seconds(R, I) == seconds(I, R) == 0.0
    assert seconds(R, S(0)) == pytest.approx(5e-6 + (SIZE / 4 + SIZE / 4) / 1e12)
    assert seconds(R, P) == pytest.approx(5e-6 + 2 * SIZE / 1e12)
    assert seconds(S(0), P) == pytest.approx(5e-6 + (SIZE / 4 + SIZE) / 1e12)


@pytest.mark.parametrize(("source", "target"), [(S(0), R), (P, I), (I, R), (R, S(1)), (S(0), S(1)), (P, S(0))], ids=str)
def test_backward_is_the_conjugate(source: Placement, target: Placement) -> None:
    """The cost of the backward pass is that of the change between the gradients' placements forward."""
    costs = StepCosts(CLUSTER, MESH)
    steps = redistribution((source,), (target,), (4096, 64), MESH)
    conjugate = redistribution((target.gradient,), (source.gradient,), (4096, 64), MESH)
    backward = costs.total([step.backward for step in steps], 4)
    assert backward == pytest.approx(costs.total(conjugate, 4))
    one = np.ones(len(steps), dtype=np.int64)
    assert costs.seconds(as_steps(steps).backward, 4 * one, np.stack([one, one])).sum() == pytest.approx(backward)


def test_links_of_the_axis_count() -> None:
    """The same change costs more on an axis that crosses nodes."""
    mesh = mesh_of(outer=2, inner=8)
    cluster = replace(CLUSTER, between=Link(10e9, 20e-6))
    (outer,) = redistribution((P, R), (R, R), (64, 64), mesh)
    (inner,) = redistribution((R, P), (R, R), (64, 64), mesh)
    assert outer.span == 0
    size = 64 * 64 * 4
    assert StepCosts(cluster, mesh).total([outer], 4) == pytest.approx(2 * (20e-6 + size / 2 / 10e9))
    assert StepCosts(cluster, mesh).total([inner], 4) == pytest.approx(2 * (7 * 2e-6 + size * 7 / 8 / 100e9))


def test_a_step_takes_the_fastest_algorithm_for_its_size() -> None:
    """Few bytes and many take different algorithms, in one call."""
    mesh, cluster = mesh_of(a=8), CLUSTERS["h100"]
    costs = StepCosts(cluster, mesh)
    lines = collective_lines("all_reduce", cluster.route(mesh, 0))
    steps = [RedistributionStep(0, P, I, (size,), (size,)) for size in (64, 1 << 26)]
    fastest = [min((fixed + 2 * prod(step.before) * each, fixed) for fixed, each in lines) for step in steps]
    assert len({fixed for _, fixed in fastest}) == 2
    assert costs.total(steps, 2) == pytest.approx(sum(taken for taken, _ in fastest))


def test_many_all_to_alls_share_the_latency() -> None:
    """Together each adds its bytes, and a copy into a buffer and out of one."""
    (step,) = redistribution((S(0),), (S(1),), (4096, 64), MESH)
    part = SIZE / 4
    expected = 2 * 5e-6 + part * 3 / 4 / 100e9 + 2 * 2 * part / 1e12
    assert StepCosts(CLUSTER, MESH).joint_total([step, step], 4) == pytest.approx(2 * expected)


def test_figures_are_priced_as_their_numbers_are() -> None:
    """Sizes of tensors, and of the mesh; their formulas give the same seconds."""
    rows, ways = sympy.symbols("rows ways")
    mesh, whole, sizes = Mesh(("a",), (size_of(4, ways),)), (size_of(4096, rows), 64), {rows: 4096, ways: 4}
    for cluster in (CLUSTER, CLUSTERS["h100"]):
        for source, target in ((S(0), R), (P, I), (R, S(0)), (S(0), S(1))):
            number = StepCosts(cluster, MESH).total(redistribution((source,), (target,), (4096, 64), MESH), 2)
            for own, shape in ((mesh, (4096, 64)), (MESH, whole), (mesh, whole)):
                steps = redistribution((source,), (target,), shape, own)
                found = StepCosts(cluster, own).total(steps, 2)
                assert isinstance(found, Figure)
                assert found.value == pytest.approx(number)
                assert float(formula(found).subs(sizes)) == pytest.approx(number)
