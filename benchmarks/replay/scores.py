"""Errors of predictions over many records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.replay.predict import Replayed
from benchmarks.replay.records import Measured, Run

# Groups of fewer plans have no order to speak of.
LEAST = 4


@dataclass(frozen=True)
class Scores:
    """Errors as fractions, None where nothing was measured; rank correlations by sweep."""

    median_step_time: float | None
    p90_step_time: float | None
    median_memory: float | None
    spearman: Mapping[str, float]


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` of `values` do not exceed, between neighbours in proportion."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda number: values[number])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            found[order[place]] = (start + end) / 2
        start = end + 1
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of the ranks of two lists of one length. 0 where one of them is all equal."""
    first, second = ranks(left), ranks(right)
    mean = (len(first) - 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    bottom = (sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)) ** 0.5
    return top / bottom if bottom else 0.0


def score(found: Sequence[Replayed]) -> Scores:
    """The scores of what was predicted. Sweeps are ranked by tokens/s of a device, as their sources rank them: other
    sizes of the batch and of the cluster do not change it."""
    errors = [abs(item.error) for item in found if item.error is not None]
    memory = [abs(item.memory_error) for item in found if item.memory_error is not None]
    return Scores(
        median(errors) if errors else None,
        percentile(errors, 0.9) if errors else None,
        median(memory) if memory else None,
        {
            name: spearman(
                [_throughput(item, item.seconds or 0.0) for item in items],
                [_throughput(item, item.predicted) for item in items],
            )
            for name, items in _sweeps(found).items()
        },
    )


def _sweeps(found: Sequence[Replayed]) -> dict[str, list[Replayed]]:
    """Predictions and measurements by group."""
    groups: dict[str, list[Replayed]] = {}
    for item in found:
        if item.seconds is not None:
            groups.setdefault(item.run.group, []).append(item)
    return {name: items for name, items in sorted(groups.items()) if len(items) >= LEAST}


def repeated(found: Sequence[Replayed]) -> dict[str, tuple[int, float, float]]:
    """Of each group with records that differ in nothing but their names and what was measured: how many they are, how
    far the slowest and the fastest of equal ones are apart at most, and the rank correlation of the group if all
    records were predicted as the means of their equals: about the most that a function of the records can reach."""
    result = {}
    for name, items in _sweeps(found).items():
        rates: dict[Run, list[float]] = {}
        for item in items:
            rates.setdefault(_plan(item), []).append(_throughput(item, item.seconds or 0.0))
        several = [values for values in rates.values() if len(values) > 1]
        if not several:
            continue
        measured = [_throughput(item, item.seconds or 0.0) for item in items]
        means = [sum(rates[_plan(item)]) / len(rates[_plan(item)]) for item in items]
        apart = max(max(values) / min(values) - 1 for values in several)
        result[name] = (sum(map(len, several)), apart, spearman(measured, means))
    return result


def _plan(item: Replayed) -> Run:
    """A run without its name and what was measured and remarked of it."""
    nothing = Measured(None, None, None, None, None, "")
    return replace(item.run, id="", measured=nothing, notes="", software=replace(item.run.software, slower=1.0))


def _throughput(item: Replayed, seconds: float) -> float:
    """Tokens/s of one device."""
    return item.run.tokens / (seconds * item.run.devices)
