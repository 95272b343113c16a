"""How long planning takes, pass by pass: `python benchmarks/planning.py`. Needs no accelerator and no weights.

Short passes are run three times, and the least time counts. Targets stand beside what is measured.
"""

import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

from autopar import huggingface
from autopar.build import compile_model
from autopar.options import Options
from autopar.request import Request, make_request
from passes.capture import Tracing, capture
from passes.ir.errors import InfeasibleError
from passes.normalize import normalize
from passes.regions import fold

MESH = {"dp": 8, "tp": 8}
SEQUENCE = 8192
PASSES = ("capture", "normalize", "regions", "candidates", "solve", "lower", "emit")
# Planning that takes longer than this (seconds after tracing) is run once only.
SHORT = 10.0
RUNS = 3
NODES = 5400


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


def request_for(model: LlamaForCausalLM, batch: int, memory_limit: float | None) -> Request:
    """A training step on a global batch; a limit of None is what an H100 has."""
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long, device="meta")
    options = Options(cluster="h100", memory_limit=memory_limit)
    return make_request(model, MESH, {"input_ids": ids, "labels": ids}, options)


def measure(layers: int, batch: int, memory_limit: float | None = None) -> Measured:
    """Plan a llama, three times if that is short."""
    model = llama(layers)
    request = request_for(model, batch, memory_limit)
    found: list[Mapping[str, float]] = []
    while len(found) < RUNS:
        # What earlier runs left behind is not this one's to clean up.
        gc.collect()
        compiled = compile_model(model, request)
        found.append(compiled.times)
        if sum(compiled.times[name] for name in PASSES[1:]) > SHORT:
            break
    times = {name: min(run[name] for run in found) for name in PASSES}
    return Measured(times, compiled.plan.programs["train"].gap, len(found))


def normalize_and_regions(layers: int) -> tuple[int, float]:
    """The nodes of a traced llama, and the least seconds that bringing it to normal form and folding it take."""
    model = llama(layers)
    request = request_for(model, 8, None)
    program = capture(model, request.inputs, Tracing(True, True, huggingface.tracing(model, request.inputs)))
    least = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        fold(normalize(program))
        least = min(least, time.perf_counter() - start)
    return len(program.ops), least


def row(what: str, measured: str, target: str = "") -> None:
    """Print one line of the table."""
    print(f"{what:58}{measured:>12}  {target}", flush=True)


def seconds(value: float) -> str:
    """Seconds with their unit."""
    return f"{value:.3f} s"


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
    Case("Llama 8B, mesh given", llama_config(4096, 14336, 32, 32), MESH, 64, 8.0),
    Case("Qwen3 8B, mesh given", QWEN, MESH, 64, 8.0),
    Case("Llama 70B, mesh searched", llama_config(8192, 28672, 80, 64), 512, 512, 25.0),
    Case("Llama 405B, mesh searched", llama_config(16384, 53248, 126, 128), 16384, 2048, 45.0),
    Case("Llama 8B, mesh given", llama_config(4096, 14336, 32, 32), {"dp": 4, "cp": 4, "tp": 4}, 64),
    Case("Llama 8B, mesh given", llama_config(4096, 14336, 32, 32), {"pod": 4, "dp": 4, "cp": 2, "tp": 2}, 64),
)


def whole_planning(case: Case) -> None:
    """Plan from the model to the source, and print how long that takes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config).to(torch.bfloat16)
    ids = torch.empty(case.batch, SEQUENCE, dtype=torch.long, device="meta")
    gc.collect()
    start = time.perf_counter()
    compiled = compile_model(
        model, make_request(model, case.mesh, {"input_ids": ids, "labels": ids}, Options(cluster="h100"))
    )
    total = time.perf_counter() - start
    program = compiled.plan.programs["train"]
    mesh = " x ".join(str(size) for size in compiled.plan.mesh.values())
    row(f"{case.name}: {mesh}, batch {case.batch}", seconds(total), f"<= {case.at_most:g} s" if case.at_most else "")
    row("  of that tracing", seconds(compiled.times["capture"]))
    row("  of that solver", seconds(compiled.times["solve"]))
    row("  gap that the solver left", f"{program.gap:.1e}", "<= 1e-6")
    again = ", ".join(program.stages[0].recompute.values()) or "none"
    row(
        f"  predicted step; {program.micro_batches} micro-batches, recompute {again}",
        seconds(sum(program.seconds.values())),
    )


def main() -> None:
    """Measure and print everything."""
    logging.getLogger("autopar").setLevel(logging.ERROR)
    section(f"Planning, all included, sequence {SEQUENCE}, H100")
    for case in CASES:
        whole_planning(case)

    mesh = " x ".join(f"{name} {size}" for name, size in MESH.items())
    plenty = 1e12
    for batch, limit, name in ((8, None, "of an H100"), (64, plenty, "without limit")):
        section(f"Llama 8B, 32 layers, sequence {SEQUENCE}, batch {batch}, {mesh}, memory {name}")
        passes(measure(32, batch, limit))

    section(f"Depth: 8B widths, sequence {SEQUENCE}, batch 8, {mesh}")
    # With fewer layers there is no traffic of theirs that could be exposed, and nothing to decide about it.
    few, many = measure(8, 8, plenty), measure(128, 8, plenty)
    row("candidates to emit, 8 layers", seconds(few.total("candidates")))
    row("candidates to emit, 128 layers", seconds(many.total("candidates")))
    row("ratio", f"{many.total('candidates') / few.total('candidates'):.2f}", "<= 1.5")

    section("Size of the traced program")
    per_layer = (normalize_and_regions(4)[0] - normalize_and_regions(2)[0]) // 2
    layers = -(-NODES // per_layer)
    layers += layers % 2
    (half, half_time), (whole, whole_time) = normalize_and_regions(layers // 2), normalize_and_regions(layers)
    row(f"normalize and regions, {half:,} nodes", seconds(half_time))
    row(f"normalize and regions, {whole:,} nodes", seconds(whole_time), f"<= 1 s from {NODES:,} nodes")
    row("ratio of times", f"{whole_time / half_time:.2f}", f"about {whole / half:.2f}")

    section(f"Where memory is short: Llama 8B, 32 layers, sequence {SEQUENCE}, batch 64, {mesh}, memory of an H100")
    start = time.perf_counter()
    try:
        passes(measure(32, 64))
    except InfeasibleError as error:
        row("no plan found, with tracing", seconds(time.perf_counter() - start), "<= 5 s")
        print(error)


if __name__ == "__main__":
    main()
