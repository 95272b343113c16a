"""Training steps on one device: predicted, measured, and beside the stock model; their peaks of memory too.

`python benchmarks/device.py` runs on a CUDA device. Each row trains a model with AdamW in a process of its own: the
stock model first, then the distributed module on a mesh of one, from the same sizes. Seconds are medians of steps
between synchronizations; peaks are what the allocator counted in a step. Steps are predicted with the figures of the
planner's table for this device and with those of a profile, which is measured first (or given by `--profile`).
`--json` writes the figures; `--kernels` names a folder for the seconds of each kernel.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.profile import QUICK, known_cluster, profile
from autopar.testing.ranks import RankError, run_ranks
from passes.cost.cluster import GIB, Cluster

STEPS, WARM_UPS = 8, 3


@dataclass(frozen=True)
class Case:
    """A model that is trained with AdamW on one device, in bfloat16."""

    kind: str
    sizes: Mapping[str, object]
    batch: int
    length: int
    options: Mapping[str, object] = field(default_factory=dict)


def _llama(width: int, inner: int, layers: int, heads: int, vocabulary: int, **more: object) -> Mapping[str, object]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 17,
        **more,
    }


_8B = _llama(4096, 14336, 8, 32, 128256)
_1B = _llama(2048, 8192, 16, 32, 128256, tie_word_embeddings=True)
# The sizes of published models, some with fewer layers: parameters, gradients and both moments fit a device.
CASES: Mapping[str, Case] = {
    "Llama 3.2 1B": Case("Llama", _1B, 2, 4096),
    "Llama 3.2 1B, recompute": Case("Llama", _1B, 4, 4096, {"recompute": "full"}),
    "Llama 3 8B, 8 layers": Case("Llama", _8B, 2, 4096),
    "Llama 3 8B, 8 layers, 32k tokens": Case("Llama", _8B, 1, 32768, {"recompute": "full"}),
    "Qwen3 1.7B": Case(
        "Qwen3", _llama(2048, 6144, 28, 16, 151936, head_dim=128, tie_word_embeddings=True), 1, 4096
    ),
    "GPT-2 XL": Case(
        "GPT2",
        {
            "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        4,
        1024,
    ),
    "a small llama": Case("Llama", _llama(512, 1408, 8, 8, 32000), 2, 512),
}  # fmt: skip
# Rows that a CPU can run.
TINY: Mapping[str, Case] = {
    "a tiny llama": Case("Llama", _llama(64, 128, 2, 8, 128), 2, 64),
    "a tiny llama, recompute": Case("Llama", _llama(64, 128, 2, 8, 128), 2, 64, {"recompute": "full"}),
}


@dataclass(frozen=True)
class Figures:
    """Seconds of a step and bytes at its peak: stock (None where it does not fit), distributed, and predicted."""

    stock_s: float | None
    step_s: float
    tabled_s: float
    profiled_s: float
    stock_bytes: int | None
    peak_bytes: int
    planned_bytes: float
    planning_s: float
    # By part, as predicted with the profile.
    parts_s: Mapping[str, float]


def _model(case: Case) -> nn.Module:
    config = getattr(transformers, f"{case.kind}Config")(**case.sizes)
    name = "GPT2LMHeadModel" if case.kind == "GPT2" else f"{case.kind}ForCausalLM"
    model: nn.Module = getattr(transformers, name)(config).bfloat16()
    return model


def _trained(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        # Plans count outputs until the step ends.
        outputs = model(**batch)
        outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _measured(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Seconds of a step and bytes at its peak."""
    for _ in range(WARM_UPS):
        step()
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _run(case: Case, device_type: str, profiled: str, kernels: str | None) -> Figures:
    """The figures of one row, on the one rank of a process group."""
    device = torch.device(device_type)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(str(case.sizes["vocab_size"]))
    ids = torch.randint(0, vocabulary, (case.batch, case.length), generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids}
    stock: tuple[float, int] | tuple[None, None] = None, None
    if not case.options:
        with device:
            model = _model(case)
        stock = _measured(_trained(model, batch), device)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    mesh = init_device_mesh(device_type, (1,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = _model(case)
    known = known_cluster(device_type)
    predicted = autopar.plan(model, {"dp": 1}, batch, cluster=Cluster.load(profiled), **case.options)  # type: ignore[arg-type]
    began = time.perf_counter()
    module = autopar.parallelize(model, mesh, batch, cluster=known, **case.options)  # type: ignore[arg-type]
    planning_s = time.perf_counter() - began
    module.init_weights()
    step = _trained(module, batch)
    step_s, peak = _measured(step, device)
    if kernels is not None:
        _save_kernels(step, Path(kernels))
    plan = module.plan
    return Figures(
        stock[0],
        step_s,
        plan.programs["train"].step_s,
        predicted.programs["train"].step_s,
        stock[1],
        peak,
        sum(plan.programs["train"].memory.values()),
        planning_s,
        predicted.programs["train"].seconds,
    )


def _save_kernels(step: Callable[[], None], path: Path) -> None:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA], record_shapes=True
    ) as found:
        step()
        torch.cuda.synchronize()
    averages = found.key_averages(group_by_input_shape=True)
    path.write_text(averages.table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90))


def main() -> None:
    """Run the rows that are asked for, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", nargs="*", help="the rows to run (all)")
    parser.add_argument("--profile", metavar="FILE", help="a cluster file that `autopar profile` wrote on this machine")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--kernels", metavar="FOLDER")
    given = parser.parse_args()
    cases = CASES if given.device == "cuda" else TINY
    with tempfile.TemporaryDirectory() as folder:
        profiled = given.profile or f"{folder}/profile.json"
        if given.profile is None:
            run_ranks(_profile, 1, profiled, given.device, device_type=given.device)
        found: dict[str, Figures] = {}
        print("| model | stock | distributed | tables | profile | planned | allocated | stock |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for number, name in enumerate(given.rows or cases):
            kernels = f"{given.kernels}/{number}.txt" if given.kernels else None
            try:
                (row,) = run_ranks(_run, 1, cases[name], given.device, profiled, kernels, device_type=given.device)
            except RankError as error:
                print(f"| {name} | {str(error).strip().splitlines()[-1]} |", flush=True)
                continue
            found[name] = row
            print(_line(name, row), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({name: asdict(row) for name, row in found.items()}, indent=2))


def _profile(path: str, device_type: str) -> None:
    profile(path, device_type, None if device_type == "cuda" else QUICK)


def _line(name: str, row: Figures) -> str:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value * 1e3:.1f} ms"

    def beside(value: float) -> str:
        return f"{seconds(value)} ({value / row.step_s:.3f})"

    def size(value: float | None) -> str:
        return "" if value is None else f"{value / GIB:.3f} GiB"

    planned = f"{size(row.planned_bytes)} ({row.planned_bytes / max(1, row.peak_bytes):.4f})"
    cells = [name, seconds(row.stock_s), seconds(row.step_s), beside(row.tabled_s), beside(row.profiled_s), planned]
    return f"| {' | '.join([*cells, size(row.peak_bytes), size(row.stock_bytes)])} |"


if __name__ == "__main__":
    main()
