"""regions: folds the repeated sequences of ops of a program in normal form.

A model writes a layer once and lists it many times (`model.layers.0`, `model.layers.1`, …). Where the ops of such
entries are the same but for their parameters, they become one region: planned once, generated as one class. Entries
that alternate make one longer region.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from passes.ir.arguments import Argument, Ref, references, rename
from passes.ir.entries import Segment, entry_segments
from passes.ir.folded import Carry, Export, Folded, Region
from passes.ir.grouping import grouped
from passes.ir.program import Input, Op, Parameter, Program, TensorType, flow, has_gradient

_LONGEST_PERIOD = 8

# The relation of a name from outside to that of the copy before: "shared", "owned", or carried from a result.
Role = str | tuple[int, int]


def fold(program: Program, label: Callable[[Op], Hashable] = lambda op: None) -> Folded:
    """Fold the repeated sequences of ops of `program`.

    Ops with different labels are never folded together, so that a constraint on one layer applies to that layer only.
    Linear in the number of ops.
    """
    folder = _Folder(program, label)
    items = folder.items(0, len(program.ops), 0)
    types = dict(folder.types)
    flowing = _dependent(program, items, types) & _contributing(program, items, types)
    return Folded(program, tuple(items), types, frozenset(flowing), folder.alike)


def _dependent(program: Program, items: Sequence[Op | Region], types: Mapping[str, TensorType]) -> set[str]:
    """The tensors of `items` that depend, differentiably, on a trainable parameter or input."""
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    flowing = {item.name for item in sources if item.trainable}
    trainable = set(flowing)
    for item in items:
        if isinstance(item, Op):
            flow([item], flowing, types)
            continue
        flowing.update(name for name, names in item.owned.items() if names[0] in trainable)
        for _ in range(len(item.carries) + 1):
            flowing.update(
                carry.argument for carry in item.carries if carry.initial in flowing or carry.next in flowing
            )
            flow(item.ops, flowing, types)
        for export in item.exports:
            if export.value in flowing:
                flowing.update(name for name in export.names if name)
    return flowing


def _contributing(program: Program, items: Sequence[Op | Region], types: Mapping[str, TensorType]) -> set[str]:
    """The tensors of `items` on which an output depends, differentiably: what only chooses indices or masks gets no
    gradient."""
    found = {name for value in program.outputs for name in references(value) if has_gradient(types[name].dtype)}
    for item in reversed(items):
        if isinstance(item, Op):
            _flow_back([item], found, types)
            continue
        found.update(export.value for export in item.exports if any(name in found for name in export.names))
        for _ in range(len(item.carries) + 1):
            _flow_back(item.ops, found, types)
            found.update(carry.next for carry in item.carries if carry.argument in found)
        found.update(carry.initial for carry in item.carries if carry.argument in found)
        found.update(name for own, names in item.owned.items() if own in found for name in names)
    return found


def _flow_back(ops: Sequence[Op], found: set[str], types: Mapping[str, TensorType]) -> None:
    """Add to `found` the operands of ops with a result in it that can have gradients."""
    for op in reversed(ops):
        if op.kind != "detach" and any(name in found for name in op.results):
            found.update(name for name in op.operands if has_gradient(types[name].dtype))


class _Folder:
    def __init__(self, program: Program, label: Callable[[Op], Hashable]) -> None:
        self.program = program
        self.ops = program.ops
        self.label = label
        self.types: dict[str, TensorType] = dict(program.types)
        self.producer = {
            name: (position, index) for position, op in enumerate(program.ops) for index, name in enumerate(op.results)
        }
        self.parameters = {item.name for item in program.parameters}
        trainable = {item.name for item in program.parameters if item.trainable}
        self.states = {item.name: item.name in trainable for item in (*program.parameters, *program.buffers)}
        uses = [(name, position) for position, op in enumerate(program.ops) for name in op.operands]
        self.users = grouped([*uses, *((name, len(program.ops)) for name in program.returned)])
        self.signatures: dict[Hashable, int] = {}
        self.operands: dict[tuple[int, int], tuple[list[str], list[Hashable]]] = {}
        self.count = 0
        self.named: set[str | None] = set()
        self.first: dict[tuple[str | None, int], Sequence[str]] = {}
        self.alike: dict[str, str] = {}

    def items(self, start: int, stop: int, depth: int) -> list[Op | Region]:
        """Fold the ops [start, stop), whose module paths agree in their first `depth` parts."""
        found: list[Op | Region] = []
        for owner, run in groupby(entry_segments(self.ops, start, stop, depth), lambda segment: segment.owner):
            if owner is None:
                found += [op for segment in run for op in self.ops[segment.start : segment.stop]]
            else:
                found += self.entries(list(run))
        return found

    def entries(self, run: Sequence[Segment]) -> list[Op | Region]:
        """Fold successive entries of one list."""
        signatures = [self.signature(segment) for segment in run]
        repeats = _most_covering(self.counts(run, signatures), 0, len(run))
        inside = {signatures[index] for start, stop, _ in repeats for index in range(start, stop)}
        found: list[Op | Region] = []
        at = 0
        for start, stop, period in (*repeats, (len(run), len(run), 1)):
            for segment, signature in zip(run[at:start], signatures[at:start], strict=True):
                ops = self.ops[segment.start : segment.stop]
                items = ops if signature in inside else self.items(segment.start, segment.stop, segment.depth)
                found += items
                if len(items) == len(ops):
                    self.share(segment, signature, ops)
            if start < stop:
                units = [run[index : index + period] for index in range(start, stop, period)]
                found.append(self.write(units, signatures[start : start + period]))
            at = stop
        return found

    def share(self, segment: Segment, signature: int, ops: Sequence[Op], owned: Collection[str] = ()) -> None:
        """Let an entry that is written as `ops` decide as the first one of its list that does the same."""
        states = (name for op in ops for name in op.operands if name in self.states or name in owned)
        names = [*(op.key for op in ops), *states]
        pairs = zip(names, self.first.setdefault((segment.owner, signature), names), strict=True)
        self.alike.update((own, self.alike.get(other, other)) for own, other in pairs if own != other)

    def counts(self, run: Sequence[Segment], signatures: Sequence[int]) -> dict[int, list[int]]:
        """By period and first entry the number of copies that fit together; no longer periods than one that covers all
        entries."""
        found: dict[int, list[int]] = {}
        for period in range(1, min(_LONGEST_PERIOD, len(run) // 2) + 1):
            counts = found[period] = [1] * len(run)
            roles: list[Sequence[Role] | None] = [None] * len(run)
            for at in range(len(run) - 2 * period, -1, -1):
                after = at + period
                if signatures[at:after] == signatures[after : after + period]:
                    roles[at] = self.roles(run[at:after], run[after : after + period])
                if roles[at] is not None:
                    counts[at] = 1 + (counts[after] if roles[after] == roles[at] else 1)
            if counts[0] * period == len(run):
                break
        return found

    def signature(self, segment: Segment) -> int:
        """Equal for segments whose ops do the same to tensors of the same types."""
        slots: dict[str, int] = {}
        rows: list[Hashable] = []
        for op in self.ops[segment.start : segment.stop]:

            def shown(name: str) -> Argument:
                position, index = self.producer.get(name, (-1, 0))
                if segment.start <= position < segment.stop:
                    return ("op", position - segment.start, index)
                slot = slots.setdefault(name, len(slots))
                state = self.states.get(name)
                own = name.removeprefix(segment.path) if state is not None else None
                return ("outside", slot, str(self.types[name]), state, own)

            arguments = tuple((key, rename(value, shown)) for key, value in op.arguments.items())
            types = tuple(self.types[name] for name in op.results)
            rows.append((op.target, op.module.removeprefix(segment.path), arguments, types, self.label(op)))
        return self.signatures.setdefault(tuple(rows), len(self.signatures))

    def outside(self, unit: Sequence[Segment]) -> tuple[list[str], list[Hashable]]:
        """The names from outside that the ops of a unit use, in order of first use; and what each operand of the unit
        is: one of these by its number, or which result in the unit."""
        start, stop = unit[0].start, unit[-1].stop
        if (start, stop) not in self.operands:
            names: dict[str, int] = {}
            pattern: list[Hashable] = []
            for op in self.ops[start:stop]:
                for name in op.operands:
                    position, index = self.producer.get(name, (-1, 0))
                    inside = start <= position < stop
                    pattern.append((position - start, index) if inside else names.setdefault(name, len(names)))
            self.operands[start, stop] = list(names), pattern
        return self.operands[start, stop]

    def roles(self, unit: Sequence[Segment], following: Sequence[Segment]) -> Sequence[Role] | None:
        """The roles of the names from outside, if two units are copies one of which follows the other."""
        (names, pattern), (others, other_pattern) = self.outside(unit), self.outside(following)
        if pattern != other_pattern:
            return None
        pairs = zip(names, others, strict=True)
        roles = [role for before, here in pairs if (role := self.role(before, here, unit, following)) is not None]
        is_copy = len(roles) == len(names) and self.is_alone(unit, names, roles)
        return roles if is_copy and self.is_alone(following, others, roles) else None

    def is_alone(self, unit: Sequence[Segment], names: Sequence[str], roles: Sequence[Role]) -> bool:
        """Whether the parameters that a copy owns are read in it alone: what reads them elsewhere, such as the same
        layer once more, would be planned by itself, and want them stored in its own way."""
        start, stop = unit[0].start, unit[-1].stop
        owned = (name for name, role in zip(names, roles, strict=True) if role == "owned" and name in self.parameters)
        return all(start <= user < stop for name in owned for user in self.users[name])

    def role(self, before: str, here: str, last: Sequence[Segment], unit: Sequence[Segment]) -> Role | None:
        """The relation of a name from outside to that of the copy before: shared, owned, or carried from a result."""
        position, index = self.producer.get(here, (-1, 0))
        if last[0].start <= position < last[-1].stop:
            return (position - last[0].start, index)
        if before == here:
            return "shared"
        if before in self.states and here in self.states:
            return "owned"
        return None

    def exports(self, units: Sequence[Sequence[Segment]]) -> dict[tuple[int, int], tuple[str | None, ...]]:
        """Results that are used outside all copies: their names there, for each copy."""
        start, stop = units[0][0].start, units[-1][-1].stop
        found: dict[tuple[int, int], list[str | None]] = {}
        for copy, unit in enumerate(units):
            for offset, op in enumerate(self.ops[unit[0].start : unit[-1].stop]):
                for index, name in enumerate(op.results):
                    if any(not start <= user < stop for user in self.users.get(name, ())):
                        found.setdefault((offset, index), [None] * len(units))[copy] = name
        return {place: tuple(names) for place, names in found.items()}

    def region_name(self, units: Sequence[Sequence[Segment]]) -> str:
        """ "layers.*", or for a further region of the same list its entries: "layers.3-5"."""
        owner = units[0][0].owner
        if owner not in self.named:
            self.named.add(owner)
            return f"{owner}.*"
        first, last = (segment.path.rsplit(".", 1)[-1] for segment in (units[0][0], units[-1][-1]))
        return f"{owner}.{first}-{last}"

    def write(self, units: Sequence[Sequence[Segment]], signatures: Sequence[int]) -> Region:
        """The region of these copies, whose entries have these signatures: the ops of the first copy under names of the
        region's own."""
        slots = [self.outside(unit)[0] for unit in units]
        roles, exports = self.roles(*units[:2]), self.exports(units)
        assert roles is not None
        period = len(units[0])
        name = self.region_name(units)
        stars = [name if period == 1 else f"{name}[{index}]" for index in range(period)]
        body = self.ops[units[0][0].start : units[0][-1].stop]
        names: dict[str, Argument] = {}
        carries: list[Carry] = []
        owned: dict[str, tuple[str, ...]] = {}
        for slot, role in enumerate(roles):
            first = slots[0][slot]
            if role == "owned":
                entry = next(
                    (index for index, segment in enumerate(units[0]) if first.startswith(segment.path + ".")), None
                )
                own = first if entry is None else stars[entry] + first.removeprefix(units[0][entry].path)
                names[first] = Ref(own)
                owned[own] = tuple(copy[slot] for copy in slots)
                self.types[own] = self.types[first]
            elif isinstance(role, tuple):
                argument = f"%carry_{self.count}"
                self.count += 1
                offset, index = role
                names[first] = Ref(argument)
                carries.append(Carry(argument, first, body[offset].results[index]))
                self.types[argument] = self.types[first]
        ops: list[Op] = []
        for segment, signature, star in zip(units[0], signatures, stars, strict=True):
            own_ops = []
            for op in self.ops[segment.start : segment.stop]:
                arguments = {
                    key: rename(value, lambda name: names.get(name, Ref(name))) for key, value in op.arguments.items()
                }
                module = star + op.module.removeprefix(segment.path)
                key = star + op.key.removeprefix(segment.path)
                own_ops.append(replace(op, arguments=arguments, module=module, key=key))
            self.share(segment, signature, own_ops, owned)
            ops += own_ops
        return Region(
            name,
            tuple(tuple(segment.path for segment in unit) for unit in units),
            tuple(ops),
            tuple(carries),
            owned,
            tuple(Export(body[offset].results[index], given) for (offset, index), given in exports.items()),
        )


def _most_covering(counts: Mapping[int, Sequence[int]], low: int, high: int) -> list[tuple[int, int, int]]:
    """Repeats (start, stop, period) among the entries [low, high), in order: the one that covers most, of equals the
    one of the shortest period, then the first; and the same on both sides of it."""
    covered = {
        (start, period): period * min(own[start], (high - start) // period)
        for period, own in counts.items()
        for start in range(low, high)
        if own[start] > 1 and high - start >= 2 * period
    }
    if not covered:
        return []
    start, period = min(covered, key=lambda each: (-covered[each], each[1], each[0]))
    stop = start + covered[start, period]
    return [*_most_covering(counts, low, start), (start, stop, period), *_most_covering(counts, stop, high)]
