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
from passes.ir.lowered import Body, Compute, FSDPUnit, FSDPUnits, Loop, Lowered, Redistribution, Statement
from passes.ir.mesh import Mesh
from passes.ir.program import Parameter, find_overload, references
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
    kept: Layout


def fsdp_units(
    lowered: Lowered, mesh: Mesh, groups: Sequence[FSDPUnit] | None = None, gather_once: bool = False
) -> Lowered:
    """`lowered` with its FSDP units, and the redistributions marked that they run.

    `groups` are the existing units of the model's parameters, if any, which another program of the same model reuses
    where they fit. With `gather_once` parameters stay gathered for all micro-batches.
    """
    uses = _uses(lowered)
    if groups is None:
        groups = _groups(lowered, uses, mesh, gather_once)
        given = _held(lowered, uses, groups, mesh).gathered
        kept = [{name: dim for name, dim in group.parameters.items() if name in given} for group in groups]
        groups = [replace(group, parameters=names) for group, names in zip(groups, kept, strict=True) if names]
    return _marked(lowered, _held(lowered, uses, groups, mesh), mesh)


def _uses(lowered: Lowered) -> dict[str, list[_Use]]:
    """All uses of every parameter, by its own name."""
    found: dict[str, list[_Use]] = {name: [] for name in lowered.parameters}
    readers = dict(_readers(lowered.body))
    for name, change in _reads(lowered.body):
        if name in found:
            found[name].append(_Use(None if change is None else readers.get(change.result), change))
    for number, loop in enumerate(_loops(lowered)):
        for name, change in _reads(loop.body):
            for copy in range(loop.region.count):
                own = loop.region.owned[name][copy] if name in loop.region.owned else name
                if own in found:
                    found[own].append(_Use((number, copy), change))
    for output in lowered.outputs:
        for name in references(output.value):
            if name in found:
                found[name].append(_Use(None, None))
    return found


def _loops(lowered: Lowered) -> list[Loop]:
    return [item for item in lowered.body.statements if isinstance(item, Loop)]


def _reads(body: Body) -> Iterator[tuple[str, Redistribution | None]]:
    """The values that the statements of a body read, and the redistribution of each; those inside its loops
    excepted."""
    for statement in body.statements:
        if isinstance(statement, Redistribution):
            yield statement.source, statement
        elif isinstance(statement, Compute):
            yield from ((name, None) for name in statement.op.operands)
        else:
            yield from ((name, None) for name in (*statement.initial, *statement.shared))
    yield from ((name, None) for name in body.results)


def _readers(body: Body) -> Iterator[tuple[str, str | None]]:
    """The op that reads a value, by the value; None if another statement does, or several ops do."""
    found: dict[str, set[str | None]] = {}
    for statement in body.statements:
        if isinstance(statement, Compute):
            reader = statement.op.key if _may_be_surrounded(statement) else None
            for name in statement.op.operands:
                found.setdefault(name, set()).add(reader)
        elif isinstance(statement, Redistribution):
            found.setdefault(statement.source, set()).add(None)
        else:
            for name in (*statement.initial, *statement.shared):
                found.setdefault(name, set()).add(None)
    for name in body.results:
        found.setdefault(name, set()).add(None)
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


