"""Measure this machine, and write the results to a cluster file that the planner uses.

On each rank: matrix products of several shapes in each dtype, fused attention, reading and writing memory, starting
kernels, and copies from the host. Under torchrun also collectives, among the ranks of a node and between nodes. What
was not measured (links of a single process, or between nodes where there is one) is taken from the known figures of
the device. Of ranks that differ, the slowest counts. In training, clocks fall and memory is shared: rates of products
and attention are lowered as those of known devices are.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar._torch import collectives
from autopar.launch.world import check_device_type
from autopar.profile.fitting import Shape, fit_attention, fit_line, fit_link, fit_products
from autopar.runtime.ranks.groups import job_timeout
from passes.cost.cluster import CLUSTERS, Cluster, Device, Link, cluster_of_device
from passes.cost.devices import LINKS, derated
from passes.ir.errors import ClusterError, MeshError
from passes.ir.log import logger
from passes.ir.program import dtype_name

# Starts a collective on a tensor and one of its parts.
Collective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measurements:
    """The sizes and dtypes that are measured.

    - `products`: (m, n, k) of the matrix products that rates are fitted to.
    - `dtypes`: dtypes of the products; attention and shapes are measured in the first.
    - `heads`: (batch, heads, sequence) of attention.
    - `streamed`: bytes of a tensor that is copied.
    - `messages`: bytes of collectives, the larger of input and output.
    - `seconds`: minimum duration of each measurement.
    """

    products: Sequence[Shape]
    dtypes: Sequence[torch.dtype]
    heads: Shape
    streamed: int
    messages: Sequence[int]
    seconds: float


_LARGE = Measurements(
    products=[
        *((size, size, size) for size in (2048, 4096, 8192)),
        *((8192, 8192, 512), (8192, 1024, 8192), (1024, 1024, 8192), (2048, 8192, 2048), (512, 4096, 4096)),
    ],
    dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    heads=(2, 16, 4096),
    streamed=1 << 30,
    messages=[1 << 16, 1 << 20, 1 << 24, 1 << 28],
    seconds=0.1,
)
_SMALL = Measurements(
    products=[
        *((size, size, size) for size in (128, 256, 512, 768)),
        *((1024, 1024, 64), (1024, 64, 1024), (64, 1024, 1024), (512, 1024, 256)),
    ],
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    heads=(1, 4, 512),
    streamed=1 << 28,
    messages=[1 << 12, 1 << 16, 1 << 20, 1 << 24],
    seconds=0.05,
)
QUICK = replace(_SMALL, streamed=1 << 24, messages=[1 << 12, 1 << 18, 1 << 22], seconds=0.002)


def profile(
    output: str | Path | None = None, device_type: str | None = None, measurements: Measurements | None = None
) -> Cluster:
    """Measure this machine; returns it as a cluster, and the first rank writes it to `output`.

    Called alike by every rank of a process group, or by one process without; started by torchrun, it forms the group
    itself. `device_type` is "cuda" or "cpu" (None: cuda where there is one), `measurements` what is measured (None: by
    device type).

    Raises ClusterError where the device is not there.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device_type(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    # The process group that torchrun asks for.
    formed = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) != 1
    if formed:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        cluster = _Bench(device_type, measurements or (_LARGE if device_type == "cuda" else _SMALL)).cluster()
        if output is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            cluster.save(output)
        return cluster
    finally:
        if formed:
            dist.destroy_process_group()


def known_cluster(device_type: str) -> Cluster:
    """The known figures of clusters of this process's device.

    Raises MeshError for an unknown device.
    """
    return cluster_of_device(torch.cuda.get_device_name() if device_type == "cuda" else device_type)


