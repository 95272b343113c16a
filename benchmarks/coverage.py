"""Coverage of stock architectures: traced, split, and equal to one device: `python benchmarks/coverage.py [name ...]`.

Two measurements of each: in small, on gloo processes, against itself on one device; and in its default size with few
layers, planned only, how much of the computation is left to each of four devices. They run in another process, with a
time limit. Results are kept in build/coverage.json and hold for the sources that they were measured with, so that a run
can be continued. docs/coverage.md is written from them at the end.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import autopar  # noqa: E402
from autopar.testing import RankError, compare  # noqa: E402
from tests.architectures import ARCHITECTURES  # noqa: E402

RESULTS = ROOT / "build" / "coverage.json"
DOCUMENT = ROOT / "docs" / "coverage.md"
MESHES: Sequence[Mapping[str, int]] = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})
FOUR: Sequence[Mapping[str, int]] = ({"tp": 4}, {"dp": 2, "tp": 2})
OBJECTIVES = ("train", "infer")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SAMPLES = 4
# As devices are, and with devices and links that take no time to start.
CLUSTERS = ("h100", "ideal")
# The part of the computation that each of four devices should be left with at most, and of how many architectures.
AIM, OF = 0.30, 0.90
# Seconds that one measurement may take.
LIMIT = 600.0
# More memory than any model here needs: what is asked is how far the computation is split.
PLENTY = 1e15

INTRODUCTION = """# Coverage

Written by `make coverage`. What is measured:

- **In small**: every architecture as a tiny model, in float64 (float32 where its operators have no other), in training
  and inference, on gloo processes ({meshes}), against itself on one device: outputs, loss and every gradient. Equal is
  a relative error of at most 1e-9 (1e-4 in float32).
- **In its default size**, with two layers or four, in bfloat16, a batch of 128 texts, 256 sounds or 1,024 images: the
  predicted seconds of computation of each of four H100, on the better of tp 4 and dp 2 x tp 2, as a part of those of
  one. A quarter is perfect. Starting an operator takes time, and so does every message: for small operators it does
  not pay to split them. How far they can be split is the other figure, where starts and messages are free."""

Result = dict[str, Any]


def equality(name: str) -> Result:
    """Trace, plan and compare one architecture in small."""
    one = ARCHITECTURES[name]
    inputs = cast(one.inputs(SAMPLES), one.dtype)
    plan = autopar.plan(one.make().to(one.dtype), MESHES[-1], inputs, cluster="ideal")
    found: Result = {"ops": operators(plan), "whole": list(plan.whole_ops), "comparisons": {}}
    for mesh in MESHES:
        for objective in OBJECTIVES:
            try:
                comparison = compare(one.make(), mesh, inputs, one.dtype, objective=objective, cluster="ideal")
            except Exception as error:
                item: Result = {"failed": one_line(error)}
            else:
                tensor, off = comparison.worst
                item = {"worst": tensor, "error": off}
            found["comparisons"][f"{text(mesh)}, {objective}"] = item
    return found


def compute(name: str) -> Result:
    """The predicted seconds of computation of one architecture in large, on one device and on each of four."""
    one = ARCHITECTURES[name]
    assert one.large is not None
    model, inputs = one.large()
    model, inputs = model.to(torch.bfloat16), cast(inputs, torch.bfloat16)
    found: Result = {}
    for cluster in CLUSTERS:
        plans = {
            text(mesh): autopar.plan(model, mesh, inputs, cluster=cluster, memory_limit=PLENTY)
            for mesh in ({"one": 1}, *FOUR)
        }
        spent = {mesh: computation(plan) for mesh, plan in plans.items()}
        best = plans[min(text(mesh) for mesh in FOUR if spent[text(mesh)] == min(spent[text(mesh)] for mesh in FOUR))]
        found[cluster] = {"seconds on": spent, "repeated": repeated(best)}
    return {**found, "whole": list(best.whole_ops)}


def computation(plan: autopar.Plan) -> float:
    """Predicted seconds of computation of a step."""
    spent = plan.programs["train"].seconds
    return spent["forward compute"] + spent["backward compute"]


def repeated(plan: autopar.Plan) -> list[str]:
    """Names of the operators that several devices compute alike, those with the largest results first."""
    sizes: Counter[str] = Counter()
    for stage in plan.programs["train"].stages:
        for block in stage.blocks:
            for row in block.rows:
                if row.kind == "op" and not all(f"{axis} " in row.how for axis in plan.mesh):
                    dims = re.search(r"\[([^]]*)\]", row.type)
                    size = math.prod(int(dim) for dim in dims[1].split(", ") if dim) if dims else 1
                    sizes[bare(row.name)] += block.count * size
    return [name for name, _ in sizes.most_common(5)]


def bare(key: str) -> str:
    """The operator that a key names."""
    return re.sub(r"\.\d+$", "", key.rpartition("/")[2])


MEASUREMENTS: Mapping[str, Callable[[str], Result]] = {"equality": equality, "compute": compute}


def cast(inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Floating tensors in `dtype`."""
    return {
        name: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for name, leaf in inputs.items()
    }


