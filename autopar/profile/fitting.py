"""Figures of devices and links, fitted to measurements."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, log

import torch

from passes.cost.cluster import Link

# Rows and columns of the result of a matrix product, and what it sums over.
Shape = tuple[int, int, int]


def fit_products(timed: Mapping[Shape, float]) -> tuple[float, float, float]:
    """Fit rate (FLOP/s), `fill` and `depth` of a device to the seconds of products of (m, n, k).

    They minimize the squared logarithms of predicted over measured seconds: on a grid of powers of two, then by
    decreasing steps around the best.
    """

    def fitted(fill: float, depth: float) -> tuple[float, float, float, float]:
        logs = [log(2 * (m * n + fill) * (k + depth) / taken) for (m, n, k), taken in timed.items()]
        rate = statistics.fmean(logs)
        return sum((value - rate) ** 2 for value in logs), exp(rate), fill, depth

    fills, depths = [0.0, *(2.0**power for power in range(6, 25))], [0.0, *(2.0**power for power in range(2, 12))]
    best = min(fitted(fill, depth) for fill, depth in product(fills, depths))
    for power in range(1, 8):
        steps = [2.0 ** (sign * 2.0**-power) for sign in (-1, 0, 1)]
        best = min(fitted(best[2] * one, best[3] * other) for one, other in product(steps, steps))
    return best[1:]


def fit_attention(timed: Mapping[int, float], scores: float, rate: float) -> tuple[float, float]:
    """`attention` and `softmax` of a device with products at `rate`, of the seconds that attention took with heads of
    two widths, forward and backward: 4 multiplications for each score and element, and 2.5 times as many backward."""
    (narrow, slow), (wide, fast) = sorted(timed.items())
    # Seconds of a unit of width: (1 + softmax / width) / attention at the rate of products.
    each, other = (taken * rate / (scores * 4 * width * 3.5) for width, taken in ((narrow, slow), (wide, fast)))
    softmax_by_attention = max(0.0, (each - other) / (1 / narrow - 1 / wide))
    attention = min(1.0, 1 / max(other - softmax_by_attention / wide, 1e-12))
    return attention, softmax_by_attention * attention


def fit_line(timed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = fixed + each * bytes by least squares of relative errors; neither is negative."""
    # Divided by the seconds, each measurement is a row of fixed / t + each bytes / t = 1.
    rows = torch.tensor([(1 / taken, size / taken) for size, taken in timed], dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    scale = rows.abs().amax(dim=0)
    fixed, each = (torch.linalg.lstsq(rows / scale, ones).solution.flatten() / scale).tolist()
    if fixed < 0 or each <= 0:
        size, taken = max(timed)
        return max(0.0, min(seconds for _, seconds in timed) if each <= 0 else 0.0), taken / size
    return fixed, each


def fit_link(
    gather: tuple[float, float],
    scatter: tuple[float, float],
    reduction: tuple[float, float],
    exchange: tuple[float, float],
    ways: int,
) -> Link:
    """The link among `ways` devices, of what is fixed and what each byte adds in all-gathers, reduce-scatters,
    all-reduces and all-to-alls.

    The ring of an all-gather gives the bandwidth, the hops that an all-reduce has more the latency. Where an all-reduce
    takes less than two rings, by more than what measurements waver by, it is reduced in the switches.
    """
    share = (ways - 1) / ways
    bandwidth = share / gather[1]
    latency = (reduction[0] - gather[0]) / (ways - 1)
    start = gather[0] - (ways - 1) * latency
    if latency < 0 or start < 0:
        latency, start = gather[0] / (ways - 1), 0.0
    ring = 2 * share / bandwidth
    switch = (1 + 1 / ways) / (bandwidth * reduction[1]) if reduction[1] < 0.9 * ring else 0.0
    scattering, exchanging = (min(1.0, share / (bandwidth * each)) for each in (scatter[1], exchange[1]))
    waits = max(0.0, reduction[0] - start) if switch else 0.0
    return Link(bandwidth, latency, 1.0, exchanging, start, switch=switch, switch_latency=waits, scatter=scattering)