def device_name(device_type: str) -> str:
    """The name of this process's device: "NVIDIA H100 80GB HBM3", "AMD EPYC 9654 96-Core Processor"."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_machine(cluster: Cluster, device_type: str) -> None:
    """Raise ClusterError where `cluster` was measured on another device than that of this process."""
    here = device_name(device_type)
    if cluster.machine and cluster.machine != here:
        raise ClusterError(
            f"the cluster {cluster.name!r} is a profile from another machine: it was measured on {cluster.machine!r}, "
            f"and the mesh has {here!r}; run `autopar profile` here, or plan without a process group for there"
        )


@dataclass
class _Bench:
    """Measures on one device, together with the other ranks where there are some."""

    device_type: str
    what: Measurements

    def cluster(self) -> Cluster:
        """Measure everything, and return it as a cluster."""
        known = _known_or_most(self.device_type)
        name = device_name(self.device_type)
        world = dist.get_world_size() if dist.is_initialized() else 1
        local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        bandwidth = 2 * self.what.streamed / self._stream()
        one = torch.zeros(1, device=self.device_type)
        launch = self._seconds(lambda: one.add_(1.0))
        device = derated(self._device(name, bandwidth, launch, local), known.device.name)
        inside, between = known.inside, known.between
        if local > 1:
            inside = self._link([list(range(first, first + local)) for first in range(0, world, local)], "inside")
        if world > local:
            between = self._link([list(range(first, world, local)) for first in range(local)], "between")
        else:
            logger.info("links between nodes were not measured: they are those of the cluster %r", known.name)
        node_size = local if world > 1 else known.node_size
        return Cluster(f"profile of {name}", device, node_size, inside, between, self._host(bandwidth), machine=name)

    # --- one device ---

    def _device(self, name: str, bandwidth: float, launch: float, local: int) -> Device:
        main, *others = self.what.dtypes
        timed = {shape: self._product(shape, main) for shape in self.what.products}
        rate, fill, depth = fit_products(timed)
        flops = {dtype_name(main): rate}
        largest = sorted(self.what.products, key=prod)[-3:]
        for dtype in others:
            seconds = {shape: self._product(shape, dtype) for shape in largest}
            flops[dtype_name(dtype)] = statistics.median(
                2 * (m * n + fill) * (k + depth) / taken for (m, n, k), taken in seconds.items()
            )
        batch, heads, sequence = self.what.heads
        # Of causal attention half of the scores are computed.
        attention, softmax = fit_attention(
            {width: self._attention(width, main) for width in (64, 128)}, batch * heads * sequence**2 / 2, rate
        )
        memory = self._memory() / (local if self.device_type == "cpu" else 1)
        return Device(
            name,
            flops,
            efficiency=1.0,
            memory=memory,
            bandwidth=bandwidth,
            launch=launch,
            reserve=0.05 * memory,
            fill=fill,
            depth=depth,
            attention=attention,
            softmax=softmax,
            overlaps=self.device_type != "cpu",
        )

    def _product(self, shape: Shape, dtype: torch.dtype) -> float:
        m, n, k = shape
        left, right = self._random((m, k), dtype), self._random((k, n), dtype)
        made = torch.empty(m, n, dtype=dtype, device=self.device_type)
        return self._seconds(lambda: torch.mm(left, right, out=made))

    def _attention(self, width: int, dtype: torch.dtype) -> float:
        """Forward and backward of causal attention."""
        query, key, value = (self._random((*self.what.heads, width), dtype).requires_grad_() for _ in range(3))
        gradient = self._random((*self.what.heads, width), dtype)

        def run() -> None:
            made = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(made, (query, key, value), gradient)

        return self._seconds(run)

    def _stream(self) -> float:
        source = torch.ones(self.what.streamed, dtype=torch.uint8, device=self.device_type)
        target = torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def _host(self, bandwidth: float) -> float:
        """Bytes/s from the host; on a CPU, a copy within its own memory."""
        if self.device_type == "cpu":
            return bandwidth / 2
        size = min(self.what.streamed, 1 << 28)
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device=self.device_type)
        return size / self._seconds(lambda: target.copy_(source, non_blocking=True))

    def _memory(self) -> float:
        if self.device_type == "cuda":
            return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    # --- links ---

    def _link(self, groups: Sequence[Sequence[int]], where: str) -> Link:
        """The link among the ranks of each of `groups`, which all measure at once."""
        own, _ = dist.new_subgroups_by_enumeration(groups, timeout=job_timeout())  # type: ignore[no-untyped-call]
        size, name = own.size(), own.group_name
        gather, scatter, reduction, exchange = (
            fit_line([(message, self._collective(run, message, size)) for message in self.what.messages])
            for run in (
                lambda whole, part: collectives.all_gather_into_tensor(part, size, name),
                lambda whole, part: collectives.reduce_scatter_tensor(whole, "sum", size, name),
                lambda whole, part: collectives.all_reduce(whole, "sum", name),
                lambda whole, part: collectives.all_to_all_single(whole, [len(part)] * size, [len(part)] * size, name),
            )
        )
        link = fit_link(gather, scatter, reduction, exchange, size)
        logger.info("%s nodes: %.3g GB/s, %.3g us a hop", where, link.bandwidth / 1e9, link.latency * 1e6)
        return link

    def _collective(self, run: Collective, message: int, size: int) -> float:
        """Seconds of a collective on a tensor of `message` bytes and one of its `size` parts."""
        part = torch.zeros(max(1, message // 4 // size), device=self.device_type)
        whole = part.repeat(size)
        # All ranks run it equally often.
        timer, repeats = _timer(lambda: collectives.wait_tensor(run(whole, part))), 5 if message >= 1 << 20 else 20
        return self._slowest(statistics.median(timer.timeit(repeats).mean for _ in range(5)))

    # --- timing ---

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=self.device_type).to(dtype)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one run: the median of several batches of runs, on the slowest rank."""
        return self._slowest(_timer(run).blocked_autorange(min_run_time=self.what.seconds).median)

    def _slowest(self, seconds: float) -> float:
        if not dist.is_initialized():
            return seconds
        every = torch.tensor([seconds], dtype=torch.float64, device=self.device_type)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return float(every.item())


def _timer(run: Callable[[], object]) -> "torch.utils.benchmark.Timer":
    """A timer, which waits for the device, with as many threads as training has."""
    # Imported here: it takes 0.1 s, and plans need none of it.
    from torch.utils.benchmark import Timer

    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())


def _known_or_most(device_type: str) -> Cluster:
    """The known cluster of this device, or a cluster with typical links if the device is unknown."""
    try:
        return known_cluster(device_type)
    except MeshError:
        return replace(CLUSTERS["a100"], name="unknown", inside=LINKS["pcie4"], between=LINKS["hdr"])