def _groups(lowered: Lowered, uses: Mapping[str, Sequence[_Use]], mesh: Mesh, gather_once: bool) -> list[FSDPUnit]:
    """One unit for the parameters that are read in one place and take the same steps on the same axes. Those of
    recomputed copies are regathered."""
    members: dict[_Signature, dict[str, int]] = {}
    turned: dict[_Signature, dict[str, Layout]] = {}
    changes: dict[_Signature, list[Redistribution]] = {}
    for parameter in lowered.program.parameters:
        own = uses[parameter.name]
        place, found = _place(own), _axes(parameter, lowered.parameters[parameter.name], own, mesh)
        if found is None or place is None:
            continue
        made = [use.change for use in own if use.change is not None]
        signature = (place, found.sharded, found.replicated, parameter.type.dtype, made[0].dtypes)
        members.setdefault(signature, {})[parameter.name] = found.dim
        kept = {} if found.kept == lowered.parameters[parameter.name] else {parameter.name: found.kept}
        turned.setdefault(signature, {}).update(kept)
        changes.setdefault(signature, []).extend(made)
    whole = {number for number, loop in enumerate(_loops(lowered)) if loop.recompute == "full" and not gather_once}
    tables = {item.op.key for item in lowered.body.statements if isinstance(item, Compute) and item.op.kind in _TABLES}
    groups = []
    for common, names in members.items():
        _, sharded, replicated, _, dtypes = common
        saved = common[0] not in tables
        # Replicated parameters are copied for use, not sent: they need not stay gathered.
        again = any(change.regathered for change in changes[common]) or not sharded or not saved
        again |= isinstance(common[0], tuple) and common[0][0] in whole
        groups.append(FSDPUnit(names, sharded, replicated, saved, again, dtypes, turned[common]))
    return groups


def _axes(parameter: Parameter, stored: Layout, uses: Sequence[_Use], mesh: Mesh) -> _Axes | None:
    """The axes of a parameter that a unit can take; None for none."""
    type = parameter.type
    changes = [use.change for use in uses if use.change is not None]
    if len(changes) < len(uses) or not changes or not prod(type.shape) or not type.shape:
        return None
    if not type.dtype.is_floating_point:
        return None
    return _axes_of_kept(parameter, _kept(stored, changes, mesh), changes, mesh)


def _kept(stored: Layout, changes: Sequence[Redistribution], mesh: Mesh) -> Layout:
    """The layout of a parameter in its unit: after the all-to-alls that all of its redistributions begin with, if these
    are the same."""
    reached = set()
    for change in changes:
        steps = redistribution(stored, change.after, change.type.shape, mesh)
        first = [step.axis for step in takewhile(lambda step: step.collective == "all_to_all", steps)]
        reached.add(tuple(change.after[axis] if axis in first else placement for axis, placement in enumerate(stored)))
    return reached.pop() if len(reached) == 1 else stored


def _axes_of_kept(parameter: Parameter, stored: Layout, changes: Sequence[Redistribution], mesh: Mesh) -> _Axes | None:
    """The axes that a unit can take of a parameter whose layout in the unit is `stored`."""
    free = [
        axis for axis in mesh.dimensions if mesh.sizes[axis] > 1 and all(change.after[axis] == R for change in changes)
    ]
    # A frozen parameter has no gradient to be reduced, and a replicated one need not be gathered.
    replicated = tuple(axis for axis in free if stored[axis].kind == "I" and parameter.trainable)
    split = [axis for axis in free if stored[axis].kind == "S"]
    choices = [
        axes
        for count in range(1, len(split) + 1)
        for axes in combinations(split, count)
        if _is_leading(axes, stored, mesh)
    ]
    sharded = max(choices, key=lambda axes: prod(mesh.sizes[axis] for axis in axes), default=())
    if not sharded and not replicated:
        return None
    used = FSDPUnit({}, sharded, replicated, False, False, (None, None)).used(stored)
    if not all(_grows(used, change, mesh) for change in changes):
        return None
    return _Axes(sharded, replicated, stored[sharded[0]].dim if sharded else 0, stored)


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


# --- units of another program ----------------------------------------------------------------------------------------


