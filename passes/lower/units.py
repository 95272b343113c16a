"""units: the FSDP units, in which torch gathers parameters and reduces their gradients in place of the generated code.

The axes that a unit takes of a parameter are those of `ir.unit_axes`; its steps come first, the others follow in the
generated code.

Where all-to-alls on other axes are planned before the gather, because less is sent that way, the unit gathers a copy
that these produce (`FSDPUnit.turned`), once in each forward pass, for all parameters before the first is gathered.

Parameters that the backward pass reads are in a unit that is regathered for it or in one that is not, as the solver
decided for each. Those of which it reads a copy that generated code makes of the gathered parameter are in a unit of
their own, which is freed after use. The others, such as biases, join a unit that is regathered where there is one; the
price does not count them again.

Parameters that are read as they are stored are not gathered (`FSDPUnit.gathers`): the unit only reduces their
gradients, and nothing is called around the code that reads them.

All other steps stay in the generated code. So do those of a parameter that is read in several places: a unit would keep
it gathered between them.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeVar

import torch

from passes._torch import schema_of
from passes.ir.arguments import find_overload
from passes.ir.grouping import grouped
from passes.ir.layout import Layout, R
from passes.ir.lowered import Body, Compute, FSDPUnit, FSDPUnits, Loop, Redistribution, Stage, Statement
from passes.ir.mesh import Mesh
from passes.ir.program import Parameter
from passes.ir.redistribution import redistribution
from passes.ir.unit_axes import UnitAxes, unit_axes

T = TypeVar("T")

# Where a parameter is read: in a copy of a loop (their numbers), or by an op outside of loops (its key). None for what
# is no such place: several of them, or something else.
_Place = tuple[int, int] | str | None
# The common properties of the parameters of one unit.
_Signature = tuple[_Place, tuple[int, ...], tuple[int, ...], torch.dtype, tuple[torch.dtype | None, torch.dtype | None]]

# The tensor that the backward pass reads: the parameter of a unit, gathered again or kept; a copy of it; or none.
_Reading = Literal["regathered", "kept", "copied", "unread"]

# Ops whose backward pass reads no parameter, only where its gradient goes.
_TABLES = {"embedding"}


@dataclass(frozen=True)
class _Use:
    """One use of a parameter; `change` is None if it is read as it is stored."""

    place: _Place
    change: Redistribution | None


def fsdp_units(
    stage: Stage,
    mesh: Mesh,
    units: Sequence[FSDPUnit] | None = None,
    gather_once: bool = False,
    apart: Set[str] = frozenset(),
) -> Stage:
    """`stage` with its FSDP units, and the redistributions marked that they run.

    `units` are the existing units of the model's parameters, if any, which another program of the same model reuses
    where they fit. With `gather_once` parameters stay gathered for all micro-batches. Those in `apart` are in no unit.
    """
    uses = {name: [] if name in apart else own for name, own in _uses(stage).items()}
    if units is None:
        units = _formed(stage, uses, mesh, gather_once)
        gathered = _placed(stage, uses, units, mesh).gathered
        left = [{name: dim for name, dim in unit.parameters.items() if name in gathered} for unit in units]
        units = [replace(unit, parameters=names) for unit, names in zip(units, left, strict=True) if names]
    return _marked(stage, _placed(stage, uses, units, mesh), mesh)


def _uses(stage: Stage) -> dict[str, list[_Use]]:
    """All uses of every parameter, by its own name."""
    found: dict[str, list[_Use]] = {name: [] for name in stage.parameters}
    readers = _readers(stage.body)
    for name, statement in _reads(stage.body):
        if name in found:
            change = statement if isinstance(statement, Redistribution) else None
            found[name].append(_Use(None if change is None else readers.get(change.result), change))
    for number, loop in enumerate(stage.loops):
        for name, statement in _reads(loop.body):
            change = statement if isinstance(statement, Redistribution) else None
            for copy, own in enumerate(loop.owned.get(name, (name,) * len(loop.copies))):
                if own in found:
                    found[own].append(_Use((number, copy), change))
    return found


def _reads(body: Body) -> Iterator[tuple[str, Statement | None]]:
    """The values that a body reads, and the statement that reads each; None for its results. Statements inside its
    loops are left out."""
    yield from ((name, statement) for statement in body.statements for name in statement.reads)
    yield from ((name, None) for name in body.results)


def _readers(body: Body) -> dict[str, str | None]:
    """The op that reads a value, by the value; None if another statement does, or several ops do."""
    found = grouped(
        (name, statement.op.key if isinstance(statement, Compute) and _may_be_surrounded(statement) else None)
        for name, statement in _reads(body)
    )
    return {name: readers[0] if len(set(readers)) == 1 else None for name, readers in found.items()}


def _may_be_surrounded(statement: Compute) -> bool:
    """Whether parameters can be gathered for the duration of an op alone: not if its result is a view of them, nor if
    it draws random numbers, in a context of its own."""
    views = any(result.alias_info is not None for result in schema_of(find_overload(statement.op.target)).returns)
    return not views and statement.draws is None


def _place(uses: Sequence[_Use]) -> _Place:
    """The single place of all uses."""
    places = {use.place for use in uses}
    return places.pop() if len(places) == 1 else None


# --- forming units ----------------------------------------------------------------------------------------------------


def _formed(stage: Stage, uses: Mapping[str, Sequence[_Use]], mesh: Mesh, gather_once: bool) -> list[FSDPUnit]:
    """One unit for the parameters that are read in one place, take the same steps on the same axes, and are read alike
    by the backward pass. Those of recomputed copies are regathered."""
    members: dict[_Signature, dict[_Reading, list[tuple[str, UnitAxes]]]] = {}
    for parameter in stage.program.parameters:
        own = uses[parameter.name]
        if not own:
            continue
        place, axes = _place(own), _axes(parameter, stage.parameters[parameter.name], own, mesh)
        if axes is not None and place is not None:
            changes = [use.change for use in own if use.change is not None]
            signature = (place, axes.sharded, axes.replicated, parameter.type.dtype, changes[0].dtypes)
            reading = _reading(changes, axes, mesh, gather_once)
            members.setdefault(signature, {}).setdefault(reading, []).append((parameter.name, axes))
    recomputed = {number for number, loop in enumerate(stage.loops) if loop.recompute == "full" and not gather_once}
    tables = {item.op.key for item in stage.body.statements if isinstance(item, Compute) and item.op.kind in _TABLES}
    units = []
    for (place, sharded, replicated, _, dtypes), readings in members.items():
        is_read = place not in tables
        # Replicated parameters are copied for use, not sent: they need not stay gathered.
        always = not sharded or not is_read or (isinstance(place, tuple) and place[0] in recomputed)
        for reading, found in _by_reading(readings, always=always):
            dims = {name: axes.layout[sharded[0]].dim if sharded else 0 for name, axes in found}
            turned = {name: axes.layout for name, axes in found if axes.layout != stage.parameters[name]}
            regathered = reading in ("regathered", "copied")
            saved = is_read and reading != "copied"
            units.append(FSDPUnit(dims, sharded, replicated, saved, regathered, dtypes, turned))
    return units


def _reading(changes: Sequence[Redistribution], axes: UnitAxes, mesh: Mesh, gather_once: bool) -> _Reading:
    """The way in which the backward pass reads a parameter that `changes` redistribute. One that is gathered once for
    all micro-batches is kept."""
    if any(change.regathered for change in changes):
        return "regathered"
    saved = [change for change in changes if change.saved]
    if not saved:
        return "unread"
    steps = (step for each in saved for step in redistribution(axes.gathered, each.after, each.type.shape, mesh))
    return "copied" if not gather_once and any(step.moves for step in steps) else "kept"


def _by_reading(readings: Mapping[_Reading, Sequence[T]], *, always: bool) -> Iterator[tuple[_Reading, Sequence[T]]]:
    """The members of units by how the backward pass reads them: `always` all from one that is regathered. What it does
    not read goes to that one if there is any, or else to the others."""
    if always:
        yield "regathered", [member for own in readings.values() for member in own]
        return
    joined = next(reading for reading in ("regathered", "kept", "copied", "unread") if reading in readings)
    for reading, own in readings.items():
        if reading != "unread" or joined == "unread":
            yield reading, [*own, *(readings.get("unread", ()) if reading == joined != "unread" else ())]


def _axes(parameter: Parameter, stored: Layout, uses: Sequence[_Use], mesh: Mesh) -> UnitAxes | None:
    """The axes of a parameter that a unit can take; None for none."""
    type = parameter.type
    used = [use.change.after for use in uses if use.change is not None]
    if len(used) < len(uses) or not type.size or not type.shape or not type.dtype.is_floating_point:
        return None
    return unit_axes(stored, used, type.shape, parameter.trainable, mesh)


def _grows(used: Layout, change: Redistribution, mesh: Mesh) -> bool:
    """Whether none of the steps after the unit's shrinks the tensor."""
    steps = redistribution(used, change.after, change.type.shape, mesh)
    return all(prod(step.after) >= prod(step.before) for step in steps)


