"""The cost of running a distributed module, beside the stock model that it was made from.

`python benchmarks/overhead.py` prints a table of ratios with their targets. All that a row compares runs in turn, one
call each, in the same processes; a row has the median of 25 rounds, in seconds of wall time and of the process's CPU
time. The latter says more on a machine that runs other things too. `--rows` names the rows to run, `--json` prints the
figures as JSON.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autopar import parallelize
from autopar.runtime.calls.inputs import BoundCall
from autopar.runtime.generated.random import Randomness
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.comparing import CallComparison, Surroundings
from autopar.runtime.state import mesh_of
from autopar.testing.ranks import run_ranks
from tests.models import llama, tokens

ROUNDS = 25
WARM_UPS = 5

SMALL: Mapping[str, int] = {}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "vocab_size": 512,
}

_aten = torch.ops.aten
# The ops whose results `recompute="selective"` saves.
_SAVED = frozenset({
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
})  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """Medians over the rounds."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """One comparison: `value` beside `target`, with the same ratio in CPU time."""

    name: str
    value: float
    cpu_value: float
    target: float
    at_most: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target


def interleaved(steps: Mapping[str, Callable[[], object]], repeat: int = 1) -> dict[str, Seconds]:
    """Call all `steps` in turn, `ROUNDS` times after some to warm up; a round makes `repeat` calls of each."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    # The collector's runs belong to nothing that is measured; frozen, what is there already costs it no time.
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(WARM_UPS + ROUNDS):
        # Each is first in turn as often as the others.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                steps[name]()
            spent, spent_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            if number >= WARM_UPS:
                wall[name].append(spent / repeat)
                cpu[name].append(spent_cpu / repeat)
        gc.collect()
    gc.enable()
    return {name: Seconds(statistics.median(wall[name]), statistics.median(cpu[name])) for name in names}


def _forward_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    model.zero_grad()
    model(**batch)["loss"].backward()


def _mesh(ranks: int, name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))


# --- one rank ---


def _against_stock(sizes: Mapping[str, int], batch: Mapping[str, Tensor], recompute: str) -> dict[str, Seconds]:
    """A distributed module on one rank, and the stock model under torch's checkpointing where there is recompute:
    "selective" saves the results of the same ops, "plain" is `"selective"` beside checkpoints of whole layers."""
    _quiet()
    level = "selective" if recompute == "plain" else recompute
    stock = llama(**sizes)
    module = parallelize(llama(**sizes), _mesh(1, "dp"), batch, cluster="ideal", recompute=level)
    if recompute != "none":
        _checkpoint(stock, recompute)
    return interleaved(
        {"stock": partial(_forward_backward, stock, batch), "autopar": partial(_forward_backward, module, batch)}
    )


def _policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint(model: nn.Module, level: str) -> None:
    """Run the model's layers under torch.utils.checkpoint."""
    arguments: dict[str, object] = {"use_reentrant": False}
    if level == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)  # type: ignore[operator]


def _drawing() -> dict[str, Seconds]:
    """Dropout of a small tensor, and the same where generated code draws."""
    source = Randomness(0)
    source.advance()
    x = torch.ones(64, 32)

    def drawn() -> None:
        with source.drawn("model.layers.*.dropout/dropout of copy 0", (), torch.device("cpu")):
            nn.functional.dropout(x, 0.1)

    return interleaved({"stock": lambda: nn.functional.dropout(x, 0.1), "autopar": drawn}, repeat=200)


# --- two ranks ---


def _training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> None:
    optimizer.zero_grad()
    model(**batch)["loss"].backward()
    optimizer.step()


