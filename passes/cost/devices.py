"""Figures of devices and links.

Peaks (dense), memory, bandwidth of memory and of links, and the largest rates of matrix products that were measured
(271 of 312 TFLOP/s on A100, 795 of 989 on H100, 1745 of 2250 on B200, 668 of 1300 on MI300X, in bfloat16) are from the
tables of stas00/ml-engineering (compute/accelerator, network, at 744d01e1), the peaks of torchtitan (tools/utils.py),
and NVIDIA/dgxc-benchmarking. The efficiencies of links are from nccl-tests on nodes of eight (see
`passes.cost.communication`), hop latencies are those of NCCL's tuning (tuning.cc). That products with rows that do not
begin at multiples of 16 bytes take three times as long was measured at heads of language models (Netflix on scaling
post-training, 2026).

A channel of NCCL is a block on one multiprocessor (NVIDIA/nccl#689); it has 24 of them in a node with NVSwitch
(nccl#1259) and 16 across nodes (nccl#1453).

Recalled from data sheets and papers, not read there: all rates in float32 and float64; multiprocessors; A100-SXM-40GB
and H100-NVL memory bandwidth; H20 but for its bfloat16 rate; RTX 4090; efficiencies of attention and streaming
(FlashAttention-2 and -3: 190 of 312 TFLOP/s on A100 and about 330 of 989 on H100 with heads of 128, forward and
backward); links of A800, H800, MI300X and of cards without NVLink; the network cards of Blackwell nodes.
"""

from collections.abc import Mapping
from dataclasses import replace

from passes.cost.hardware import GIB, Device, Link, Protocol

# Elements of the result that one multiprocessor computes at a time.
_WIDE, _SQUARE, _LARGE = 128 * 256, 128 * 128, 256 * 256
# The prologue and epilogue of a tile, as a number of elements of the sum.
_DEPTH = 128.0


def _flops(half: float, single: float, double: float, quarter: float | None = None) -> Mapping[str, float]:
    """Rates from TFLOP/s in 16, 32, 64 and 8 bits."""
    rates = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    if quarter is not None:
        rates |= {"float8_e4m3fn": quarter, "float8_e5m2": quarter}
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


def _device(
    name: str,
    flops: Mapping[str, float],
    gigabytes: float,
    terabytes: float,
    efficiency: float,
    units: tuple[int, int],
    attention: float,
    softmax: float,
    reserve: float = 4 * GIB,
) -> Device:
    """A device; `units` are its multiprocessors, and the elements of a result that each computes at a time."""
    return Device(
        name,
        flops,
        efficiency=efficiency,
        memory=gigabytes * 1e9,
        bandwidth=terabytes * 1e12,
        launch=5e-6,
        reserve=reserve,
        # The average idle part of the last wave of tiles.
        fill=units[0] * units[1] / 2,
        depth=_DEPTH,
        attention=attention,
        softmax=softmax,
        streaming=0.85,
        unaligned=1 / 3,
        multiprocessors=units[0],
    )


_AMPERE = _flops(312, 19.5, 9.7)
_HOPPER = _flops(989, 67, 34, 1979)
_BLACKWELL = _flops(2250, 80, 40, 4500)

# Figures of single ops that run alone.
ALONE: Mapping[str, Device] = {
    "a100": _device("A100-SXM-80GB", _AMPERE, 80, 2.0, 0.87, (108, _WIDE), 0.68, 16),
    "a100-40gb": _device("A100-SXM-40GB", _AMPERE, 40, 1.555, 0.87, (108, _WIDE), 0.68, 16),
    "a100-pcie": _device("A100-PCIe-80GB", _AMPERE, 80, 1.94, 0.81, (108, _WIDE), 0.63, 16),
    "a100-pcie-40gb": _device("A100-PCIe-40GB", _AMPERE, 40, 1.555, 0.81, (108, _WIDE), 0.63, 16),
    "h100": _device("H100-SXM", _HOPPER, 80, 3.35, 0.80, (132, _WIDE), 0.42, 32),
    "h100-pcie": _device("H100-PCIe", _flops(756, 51, 26, 1513), 80, 2.0, 0.70, (114, _WIDE), 0.42, 32),
    "h100-nvl": _device("H100-NVL", _flops(835, 60, 30, 1671), 94, 3.9, 0.75, (132, _WIDE), 0.42, 32),
    "h100-hbm2e": _device("H100-SXM-96GB-HBM2e", _HOPPER, 96, 2.4, 0.70, (132, _WIDE), 0.38, 32),
    "h200": _device("H200-SXM", _HOPPER, 141, 4.8, 0.80, (132, _WIDE), 0.42, 32),
    "h20": _device("H20", _flops(148, 44, 1, 296), 96, 4.0, 0.90, (78, _WIDE), 0.80, 16),
    "b200": _device("B200", _BLACKWELL, 180, 8.0, 0.78, (148, _LARGE), 0.50, 32),
    "b200-limited": _device("B200 at limited power", _BLACKWELL, 180, 8.0, 0.78, (148, _LARGE), 0.50, 32),
    "b300": _device("B300", _flops(2250, 77, 1.2, 4500), 288, 8.0, 0.79, (148, _LARGE), 0.55, 32),
    "gb200": _device("GB200", _flops(2500, 80, 40, 5000), 186, 8.0, 0.73, (152, _LARGE), 0.50, 32),
    "mi300x": _device("MI300X", _flops(1300, 163.4, 81.7, 2610), 192, 5.3, 0.51, (304, _LARGE), 0.35, 32),
    "l40s": _device("L40S", _flops(362, 91.6, 1.4, 733), 48, 0.864, 0.65, (142, _SQUARE), 0.50, 16, 2 * GIB),
    "rtx4090": _device("RTX-4090", _flops(165.2, 82.6, 1.3, 330), 24, 1.008, 0.95, (128, _SQUARE), 0.85, 8, GIB),
}

