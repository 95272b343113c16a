"""Records of plans, compared between two versions of autopar. Needs no accelerator and no weights.

    python benchmarks/same_plans.py record OLD.json [NAME ...]
    python benchmarks/same_plans.py compare OLD.json NEW.json [--renames MAP.json]

`record` plans the programs of `plan_cases.py`, or those whose names contain one of the NAMEs. It writes what was
decided, the generated source, and all predicted seconds and bytes. `compare` prints what differs of the programs that
both files have, and exits with 1 if anything does. Decisions, rows and source must be equal, numbers within 1e-9,
relative; a file of renames, `{"old word": "new word"}`, is applied to all text of the old record first. Seconds and
effort of planning are printed, not compared.

PYTHONPATH selects the version of autopar that plans; it may be another checkout:

    PYTHONPATH=OTHER_CHECKOUT python benchmarks/same_plans.py record OTHER.json
"""

import argparse
import difflib
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

# Neighbours come from beside this file, autopar from where Python finds it.
sys.path.insert(0, str(Path(__file__).parent))

from plan_cases import CASES, Case

# Relative to the number; of a gap, which is relative already, to the step.
TOLERANCE = 1e-9
# Lines of source that are printed of a program that differs.
_LINES = 20
_MISSING = "nothing"


__all__ = ["Case", "compare", "differences", "main", "record", "renamed"]


def record(path: str, names: Sequence[str]) -> None:
    """Plan the programs whose names contain one of `names` (all, without any) and write their records to `path`."""
    from plan_records import record_case

    chosen = [case for case in CASES if not names or any(name in case.name for name in names)]
    if not chosen:
        sys.exit(f"no program's name contains any of {', '.join(names)}; there are: {', '.join(c.name for c in CASES)}")
    found: dict[str, Any] = {}
    for case in chosen:
        found[case.name] = record_case(case)
        cost = found[case.name]["cost"]
        effort = "" if cost["effort"] is None else f"{cost['effort']:10.0f} units"
        print(f"{case.name:45}{cost['seconds']:8.1f} s{effort}", flush=True)
        # Each at once, so that the first ones can be compared while the others are planned.
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'all ' + str(len(found)):45}{sum(item['cost']['seconds'] for item in found.values()):8.1f} s")


def renamed(value: Any, renames: Mapping[str, str]) -> Any:
    """`value`, which is JSON, with whole words renamed in all of its text, in keys too."""
    if not renames:
        return value
    words = sorted(renames, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words))

    def change(item: Any) -> Any:
        if isinstance(item, str):
            return pattern.sub(lambda match: renames[match[0]], item)
        if isinstance(item, list):
            return [change(inner) for inner in item]
        if isinstance(item, dict):
            return {change(key): change(inner) for key, inner in item.items()}
        return item

    return change(value)


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """A line for everything in which two records, or parts of them, differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{place} / {key}" if place else str(key)
            yield from differences(old.get(key, _MISSING), new.get(key, _MISSING), inner)
    elif isinstance(old, list) and isinstance(new, list):
        for number, (one, other) in enumerate(zip_longest(old, new, fillvalue=_MISSING)):
            yield from differences(one, other, f"{place}[{number}]")
    elif _is_number(old) and _is_number(new):
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE if place.endswith("gap") else 0.0):
            yield f"{place}: {old!r} -> {new!r} ({_relative(old, new)})"
    elif old != new and isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        yield f"{place}:\n{_text_difference(old, new)}"
    elif old != new:
        yield f"{place}: {old!r} -> {new!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relative(old: float, new: float) -> str:
    return f"{(new - old) / abs(old):+.2e}" if old else "from nothing"


def _text_difference(old: str, new: str) -> str:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "old", "new", lineterm="", n=1))
    left = len(lines) - _LINES
    return "\n".join([*(f"    {line}" for line in lines[:_LINES]), *([f"    … {left} more lines"] if left > 0 else [])])


def compare(old_path: str, new_path: str, renames_path: str | None) -> int:
    """Print what differs between two files of records; returns the exit status."""
    old, new = (json.loads(Path(path).read_text()) for path in (old_path, new_path))
    renames = json.loads(Path(renames_path).read_text()) if renames_path else {}
    common = [name for name in old if name in new]
    if not common:
        print("the two files have no program in common")
        return 1
    differing = 0
    for name in common:
        lines = list(program_differences(old[name], new[name], renames))
        differing += bool(lines)
        print(f"{name:45}{f'{len(lines)} differences' if lines else 'same':16}{_cost(old[name], new[name])}")
        for line in lines:
            print(f"  {line}")
    print(f"{differing} of {len(common)} programs differ")
    return 1 if differing else 0


def program_differences(old: Mapping[str, Any], new: Mapping[str, Any], renames: Mapping[str, str]) -> Iterator[str]:
    """A line for everything in which the records of a program differ, but for what planning it took."""
    before, after = ({key: value for key, value in item.items() if key != "cost"} for item in (old, new))
    yield from differences(renamed(before, renames), after)


def _cost(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Statistics of planning itself, old and new."""
    costs = old["cost"], new["cost"]
    text = f"{costs[0]['seconds']:6.1f} -> {costs[1]['seconds']:6.1f} s"
    if all(cost["effort"] is not None for cost in costs):
        text += f", {costs[0]['effort']:.0f} -> {costs[1]['effort']:.0f} units"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Record plans, and compare them with those of another version.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record", help="plan programs and write what comes out")
    command.add_argument("path", help="the file to write")
    command.add_argument("names", nargs="*", help="parts of names of programs (all)")
    command = commands.add_parser("compare", help="print what differs between two records")
    command.add_argument("old")
    command.add_argument("new")
    command.add_argument("--renames", help="JSON of old words and the new ones in their place")
    given = parser.parse_args(arguments)
    if given.command == "compare":
        return compare(given.old, given.new, given.renames)
    record(given.path, given.names)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("autopar").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.exit(main())
