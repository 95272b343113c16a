"""Seconds and memory of planning: `python benchmarks/planning.py [NAME ...]`. Needs no accelerator and no weights.

Every row is measured in a process of its own, with the largest memory that was resident in it, the libraries' included.
Short passes are run three times, and the least time counts. Targets stand beside what is measured. With NAMEs only the
programs of stock sizes are planned whose row contains one of them.
"""

import gc
import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

from autopar.models import huggingface
from autopar.models.info import read_model
from autopar.options import Options
from autopar.planner import plan_model
from autopar.request import make_request
from passes.capture import Tracing, capture
from passes.normalize import normalize
from passes.regions import fold

T = TypeVar("T")

MESH = {"dp": 8, "tp": 8}
SEQUENCE = 8192
PASSES = ("capture", "normalize", "regions", "strategies", "solve", "lower", "variables", "emit")
# Planning that takes longer than this (seconds after tracing) is run once only.
SHORT = 10.0
RUNS = 3
NODES = 5400
# Bytes that never decide anything.
PLENTY = 1e12
MESH_TEXT = " x ".join(f"{name} {size}" for name, size in MESH.items())


@dataclass(frozen=True)
class Measured:
    """The least seconds of each pass over some runs, and the gap that the solver left."""

    times: Mapping[str, float]
    gap: float
    runs: int

    def total(self, first: str) -> float:
        """Seconds of the passes from `first` on."""
        return sum(self.times[name] for name in PASSES[PASSES.index(first) :])


def llama(layers: int) -> LlamaForCausalLM:
    """A llama of 8B widths in bfloat16, without values."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=SEQUENCE,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def inputs_of(batch: int) -> dict[str, object]:
    """The global batch of a training step."""
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def measure(layers: int, batch: int, memory_limit: float | None = None) -> Measured:
    """Plan a llama, three times if that is short."""
    model = llama(layers)
    # A limit of None is what an H100 has.
    request = make_request(MESH, Options(cluster="h100", memory_limit=memory_limit))
    info = read_model(model, inputs_of(batch), request)
    found: list[Mapping[str, float]] = []
    while len(found) < RUNS:
        # What earlier runs left behind is not this one's to clean up.
        gc.collect()
        compiled = plan_model(model, info, request)
        found.append(compiled.times)
        if sum(compiled.times[name] for name in PASSES[1:]) > SHORT:
            break
    times = {name: min(run[name] for run in found) for name in PASSES}
    return Measured(times, compiled.plan.programs["train"].gap, len(found))


def normalize_and_regions(layers: int) -> tuple[int, float]:
    """The nodes of a traced llama, and the least seconds that bringing it to normal form and folding it take."""
    model = llama(layers)
    inputs = {**inputs_of(8), "use_cache": False}
    program = capture(model, inputs, Tracing(True, True, huggingface.tracing(model, inputs, "train")))
    least = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        fold(normalize(program))
        least = min(least, time.perf_counter() - start)
    return len(program.ops), least


def apart(function: Callable[..., T], *args: object) -> tuple[T, float]:
    """The result of `function(*args)` in a process of its own, and the bytes that were resident there at most."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _quiet) as pool:
        result = pool.submit(function, *args).result()
        return result, pool.submit(peak_bytes).result()


def _quiet() -> None:
    logging.getLogger("autopar").setLevel(logging.ERROR)


def peak_bytes() -> float:
    """The largest memory that was resident in this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # `ru_maxrss` of a new process begins with what was resident in its parent.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024.0 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def row(what: str, measured: str, target: str = "") -> None:
    """Print one line of the table."""
    print(f"{what:58}{measured:>12}  {target}", flush=True)


def seconds(value: float) -> str:
    """Seconds with their unit."""
    return f"{value:.3f} s"


def memory_row(peak: float) -> None:
    """Print the largest memory that was resident."""
    row("  peak resident memory", f"{peak / 1024**3:.2f} GiB")


def section(title: str) -> None:
    """Print a heading."""
    print(f"\n{title}\n{'what':58}{'measured':>12}  target", flush=True)


def passes(found: Measured) -> None:
    """Print the seconds of every pass."""
    for step in PASSES:
        row(step, seconds(found.times[step]), "<= 1 s" if step == "solve" else "")
    row("all after tracing", seconds(found.total("normalize")), "<= 5 s")
    row("gap that the solver left", f"{found.gap:.1e}", "<= 1e-6")
    row("runs", str(found.runs))


@dataclass(frozen=True)
class Case:
    """A model of stock sizes, on how many devices or which mesh, and the seconds that planning it may take (None: they
    are only measured)."""

    name: str
    config: PretrainedConfig
    mesh: Mapping[str, int] | int
    batch: int
    at_most: float | None = None

    @property
    def row(self) -> str:
        """Its name in the table."""
        mesh = f"{self.mesh} devices, searched"
        if isinstance(self.mesh, Mapping):
            mesh = " x ".join(str(size) for size in self.mesh.values())
        return f"{self.name}, {mesh}, batch {self.batch}"


def llama_config(hidden: int, inner: int, layers: int, heads: int) -> LlamaConfig:
    """A llama 3 with these sizes."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=SEQUENCE,
    )


