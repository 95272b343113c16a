"""Seconds of collectives."""

from dataclasses import replace
from itertools import pairwise

import pytest

from passes.cost.cluster import CLUSTERS, Cluster, Link, Protocol, Route
from passes.cost.communication import collective_lines
from passes.ir.mesh import Mesh
from tests.passes.helpers import mesh_of

MESH = mesh_of(a=4)
DEVICE = replace(CLUSTERS["h100"].device, bandwidth=1e12, streaming=1.0, launch=5e-6)
CLUSTER = Cluster("c", DEVICE, 8, Link(100e9, 2e-6), Link(100e9, 2e-6))
SIZE = 4096 * 64 * 4


def collective_seconds(collective: str, size: float, route: Route) -> float:
    """Seconds that a collective takes by its fastest algorithm, where the larger of its input and output has `size`
    bytes."""
    return min(fixed + each * size for fixed, each in collective_lines(collective, route))


def test_gathers_and_scatters_may_reach_another_part() -> None:
    """Of links inside nodes and between them; all-reduces reach what they did."""
    link = Link(100e9, 2e-6, 0.8, gather=0.5, scatter=0.25)
    for mesh, each in ((MESH, 3 * 2e-6), (mesh_of(a=16), 15 * 2e-6)):
        ways = mesh.sizes[0]
        route = replace(CLUSTER, inside=link, between=link).route(mesh, 0)
        for collective, part in (("all_gather", 0.5), ("reduce_scatter", 0.25)):
            expected = each + SIZE * (ways - 1) / ways / (100e9 * part)
            assert collective_seconds(collective, SIZE, route) == pytest.approx(expected)
        plain = replace(route, inside=Link(100e9, 2e-6, 0.8), between=Link(100e9, 2e-6, 0.8))
        assert collective_lines("all_reduce", route) == collective_lines("all_reduce", plain)


# --- algorithms ---

QUICK, FAR = Protocol(6e-6, 0.5e-6, 0.5), Protocol(7e-6, 2.5e-6, 0.5)
NODE = Link(450e9, 3e-6, 0.8, 0.7, 8e-6, (QUICK,), switch=0.68, switch_latency=25e-6)
NETWORK = Link(50e9, 14e-6, 0.9, 0.8, 9e-6, (FAR,))


def route(ways: int, nodes: int = 1, inside: Link = NODE, between: Link = NETWORK) -> Route:
    """A group that lies in `nodes` nodes evenly."""
    return Route(ways, nodes, ways // nodes, inside, between)


def plain(link: Link) -> Link:
    """A link without switches and without a protocol for short messages."""
    return replace(link, protocols=(), switch=0.0)


def test_a_ring_in_a_node() -> None:
    """Start, seven hops of eight devices, and 7/8 of the bytes at 0.8 of the bandwidth; an all-reduce goes twice."""
    size = 1e9
    once = 7 * 3e-6 + 7 / 8 * size / (0.8 * 450e9)
    for collective in ("all_gather", "reduce_scatter"):
        assert collective_seconds(collective, size, route(8)) == pytest.approx(8e-6 + once)
    assert collective_seconds("all_reduce", size, route(8, inside=plain(NODE))) == pytest.approx(8e-6 + 2 * once)


def test_short_messages_take_quick_hops() -> None:
    """At half the bandwidth: worth it for 64 kB, not for 64 MB."""
    quick = 6e-6 + 7 * 0.5e-6 + 2 * 7 / 8 * 65536 / (0.8 * 450e9)
    assert collective_seconds("all_gather", 65536, route(8)) == pytest.approx(quick)
    slow = 8e-6 + 7 * 3e-6 + 7 / 8 * 2**26 / (0.8 * 450e9)
    assert collective_seconds("all_gather", 2**26, route(8)) == pytest.approx(slow)
    # Across nodes both links take the protocol.
    across = 7e-6 + 14 * 0.5e-6 + 2.5e-6 + 2 * 15 / 16 * 65536 / (0.8 * 450e9)
    assert collective_seconds("all_gather", 65536, route(16, 2)) == pytest.approx(across)


@pytest.mark.parametrize(
    ("cluster", "ways", "measured"),
    [("h200", 4, 363), ("h200", 5, 414), ("h200", 6, 436), ("h200", 7, 460), ("h200", 8, 473), ("b200", 8, 838)],
)
def test_reductions_in_switches_are_as_fast_as_measured(cluster: str, ways: int, measured: float) -> None:
    """Bus bandwidth of large all-reduces in GB/s, by nccl-tests on nodes of H200 and B200: within 3%."""
    size = 16e9
    seconds = collective_seconds("all_reduce", size, CLUSTERS[cluster].route(Mesh(("a",), (ways,)), 0))
    assert 2 * (ways - 1) / ways * size / seconds / 1e9 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("collective", "measured"), [("all_gather", 361), ("reduce_scatter", 363)])
def test_rings_are_as_fast_as_measured(collective: str, measured: float) -> None:
    """Bus bandwidth in GB/s on 8 H200: within 1%."""
    size = 16e9
    seconds = collective_seconds(collective, size, CLUSTERS["h200"].route(Mesh(("a",), (8,)), 0))
    assert 7 / 8 * size / seconds / 1e9 == pytest.approx(measured, rel=0.01)


