"""Fit what training reaches of a device to a few published runs: `python benchmarks/calibrate.py [device ...]`.

Two figures of a device are fitted, the parts of the peak that matrix products and fused attention reach, so that the
named runs are predicted with the least mean square of relative errors. The result is frozen in `passes.cost.devices`;
all other runs are predicted with it. A test holds the two together.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.replay.clusters import cluster_of  # noqa: E402
from benchmarks.replay.predict import forced_of, replayed  # noqa: E402
from benchmarks.replay.records import read_records, read_run  # noqa: E402

DATA = Path(__file__).parent / "data"
FITTED = ("efficiency", "attention")
# The fit ends where a step of 0.5% helps no more.
FIRST, LAST = 0.15, 0.005


@dataclass(frozen=True)
class Fit:
    """The fitted figures, and what relative errors they leave, by run."""

    figures: Mapping[str, float]
    errors: Mapping[str, float]


def named_runs() -> Mapping[str, Sequence[str]]:
    """The runs that each device is calibrated on, four at most."""
    found: Mapping[str, Sequence[str]] = json.loads((DATA / "calibration.json").read_text())["runs"]
    return found


def fit(runs: Sequence[str]) -> Fit:
    """Fit the device that `runs` ran on."""
    records = {str(record.get("id")): record for record in read_records(DATA / "training_runs.json")}
    problems = []
    for name in runs:
        run = read_run(records[name], name)
        key, cluster = cluster_of(run)
        problems.append((run, key, cluster, *forced_of(run, key)))

    def errors(figures: Sequence[float]) -> dict[str, float]:
        found = {}
        for run, key, cluster, forced, counted, apart in problems:
            efficiency, attention = figures
            device = replace(cluster.device, efficiency=efficiency, attention=attention)
            item = replayed(run, key, replace(cluster, device=device), forced, counted, apart)
            assert item.error is not None
            found[run.id] = item.error
        return found

    def loss(figures: Sequence[float]) -> float:
        return math.sqrt(sum(math.log1p(value) ** 2 for value in errors(figures).values()) / len(problems))

    device = problems[0][2].device
    best = _descend(loss, [float(getattr(device, name)) for name in FITTED])
    return Fit(dict(zip(FITTED, best, strict=True)), errors(best))


def _descend(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Coordinate descent to a local minimum of `loss`; figures stay above 0 and at most 1."""
    best, least, step = list(start), loss(start), FIRST
    while step > LAST:
        moved = False
        for place in range(len(best)):
            for factor in (1 - step, 1 / (1 - step)):
                tried = [*best[:place], min(1.0, best[place] * factor), *best[place + 1 :]]
                value = loss(tried)
                if value < least - 1e-9:
                    best, least, moved = tried, value, True
                    break
        step = step if moved else step / 2
    return best


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", nargs="*", help="those of calibration.json by default")
    chosen = parser.parse_args().device
    logging.disable(logging.ERROR)
    for device, runs in named_runs().items():
        if chosen and device not in chosen:
            continue
        found = fit(runs)
        print(device, ", ".join(f"{name} {value:.3f}" for name, value in found.figures.items()))
        for name, error in found.errors.items():
            print(f"  {name:64}{100 * error:+6.1f}%")


if __name__ == "__main__":
    main()