def text(mesh: Mapping[str, int]) -> str:
    """A mesh in a few placements."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def operators(plan: autopar.Plan) -> int:
    """Operators that a program runs."""
    return sum(
        block.count * sum(row.kind == "op" for row in block.rows)
        for stage in plan.programs["train"].stages
        for block in stage.blocks
    )


def one_line(error: Exception) -> str:
    """The message of an error in one line; of errors of several ranks the first."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, RankError):
        # A rank says its traceback, at whose end is the error.
        errors = re.findall(r"^\w[\w.]*(?:Error|Exception|Interrupt)\b.*(?:\n(?!rank).*)?", str(error), re.MULTILINE)
        said = errors[0] if errors else said
    return re.sub(r"\S*/site-packages/", "", " ".join(said.split()))[:300]


class Worker:
    """A process that measures one architecture after another. It ends, and another is started, where one takes too
    long or ends it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, measurement: str, name: str) -> Result:
        """A result, or why there is none."""
        process = self.process or subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        print(measurement, name, file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], LIMIT)
        line = process.stdout.readline() if ready else ""
        if line:
            found: Result = json.loads(line)
            return found
        self.end()
        return {
            "failed": f"it ended its process with {process.returncode}" if ready else f"it takes over {LIMIT:.0f} s"
        }

    def end(self) -> None:
        """End the process, and whatever it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def work() -> None:
    """Measure what standard input says, and print it as JSON: what a worker does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    # What models print is no answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        measurement, name = line.split()
        print(json.dumps(measured(measurement, name)), file=answers, flush=True)


def measured(measurement: str, name: str) -> Result:
    """A result, or why there is none."""
    try:
        return MEASUREMENTS[measurement](name)
    except Exception as error:
        return {"failed": one_line(error)}


def sources() -> str:
    """A fingerprint of all that results depend on."""
    digest = hashlib.sha256()
    for path in sorted(
        [*ROOT.glob("passes/**/*.py"), *ROOT.glob("autopar/**/*.py"), *ROOT.glob("tests/architectures/*.py")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def problems(name: str, result: Result) -> Iterator[tuple[str, str]]:
    """The differences of a small model: the place, and a line that describes each."""
    if "failed" in result:
        yield "trace or plan", result["failed"]
    allowed = TOLERANCE[ARCHITECTURES[name].dtype]
    for where, item in result.get("comparisons", {}).items():
        if "failed" in item:
            yield where, item["failed"]
        elif not item["error"] <= allowed:
            yield where, f"NOT EQUAL: {item['worst']} has relative error {item['error']:.2e}"


def share(result: Result, cluster: str) -> float | None:
    """The part of the computation that each of four devices is left with, on the better of the meshes."""
    if cluster not in result:
        return None
    spent = result[cluster]["seconds on"]
    found: float = min(spent[text(mesh)] for mesh in FOUR) / spent["one 1"]
    return found


def read() -> dict[str, dict[str, Result]]:
    """Results of earlier runs, by measurement and architecture."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {name: {} for name in MEASUREMENTS}


def run(names: Iterable[str], measurements: Iterable[str], again: bool) -> None:
    """Measure what has no result that holds."""
    state = sources()
    worker = Worker()
    for measurement in measurements:
        for name in names:
            known = read()[measurement].get(name, {})
            if known.get("sources") == state and not again:
                continue
            if measurement == "compute" and (ARCHITECTURES[name].large is None or ARCHITECTURES[name].extra):
                continue
            start = time.perf_counter()
            result = worker(measurement, name)
            result |= {"sources": state, "seconds": round(time.perf_counter() - start, 1)}
            results = read()
            results[measurement][name] = result
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{measurement} of {name}: {verdict(measurement, name, result)}, {result['seconds']} s", flush=True)
            if measurement == "equality":
                for where, line in problems(name, result):
                    print(f"    {where}: {line}", flush=True)
    worker.end()


def verdict(measurement: str, name: str, result: Result) -> str:
    """A result in a few words."""
    if "failed" in result:
        return f"failed: {result['failed']}"
    whole = f"{len(result['whole'])} ops whole"
    if measurement == "compute":
        return ", ".join([*(f"{share(result, cluster):.0%} on {cluster}" for cluster in CLUSTERS), whole])
    return f"{'not ' if list(problems(name, result)) else ''}equal, {result['ops']} ops, {whole}"


