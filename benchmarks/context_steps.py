"""A long sequence on four gloo ranks, by each method of attention: `python benchmarks/context_steps.py [--tokens N]`.

A small stock llama takes one sequence. Each method is forced on the mesh of four ranks; one device runs the stock
model. A line has seconds of a forward and backward pass and the memory that the step adds to a rank's process at its
peak (both of the worst rank), as ratios of those of one device, and the relative difference of the loss and of the
worst gradient. All methods take turns, `ROUNDS` times after one to warm up, and the median counts. Ranks share the
cores of the machine, so wall time says what a method costs in all rather than what it saves; CPU time is that of all
ranks together.
"""

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import parallelize
from autopar.testing.ranks import run_ranks
from tests.models import llama

RANKS = 4
ROUNDS = 3
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
ALONE = "one device"
ATTENTION = "@scaled_dot_product_attention"


def methods(tokens: int) -> dict[str, dict[str, dict[str, str]]]:
    """Constraints on attention by the name of a method: gathered keys, rings, and heads between split sequences."""
    stripes = tokens // RANKS
    split = {"model.layers.*.mlp.down_proj/linear": {"in": {"cp": "S(1)"}}}
    forced = {
        "queries": "queries",
        "queries in stripes": f"queries@{stripes}",
        "ring": "ring",
        "ring in stripes": f"ring@{stripes}",
        "Ulysses": "heads",
    }
    return {
        name: {ATTENTION: {"method": {"cp": method}}, **(split if method == "heads" else {})}
        for name, method in forced.items()
    }


@dataclass(frozen=True)
class Measured:
    """Of one rank: medians of seconds, bytes that a step adds at its peak, the loss, and gradients by name."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    loss: float
    gradients: Mapping[str, Tensor]


def _resident(field: str) -> int:
    """A figure of this process in bytes: "VmRSS" now, or "VmHWM" at most since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _measured(steps: Mapping[str, Callable[[], Tensor]], models: Mapping[str, nn.Module]) -> dict[str, Measured]:
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, list[int]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number in range(1 + ROUNDS):
        for name, step in steps.items():
            for model in models.values():
                model.zero_grad()
            gc.collect()
            dist.barrier()
            _forget_peak()
            before, began, began_cpu = _resident("VmRSS"), time.perf_counter(), time.process_time()
            losses[name] = float(step())
            if number:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
                peaks[name].append(_resident("VmHWM") - before)
    found = {}
    for name, step in steps.items():
        models[name].zero_grad()
        step()
        gradients = {
            key: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
            for key, parameter in models[name].named_parameters()
            if (each := parameter.grad) is not None
        }
        median = statistics.median
        found[name] = Measured(median(wall[name]), median(cpu[name]), median(peaks[name]), losses[name], gradients)
    return found


def _step(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    loss.backward()
    return loss.detach()


def _batch(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _on_ranks(tokens: int) -> dict[str, Measured]:
    logging.getLogger("autopar").setLevel(logging.ERROR)
    mesh, batch = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), _batch(tokens)
    models = {
        name: parallelize(_model(tokens), mesh, batch, cluster="ideal", constraints=constraints)
        for name, constraints in methods(tokens).items()
    }
    steps = {name: partial(_step, model, batch) for name, model in models.items()}
    # The stock model runs on the first rank while the others wait.
    stock = _model(tokens) if dist.get_rank() == 0 else nn.Module()
    alone = partial(_step, stock, {**batch, "use_cache": False}) if dist.get_rank() == 0 else partial(torch.zeros, ())
    return _measured({ALONE: alone, **steps}, {ALONE: stock, **models})


def _model(tokens: int) -> nn.Module:
    return llama(**SIZES, max_position_embeddings=tokens)


def _off(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def table(tokens: int) -> Iterator[str]:
    """The lines for a sequence of so many tokens."""
    ranks = run_ranks(_on_ranks, RANKS, tokens, timeout=3600)
    alone = ranks[0][ALONE]
    yield f"one device: {alone.wall_s:.2f} s, {alone.peak_bytes / 2**20:.0f} MiB at the peak of a step"
    yield "| method | wall | CPU of all ranks | memory of a rank | loss | worst gradient |\n|---|---|---|---|---|---|"
    for name in methods(tokens):
        found = [rank[name] for rank in ranks]
        wall, cpu = max(each.wall_s for each in found), sum(each.cpu_s for each in found)
        memory = max(each.peak_bytes for each in found)
        loss = abs(found[0].loss - alone.loss) / abs(alone.loss)
        cells = (f"{wall / alone.wall_s:.2f}", f"{cpu / alone.cpu_s:.2f}", f"{memory / max(alone.peak_bytes, 1):.2f}")
        yield f"| {name} | {' | '.join(cells)} | {loss:.1e} | {_off(found[0].gradients, alone.gradients):.1e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the sequence")
    for line in table(parser.parse_args().tokens):
        print(line, flush=True)


if __name__ == "__main__":
    main()
