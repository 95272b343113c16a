"""Fits, of measurements that are made from known figures."""

from dataclasses import replace

import pytest
import torch

from autopar.profile.fitting import fit_attention, fit_line, fit_link, fit_products
from passes.cost.cluster import Device, Link, Route
from passes.cost.communication import collective_lines
from passes.cost.compute import attention_seconds, product_seconds

SHAPES = [(2048, 2048, 2048), (8192, 8192, 512), (512, 4096, 4096), (8192, 8192, 8192), (1024, 1024, 8192)]


@pytest.mark.parametrize(("fill", "depth"), [(0.0, 0.0), (2.0**21, 128.0), (2.0**16, 0.0), (0.0, 64.0)])
def test_products(fill: float, depth: float) -> None:
    """A device comes back from the seconds that products take on it."""
    device = Device("d", {"float32": 5e14}, 1.0, 1.0, 1.0, 0.0, 0.0, fill=fill, depth=depth)
    timed = {(m, n, k): product_seconds(2.0 * m * n * k, m * n, torch.float32, device) for m, n, k in SHAPES}
    assert fit_products(timed) == pytest.approx((5e14, fill, depth), rel=1e-3, abs=1e-3)


def test_products_between_the_points_of_the_grid() -> None:
    """The fit is good for the shapes that were measured, within 2%."""
    device = Device("d", {"float32": 5e14}, 1.0, 1.0, 1.0, 0.0, 0.0, fill=1.7e6, depth=100.0)
    timed = {(m, n, k): product_seconds(2.0 * m * n * k, m * n, torch.float32, device) for m, n, k in SHAPES}
    rate, fill, depth = fit_products(timed)
    fitted = Device("f", {"float32": rate}, 1.0, 1.0, 1.0, 0.0, 0.0, fill=fill, depth=depth)
    for (m, n, k), seconds in timed.items():
        assert product_seconds(2.0 * m * n * k, m * n, torch.float32, fitted) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(("attention", "softmax"), [(0.4, 32.0), (0.7, 0.0), (1.0, 8.0)])
def test_attention(attention: float, softmax: float) -> None:
    """From heads of 64 and 128, forward and backward."""
    device = Device("d", {"float32": 5e14}, 1.0, 1.0, 1.0, 0.0, 0.0, attention=attention, softmax=softmax)
    scores = 1e9
    timed = {
        width: attention_seconds(3.5 * 4 * scores * width, 1e9, width, torch.float32, device) for width in (128, 64)
    }
    assert fit_attention(timed, scores, 5e14) == pytest.approx((attention, softmax))


def test_lines() -> None:
    """Exactly where there is one; never below zero."""
    sizes = [2.0**power for power in (12, 16, 20, 24)]
    assert fit_line([(size, 3e-5 + 2e-9 * size) for size in sizes]) == pytest.approx((3e-5, 2e-9))
    for timed in ([(1.0, 1.0), (10.0, 100.0)], [(1.0, 1.0), (10.0, 0.5)]):
        fixed, each = fit_line(timed)
        assert fixed >= 0
        assert each > 0


@pytest.mark.parametrize(
    "link",
    [
        Link(3e11, 3e-6, start=8e-6),
        Link(1e9, 2e-4, exchange=0.5, scatter=0.4),
        Link(4e11, 3e-6, start=9e-6, switch=0.95),
    ],
    ids=["plain", "slow exchange and scatter", "switch"],
)
@pytest.mark.parametrize("ways", [2, 4, 8])
def test_links(link: Link, ways: int) -> None:
    """A link comes back from what collectives take over it."""
    if ways < 8:
        link = replace(link, switch=0.0)
    route = Route(ways, 1, ways, link, link)
    gather, scatter, reduction, exchange = (
        collective_lines(name, route)[-1] for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    )
    found = fit_link(gather, scatter, reduction, exchange, ways)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert found.exchange == pytest.approx(link.exchange)
    assert found.scatter == pytest.approx(link.scatter_efficiency)
    assert found.switch == pytest.approx(link.switch)
    refound = Route(ways, 1, ways, found, found)
    for name, line in (("all_gather", gather), ("all_reduce", reduction)):
        assert collective_lines(name, refound)[-1] == pytest.approx(line), name
