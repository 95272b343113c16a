"""What of the stock architectures is traced, split, and equal to itself: `python benchmarks/coverage.py [name ...]`.

Every architecture has a process of its own with a time limit. Results are kept in build/coverage.json and hold for the
sources they were measured with, so that a run can be continued. Writes docs/coverage.md from all that hold.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import autopar  # noqa: E402
from autopar.testing import compare  # noqa: E402
from tests.architectures import ARCHITECTURES  # noqa: E402

RESULTS = ROOT / "build" / "coverage.json"
MESHES = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})
OBJECTIVES = ("train", "infer")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SAMPLES = 4
# Seconds that one architecture may take.
LIMIT = 400.0

Result = dict[str, Any]


def measure(name: str) -> Result:
    """Trace, plan and compare one architecture."""
    one = ARCHITECTURES[name]
    start = time.perf_counter()
    found: Result = {"comparisons": {}}
    try:
        model, inputs = one.make(), one.inputs(SAMPLES)
        plan = autopar.plan(model, MESHES[-1], inputs, cluster="ideal")
    except Exception as error:
        return {**found, "failed": one_line(error), "seconds": time.perf_counter() - start}
    found["ops"] = sum(
        block.count * sum(row.kind == "op" for row in block.rows)
        for stage in plan.programs["train"].stages
        for block in stage.blocks
    )
    found["whole"] = list(plan.whole_ops)
    for mesh in MESHES:
        for objective in OBJECTIVES:
            what = f"{' x '.join(f'{axis} {size}' for axis, size in mesh.items())}, {objective}"
            try:
                comparison = compare(model, mesh, inputs, one.dtype, objective=objective, cluster="ideal")
            except Exception as error:
                found["comparisons"][what] = {"failed": one_line(error)}
            else:
                tensor, error = comparison.worst
                found["comparisons"][what] = {"worst": tensor, "error": error}
    return {**found, "seconds": time.perf_counter() - start}


def one_line(error: Exception) -> str:
    """What an error says, in a line; of what ranks say the first error."""
    text = str(error)
    if isinstance(error, autopar.testing.RankError):
        # A rank says its traceback, at whose end is the error.
        said = re.findall(r"^\w[\w.]*(?:Error|Exception|Warning|Interrupt)\b.*(?:\n(?!rank).*)?", text, re.MULTILINE)
        text = said[0] if said else text
        return " ".join(text.split())[:300]
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]


def in_process(name: str) -> Result:
    """Measure one architecture in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, said = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        out, said = "", f"it took longer than {LIMIT:.0f} s"
    finally:
        # Whatever the process started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = said.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    return {"comparisons": {}, "failed": last[0][:300], "seconds": time.perf_counter() - start}


def sources() -> str:
    """A fingerprint of all that results depend on."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("passes/**/*.py"), *ROOT.glob("autopar/**/*.py"), ROOT / "tests/architectures.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def problems(name: str, result: Result) -> list[tuple[str, str]]:
    """What is not as it should be: the phase and a line on it."""
    if "failed" in result:
        return [("trace or plan", result["failed"])]
    found = []
    allowed = TOLERANCE[ARCHITECTURES[name].dtype]
    for what, item in result["comparisons"].items():
        if "failed" in item:
            found.append((what, item["failed"]))
        elif not item["error"] <= allowed:
            found.append((what, f"NOT EQUAL: {item['worst']} has relative error {item['error']:.2e}"))
    return found


def read() -> dict[str, Result]:
    """Results of earlier runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what has no result yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--one", metavar="NAME", help="measure this one in this process, and print JSON")
    parser.add_argument("--again", action="store_true", help="measure also what has a result")
    options = parser.parse_args(arguments)
    if options.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        print(json.dumps(measure(options.one)))
        return
    state = sources()
    for name in options.names or ARCHITECTURES:
        results = read()
        if not options.again and results.get(name, {}).get("sources") == state:
            continue
        result = {**in_process(name), "sources": state}
        results = read()
        results[name] = result
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        wrong = problems(name, result)
        whole = len(result.get("whole", ()))
        print(f"{name:34}{result['seconds']:6.1f} s  {result.get('ops', 0):5} ops {whole:3} whole  {'equal' if not wrong else ''}", flush=True)
        for phase, line in wrong:
            print(f"    {phase}: {line}", flush=True)


if __name__ == "__main__":
    main()