def _trained(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], None]:
    parameters = list(model.parameters())
    # `foreach` is the default on accelerators: on CPU each parameter that is a DTensor would cost 150 us. It takes no
    # mixture of both, which parallelize_module leaves.
    foreach = len({isinstance(parameter, DTensor) for parameter in parameters}) == 1
    return partial(_training_step, model, torch.optim.AdamW(parameters, lr=1e-4, foreach=foreach), batch)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The usual plan for a llama: projections by columns, those that end a block by rows."""
    plan: dict[str, ParallelStyle] = {}
    for number in range(len(model.model.layers)):  # type: ignore[union-attr, arg-type]
        layer = f"model.layers.{number}"
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def _two_ranks(sizes: Mapping[str, int], batch: Mapping[str, Tensor]) -> dict[str, Seconds]:
    """One step with AdamW by each way to train on two ranks; every rank has half of the batch, or the whole one."""
    _quiet()
    rank = dist.get_rank()
    half = {name: tensor.chunk(2)[rank] for name, tensor in batch.items()}
    mesh = _mesh(2, "dp")
    module = parallelize(llama(**sizes), mesh, batch)
    models: dict[str, tuple[nn.Module, Mapping[str, Tensor]]] = {
        "autopar": (module, batch),
        "DDP": (nn.parallel.DistributedDataParallel(llama(**sizes)), half),
        "FSDP2": (_fully_sharded(llama(**sizes), mesh), half),
        "parallelize_module": (_tensor_parallel(llama(**sizes), mesh), batch),
    }
    return interleaved({name: _trained(model, inputs) for name, (model, inputs) in models.items()})


def _comparing(batch: Mapping[str, Tensor]) -> dict[str, Seconds]:
    """What a call compares between ranks before it runs, which the ranks come to at the same time."""
    _quiet()
    mesh = _mesh(2, "dp")
    shape = mesh_of(mesh)
    watch = ParameterWatch(llama(num_hidden_layers=8), {}, lambda: None)
    comparison = CallComparison(Agreement(mesh), shape, shape, "dp")
    call = BoundCall(batch, batch, {}, {}, as_planned=True)
    surroundings = Surroundings(True, 1, Randomness(0), "none of its contexts", "cpu")
    steps = {"none": lambda: None, "autopar": lambda: comparison.compare(call, surroundings, watch.flags(), watch)}
    return interleaved(steps)


# --- the table ---


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)


def _ratio(name: str, found: Mapping[str, Seconds], target: float) -> Row:
    ours, stock = found["autopar"], found["stock"]
    return Row(name, ours.wall_s / stock.wall_s, ours.cpu_s / stock.cpu_s, target, at_most=True)


def _one_rank(
    name: str, sizes: Mapping[str, int], batch: Mapping[str, Tensor], recompute: str, target: float
) -> list[Row]:
    (found,) = run_ranks(_against_stock, 1, sizes, batch, recompute, timeout=900.0)
    return [_ratio(name, found, target)]


def _draws(name: str) -> list[Row]:
    _quiet()
    found = _drawing()
    ours, stock = found["autopar"], found["stock"]
    added, added_cpu = ((ours.wall_s - stock.wall_s) * 1e6, (ours.cpu_s - stock.cpu_s) * 1e6)
    return [Row(f"{name} ({stock.cpu_s * 1e6:.0f} us), added", added, added_cpu, 12.0, at_most=True, unit="us")]


def _against_others(name: str, sizes: Mapping[str, int], batch: Mapping[str, Tensor]) -> list[Row]:
    ranks = run_ranks(_two_ranks, 2, sizes, batch, timeout=900.0)
    # A step takes as long as the rank that takes longest.
    slowest = {
        key: Seconds(max(rank[key].wall_s for rank in ranks), max(rank[key].cpu_s for rank in ranks))
        for key in ranks[0]
    }
    ours = slowest.pop("autopar")
    return [
        Row(f"{name}: speed beside {key}", theirs.wall_s / ours.wall_s, theirs.cpu_s / ours.cpu_s, 0.98, at_most=False)
        for key, theirs in slowest.items()
    ]


def _compares(name: str, batch: Mapping[str, Tensor]) -> list[Row]:
    ranks = run_ranks(_comparing, 2, batch, timeout=300.0)
    wall_s, cpu_s = (max(getattr(rank["autopar"], kind) for rank in ranks) for kind in ("wall_s", "cpu_s"))
    # At most 0.1% of a step of one second.
    return [Row(name, wall_s * 1e6, cpu_s * 1e6, 1000.0, at_most=True, unit="us")]


def _rows() -> dict[str, Callable[[], list[Row]]]:
    """The measurements, by the names that `--rows` takes."""
    batch, long = tokens(), tokens(4, 128, 512)
    found: dict[str, Callable[[], list[Row]]] = {}
    for layers in (2, 8, 32):
        sizes = {**SMALL, "num_hidden_layers": layers}
        name = f"one rank, tiny llama of {layers} layers"
        found[f"tiny-{layers}"] = partial(_one_rank, name, sizes, batch, "none", 1.10)
    name = "one rank, hidden 256, 4 layers, 4 x 128 tokens"
    found["wide"] = partial(_one_rank, name, WIDE, long, "none", 1.03)
    for level in ("selective", "full"):
        name = f'recompute="{level}", tiny llama of 8 layers'
        found[level] = partial(_one_rank, name, {"num_hidden_layers": 8}, batch, level, 1.1)
        found[f"wide-{level}"] = partial(
            _one_rank, f'recompute="{level}", hidden 256, 4 layers', WIDE, long, level, 1.1
        )
        if level == "selective":
            name = 'recompute="selective" beside checkpoints of whole layers, tiny llama of 8 layers'
            found["plain"] = partial(_one_rank, name, {"num_hidden_layers": 8}, batch, "plain", 1.1)
    found["draw"] = partial(_draws, "an op that draws random numbers")
    found["compare"] = partial(_compares, "two ranks, comparison of a call, tiny llama of 8 layers", batch)
    found["two"] = partial(_against_others, "two ranks, AdamW, tiny llama of 8 layers", {"num_hidden_layers": 8}, batch)
    found["wide-two"] = partial(_against_others, "two ranks, AdamW, hidden 256, 4 layers", WIDE, long)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rows that are asked for and print them."""
    rows = _rows()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(rows), default=list(rows), help="the rows to measure")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    found: list[Row] = []
    if not options.json:
        print("| | today | in CPU time | target | |\n|---|---|---|---|---|", flush=True)
    for name in options.rows:
        for row in rows[name]():
            found.append(row)
            if not options.json:
                print(_line(row), flush=True)
    if options.json:
        print(json.dumps([{**asdict(row), "met": row.met} for row in found], indent=2))


def _line(row: Row) -> str:
    unit = f" {row.unit}" if row.unit else ""
    bound = "at most" if row.at_most else "at least"
    met = "met" if row.met else "missed"
    return f"| {row.name} | {row.value:.2f}{unit} | {row.cpu_value:.2f}{unit} | {bound} {row.target:g}{unit} | {met} |"


if __name__ == "__main__":
    main()
