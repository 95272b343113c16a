"""Methods of attention on long sequences: `python benchmarks/context.py [--rows NAME,NAME] [--alternatives] [--json]`.

Each row is a published model with sequences of some length, planned from `meta` on H100s with a searched mesh. It says
which method of attention the plan has on which axis. With `--alternatives` every other method of an axis is forced on
the same mesh, and all else planned anew. Needs no accelerator and no weights.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

import autopar
from benchmarks.sizes import GIB
from benchmarks.sizes import ROWS as SIZES

ATTENTION = "scaled_dot_product_attention"
METHODS = ("batch", "heads", "groups", "queries", "ring")


@dataclass(frozen=True)
class Row:
    """A model of `benchmarks/sizes.py`, the number of devices, and the batch: samples, and tokens of each."""

    model: str
    devices: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """The model and the length."""
        return f"{self.model}-{self.length // 1024}k-{self.devices}"


ROWS = (
    Row("llama-3.1-8b", 8, 16, 8192),
    Row("llama-3.1-8b", 8, 1, 131072),
    Row("llama-3.1-8b", 64, 128, 8192),
    Row("llama-3.1-8b", 64, 16, 32768),
    Row("llama-3.1-8b", 64, 1, 131072),
    Row("llama-3.1-8b", 64, 1, 1048576),
    Row("llama-3.1-8b", 512, 4, 1048576),
    Row("llama-3.1-70b", 512, 512, 8192),
    Row("llama-3.1-70b", 256, 64, 32768),
    Row("llama-3.1-70b", 256, 8, 131072),
    Row("llama-3.1-70b", 1024, 2, 1048576),
    Row("qwen3-32b", 128, 256, 8192),
    Row("qwen3-32b", 128, 32, 32768),
    Row("qwen3-32b", 128, 4, 131072),
    Row("qwen3-32b", 1024, 2, 1048576),
)


def inputs_of(row: Row) -> tuple[torch.nn.Module, dict[str, object]]:
    """The stock model of a row without values, and its global batch."""
    size = next(item for item in SIZES if item.name == row.model)
    config = getattr(transformers, f"{size.kind}Config")(**{**size.sizes, "max_position_embeddings": row.length})
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, size.head.format(size.kind))(config).to(size.dtype)
    ids = torch.empty(row.batch, row.length, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def methods_of(plan: autopar.Plan) -> dict[str, str]:
    """The method of attention on each axis."""
    rows = (row for block in plan.programs["train"].stages[0].blocks for row in block.rows)
    how = next(row.how for row in rows if row.kind == "op" and row.name.endswith(ATTENTION)).partition(" (")[0]
    if " " not in how:
        return dict.fromkeys(plan.mesh, how)
    return dict(part.rsplit(" ", 1) for part in how.removeprefix("whole; ").split(", "))


def measure(row: Row, *, alternatives: bool) -> Iterator[dict[str, object]]:
    """Plan a row, and the alternatives on the mesh that it found."""
    model, inputs = inputs_of(row)
    start = time.process_time()
    try:
        plan = autopar.plan(model, row.devices, inputs, cluster="h100")
    except autopar.AutoparError as error:
        yield {"row": row.name, "error": str(error)}
        return
    chosen = methods_of(plan)
    yield {**_figures(row, plan), "planning_s": time.process_time() - start}
    if alternatives:
        for axis, method in ((axis, method) for axis in chosen for method in METHODS):
            if method != chosen[axis].partition("@")[0]:
                demand = {f"@{ATTENTION}": {"method": {axis: method}}}
                try:
                    other = autopar.plan(model, dict(plan.mesh), inputs, cluster="h100", constraints=demand)
                except autopar.AutoparError as error:
                    yield {"row": row.name, "forced": f"{axis} {method}", "error": str(error)}
                else:
                    yield {**_figures(row, other), "forced": f"{axis} {method}"}


def _figures(row: Row, plan: autopar.Plan) -> dict[str, object]:
    program = plan.programs["train"]
    return {
        "row": row.name,
        "mesh": dict(plan.mesh),
        "methods": methods_of(plan),
        "step_s": program.step_s,
        "gap": program.gap,
        "memory_gib": sum(program.memory.values()) / GIB,
        "tokens_per_second_per_device": program.tokens_per_second_per_device,
    }


def line(found: Mapping[str, object]) -> str:
    """A result as a line of text."""
    head = f"{found['row']:28}{found.get('forced', 'chosen'):18}"
    if "error" in found:
        return f"{head}{str(found['error']).splitlines()[0][:150]}"
    mesh, methods = found["mesh"], found["methods"]
    assert isinstance(mesh, dict)
    assert isinstance(methods, dict)
    how = ", ".join(f"{size} {methods.get(axis, 'whole')}" for axis, size in mesh.items())
    seconds = f"{found['planning_s']:6.0f} s" if "planning_s" in found else f"{'':8}"
    return f"{head}{found['step_s']:9.3f} s{found['memory_gib']:7.1f} GiB{seconds}  {how}"


def main() -> None:
    """Measure the rows and print a line of each, or their data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="", help="names, or parts of names, with commas between them")
    parser.add_argument("--alternatives", action="store_true", help="also force the other methods")
    parser.add_argument("--json", action="store_true", help="print data")
    given = parser.parse_args()
    logging.getLogger("autopar").setLevel(logging.ERROR)
    found = []
    for row in (row for row in ROWS if any(part in row.name for part in given.rows.split(","))):
        for each in measure(row, alternatives=given.alternatives):
            found.append(each)
            if not given.json:
                print(line(each), flush=True)
    if given.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