# --- places of units -------------------------------------------------------------------------------------------------


def _placed(stage: Stage, uses: Mapping[str, Sequence[_Use]], units: Sequence[FSDPUnit], mesh: Mesh) -> FSDPUnits:
    """The units of this stage, from `units`, and the places where they are called."""
    gathered: set[str] = set()
    for unit in units:
        names = {name for name in unit.parameters if uses.get(name) and _fits(name, stage, uses, unit, mesh)}
        # A unit gathers around one place; a program that is folded differently has none for it.
        if len({_place(uses[name]) for name in names} - {None}) == 1:
            gathered.update(name for name in names if _place(uses[name]) is not None)
    # A region is generated once: a parameter of its body is gathered in all copies, in the same way, or in none.
    ways = {
        name: (unit.sharded, unit.replicated, unit.regathered, unit.turned.get(name))
        for unit in units
        for name in unit.parameters
    }
    bodies = [own for loop in stage.loops for own in loop.owned.values() if own[0] in stage.parameters]
    while torn := [own for own in bodies if gathered.intersection(own) and not _alike(own, gathered, ways)]:
        gathered.difference_update(*torn)
    called = grouped(
        (place, number)
        for number, unit in enumerate(units)
        for place in {_place(uses[name]) for name in gathered.intersection(unit.parameters) if unit.gathers}
    )
    around = {place: tuple(numbers) for place, numbers in called.items()}
    copies = tuple(
        tuple(around.get((number, copy), ()) for copy in range(len(loop.copies)))
        for number, loop in enumerate(stage.loops)
    )
    ops = {place: numbers for place, numbers in around.items() if isinstance(place, str)}
    places = tuple(around[place] for place in _places(stage) if place in around)
    return FSDPUnits(tuple(units), frozenset(gathered), copies, ops, places)


