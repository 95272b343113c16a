"""Digits that follow each other: axes that split a factor at one place take its digits in mesh order, also where they
have other methods, as the queries of attention have in a ring and alone."""

from collections.abc import Iterable, Mapping, Sequence

from passes.ir.rule import Rule


def share_factors(rule: Rule | None, name: str, other: str) -> bool:
    """Whether two methods split a factor in common."""
    if name == other:
        return True
    own, their = (None, None) if rule is None else (rule.method(name), rule.method(other))
    return own is not None and their is not None and not set(own.factors).isdisjoint(their.factors)


def parsed(method: str) -> tuple[str, int]:
    """The name of a method and the major of its split: "ring@4" is ("ring", 4)."""
    name, _, major = method.partition("@")
    return name, int(major) if major.isdigit() else 1


def begun_tokens(methods: Sequence[str], sizes: Sequence[int], rule: Rule | None = None) -> list[frozenset[str]]:
    """The names of the methods of an op's strategy among allowed methods, for each axis, with the majors that digits
    may begin at: axes that split a factor one after the other begin at one major. On axes of 2, 8 and 4 the digits at
    1, 2 and 16 may all begin at 1, or the last two at 2, as those of a sequence after two samples do."""
    taken: list[tuple[str, int, int]] = []
    found = []
    for method, size in zip(methods, sizes, strict=True):
        name, major = parsed(method)
        begun = {first for first, ways in _taken(taken, name, rule).items() if first * ways == major} | {major}
        taken += [(name, first, size) for first in sorted(begun)]
        found.append(frozenset(f"{name}@{first}" for first in begun))
    return found


def following(rule: Rule | None, methods: Mapping[int, str], sizes: Sequence[int]) -> dict[int, str]:
    """`methods` of an op by axis, in which axes that split a factor at one place have the digits that follow each
    other: a ring on an axis of 2 and queries on one after it are "ring" and "queries@2"."""
    taken: list[tuple[str, int, int]] = []
    found = {}
    for axis, method in sorted(methods.items()):
        name, major = parsed(method)
        ways = _taken(taken, name, rule).get(major, 1) if rule is not None and rule.method(name) else 1
        taken.append((name, major, sizes[axis]))
        found[axis] = method if ways == 1 else f"{name}@{major * ways}"
    return found


def ranks_by_start(methods: Sequence[str], sizes: Sequence[int], axes: Iterable[int]) -> dict[int, int]:
    """The number of ranks of those `axes` whose digits follow each other, by the major that they begin at; the methods
    of all of them split one factor."""
    found: dict[int, int] = {}
    for axis in axes:
        _, major = parsed(methods[axis])
        start = next((first for first, ranks in found.items() if first * ranks == major), major)
        found[start] = found.get(start, 1) * sizes[axis]
    return found


def _taken(taken: Sequence[tuple[str, int, int]], name: str, rule: Rule | None) -> dict[int, int]:
    """The ranks of the axes that split a factor of the method `name` from a major on, by that major; `taken` are the
    methods of axes, the majors that they begin at, and their sizes."""
    found: dict[int, int] = {}
    for other, first, size in taken:
        if share_factors(rule, name, other):
            found[first] = found.get(first, 1) * size
    return found
