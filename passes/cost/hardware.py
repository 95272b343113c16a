"""Devices and links: the figures that costs are computed from.

Rates are in units per second (FLOP/s, bytes/s), sizes in bytes, latencies in seconds. The figures of known devices are
in `passes.cost.devices`; `autopar profile` measures them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from passes.ir.errors import ClusterError
from passes.ir.program import dtype_name

GIB = 1024**3
# Alignment in bytes of the operands of tensor cores.
ALIGNMENT = 16


def _checker(demand: str, holds: Callable[[float], bool]) -> Callable[[str, Mapping[str, float]], None]:
    """A function that raises ClusterError for a figure that does not meet a demand, as one that is not a number."""

    def check(about: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            if not holds(value):
                raise ClusterError(f"{about}: {name} is {value}, but must be {demand}")

    return check


check_positive = _checker("a number above zero", lambda value: value > 0)
check_no_less = _checker("zero or a number above it", lambda value: value >= 0)
check_part = _checker("a part above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class Device:
    """One accelerator.

    - `flops`: the peak by dtype ("bfloat16"), dense; dtypes that are missing run at the rate of float32.
    - `efficiency`: the part of the peak that a large matrix product reaches; `efficiencies` by dtype, where it differs.
    - `memory`, `bandwidth`: bytes, and bytes/s at best.
    - `launch`: seconds to launch one kernel.
    - `reserve`: bytes that a plan may not use (context, communication buffers, allocator).
    - `fill`: the idle part of the last wave of tiles, as a number of additional elements in the result of a product.
    - `depth`: the prologue and epilogue of a tile, as a number of additional elements of the sum.
    - `attention`: the part of the peak that fused attention reaches with wide heads.
    - `multiprocessors`: their number, which computation shares with collectives; 0 if unknown.
    - `softmax`: the cost of the exponentials of attention, as a number of additional elements of the width of its
      heads.
    - `streaming`: the part of `bandwidth` that reading and writing large tensors reaches.
    - `unaligned`: the part of its rate that a product keeps whose rows do not begin at multiples of `ALIGNMENT` bytes;
      1 if alignment does not matter.
    - `overlaps`: whether collectives overlap computation. A CPU uses the same cores for both.
    """

    name: str
    flops: Mapping[str, float]
    efficiency: float
    memory: float
    bandwidth: float
    launch: float
    reserve: float
    fill: float = 0.0
    depth: float = 0.0
    attention: float = 1.0
    softmax: float = 0.0
    streaming: float = 1.0
    unaligned: float = 1.0
    multiprocessors: int = 0
    efficiencies: Mapping[str, float] = field(default_factory=dict)
    overlaps: bool = True

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ClusterError(f"device {self.name!r}: flops has no 'float32', at which other dtypes would run")
        about = f"device {self.name!r}"
        check_positive(about, {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()})
        check_positive(about, {"efficiency": self.efficiency, "memory": self.memory, "bandwidth": self.bandwidth})
        check_positive(about, {f"efficiencies[{dtype!r}]": part for dtype, part in self.efficiencies.items()})
        check_part(about, {"attention": self.attention, "streaming": self.streaming, "unaligned": self.unaligned})
        check_no_less(about, {"launch": self.launch, "reserve": self.reserve})
        check_no_less(about, {"fill": self.fill, "depth": self.depth, "softmax": self.softmax})

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in `dtype` at best."""
        return self.flops.get(dtype_name(dtype), self.flops["float32"])

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s that a large matrix product reaches in `dtype`."""
        return self.efficiencies.get(dtype_name(dtype), self.efficiency) * self.peak(dtype)

    def unaligned_rate(self, dtype: torch.dtype, batched: bool) -> float:
        """FLOP/s that a large matrix product reaches in `dtype` if rows do not begin at multiples of `ALIGNMENT` bytes;
        a `batched` product reaches at most the rate of float32, without tensor cores."""
        rate = self.rate(dtype)
        if self.unaligned == 1.0:
            return rate
        if batched:
            return min(rate, self.rate(torch.float32))
        return self.unaligned * rate

    def share(self, link: "Link") -> float:
        """The fraction of the multiprocessors that a collective over `link` occupies."""
        return min(1.0, link.blocks / self.multiprocessors) if self.multiprocessors else 0.0

    @property
    def type(self) -> str:
        """Either "cpu" or "cuda". Unknown devices are taken to be CUDA's, the ideal one a CPU."""
        return "cpu" if self.name == "ideal" or not self.overlaps else "cuda"

    @property
    def stream(self) -> float:
        """Bytes/s at which large tensors are read and written."""
        return self.bandwidth * self.streaming


@dataclass(frozen=True)
class Protocol:
    """A protocol for shorter messages over a link: the seconds to start a collective and of one hop, and its fraction
    of the bandwidth."""

    start: float
    latency: float
    share: float

    def __post_init__(self) -> None:
        check_no_less("a protocol", {"start": self.start, "latency": self.latency})
        check_part("a protocol", {"share": self.share})


@dataclass(frozen=True)
class Link:
    """A link between devices.

    - `bandwidth`: bytes/s that each device can send; `pair` the maximum to a single other device (None: all of them).
    - `latency`: seconds for one hop.
    - `efficiency`: the part of `bandwidth` that rings and trees reach with large messages, `exchange` that all-to-all
      reaches.
    - `gather`, `scatter`: the parts that all-gather and reduce-scatter reach (None: `efficiency`).
    - `start`: seconds to start a collective.
    - `blocks`: multiprocessors of a device that a collective occupies.
    - `protocols`: others, for shorter messages.
    - `switch`: the part of `bandwidth` that a reduction in the switches reaches (0: not supported); `switch_latency`
      its latency in seconds.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    exchange: float = 1.0
    start: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    switch: float = 0.0
    switch_latency: float = 0.0
    pair: float | None = None
    blocks: int = 0
    gather: float | None = None
    scatter: float | None = None

    def __post_init__(self) -> None:
        check_positive("a link", {"bandwidth": self.bandwidth})
        if self.pair is not None:
            check_positive("a link", {"pair": self.pair})
        check_part("a link", {"efficiency": self.efficiency, "exchange": self.exchange})
        check_part("a link", {"gather": self.gather_efficiency, "scatter": self.scatter_efficiency})
        check_no_less("a link", {"latency": self.latency, "start": self.start})
        check_no_less("a link", {"switch": self.switch, "switch_latency": self.switch_latency})

    @property
    def gather_efficiency(self) -> float:
        """The part of the bandwidth that all-gather reaches."""
        return self.efficiency if self.gather is None else self.gather

    @property
    def scatter_efficiency(self) -> float:
        """The part of the bandwidth that reduce-scatter reaches."""
        return self.efficiency if self.scatter is None else self.scatter

    def among(self, devices: int) -> float:
        """Bytes/s that each of `devices` can send to the others of them."""
        if self.pair is None:
            return self.bandwidth
        return min(self.bandwidth, max(1, devices - 1) * self.pair)