def _places(stage: Stage) -> Iterator[_Place]:
    """All places where parameters may be read, in the order of the program."""
    number = 0
    for statement in stage.body.statements:
        if isinstance(statement, Compute):
            yield statement.op.key
        elif isinstance(statement, Loop):
            yield from ((number, copy) for copy in range(len(statement.copies)))
            number += 1


def _alike(own: Sequence[str], gathered: Set[str], ways: Mapping[str, object]) -> bool:
    """Whether the units gather all of `own`, in the same way."""
    return gathered >= set(own) and all(ways[name] == ways[own[0]] for name in own)


def _fits(name: str, stage: Stage, uses: Mapping[str, Sequence[_Use]], unit: FSDPUnit, mesh: Mesh) -> bool:
    """Whether all redistributions of a parameter in a stage can begin with those of a unit."""
    used = unit.gathered_layout(unit.copy_layout(name, stage.parameters[name]))
    return all(
        change is not None
        and change.dtypes[0] == unit.dtypes[0]
        and _grows(used, change, mesh)
        and all(change.after[axis] == R for axis in (*unit.sharded, *unit.replicated))
        for change in (use.change for use in uses[name])
    )


def _marked(stage: Stage, units: FSDPUnits, mesh: Mesh) -> Stage:
    """`stage` with the steps of the units before all others."""
    by_name = {name: unit for unit in units.units for name in unit.parameters if name in units.gathered}

    def marked(item: Statement, names: Mapping[str, Sequence[str]]) -> Statement:
        if isinstance(item, Loop):
            inner = [marked(each, item.owned) for each in item.body.statements]
            return replace(item, body=replace(item.body, statements=tuple(inner)))
        if isinstance(item, Compute) or (name := names.get(item.source, (item.source,))[0]) not in by_name:
            return item
        return _by_unit(name, item, by_name[name], mesh)

    statements = tuple(marked(item, {}) for item in stage.body.statements)
    return replace(stage, body=replace(stage.body, statements=statements), units=units)


def _by_unit(name: str, change: Redistribution, unit: FSDPUnit, mesh: Mesh) -> Redistribution:
    """`change` with the steps of the unit first. The units of another program may take other axes than come first."""
    layout, shape = unit.copy_layout(name, change.before), change.type.shape
    used, steps = unit.gathered_layout(layout), change.steps
    taken = {axis for axis in mesh.dimensions if used[axis] != change.before[axis]}
    changed = [set(mesh.spans[step.span]) for step in steps]
    for count in range(len(steps) + 1):
        if set().union(*changed[:count]) == taken:
            return replace(change, unit_steps=count)
    first = (*redistribution(change.before, layout, shape, mesh), *redistribution(layout, used, shape, mesh))
    return replace(change, steps=(*first, *redistribution(used, change.after, shape, mesh)), unit_steps=len(first))
