"""units: the FSDP units, in which torch gathers parameters and reduces their gradients in place of the generated code.

An axis on which every use of a parameter is `R` (its gradient is a pending sum) and on which it is stored `S` or `I` is
a data axis for it: `fully_shard` can redistribute it to `R` there, and its gradient back, for many parameters at once,
ahead of time and overlapping computation. The steps of a unit must

- come first: the steps on other axes follow in the generated code, and none of them may shrink the tensor, or the unit
  would send more than was planned;
- be one gather: the unit splits a dim of a rank's shard into consecutive parts, so the digits of its axes must be the
  most significant ones besides those of the other axes, in the order of the mesh.

Where all-to-alls on other axes are planned before the gather, because less is sent that way, the unit gathers a copy
that these produce (`FSDPUnit.turned`), once in each forward pass, for all parameters before the first is gathered. If
gathering that copy is not a single gather, the generated code runs all steps: with the gather first, more would be sent
than was planned.

Parameters that are read as they are stored are not gathered (`FSDPUnit.gathers`): the unit only reduces their
gradients, and nothing is called around the code that reads them.

All other steps stay in the generated code. So do those of a parameter that is read in several places: a unit would keep
it gathered between them.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from math import prod

import torch

from passes._torch import schema_of
from passes.ir.layout import Layout, R, local_major
from passes.ir.lowered import Body, Compute, FSDPUnit, FSDPUnits, Loop, Redistribution, Stage, Statement
from passes.ir.mesh import Mesh
from passes.ir.program import Parameter, find_overload
from passes.ir.redistribution import redistribution

# Where a parameter is read: in a copy of a loop (their numbers), or by an op outside of loops (its key). None for what
# is no such place: several of them, or something else.
_Place = tuple[int, int] | str | None
# The common properties of the parameters of one unit.
_Signature = tuple[_Place, tuple[int, ...], tuple[int, ...], torch.dtype, tuple[torch.dtype | None, torch.dtype | None]]

# Ops whose backward pass reads no parameter, only where its gradient goes.
_TABLES = {"embedding"}


@dataclass(frozen=True)
class _Use:
    """One use of a parameter; `change` is None if it is read as it is stored."""

    place: _Place
    change: Redistribution | None


@dataclass(frozen=True)
class _Axes:
    """The axes of a parameter that a unit can take, the dim that the sharded ones split, and the layout of the unit's
    copy."""

    sharded: tuple[int, ...]
    replicated: tuple[int, ...]
    dim: int
    layout: Layout


def fsdp_units(stage: Stage, mesh: Mesh, units: Sequence[FSDPUnit] | None = None, gather_once: bool = False) -> Stage:
    """`stage` with its FSDP units, and the redistributions marked that they run.

    `units` are the existing units of the model's parameters, if any, which another program of the same model reuses
    where they fit. With `gather_once` parameters stay gathered for all micro-batches.
    """
    uses = _uses(stage)
    if units is None:
        units = _formed(stage, uses, mesh, gather_once)
        gathered = _placed(stage, uses, units, mesh).gathered
        left = [{name: dim for name, dim in unit.parameters.items() if name in gathered} for unit in units]
        units = [replace(unit, parameters=names) for unit, names in zip(units, left, strict=True) if names]
    return _marked(stage, _placed(stage, uses, units, mesh), mesh)


def _uses(stage: Stage) -> dict[str, list[_Use]]:
    """All uses of every parameter, by its own name."""
    found: dict[str, list[_Use]] = {name: [] for name in stage.parameters}
    readers = dict(_readers(stage.body))
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


def _readers(body: Body) -> Iterator[tuple[str, str | None]]:
    """The op that reads a value, by the value; None if another statement does, or several ops do."""
    found: dict[str, set[str | None]] = {}
    for name, statement in _reads(body):
        reader = statement.op.key if isinstance(statement, Compute) and _may_be_surrounded(statement) else None
        found.setdefault(name, set()).add(reader)
    for name, readers in found.items():
        yield name, readers.pop() if len(readers) == 1 else None


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
    """One unit for the parameters that are read in one place and take the same steps on the same axes. Those of
    recomputed copies are regathered."""
    members: dict[_Signature, list[tuple[str, _Axes, Sequence[Redistribution]]]] = {}
    for parameter in stage.program.parameters:
        own = uses[parameter.name]
        place, axes = _place(own), _axes(parameter, stage.parameters[parameter.name], own, mesh)
        if axes is not None and place is not None:
            changes = [use.change for use in own if use.change is not None]
            signature = (place, axes.sharded, axes.replicated, parameter.type.dtype, changes[0].dtypes)
            members.setdefault(signature, []).append((parameter.name, axes, changes))
    recomputed = {number for number, loop in enumerate(stage.loops) if loop.recompute == "full" and not gather_once}
    tables = {item.op.key for item in stage.body.statements if isinstance(item, Compute) and item.op.kind in _TABLES}
    units = []
    for (place, sharded, replicated, _, dtypes), found in members.items():
        saved = place not in tables
        # Replicated parameters are copied for use, not sent: they need not stay gathered.
        regathered = any(change.regathered for _, _, changes in found for change in changes) or not sharded or not saved
        regathered |= isinstance(place, tuple) and place[0] in recomputed
        dims = {name: axes.dim for name, axes, _ in found}
        turned = {name: axes.layout for name, axes, _ in found if axes.layout != stage.parameters[name]}
        units.append(FSDPUnit(dims, sharded, replicated, saved, regathered, dtypes, turned))
    return units


def _axes(parameter: Parameter, stored: Layout, uses: Sequence[_Use], mesh: Mesh) -> _Axes | None:
    """The axes of a parameter that a unit can take; None for none."""
    type = parameter.type
    changes = [use.change for use in uses if use.change is not None]
    if len(changes) < len(uses) or not changes or not type.size or not type.shape or not type.dtype.is_floating_point:
        return None
    layout = _copied(stored, changes, mesh)
    free = [
        axis for axis in mesh.dimensions if mesh.sizes[axis] > 1 and all(change.after[axis] == R for change in changes)
    ]
    # A frozen parameter has no gradient to be reduced, and a replicated one need not be gathered.
    replicated = tuple(axis for axis in free if layout[axis].kind == "I" and parameter.trainable)
    split = [axis for axis in free if layout[axis].kind == "S"]
    choices = [
        axes
        for count in range(1, len(split) + 1)
        for axes in combinations(split, count)
        if _is_leading(axes, layout, mesh)
    ]
    sharded = max(choices, key=lambda axes: prod(mesh.sizes[axis] for axis in axes), default=())
    used = FSDPUnit({}, sharded, replicated, False, False, (None, None)).gathered_layout(layout)
    if not (sharded or replicated) or not all(_grows(used, change, mesh) for change in changes):
        return None
    return _Axes(sharded, replicated, layout[sharded[0]].dim if sharded else 0, layout)


def _copied(stored: Layout, changes: Sequence[Redistribution], mesh: Mesh) -> Layout:
    """The layout of a parameter in its unit: after the all-to-alls that all of its redistributions begin with, if these
    are the same."""
    reached = set()
    for change in changes:
        steps = redistribution(stored, change.after, change.type.shape, mesh)
        first = [step.axis for step in takewhile(lambda step: step.collective == "all_to_all", steps)]
        reached.add(tuple(change.after[axis] if axis in first else placement for axis, placement in enumerate(stored)))
    return reached.pop() if len(reached) == 1 else stored


def _is_leading(axes: Sequence[int], stored: Layout, mesh: Mesh) -> bool:
    """Whether `axes`, in this order, split one dim of the shard of the other axes into consecutive parts."""
    others = tuple(R if axis in axes else placement for axis, placement in enumerate(stored))
    taken = 1
    for axis in axes:
        if stored[axis].dim != stored[axes[0]].dim or local_major(stored[axis], others, mesh) != taken:
            return False
        taken *= mesh.sizes[axis]
    return True


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
    around: dict[_Place, tuple[int, ...]] = {}
    for number, unit in enumerate(units):
        for place in {_place(uses[name]) for name in gathered.intersection(unit.parameters) if unit.gathers}:
            around[place] = (*around.get(place, ()), number)
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
    changes = [use.change for use in uses[name]]
    return all(
        change is not None
        and change.dtypes[0] == unit.dtypes[0]
        and _grows(used, change, mesh)
        and all(change.after[axis] == R for axis in (*unit.sharded, *unit.replicated))
        for change in changes
    )


def _marked(stage: Stage, units: FSDPUnits, mesh: Mesh) -> Stage:
    """`stage` with the steps of the units before all others."""
    by_name = {name: unit for unit in units.units for name in unit.parameters if name in units.gathered}

    def marked(item: Statement, names: Mapping[str, Sequence[str]], recomputed: bool) -> Statement:
        if isinstance(item, Loop):
            inner = [marked(each, item.owned, item.recompute == "full") for each in item.body.statements]
            return replace(item, body=replace(item.body, statements=tuple(inner)))
        if isinstance(item, Compute) or (name := names.get(item.source, (item.source,))[0]) not in by_name:
            return item
        return _by_unit(name, item, by_name[name], mesh, recomputed)

    statements = tuple(marked(item, {}, False) for item in stage.body.statements)
    return replace(stage, body=replace(stage.body, statements=statements), units=units)


def _by_unit(name: str, change: Redistribution, unit: FSDPUnit, mesh: Mesh, recomputed: bool) -> Redistribution:
    """`change` with the steps of the unit first; `recomputed` says that all code around it is recomputed in any
    case."""
    layout, shape = unit.copy_layout(name, change.before), change.type.shape
    used = unit.gathered_layout(layout)
    first = (*redistribution(change.before, layout, shape, mesh), *redistribution(layout, used, shape, mesh))
    rest = redistribution(used, change.after, shape, mesh)
    # A unit regathers all of its parameters, or none.
    regathered = change.regathered or (unit.regathered and unit.saved and bool(unit.sharded) and not recomputed)
    return replace(change, steps=(*first, *rest), regathered=regathered, unit_steps=len(first))
