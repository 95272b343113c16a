"""Published training runs against the cost model: `python benchmarks/published.py [--json] [--data FILE] [--free]`.

Every run's plan is forced on the traced graph of its model, priced, and held against what was published. Records that
cannot be replayed are listed with a reason. Needs no accelerator and no weights.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.replay.clusters import cluster_of  # noqa: E402
from benchmarks.replay.free import NOTABLE, Planned, is_plain, plan_freely  # noqa: E402
from benchmarks.replay.predict import Replayed, forced_of, replay, waiting  # noqa: E402
from benchmarks.replay.reasons import Reason, SkippedError  # noqa: E402
from benchmarks.replay.records import RecordsError, identity, read_records  # noqa: E402
from benchmarks.replay.scores import Scores, repeated, score  # noqa: E402
from passes.ir.errors import AutoparError  # noqa: E402

DATA = Path(__file__).parent / "data" / "training_runs.json"
GIB = 1024**3


def replay_all(
    records: Sequence[Mapping[str, object]],
) -> tuple[list[Replayed], list[tuple[str, SkippedError]]]:
    """The runs that are predicted, and those that are skipped with the reason."""
    found: list[Replayed] = []
    left: list[tuple[str, SkippedError]] = []
    for number, record in enumerate(records):
        name = identity(record, number)
        try:
            found.append(replay(record, name))
        except SkippedError as error:
            left.append((name, error))
        except (AutoparError, ArithmeticError) as error:
            left.append((name, SkippedError(Reason.TRACE, str(error))))
    return found, left


def plan_all(found: Sequence[Replayed]) -> list[Planned]:
    """The fastest plans for the models and devices of runs without pipeline and context axes."""
    planned = []
    for item in found:
        if is_plain(item.run):
            key, cluster = cluster_of(item.run)
            planned.append(plan_freely(item, forced_of(item.run, key)[0], waiting(item.run, cluster)))
    return planned


def as_json(found: Sequence[Replayed], left: Sequence[tuple[str, SkippedError]]) -> dict[str, object]:
    """Everything, as the data that `--json` prints. Errors are fractions, times seconds, memory bytes."""
    scores = score(found)
    return {
        "records": len(found) + len(left),
        "predicted": [_row(item) for item in found],
        "skipped": [{"id": name, "reason": error.reason.value, "detail": error.detail} for name, error in left],
        "median_step_time_error": scores.median_step_time,
        "p90_step_time_error": scores.p90_step_time,
        "median_memory_error": scores.median_memory,
        "spearman": dict(scores.spearman),
    }


def _row(item: Replayed) -> dict[str, object]:
    return {
        "id": item.run.id,
        "cluster": item.cluster,
        "step_time_s": item.seconds,
        "step_time_source": item.source or None,
        "predicted_step_time_s": item.predicted.total,
        "error": item.error,
        "mfu": item.utilization,
        "predicted_mfu": item.predicted_utilization,
        "memory_bytes": item.run.measured.memory,
        "memory_kind": item.run.measured.memory_kind or None,
        "predicted_memory_bytes": item.predicted_memory,
        "memory_error": item.memory_error,
        "flops_error": item.flops_apart,
    }


def _print(found: Sequence[Replayed], left: Sequence[tuple[str, SkippedError]]) -> None:
    print(f"{'run':52}{'cluster':>13}{'step':>10}{'predicted':>10}{'error':>8}{'MFU':>6}{'pred.':>6}", end="")
    print(f"{'memory':>10}{'pred.':>10}{'error':>8}  step time")
    for item in found:
        print(
            f"{item.run.id[:51]:52}{item.cluster:>13}{_seconds(item.seconds)}{_seconds(item.predicted.total)}", end=""
        )
        print(f"{_percent(item.error, 8, sign=True)}{_percent(item.utilization, 6)}", end="")
        print(f"{_percent(item.predicted_utilization, 6)}{_memory(item.run.measured.memory)}", end="")
        print(f"{_memory(item.predicted_memory)}{_percent(item.memory_error, 8, sign=True)}  {item.source}")
    print("\nleft out:")
    for name, error in left:
        print(f"{name[:51]:52}{error}")
    print("\nleft out, by reason:")
    for reason, count in Counter(error.reason for _, error in left).most_common():
        print(f"{count:6}  {reason.value}")
    _summary(found, left, score(found))


def _summary(found: Sequence[Replayed], left: Sequence[object], scores: Scores) -> None:
    print(f"\n{len(found) + len(left)} records, {len(found)} predicted, {len(left)} left out")
    print(f"step time, median error        {_percent(scores.median_step_time, 8)}   (aim: 10%)")
    print(f"step time, 90th percentile     {_percent(scores.p90_step_time, 8)}   (aim: 20%)")
    print(f"memory, median error           {_percent(scores.median_memory, 8)}   (aim: 10%)")
    print("rank correlation (Spearman; aim: 0.8)")
    for name, value in scores.spearman.items():
        print(f"  {name:40}{value:6.2f}")
    print("records that are equal but for what was measured: how far apart, and what correlation their means reach")
    for name, (count, apart, value) in repeated(found).items():
        print(f"  {name:40}{count:4} records{_percent(apart, 8)}{value:6.2f}")


def _print_planned(planned: Sequence[Planned]) -> None:
    print("\nplanned freely for the same devices (mesh, layouts, ZeRO stage, recompute)")
    print(f"{'run':52}{'published plan':>15}{'free':>11}{'faster':>8}{'memory':>11}")
    for item in planned:
        print(f"{item.run.id[:51]:52}{_seconds(item.published):>15}{_seconds(item.seconds):>11}", end="")
        print(f"{_percent(item.gain, 8)}{_memory(item.memory):>11}")
        if item.gain > NOTABLE:
            print(f"    {item.sentence()}")
    slower = sum(item.seconds > item.published for item in planned)
    notable = sum(item.gain > NOTABLE for item in planned)
    print(f"{len(planned)} planned: {slower} slower than published, {notable} more than {100 * NOTABLE:.0f}% faster")


def _seconds(value: float | None) -> str:
    return f"{value:8.3f} s" if value is not None else f"{'-':>10}"


def _memory(value: float | None) -> str:
    return f"{value / GIB:6.1f} GiB" if value is not None else f"{'-':>10}"


def _percent(value: float | None, width: int, *, sign: bool = False) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{100 * value:{'+' if sign else ''}.1f}%".rjust(width) if width > 6 else f"{100 * value:.0f}%".rjust(width)


def main() -> None:
    """Read the records, replay them and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="a JSON list of records")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument("--free", action="store_true", help="also plan freely for the same models and devices")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    try:
        records = read_records(arguments.data)
    except RecordsError as error:
        raise SystemExit(f"RecordsError: {error}") from None
    found, left = replay_all(records)
    if arguments.json:
        print(json.dumps(as_json(found, left), indent=1))
    else:
        _print(found, left)
        if arguments.free:
            _print_planned(plan_all(found))


if __name__ == "__main__":
    main()
