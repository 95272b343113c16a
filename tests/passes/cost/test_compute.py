"""Seconds of ops on one device."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from passes.cost.cluster import CLUSTERS, Device
from passes.cost.compute import Work, attention_seconds, compute_seconds, product_seconds
from passes.cost.devices import ALONE

DEVICE = Device("d", {"float32": 1e12}, 0.5, 80e9, 1e11, launch=1e-6, reserve=0.0)
SHAPED = replace(DEVICE, fill=1000.0, depth=20.0, attention=0.25, softmax=32.0, streaming=0.5)


def test_roofline() -> None:
    """The larger of the time to multiply and the time to read and write, and a launch per kernel."""
    work = Work(torch.float32, 3e6, 1e6, 5e6, (1, 2), 1e9, (1e9, 0.0, 1e9), 1e4, (1e4, 1.0, 1e4))
    forward, backward = compute_seconds(work, DEVICE)
    assert forward == pytest.approx(1e-6 + 1e9 / 0.5e12)
    assert backward == pytest.approx(2e-6 + 2e9 / 0.5e12)
    forward, backward = compute_seconds(replace(work, forward=0.0, backward=()), DEVICE)
    assert forward == pytest.approx(1e-6 + 4e6 / 1e11)
    assert backward == pytest.approx(2e-6 + 5e6 / 1e11)
    forward, backward = compute_seconds(replace(work, forward=1.0, backward=(1.0, 0.0, 0.0)), DEVICE)
    assert forward == pytest.approx(1e-6 + 4e6 / 1e11)
    assert compute_seconds(Work(torch.float32, 0.0, 0.0, kernels=(0, 0)), DEVICE) == (0.0, 0.0)


def test_streaming_reaches_a_part_of_the_bandwidth() -> None:
    """Of 100 GB/s, half."""
    assert compute_seconds(Work(torch.float32, 3e6, 1e6), SHAPED) == (pytest.approx(1e-6 + 4e6 / 0.5e11), 0.0)


def test_products_take_as_long_as_filled_ones() -> None:
    """30 x 40 over 50 with 1000 more elements in the result and 20 more in the sum: 2 * 2200 * 70 at half the peak."""
    assert product_seconds(2 * 30 * 40 * 50, 30 * 40, torch.float32, SHAPED) == pytest.approx(2 * 2200 * 70 / 0.5e12)


def test_rows_that_tensor_cores_cannot_load() -> None:
    """Three times as long in a product, at the rate of float32 in many at once; tiles begin and end as ever."""
    device = Device("d", {"float32": 1e11, "bfloat16": 1e12}, 0.5, 80e9, 1e11, 0.0, 0.0, depth=20.0, unaligned=1 / 3)

    def seconds(unaligned: bool, batched: bool) -> float:
        return product_seconds(2e9, 1e6, torch.bfloat16, device, unaligned, batched)

    tiles = 2 * 1e6 * 20 / 0.5e12
    assert seconds(False, False) == seconds(False, True) == pytest.approx(2e9 / 0.5e12 + tiles)
    assert seconds(True, False) == pytest.approx(3 * 2e9 / 0.5e12 + tiles)
    assert seconds(True, True) == pytest.approx(2e9 / 0.5e11 + tiles)
    # Where there are no tensor cores, or their loads are not known, nothing changes.
    alike = replace(device, unaligned=1.0)
    assert product_seconds(2e9, 1e6, torch.bfloat16, alike, True, True) == seconds(False, False)
    plain = product_seconds(2e9, 1e6, torch.float32, device, True, True)
    assert plain == product_seconds(2e9, 1e6, torch.float32, device)


def test_gradients_of_a_product_have_shapes_of_their_own() -> None:
    """Of x[30, 50] w[50, 40]: the gradient of x sums over 40, that of w over 30."""
    flops = 2.0 * 30 * 40 * 50
    work = Work(torch.float32, 0, 0, 0, (1, 2), flops, (flops, flops), 1200.0, (1500.0, 2000.0))
    _, backward = compute_seconds(work, SHAPED)
    assert backward == pytest.approx(2e-6 + (2 * 2500 * 60 + 2 * 3000 * 50) / 0.5e12)


def test_attention_by_hand() -> None:
    """At a quarter of the peak, heads of 64 as if they were 96 wide, with tiles a quarter as wide as a product's."""
    seconds = attention_seconds(1e9, 1e4, 64, torch.float32, SHAPED)
    assert seconds == pytest.approx(1e9 / 0.25e12 * (96 / 64) * (1 + 250 / 1e4))


def test_backward_of_attention_takes_two_and_a_half_times_as_long() -> None:
    """Its three gradients together, where it does not wait for memory."""
    elements = 1e12
    share = 1e9 * 2.5 / 3
    work = Work(torch.float32, 0, 0, 0, (0, 0), 1e9, (share,) * 3, elements, (elements,) * 3, 128)
    forward, backward = compute_seconds(work, SHAPED)
    assert backward == pytest.approx(2.5 * forward)


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "mi300x", "l40s"])
def test_products_take_longer_the_larger_they_are_and_reach_more(name: str) -> None:
    """In every dim, from 128 to 16384; a large one nears the rate of the device."""
    device = CLUSTERS[name].device

    def seconds(m: int, n: int, k: int) -> float:
        return product_seconds(2.0 * m * n * k, m * n, torch.bfloat16, device)

    sizes = [2**power for power in range(7, 15)]
    for small, large in pairwise(sizes):
        for shape, grown in (
            ((small, 4096, 4096), (large, 4096, 4096)),
            ((4096, small, 4096), (4096, large, 4096)),
            ((4096, 4096, small), (4096, 4096, large)),
        ):
            assert seconds(*shape) < seconds(*grown) < large / small * seconds(*shape)
    assert 2 * 16384**3 / seconds(16384, 16384, 16384) == pytest.approx(device.rate(torch.bfloat16), rel=0.05)


def test_dtypes_run_at_their_own_rates() -> None:
    """float8 at twice the peak, with an efficiency of its own where there is one; what is not named as float32."""
    device = ALONE["h100"]
    assert device.rate(torch.float8_e4m3fn) == pytest.approx(0.80 * 1979e12)
    own = replace(device, efficiencies={"float8_e4m3fn": 0.7})
    assert own.rate(torch.float8_e4m3fn) == pytest.approx(0.7 * 1979e12)
    assert own.rate(torch.int8) == own.rate(torch.float32) == pytest.approx(0.80 * 67e12)


def test_products_on_an_h100_reach_what_is_known_of_them() -> None:
    """795 TFLOP/s is the largest rate that was measured in bfloat16 (stas00/ml-engineering): it is neared from below,
    and products of 1024 reach less than half of it."""
    device = ALONE["h100"]
    rates = [
        2e-12 * size**3 / product_seconds(2.0 * size**3, size**2, torch.bfloat16, device)
        for size in (1024, 4096, 8192, 16384)
    ]
    assert rates == sorted(rates)
    assert 750 < rates[-1] < 795
    assert rates[0] < 795 / 2
