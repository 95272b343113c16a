"""Published training runs against the product: `python benchmarks/published.py [--json] [--data FILE] [--free]`.

Every run is planned by the product at its full depth, its plan forced, and held against what was published: as it is,
told what other software does differently, and told only what has a source of its own. Records that cannot be predicted
are listed with a reason. Needs no accelerator and no weights.
"""

import argparse
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.replay.free import NOTABLE, Planned, plan_freely  # noqa: E402
from benchmarks.replay.predict import Known, Replayed, is_alone, predict  # noqa: E402
from benchmarks.replay.reasons import Reason, SkippedError  # noqa: E402
from benchmarks.replay.records import RecordsError, identity, read_records  # noqa: E402
from benchmarks.replay.scores import repeated, score  # noqa: E402
from benchmarks.replay.software import Knowledge  # noqa: E402
from passes.ir.errors import AutoparError  # noqa: E402

DATA = Path(__file__).parent / "data" / "training_runs.json"
GIB = 1024**3


@dataclass(frozen=True)
class Predictions:
    """The records of a file: those that the product predicts, by what it is told; and those that are left out, by name
    with the reason."""

    scored: Mapping[Knowledge, Sequence[Replayed]]
    left: Sequence[tuple[str, SkippedError]]

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.scored[Knowledge.ALL]) + len(self.left)


def predict_all(records: Sequence[Mapping[str, object]], processes: int = 1) -> Predictions:
    """Predict all records that can be, in as many processes; records of one model share its trace."""
    groups: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        groups.setdefault(json.dumps(record.get("model"), sort_keys=True), []).append(number)
    tasks = [[(number, records[number]) for number in group] for group in groups.values()]
    if processes > 1:
        with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
            results = [pair for pairs in pool.map(_predicted, tasks) for pair in pairs]
    else:
        results = [pair for task in tasks for pair in _predicted(task)]
    scored: dict[Knowledge, list[Replayed]] = {knowledge: [] for knowledge in Knowledge}
    left: list[tuple[str, SkippedError]] = []
    for number, result in sorted(results, key=lambda pair: pair[0]):
        if isinstance(result, Mapping):
            for knowledge, item in result.items():
                scored[knowledge].append(item)
        else:
            left.append((identity(records[number], number), SkippedError(*result)))
    return Predictions(scored, left)


# The prediction of a record, or why there is none.
Result = Mapping[Knowledge, Replayed] | tuple[Reason, str]


def _quiet() -> None:
    logging.disable(logging.ERROR)


def _predicted(task: Sequence[tuple[int, Mapping[str, object]]]) -> list[tuple[int, Result]]:
    known: list[Known] = []
    return [(number, _result(record, identity(record, number), known)) for number, record in task]


def _result(record: Mapping[str, object], name: str, known: list[Known]) -> Result:
    try:
        return predict(record, name, known)
    except SkippedError as error:
        return error.reason, error.detail
    except (AutoparError, ArithmeticError) as error:
        return Reason.TRACE, str(error)


def plan_all(found: Sequence[Replayed]) -> list[Planned]:
    """The fastest plans for the models and devices of the runs that the product predicts as they are."""
    return [plan_freely(item) for item in found if not is_alone(item.run)]


def as_json(found: Predictions) -> dict[str, object]:
    """Everything, as the data that `--json` prints. Errors are fractions, times seconds, memory bytes. No prediction is
    left `unscored`."""
    return {
        **_scored(found, Knowledge.ALL),
        Knowledge.NOTHING.value: _scored(found, Knowledge.NOTHING),
        Knowledge.SOURCED.value: _scored(found, Knowledge.SOURCED),
        "unscored": [],
    }


def _scored(found: Predictions, knowledge: Knowledge) -> dict[str, object]:
    items = found.scored[knowledge]
    scores = score(items)
    return {
        "records": found.count,
        "predicted": [_row(item) for item in items],
        "skipped": [{"id": name, "reason": error.reason.value, "detail": error.detail} for name, error in found.left],
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
        "predicted_step_time_s": item.predicted,
        "error": item.error,
        "mfu": item.utilization,
        "predicted_mfu": item.predicted_utilization,
        "memory_bytes": item.run.measured.memory,
        "memory_kind": item.run.measured.memory_kind or None,
        "predicted_memory_bytes": item.predicted_memory,
        "memory_error": item.memory_error,
        "flops_error": item.flops_apart,
    }