def test_a_ring_across_nodes() -> None:
    """16 devices in two nodes: of 15 hops one is between nodes, and the eight cards of a node carry it together."""
    size = 1e9
    seconds = 9e-6 + 14 * 3e-6 + 14e-6 + 15 / 16 * size / min(0.8 * 450e9, 0.9 * 8 * 50e9)
    assert collective_seconds("all_gather", size, route(16, 2)) == pytest.approx(seconds)
    # One device in each of 16 nodes.
    alone = 9e-6 + 15 * 14e-6 + 15 / 16 * size / (0.9 * 50e9)
    assert collective_seconds("all_gather", size, route(16, 16)) == pytest.approx(alone)


def test_trees_reduce_short_messages_among_many_nodes() -> None:
    """Twice the six levels of 64 nodes in place of 126 hops, and all the bytes twice."""
    between = plain(NETWORK)
    far = route(64, 64, plain(NODE), between)
    tree = 9e-6 + 2 * 6 * 14e-6 + 2 * 1e6 / (0.9 * 50e9)
    assert collective_seconds("all_reduce", 1e6, far) == pytest.approx(tree)
    ring = 9e-6 + 126 * 14e-6 + 2 * 63 / 64 * 1e10 / (0.9 * 50e9)
    assert collective_seconds("all_reduce", 1e10, far) == pytest.approx(ring)
    # With eight devices in each node, chains of seven more hops down and up.
    wide = 9e-6 + 2 * 6 * 14e-6 + 2 * 7 * 3e-6 + 2 * 1e6 / (0.8 * 450e9)
    assert collective_seconds("all_reduce", 1e6, route(512, 64, plain(NODE), between)) == pytest.approx(wide)


def test_switches_inside_and_trees_between() -> None:
    """Four nodes of eight: each device reduces an eighth over its own card, while the switches go on."""
    size, between = 1e9, plain(NETWORK)
    lines = collective_lines("all_reduce", route(32, 4, between=between))
    fixed = 9e-6 + 25e-6 + 2 * 2 * 14e-6
    assert lines[-1] == (pytest.approx(fixed), pytest.approx(max(9 / 8 / (0.68 * 450e9), 2 / 8 / (0.9 * 50e9))))
    # Network switches that reduce as well take the bytes once.
    sharp = replace(between, switch=0.9, switch_latency=20e-6)
    lines = collective_lines("all_reduce", route(32, 4, between=sharp))
    assert lines[-1] == (
        pytest.approx(9e-6 + 25e-6 + 20e-6),
        pytest.approx(max(9 / 8 / (0.68 * 450e9), 1 / 8 / (0.9 * 50e9))),
    )
    assert collective_seconds("all_reduce", size, route(32, 4, between=sharp)) <= fixed + size * lines[-1][1]


def test_a_shift_is_one_hop() -> None:
    """Of a group in several nodes one device of each sends over its own network card."""
    size = 1e9
    inside, between = CLUSTER.inside, replace(CLUSTER.between, bandwidth=10e9)
    near, far = (replace(CLUSTER, between=between).route(mesh_of(a=ways), 0) for ways in (8, 16))
    assert collective_seconds("shift", size, near) == pytest.approx(2e-6 + size / inside.bandwidth / inside.efficiency)
    assert collective_seconds("shift", size, far) == pytest.approx(2e-6 + size / 10e9 / between.efficiency)


def test_all_to_all_across_nodes_goes_over_each_card() -> None:
    """Of 16 devices in two nodes: half of a device's part goes to the other node, over one card."""
    size = 1e9
    seconds = 9e-6 + 7 * 3e-6 + 8 * 14e-6 + 8 / 16 * size / (0.8 * 50e9)
    assert collective_seconds("all_to_all", size, route(16, 2)) == pytest.approx(seconds)
    inside = 8e-6 + 7 * 3e-6 + 7 / 8 * size / (0.7 * 450e9)
    assert collective_seconds("all_to_all", size, route(8)) == pytest.approx(inside)


def test_pairs_have_a_part_of_all_links() -> None:
    """Seven links of 64 GB/s each: two devices have one of them, eight all."""
    link = CLUSTERS["mi300x"].inside
    for ways in (2, 4, 8):
        fixed, each = collective_lines("all_gather", route(ways, inside=link))[0]
        assert fixed == pytest.approx(link.start + (ways - 1) * link.latency)
        assert each == pytest.approx((ways - 1) / ways / (link.efficiency * (ways - 1) * 64e9))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("cluster", ["a100", "h100", "mi300x", "rtx4090", "cpu", "gb200"])
def test_more_bytes_never_take_less(cluster: str, collective: str) -> None:
    """On any number of devices; and twice the bytes at most twice as long."""
    for ways in (2, 4, 8, 16, 64, 1024):
        path = CLUSTERS[cluster].route(Mesh(("a",), (ways,)), 0)
        seconds = [collective_seconds(collective, 2.0**power, path) for power in range(36)]
        assert all(less <= more <= 2 * less for less, more in pairwise(seconds))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_one_device_sends_nothing(collective: str) -> None:
    """A collective on one device costs no latency either."""
    assert collective_seconds(collective, 1e9, route(1)) == 0.0