def document(results: Mapping[str, Mapping[str, Result]]) -> Iterator[str]:
    """The lines of docs/coverage.md."""
    equal = {name: result for name, result in results["equality"].items() if name in ARCHITECTURES}
    large = {name: result for name, result in results["compute"].items() if name in ARCHITECTURES}
    right = [name for name, result in equal.items() if not list(problems(name, result))]
    traced = [name for name, result in equal.items() if "failed" not in result]
    unsplit = [name for name in traced if equal[name]["whole"]]
    shares = {
        cluster: {name: found for name, result in large.items() if (found := share(result, cluster)) is not None}
        for cluster in CLUSTERS
    }
    compared = sum(len(equal[name]["comparisons"]) for name in traced)
    fine = compared - sum(len(list(problems(name, equal[name]))) for name in traced)
    yield from INTRODUCTION.format(meshes=", ".join(text(mesh) for mesh in MESHES)).splitlines()
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| architectures | {len(equal)} |"
    yield f"| traced and planned | {len(traced)} |"
    yield f"| equal in all comparisons | {len(right)} |"
    yield f"| comparisons, and equal ones | {compared}, {fine} |"
    yield f"| all operators have a rule | {len(traced) - len(unsplit)} |"
    versions = {result["sources"] for found in (equal, large) for result in found.values()}
    yield f"| versions of the sources that these results were measured with | {len(versions)} |"
    for cluster, what in zip(CLUSTERS, ("on H100", "where starts and messages are free"), strict=True):
        low = sum(found <= AIM for found in shares[cluster].values())
        part = f"{low} of {len(shares[cluster])} (aim: {OF:.0%})"
        yield f"| at most {AIM:.0%} of the computation on each of four devices, {what} | {part} |"
    missing = [name for name in ARCHITECTURES if name not in equal]
    if missing:
        yield ""
        yield f"Not measured yet: {', '.join(missing)}."
    for title, extra in (("Architectures that must work", False), ("More architectures", True)):
        yield ""
        yield f"## {title}"
        yield ""
        yield "| architecture | operators | without a rule | equal | worst error | on each of four | free |"
        yield "|---|---|---|---|---|---|---|"
        for name, one in ARCHITECTURES.items():
            if one.extra == extra and name in equal:
                yield row(name, equal[name], large.get(name, {}))
    failing = {name: list(problems(name, result)) for name, result in equal.items() if name not in right}
    if failing:
        yield ""
        yield "## What fails"
        yield ""
        for name, found in failing.items():
            for line, places in grouped(found).items():
                yield f"- **{name}** ({'; '.join(places)}): {escaped(line)}"
    beyond = {name: found for name, found in shares["h100"].items() if found > AIM}
    unplanned = {name: result["failed"] for name, result in large.items() if "failed" in result}
    if beyond or unplanned:
        yield ""
        yield f"## More than {AIM:.0%} of the computation on each of four H100"
        yield ""
        for name, found in sorted(beyond.items(), key=lambda item: -item[1]):
            yield f"- **{name}**, {found:.0%}: {reason(large[name])}"
        for name, line in unplanned.items():
            yield f"- **{name}** is not planned in its default size: {escaped(line)}"


def row(name: str, small: Result, large: Result) -> str:
    """One architecture."""
    left = " | ".join("" if (found := share(large, cluster)) is None else f"{found:.0%}" for cluster in CLUSTERS)
    if "failed" in small:
        return f"| {name} | | | no | | {left} |"
    comparisons = small["comparisons"]
    good = len(comparisons) - len(list(problems(name, small)))
    worst = max((item["error"] for item in comparisons.values() if "error" in item), default=float("nan"))
    whole = ", ".join(f"{count} {op}" for op, count in Counter(map(bare, small["whole"])).items())
    return f"| {name} | {small['ops']} | {whole} | {good} of {len(comparisons)} | {worst:.0e} | {left} |"


def grouped(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Places by what is wrong there."""
    lines: dict[str, list[str]] = {}
    for where, line in found:
        lines.setdefault(line, []).append(where)
    return lines


def reason(result: Result) -> str:
    """Why the computation is not split further, with the operators that it is about."""
    free = share(result, "ideal")
    assert free is not None
    small = free <= AIM
    said = "splitting costs more than it saves" if small else "cannot be split further"
    alike = ", ".join(result["h100" if small else "ideal"]["repeated"])
    whole = ", ".join(f"{count} {op}" for op, count in Counter(map(bare, result["whole"])).items())
    return "; ".join(
        [
            f"{said} ({free:.0%} where starts and messages are free)",
            *([f"computed alike on several: {alike}"] if alike else []),
            *([f"without a rule: {whole}"] if whole else []),
        ]
    )


def escaped(line: str) -> str:
    """A line that Markdown leaves as it is."""
    return re.sub(r"([*_<>|\[\]])", r"\\\1", line)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="architectures; all by default")
    parser.add_argument("--only", choices=MEASUREMENTS, help="one of the measurements")
    parser.add_argument("--again", action="store_true", help="measure also what has a result")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return
    run(options.names or list(ARCHITECTURES), [options.only] if options.only else MEASUREMENTS, options.again)
    DOCUMENT.write_text("\n".join(document(read())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
