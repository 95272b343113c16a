"""A plan as plain data that does not depend on how plans are written down: decisions, rows, numbers, and source.

This file alone reads fields of a plan's JSON. A field that is renamed gets one more path in the tables, so that old and
new versions of autopar give the same record.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from plan_cases import Batch, Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import api
from autopar.testing import run_ranks

Record = dict[str, Any]

# What a record has of a program -> where the program's JSON has it: the first path that exists.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("schedule",),
    "micro_batches": ("micro_batches",),
    "gather_once": ("gather_once",),
    "reduce_once": ("reduce_once",),
    "peak_moment": ("peak_moment", "stages.0.peak_moment"),
    "recompute": ("stages.0.recompute",),
    "decisions": ("stages.0.decisions",),
    "regathered": ("stages.0.regathered", "stages.0.again"),
}
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "seconds": ("seconds",),
    "memory": ("memory", "stages.0.memory"),
    "gap": ("gap",),
    "hidden": ("hidden",),
    "seconds_on_one": ("seconds_on_one",),
}
BLOCKS = ("stages.0.blocks",)
ROW: Mapping[str, tuple[str, ...]] = {
    "kind": ("kind",),
    "name": ("name",),
    "how": ("how",),
    "before": ("before",),
    "after": ("after",),
    "type": ("type",),
    "again": ("rerun", "again"),
}
PLAN: Mapping[str, tuple[str, ...]] = {
    name: (name,)
    for name in ("mesh", "cluster", "optimizer", "precision", "inputs", "constants", "parameters", "whole_ops")
}


def read(data: Any, paths: tuple[str, ...]) -> Any:
    """The value at the first of `paths` ("a.0.b") that exists in JSON. Raises KeyError where none does."""
    for path in paths:
        found = data
        try:
            for part in path.split("."):
                found = found[int(part) if isinstance(found, list) else part]
        except (KeyError, IndexError, TypeError):
            continue
        return found
    raise KeyError(f"a plan has none of {', '.join(paths)}: add its new name to benchmarks/plan_records.py")


def plan_record(plan: autopar.Plan) -> Record:
    """Everything that a plan decides and says, without its source."""
    data = json.loads(plan.to_json())
    record: Record = {"plan": {name: read(data, paths) for name, paths in PLAN.items()}}
    for parameter in record["plan"]["parameters"].values():
        parameter.pop("stages", None)
    record["numbers"] = {"memory_limit": read(data, ("memory_limit",)), **_formulas(plan)}
    record["programs"] = {name: program_record(program) for name, program in read(data, ("programs",)).items()}
    return record


def program_record(data: Any) -> Record:
    """One program of a plan, from its JSON."""
    return {
        **{name: read(data, paths) for name, paths in FIELDS.items()},
        "numbers": {name: read(data, paths) for name, paths in NUMBERS.items()},
        "rows": {
            f"{number} {block['name']} x {block['count']}": [
                {name: read(row, paths) for name, paths in ROW.items()} for row in block["rows"]
            ]
            for number, block in enumerate(read(data, BLOCKS))
        },
    }


def _formulas(plan: autopar.Plan) -> dict[str, float]:
    """The formulas of costs at the planned sizes and at twice the batch; nothing for a plan without them."""
    with contextlib.suppress(autopar.ExpressionError):
        found: dict[str, float] = {"max_batch": plan.max_batch()}
        sizes = json.loads(plan.to_json())["expressions"]["sizes"]
        for name, formula in (("bytes", plan.memory_expression()), ("seconds", plan.step_time_expression())):
            for times in (1, 2):
                values = {**sizes, "batch": sizes["batch"] * times}
                found[f"{name} of {times} batches"] = float(formula.subs(values))
        return found
    return {}


# --- source and effort, which plans do not have -----------------------------------------------------------------------


@contextlib.contextmanager
def sources() -> Iterator[dict[str, str]]:
    """The generated source of all programs that `autopar.plan` plans meanwhile, by name.

    A plan has no source. The function of `autopar.api` that returns an object with `plan` and `programs` is watched,
    whatever its name is.
    """
    found: dict[str, str] = {}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if hasattr(result, "plan") and hasattr(result, "programs"):
                for name, program in result.programs.items():
                    texts = _sources_of(program)
                    found.update({f"{name} {number}" if number else name: text for number, text in enumerate(texts)})
            return result

        return run

    originals = {
        name: item
        for name, item in vars(api).items()
        if isinstance(item, FunctionType) and item not in (autopar.plan, autopar.parallelize)
    }
    try:
        vars(api).update({name: watched(item) for name, item in originals.items()})
        yield found
    finally:
        vars(api).update(originals)


def _sources_of(program: Any) -> Iterator[str]:
    """The source of a program, then that of the programs that it holds."""
    if isinstance(source := getattr(program, "source", None), str):
        yield source
    if dataclasses.is_dataclass(program):
        for item in dataclasses.fields(program):
            yield from _sources_of(getattr(program, item.name))


@contextlib.contextmanager
def effort() -> Iterator[list[float]]:
    """The units of effort that solvers spend meanwhile: one number, or none where the solver does not count."""
    modules = [item for name, item in sorted(sys.modules.items()) if name.startswith("passes.")]
    kind = next((module.Effort for module in modules if hasattr(module, "Effort")), None)
    if kind is None:
        yield []
        return
    total, add = [0.0], kind.add

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.spent
        add(self, *args, **kwargs)
        total[0] += self.spent - before

    kind.add = counted
    try:
        yield total
    finally:
        kind.add = add


# --- programs ---------------------------------------------------------------------------------------------------------


def record_case(case: Case) -> Record:
    """Plan a program; what was decided and generated, and what it took. Where no plan fits, the error and its
    numbers."""
    start = time.perf_counter()
    with effort() as spent, sources() as found:
        try:
            record = _on_ranks(case) if case.ranks else plan_record(_planned(case))
        except autopar.InfeasibleError as error:
            numbers = [float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", str(error))]
            record = {"error": type(error).__name__, "numbers": {"missing": error.missing, "said": numbers}}
        except Exception as error:
            # One program that cannot be planned does not keep the others from being recorded.
            record = {"error": f"{type(error).__name__}: {error}"}
            print(f"{case.name}: {record['error']}", file=sys.stderr)
    record.setdefault("sources", found)
    if "error" not in record and not record["sources"]:
        raise AssertionError("no generated source was seen: mend `sources` in benchmarks/plan_records.py")
    record["cost"] = {"seconds": time.perf_counter() - start, "effort": spent[0] if spent else None}
    return record


def _planned(case: Case) -> autopar.Plan:
    plan = autopar.plan(case.model(), case.mesh, case.inputs(), **case.options)
    if not case.replayed:
        return plan
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        plan.save(path)
        options = {name: value for name, value in case.options.items() if name in ("cluster", "loss")}
        again = autopar.plan(case.model(), case.mesh, case.inputs(), plan=autopar.Plan.load(path), **options)
    if plan_record(plan) != plan_record(again):
        raise AssertionError(f"{case.name}: the replayed plan is another one")
    return again


def _on_ranks(case: Case) -> Record:
    """The plan between gloo ranks, and the source of every program that they run."""
    with tempfile.TemporaryDirectory() as folder:
        record = run_ranks(_called, case.ranks, case.name, folder)[0]
        files = sorted((Path(folder) / "source").glob("*.py"), key=lambda path: path.stat().st_mtime_ns)
        named = [(re.sub(r"_[0-9a-f]{16}$", "", path.stem), path.read_text()) for path in files]
    names = [name for name, _ in named]
    record["sources"] = {f"{name} {names[:number].count(name)}": text for number, (name, text) in enumerate(named)}
    return record


def _called(name: str, folder: str) -> Record:
    """Run one rank: call the model with every batch, in training and in evaluation."""
    from plan_cases import CASES

    (case,) = (item for item in CASES if item.name == name)
    assert isinstance(case.mesh, Mapping)
    os.environ["AUTOPAR_CACHE"] = folder
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = autopar.parallelize(case.model(), mesh, case.inputs(), **case.options)
    for make in case.batches:
        _call(model, make())
    return plan_record(model.plan)


def _call(model: nn.Module, batch: Batch) -> None:
    model.train()
    model.forward_backward(**batch)
    model.eval()
    with torch.no_grad():
        model(**batch)