# What of the peak products and attention reach in training, where clocks fall and memory is shared: fitted to published
# runs (benchmarks/calibrate.py, which names them).
TRAINING: Mapping[str, tuple[float, float]] = {
    "a100": (0.726, 0.380),
    "h100": (0.584, 0.244),
    "h100-hbm2e": (0.506, 0.324),
    "b200": (0.647, 0.277),
    "b200-limited": (0.479, 0.535),
}
# The device that was fitted to runs, for others of its architecture.
_SAME_ARCHITECTURE = {
    **dict.fromkeys(("a100-40gb", "a100-pcie", "a100-pcie-40gb"), "a100"),
    **dict.fromkeys(("b300", "gb200"), "b200"),
}


def derated(device: Device, like: str) -> Device:
    """A `device` with rates alone, as it is in training: products and attention lose as much as those of the device
    called `like`.

    Devices without runs lose what the fitted one of their architecture does, and those of architectures without runs
    what the H100 does. CPUs lose nothing.
    """
    names = [name for name, each in ALONE.items() if each.name == like]
    if not names:
        return device
    fitted = names[0] if names[0] in TRAINING else _SAME_ARCHITECTURE.get(names[0], "h100")
    products, attention = TRAINING[fitted]
    return replace(
        device,
        efficiency=device.efficiency * products / ALONE[fitted].efficiency,
        attention=device.attention * attention / ALONE[fitted].attention,
    )


# Of the CPU, rates were measured on two cores.
DEVICES: Mapping[str, Device] = {
    **{name: derated(device, device.name) for name, device in ALONE.items()},
    "cpu": Device(
        "CPU core",
        {"float32": 60e9, "float64": 30e9, "bfloat16": 15e9, "float16": 15e9},
        efficiency=0.8,
        memory=8 * GIB,
        bandwidth=8e9,
        launch=5e-6,
        reserve=1 * GIB,
        attention=0.5,
        overlaps=False,
    ),
    "ideal": Device("ideal", _HOPPER, 1.0, 1e18, 1e12, launch=0.0, reserve=0.0),
}


def _protocols(flags: float, lines: float) -> tuple[Protocol, ...]:
    """NCCL's protocols for shorter messages, with the seconds of a hop: LL, half of which are flags, and LL128, where 8
    in 128 bytes are."""
    return Protocol(6.6e-6, flags, 0.5), Protocol(14e-6, lines, 120 / 128)


def _nvlink(bandwidth: float, efficiency: float, exchange: float, switch: float = 0.0) -> Link:
    """NVLink through switches; a reduction in them has a latency of 25 us."""
    protocols, waits = _protocols(0.6e-6, 1.9e-6), 25e-6 if switch else 0.0
    return Link(bandwidth, 3.4e-6, efficiency, exchange, 8.4e-6, protocols, switch, waits, blocks=24)


def _network(bandwidth: float) -> Link:
    """InfiniBand or RoCE."""
    return Link(bandwidth, 14e-6, 0.9, 0.8, 8.4e-6, _protocols(2.7e-6, 4.0e-6), blocks=16)


def _pcie(bandwidth: float, efficiency: float) -> Link:
    """PCIe, where all devices share the root complex."""
    return Link(bandwidth, 5.7e-6, efficiency, efficiency, 8.4e-6, _protocols(1.0e-6, 2.5e-6))


LINKS: Mapping[str, Link] = {
    "nvlink3": _nvlink(300e9, 0.78, 0.70),
    "nvlink4": _nvlink(450e9, 0.80, 0.70, 0.68),
    "nvlink5": _nvlink(900e9, 0.70, 0.60, 0.61),
    "nvlink3 of the A800": _nvlink(200e9, 0.78, 0.70),
    "nvlink4 of the H800": _nvlink(200e9, 0.80, 0.70, 0.68),
    "xgmi": Link(448e9, 3.4e-6, 0.70, 0.70, 8.4e-6, _protocols(1.0e-6, 2.5e-6), pair=64e9),
    "pcie4": _pcie(31e9, 0.75),
    "pcie4 through the host": _pcie(31e9, 0.40),
    "pcie5": _pcie(63e9, 0.75),
    "hdr": _network(25e9),
    "ndr": _network(50e9),
    "xdr": _network(100e9),
    # Two ranks of one machine. torch makes a reduce-scatter of gloo from an all-reduce, and copies around all-gathers.
    "gloo inside": Link(1e9, 200e-6, exchange=0.85, gather=0.7, scatter=0.45),
    "gloo between": Link(1e8, 500e-6, scatter=0.5),
    "free": Link(float("inf"), 0.0),
}
