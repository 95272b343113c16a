"""Seconds of redistributions."""

from dataclasses import replace

import pytest

from passes.cost.cluster import CLUSTERS, Cluster, Link
from passes.cost.communication import redistribution_seconds, step_seconds
from passes.ir.layout import I, Letter, P, R, S
from passes.ir.redistribution import redistribution
from tests.passes.helpers import mesh_of

MESH = mesh_of(a=4)
DEVICE = replace(CLUSTERS["h100"].device, bandwidth=1e12, streaming=1.0, launch=5e-6)
CLUSTER = Cluster("c", DEVICE, 8, Link(100e9, 2e-6), Link(100e9, 2e-6))
SIZE = 4096 * 64 * 4


def seconds(source: Letter, target: Letter) -> float:
    """Forward seconds for float32[4096, 64] on four ranks."""
    (step,) = redistribution((source,), (target,), (4096, 64), MESH)
    return step_seconds(step, 4, CLUSTER, MESH)


def test_rings() -> None:
    """(n - 1) hops and (n - 1)/n of the whole for a gather or scatter, both for an all-reduce."""
    once = 3 * 2e-6 + SIZE * 3 / 4 / 100e9
    assert seconds(S(0), R) == pytest.approx(once)
    assert seconds(P, S(0)) == pytest.approx(once)
    assert seconds(P, R) == seconds(P, I) == pytest.approx(2 * once)


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
def test_backward_is_the_conjugate(source: Letter, target: Letter) -> None:
    """What the backward pass costs is what the change between the gradients' letters costs forward, in the gradient's
    dtype; nothing where there is no gradient."""
    steps = redistribution((source,), (target,), (4096, 64), MESH)
    forward, backward = redistribution_seconds(steps, 2, 4, True, CLUSTER, MESH)
    assert forward == pytest.approx(sum(step_seconds(step, 2, CLUSTER, MESH) for step in steps))
    conjugate = redistribution((target.gradient,), (source.gradient,), (4096, 64), MESH)
    assert backward == pytest.approx(sum(step_seconds(step, 4, CLUSTER, MESH) for step in conjugate))
    assert redistribution_seconds(steps, 2, 4, False, CLUSTER, MESH) == (forward, 0.0)


def test_links_of_the_axis_count() -> None:
    """The same change costs more on an axis that crosses nodes."""
    mesh = mesh_of(outer=2, inner=8)
    cluster = replace(CLUSTER, between=Link(10e9, 20e-6))
    (outer,) = redistribution((P, R), (R, R), (64, 64), mesh)
    (inner,) = redistribution((R, P), (R, R), (64, 64), mesh)
    assert outer.axis == 0
    size = 64 * 64 * 4
    assert step_seconds(outer, 4, cluster, mesh) == pytest.approx(2 * (20e-6 + size / 2 / 10e9))
    assert step_seconds(inner, 4, cluster, mesh) == pytest.approx(2 * (7 * 2e-6 + size * 7 / 8 / 100e9))