def _held(lowered: Lowered, uses: Mapping[str, Sequence[_Use]], groups: Sequence[FSDPUnit], mesh: Mesh) -> FSDPUnits:
    """The units of this program, from `groups`, and the places where they are called."""
    given: set[str] = set()
    for group in groups:
        names = {name for name in group.parameters if uses.get(name) and _fits(name, lowered, uses, group, mesh)}
        # A unit gathers around one place; a program that is folded differently has none for it.
        if len({_place(uses[name]) for name in names} - {None}) == 1:
            given.update(name for name in names if _place(uses[name]) is not None)
    # A region is generated once: a parameter of its body is gathered in all copies, in the same way, or in none.
    ways = {
        name: (group.sharded, group.replicated, group.regathered, group.turned.get(name))
        for group in groups
        for name in group.parameters
    }
    bodies = [own for loop in _loops(lowered) for own in loop.region.owned.values() if own[0] in lowered.parameters]
    while torn := [own for own in bodies if given.intersection(own) and not _alike(own, given, ways)]:
        given.difference_update(*torn)
    around: dict[_Place, tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        for place in {_place(uses[name]) for name in given.intersection(group.parameters) if group.gathers}:
            around[place] = (*around.get(place, ()), number)
    copies = tuple(
        tuple(around.get((number, copy), ()) for copy in range(loop.region.count))
        for number, loop in enumerate(_loops(lowered))
    )
    ops = {place: numbers for place, numbers in around.items() if isinstance(place, str)}
    places = tuple(around[place] for place in _places(lowered) if place in around)
    return FSDPUnits(tuple(groups), frozenset(given), copies, ops, places)


def _places(lowered: Lowered) -> Iterator[_Place]:
    """All places where parameters may be read, in the order of the program."""
    number = 0
    for statement in lowered.body.statements:
        if isinstance(statement, Compute):
            yield statement.op.key
        elif isinstance(statement, Loop):
            yield from ((number, copy) for copy in range(statement.region.count))
            number += 1


def _alike(own: Sequence[str], given: Set[str], ways: Mapping[str, object]) -> bool:
    """Whether the units gather all of `own`, in the same way."""
    return given >= set(own) and all(ways[name] == ways[own[0]] for name in own)


def _fits(name: str, lowered: Lowered, uses: Mapping[str, Sequence[_Use]], group: FSDPUnit, mesh: Mesh) -> bool:
    """Whether all redistributions of a parameter in a program can begin with those of unit `group`."""
    used = group.used(group.kept(name, lowered.parameters[name]))
    for use in uses[name]:
        change = use.change
        if change is None or change.dtypes[0] != group.dtypes[0] or not _grows(used, change, mesh):
            return False
        if any(change.after[axis] != R for axis in (*group.sharded, *group.replicated)):
            return False
    return True


def _marked(lowered: Lowered, held: FSDPUnits, mesh: Mesh) -> Lowered:
    """`lowered` with the steps of the units before all others."""
    by_name = {name: group for group in held.units for name in group.parameters if name in held.gathered}

    def marked(body: Body, names: Mapping[str, Sequence[str]], whole: bool) -> Body:
        statements: list[Statement] = []
        for item in body.statements:
            if isinstance(item, Redistribution):
                name = names.get(item.source, (item.source,))[0]
                group = by_name.get(name)
                statements.append(item if group is None else _by_engine(name, item, group, mesh, whole))
            elif isinstance(item, Loop):
                inner = marked(item.body, item.region.owned, item.recompute == "full")
                statements.append(replace(item, body=inner))
            else:
                statements.append(item)
        return replace(body, statements=tuple(statements))

    return replace(lowered, body=marked(lowered.body, {}, False), units=held)


def _by_engine(name: str, change: Redistribution, group: FSDPUnit, mesh: Mesh, whole: bool) -> Redistribution:
    """`change` with the steps of the unit first; `whole` says that all code around it is recomputed in any case."""
    kept, shape = group.kept(name, change.before), change.type.shape
    used = group.used(kept)
    first = (*redistribution(change.before, kept, shape, mesh), *redistribution(kept, used, shape, mesh))
    rest = redistribution(used, change.after, shape, mesh)
    # A unit regathers all of its parameters, or none.
    again = change.regathered or (group.regathered and group.saved and bool(group.sharded) and not whole)
    return replace(change, steps=(*first, *rest), regathered=again, unit_steps=len(first))