QWEN = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=SEQUENCE,
)
CASES = (
    Case("Llama 8B", llama_config(4096, 14336, 32, 32), MESH, 64, 8.0),
    Case("Qwen3 8B", QWEN, MESH, 64, 8.0),
    Case("Llama 70B", llama_config(8192, 28672, 80, 64), 512, 512, 25.0),
    Case("Llama 405B", llama_config(16384, 53248, 126, 128), 16384, 2048, 45.0),
    Case("Llama 8B", llama_config(4096, 14336, 32, 32), {"dp": 4, "cp": 4, "tp": 4}, 64),
    Case("Llama 8B", llama_config(4096, 14336, 32, 32), {"pod": 4, "dp": 4, "cp": 2, "tp": 2}, 64),
)


@dataclass(frozen=True)
class Planned:
    """The figures of one plan, and the seconds that making it took."""

    mesh: str
    total: float
    tracing: float
    solver: float
    gap: float
    micro_batches: int
    recompute: str
    step: float


def whole_planning(case: Case) -> Planned:
    """Plan from the model to the source."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config).to(torch.bfloat16)
    gc.collect()
    start = time.perf_counter()
    request = make_request(case.mesh, Options(cluster="h100"))
    compiled = plan_model(model, read_model(model, inputs_of(case.batch), request), request)
    total = time.perf_counter() - start
    program = compiled.plan.programs["train"]
    return Planned(
        " x ".join(str(size) for size in compiled.plan.mesh.values()),
        total,
        compiled.times["capture"],
        compiled.times["solve"],
        program.gap,
        program.micro_batches,
        ", ".join(program.stages[0].recompute.values()) or "none",
        sum(program.seconds.values()),
    )


def whole(case: Case) -> None:
    """Print how long planning takes from the model to the source, and what memory."""
    found, peak = apart(whole_planning, case)
    target = f"<= {case.at_most:g} s" if case.at_most else ""
    row(case.row, seconds(found.total), target)
    row("  of that tracing", seconds(found.tracing))
    row("  of that solver", seconds(found.solver))
    row("  gap that the solver left", f"{found.gap:.1e}", "<= 1e-6")
    row(
        f"  step on {found.mesh}; {found.micro_batches} micro-batches, recompute {found.recompute}", seconds(found.step)
    )
    memory_row(peak)


def pass_by_pass() -> None:
    """Print the seconds of each pass, with memory that decides nothing or little."""
    for batch, limit, name in ((8, None, "of an H100"), (64, PLENTY, "without limit")):
        section(f"Llama 8B, 32 layers, sequence {SEQUENCE}, batch {batch}, {MESH_TEXT}, memory {name}")
        found, peak = apart(measure, 32, batch, limit)
        passes(found)
        memory_row(peak)


def depth() -> None:
    """Print how planning grows with the number of layers."""
    section(f"Depth: 8B widths, sequence {SEQUENCE}, batch 8, {MESH_TEXT}")
    # With fewer layers there is no traffic of theirs that could be exposed, and nothing to decide about it.
    totals = {}
    for layers in (8, 128):
        found, peak = apart(measure, layers, 8, PLENTY)
        totals[layers] = found.total("strategies")
        row(f"strategies to emit, {layers} layers", seconds(totals[layers]))
        memory_row(peak)
    row("ratio", f"{totals[128] / totals[8]:.2f}", "<= 1.5")


def traced_size() -> None:
    """Print how the first passes grow with the number of nodes."""
    section("Size of the traced program")
    per_layer = (normalize_and_regions(4)[0] - normalize_and_regions(2)[0]) // 2
    layers = -(-NODES // per_layer)
    layers += layers % 2
    found = []
    for count, target in ((layers // 2, ""), (layers, f"<= 1 s from {NODES:,} nodes")):
        (nodes, taken), peak = apart(normalize_and_regions, count)
        found.append((nodes, taken))
        row(f"normalize and regions, {nodes:,} nodes", seconds(taken), target)
        memory_row(peak)
    (half, half_time), (whole, whole_time) = found
    row("ratio of times", f"{whole_time / half_time:.2f}", f"about {whole / half:.2f}")


def short_of_memory() -> None:
    """Print the seconds of each pass where the memory of the device decides."""
    section(f"Where memory is short: Llama 8B, 32 layers, sequence {SEQUENCE}, batch 64, {MESH_TEXT}")
    found, peak = apart(measure, 32, 64)
    passes(found)
    memory_row(peak)


def main(names: Sequence[str]) -> None:
    """Measure and print everything, or the plans of stock sizes whose row contains one of `names`."""
    section(f"Planning, all included, sequence {SEQUENCE}, H100")
    for case in CASES:
        if not names or any(name in case.row for name in names):
            whole(case)
    if not names:
        pass_by_pass()
        depth()
        traced_size()
        short_of_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
