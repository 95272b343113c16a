"""Seconds of collectives, by algorithm.

S are the bytes of the larger of a collective's input and output, n the devices of a group, B the achieved bytes/s of
the link, a the seconds of a hop. Every collective uses the fastest of its algorithms for its size; each has a latency
and a time per byte:

- ring: an all-gather or reduce-scatter takes (n - 1) a + (n - 1)/n S/B, an all-reduce both (Thakur, Rabenseifner, Gropp
  2005, section 4). Of the hops, (nodes - 1) are between nodes and the others inside (NCCL, tuning.cc).
- tree, for all-reduces across nodes: up and down double binary trees over the nodes, along chains inside them: 2
  (log2(nodes) a_between + (together - 1) a_inside) + 2 S/B (Sanders, Speck, Traeff 2009; NCCL 2.4).
- in the switches: each device sends its S once and the S/n that it has reduced, and receives as much: (1 + 1/n) S/B.
  With 0.68 of NVLink 4 the bus bandwidth on 4 to 8 H200 is 367, 408, 437, 459, 476 GB/s (measured with nccl-tests: 363,
  414, 436, 460, 473), with 0.61 of NVLink 5 on 4 and 8 B200 it is 659 and 854 GB/s (measured: 673, 838). Across nodes
  each device then has S/together to reduce over its own network card, by a tree or again in switches.
- shift: each device sends its S to the next one, a = one hop. Of a group in several nodes one device of each sends to
  another node, over its own network card.
- all-to-all: a device sends (n - 1)/n of its part; what goes to other nodes goes over its own network card, meanwhile
  the rest over the link inside.

For shorter messages rings, trees and all-to-alls have protocols with faster hops and lower bandwidth (NCCL's LL and
LL128).
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, log2
from operator import attrgetter

from passes.cost.cluster import Link, Route

# Seconds of one algorithm: its latency, and the seconds per byte.
Line = tuple[float, float]


_FREE: tuple[Line, ...] = ((0.0, 0.0),)


def collective_lines(collective: str, route: Route) -> tuple[Line, ...]:
    """Seconds of a collective over `route`, by algorithm: its latency, and the seconds per byte of S.

    `collective` is "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift" or "convert", which sends
    nothing.
    """
    return tuple(_ALGORITHMS[collective](route)) if route.ways > 1 and collective != "convert" else _FREE


# --- algorithms ---


def _once(efficiency: Callable[[Link], float], route: Route) -> Iterator[Line]:
    """An all-gather or a reduce-scatter, whose links have this `efficiency`: a ring once around."""
    across = route.nodes - 1
    share = (route.ways - 1) / route.ways
    bandwidth = route.ring(efficiency(route.inside), efficiency(route.between))
    yield from _protocols(route, route.ways - 1 - across, across, share / bandwidth)


def _reduction(route: Route) -> Iterator[Line]:
    """An all-reduce: a ring twice around, a tree across nodes, or in the switches."""
    across = route.nodes - 1
    share = (route.ways - 1) / route.ways
    bandwidth = route.ring(route.inside.efficiency, route.between.efficiency)
    yield from _protocols(route, 2 * (route.ways - 1 - across), 2 * across, 2 * share / bandwidth)
    if across:
        yield from _protocols(route, 2 * (route.together - 1), 2 * _levels(route), 2 / bandwidth)
    if (route.inside.switch and route.together > 1) or (across and route.between.switch):
        yield _switched(route)


def _switched(route: Route) -> Line:
    """An all-reduce inside nodes in the switches, if they support it, and between nodes by each device with its
    part."""
    inside, between, together = route.inside, route.between, route.together
    fixed, each = _start(route), 0.0
    if together > 1 and inside.switch:
        fixed += inside.switch_latency
        each = (1 + 1 / together) / (inside.among(together) * inside.switch)
    elif together > 1:
        fixed += 2 * (together - 1) * inside.latency
        each = 2 * (together - 1) / together / (inside.among(together) * inside.efficiency)
    if route.nodes == 1:
        return fixed, each
    if between.switch:
        return fixed + between.switch_latency, max(each, 1 / together / (between.bandwidth * between.switch))
    tree = 2 / together / (between.bandwidth * between.efficiency)
    return fixed + 2 * _levels(route) * between.latency, max(each, tree)


def _exchange(route: Route) -> Iterator[Line]:
    """An all-to-all, every device with every other."""
    together = route.together
    others = route.ways - together
    each = (together - 1) / route.ways / (route.inside.among(together) * route.inside.exchange)
    if others:
        each = max(each, others / route.ways / (route.between.bandwidth * route.between.exchange))
    yield from _protocols(route, together - 1, others, each)


def _shift(route: Route) -> Iterator[Line]:
    """Every device to the next one."""
    inside, between = route.inside, route.between
    each = 1 / (inside.among(route.together) * inside.efficiency) if route.together > 1 else 0.0
    if route.nodes == 1:
        yield from _protocols(route, 1, 0, each)
    else:
        yield from _protocols(route, 0, 1, max(each, 1 / (between.bandwidth * between.efficiency)))


_ALGORITHMS: dict[str, Callable[[Route], Iterator[Line]]] = {
    "all_gather": partial(_once, attrgetter("gather_efficiency")),
    "reduce_scatter": partial(_once, attrgetter("scatter_efficiency")),
    "all_reduce": _reduction,
    "all_to_all": _exchange,
    "shift": _shift,
}


def _protocols(route: Route, inside: int, across: int, each: float) -> Iterator[Line]:
    """This many hops inside and across nodes, in every protocol; `each` is the seconds per byte of long messages."""
    near, far = route.inside, route.between
    yield _start(route) + inside * near.latency + across * far.latency, each
    if not across:
        for own in near.protocols:
            yield own.start + inside * own.latency, each / own.share
    for own, other in zip(near.protocols, far.protocols, strict=False) if across else ():
        share = min(own.share, other.share) if inside else other.share
        yield other.start + inside * own.latency + across * other.latency, each / share


def _start(route: Route) -> float:
    return route.inside.start if route.nodes == 1 else route.between.start


def _levels(route: Route) -> int:
    """Hops from the leaves of a tree over the nodes to its root."""
    return ceil(log2(route.nodes))