def _print(found: Predictions) -> None:
    print(f"{'run':52}{'cluster':>13}{'step':>10}{'predicted':>10}{'error':>8}{'MFU':>6}{'pred.':>6}", end="")
    print(f"{'memory':>10}{'pred.':>10}{'error':>8}  step time")
    _rows(found.scored[Knowledge.ALL])
    print("\nleft out:")
    for name, error in found.left:
        print(f"{name[:51]:52}{error}")
    print("\nleft out, by reason:")
    for reason, count in Counter(error.reason for _, error in found.left).most_common():
        print(f"{count:6}  {reason.value}")
    _summary(found)


def _rows(items: Sequence[Replayed]) -> None:
    for item in items:
        print(f"{item.run.id[:51]:52}{item.cluster:>13}{_seconds(item.seconds)}{_seconds(item.predicted)}", end="")
        print(f"{_percent(item.error, 8, sign=True)}{_percent(item.utilization, 6)}", end="")
        print(f"{_percent(item.predicted_utilization, 6)}{_memory(item.run.measured.memory)}", end="")
        print(f"{_memory(item.predicted_memory)}{_percent(item.memory_error, 8, sign=True)}  {item.source}")


_TITLES = {
    Knowledge.NOTHING: "as it is",
    Knowledge.SOURCED: "with facts that have a source of their own",
    Knowledge.ALL: "with facts about other software",
}


def _summary(found: Predictions) -> None:
    predicted = len(found.scored[Knowledge.ALL])
    print(f"\n{found.count} records, {predicted} predicted, {len(found.left)} left out")
    print(f"{'the product':44}{'steps':>7}{'median':>9}{'90%':>9}{'memories':>10}{'median':>9}")
    for knowledge, title in _TITLES.items():
        items = found.scored[knowledge]
        scores = score(items)
        steps, memories = (sum(value is not None for value in each) for each in zip(*_errors(items), strict=True))
        print(f"{title:44}{steps:7}{_percent(scores.median_step_time, 9)}{_percent(scores.p90_step_time, 9)}", end="")
        print(f"{memories:10}{_percent(scores.median_memory, 9)}")
    items = found.scored[Knowledge.ALL]
    print("rank correlation (Spearman)")
    for name, value in score(items).spearman.items():
        print(f"  {name:40}{value:6.2f}")
    print("records that are equal but for what was measured: how far apart, and what correlation their means reach")
    for name, (count, apart, value) in repeated(items).items():
        print(f"  {name:40}{count:4} records{_percent(apart, 8)}{value:6.2f}")


def _errors(items: Sequence[Replayed]) -> list[tuple[float | None, float | None]]:
    return [(None, None), *((item.error, item.memory_error) for item in items)]


def _print_planned(planned: Sequence[Planned]) -> None:
    print("\nplanned freely for the same devices (mesh, layouts, micro-batches, ZeRO stage, recompute)")
    print(f"{'run':52}{'published plan':>15}{'free':>11}{'faster':>8}{'memory':>11}")
    for item in planned:
        print(f"{item.id[:51]:52}{_seconds(item.published):>15}{_seconds(item.seconds):>11}", end="")
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
    """Read the records, predict them and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="a JSON list of records")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument("--free", action="store_true", help="also plan freely for the same models and devices")
    arguments = parser.parse_args()
    _quiet()
    try:
        records = read_records(arguments.data)
    except RecordsError as error:
        raise SystemExit(f"RecordsError: {error}") from None
    found = predict_all(records, processes=os.cpu_count() or 1)
    if arguments.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _print(found)
        if arguments.free:
            _print_planned(plan_all(found.scored[Knowledge.NOTHING]))


if __name__ == "__main__":
    main()
