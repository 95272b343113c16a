"""constrain: matches the user's constraints on the plan against a program in normal form.

Constraints are `{pattern: {what: {axis: layout}}}`. A pattern is matched (fnmatch) against names of parameters, modules
and ops, or is an op kind such as "@linear". `what` is "stored" or "used" (parameters), "in", "out" or "method" (ops,
and modules: what enters and leaves them). A layout is a placement as it prints, or "whole" for both R and I. Of several
constraints on the same placement the longest pattern applies. Axes that are asked for the same split make it one after
the other.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

from passes.ir.arguments import references
from passes.ir.constraints import Constraint, ConstraintTarget, PlacedConstraints
from passes.ir.errors import ConstraintError
from passes.ir.grouping import grouped
from passes.ir.layout import WHOLE, Layout, Placement, R, S, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.program import Op, Program

Constraints = Mapping[str, Mapping[str, Mapping[str, str]]]

# The number of an entry of a list, inside a name.
_NUMBER = re.compile(r"\.\d+(?=[./]|$)")

_WHATS = ("stored", "used", "in", "out", "method")


def parse(constraints: Constraints, mesh: Mesh) -> list[Constraint]:
    """Parse `constraints`.

    Raises ConstraintError for an invalid constraint, MeshError for an axis that the mesh does not have.
    """
    demands = []
    for pattern, whats in constraints.items():
        for what, axes in whats.items():
            if what not in _WHATS:
                raise ConstraintError(f"constraint {pattern!r}: {what!r} is none of {', '.join(_WHATS)}")
            for axis, text in axes.items():
                placement = None
                if what != "method":
                    try:
                        placement = R if text == WHOLE else parse_placement(text)
                    except ValueError as error:
                        raise ConstraintError(f"constraint {pattern!r}, {what}, axis {axis!r}: {error}") from None
                if what == "stored" and placement is not None and placement.kind == "P":
                    raise ConstraintError(f"constraint {pattern!r}: a parameter cannot be stored as a pending sum")
                demands.append(Constraint(pattern, what, mesh.index(axis), placement, text))
    return demands


def constrain(program: Program, constraints: Constraints, mesh: Mesh) -> PlacedConstraints:
    """Find the places that each constraint applies to.

    Raises ConstraintError if a pattern matches nothing, or if two patterns of the same length contradict each other.
    """
    demands = parse(constraints, mesh)
    if not demands:
        return PlacedConstraints({})
    names = _names(program)
    matched = {demand: _places(program, demand, names) for demand in demands}
    for demand, places in matched.items():
        if not places:
            raise _without_match(demand, program)
    placed: dict[ConstraintTarget, dict[int, Constraint]] = {}
    for demand in sorted(demands, key=lambda demand: len(demand.pattern)):
        for place in matched[demand]:
            before = placed.setdefault(place, {}).get(demand.axis)
            if before and len(before.pattern) == len(demand.pattern) and before.method != demand.method:
                raise ConstraintError(
                    f"constraints contradict each other at {place[1]} on axis {mesh.names[demand.axis]!r}: "
                    f"{before} and {demand}"
                )
            placed[place][demand.axis] = demand
    return PlacedConstraints({place: _one_after_the_other(by_axis, mesh) for place, by_axis in placed.items()})


def _one_after_the_other(by_axis: Mapping[int, Constraint], mesh: Mesh) -> dict[int, Constraint]:
    """The constraints on one tensor, where a split that several axes are asked for is split by one after the other, as
    `Shard(0), Shard(0)` of a `DTensor` is."""
    found: dict[int, Constraint] = {}
    taken: dict[Placement, int] = {}
    for axis, demand in sorted(by_axis.items()):
        asked = demand.placement
        if asked is not None and asked.kind == "S":
            ways = taken.get(asked, 1)
            demand = replace(demand, placement=S(asked.dim, asked.major * ways))
            taken[asked] = ways * mesh.sizes[axis]
        found[axis] = demand
    return found


def _without_match(demand: Constraint, program: Program) -> ConstraintError:
    """The error for a pattern that matches nothing, with the nearest names."""
    if demand.what in ("stored", "used"):
        kind = "parameter"
        known = [name for item in program.parameters for name in item.names]
    else:
        kind = "op or module"
        known = [op.key for op in program.ops] + [path for op in program.ops for path in _paths(op.module)]
        if demand.pattern.startswith("@"):
            known = [f"@{op.kind}" for op in program.ops]
    near = get_close_matches(demand.pattern, list(dict.fromkeys(_printed(name) for name in known)), 3, 0.4)
    hint = f"; the nearest names are {', '.join(map(repr, near))}" if near else ""
    if "{" in demand.pattern:
        hint += (
            "; braces are not part of a shell pattern: write one constraint for each alternative, or use * and [...]"
        )
    return ConstraintError(
        f"constraint {demand.pattern!r}, {demand.what}: it matches no {kind}{hint} (plan.table() has all names)"
    )


def _printed(name: str) -> str:
    """A name as a plan prints it, with * for the number of a layer."""
    return _NUMBER.sub(".*", name)


def is_named(op: Op, constraints: Constraints) -> bool:
    """Whether a constraint on ops or modules names `op`, or a module around it."""
    patterns = (pattern for pattern, whats in constraints.items() if set(whats) & {"in", "out", "method"})
    return any(_is_itself(op, pattern) or _around(op.module, pattern) for pattern in patterns)


def stored_as(program: Program, layouts: Mapping[str, Layout]) -> PlacedConstraints:
    """The constraint that parameters are stored in `layouts`: one for all, so that layers that are stored alike remain
    equal."""
    placed: dict[ConstraintTarget, dict[int, Constraint]] = {}
    for parameter in program.parameters:
        placements = enumerate(layouts[parameter.name])
        placed["stored", parameter.name] = {
            axis: Constraint("*", "stored", axis, placement, str(placement)) for axis, placement in placements
        }
    return PlacedConstraints(placed)


@dataclass(frozen=True)
class _Names:
    """The producers and consumers of each tensor, as module paths; `data` are the tensors that depend on the batch or
    on a parameter, parameters themselves excepted."""

    made: Mapping[str, str]
    read: Mapping[str, list[str]]
    data: frozenset[str]


def _names(program: Program) -> _Names:
    made = {name: op.module for op in program.ops for name in op.results}
    inside = [(name, op.module) for op in program.ops for name in op.operands]
    read = grouped([*inside, *((name, "") for value in program.outputs for name in references(value))])
    parameters = {item.name for item in program.parameters}
    data = parameters | {item.name for item in program.inputs}
    for op in program.ops:
        if any(name in data for name in op.operands):
            data.update(name for name in op.results if program.types[name].dtype.is_floating_point)
    return _Names(made, read, frozenset(data - parameters))


def _places(program: Program, demand: Constraint, names: _Names) -> list[ConstraintTarget]:
    """The places that a constraint applies to."""
    if demand.what not in ("stored", "used"):
        return [place for op in program.ops for place in _op_places(op, demand, names)]
    return [
        (demand.what, parameter.name)
        for parameter in program.parameters
        if any(_matches(name, demand.pattern) for name in parameter.names)
    ]


def _op_places(op: Op, demand: Constraint, names: _Names) -> Iterator[ConstraintTarget]:
    """The places of `op` that a constraint on ops or modules applies to."""
    pattern = demand.pattern
    itself = _is_itself(op, pattern)
    around = _around(op.module, pattern)
    if not itself and not around:
        return
    if demand.what == "method":
        yield ("method" if itself else "method within", op.results[0])
    elif demand.what == "out":
        for index, name in enumerate(op.results):
            if itself or any(not _inside(reader, path) for path in around for reader in names.read.get(name, ())):
                yield ("out", op.results[0], str(index))
    else:
        for slot, name in enumerate(op.operands):
            enters = any(not _inside(names.made.get(name, ""), path) for path in around)
            if name in names.data and (itself or enters):
                yield ("in", op.results[0], str(slot))


def _is_itself(op: Op, pattern: str) -> bool:
    """Whether a pattern names the op, by its kind or its key."""
    return pattern == f"@{op.kind}" or _matches(op.key, pattern)


# Modules have many ops, and programs of one model are constrained many times.
@lru_cache(maxsize=1 << 16)
def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name, or the name as a plan prints it: "model.layers.*.mlp" for all layers."""
    return fnmatchcase(name, pattern) or fnmatchcase(_printed(name), pattern)


@lru_cache(maxsize=1 << 16)
def _around(module: str, pattern: str) -> tuple[str, ...]:
    """The modules around an op of `module`, itself among them, that a pattern matches."""
    return tuple(path for path in _paths(module) if _matches(path, pattern))


def _paths(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))] if module else []


def _inside(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")
