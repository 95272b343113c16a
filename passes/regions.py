"""regions: folds the repeated sequences of ops of a program in normal form.

A model writes a layer once and lists it many times (`model.layers.0`, `model.layers.1`, …). Where the ops of such
entries are the same but for their parameters, they become one region: planned once, generated as one class. Entries
that alternate make one longer region.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from passes.ir.program import (
    Argument,
    Carry,
    Export,
    Folded,
    Input,
    Op,
    Parameter,
    Program,
    Ref,
    Region,
    TensorType,
    flow,
    references,
    rename,
)

_LONGEST_PERIOD = 8


def fold(program: Program, label: Callable[[Op], Hashable] = lambda op: None) -> Folded:
    """Fold the repeated sequences of ops of `program`.

    Ops with different labels are never folded together, so that a constraint on one layer applies to that layer only.
    Linear in the number of ops.
    """
    folder = _Folder(program, label)
    items = folder.items(0, len(program.ops), 0)
    types = dict(folder.types)
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
    return Folded(program, tuple(items), types, frozenset(flowing))


@dataclass(frozen=True)
class _Segment:
    """The ops [start, stop) of one entry of a module list; `path` is the entry, `owner` the list."""

    start: int
    stop: int
    owner: str
    path: str


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
        self.states = {item.name: item.trainable for item in program.parameters}
        self.states.update({item.name: False for item in program.buffers})
        self.users: dict[str, list[int]] = {}
        for position, op in enumerate(program.ops):
            for name in op.operands:
                self.users.setdefault(name, []).append(position)
        outside = [*program.outputs, *(Ref(update.value) for update in program.updates)]
        for name in (name for value in outside for name in references(value)):
            self.users.setdefault(name, []).append(len(program.ops))
        self.signatures: dict[Hashable, int] = {}
        self.count = 0
        self.named: set[str] = set()

    def items(self, start: int, stop: int, depth: int) -> list[Op | Region]:
        """Fold the ops [start, stop), whose module paths agree in their first `depth` parts."""
        found: list[Op | Region] = []
        segments = self.segments(start, stop, depth)
        at = 0
        while at < len(segments):
            segment = segments[at]
            if isinstance(segment, int):
                found.append(self.ops[segment])
                at += 1
                continue
            region, taken = self.region(segments, at)
            if region is not None:
                found.append(region)
                at += taken
            else:
                found += self.items(segment.start, segment.stop, segment.path.count(".") + 1)
                at += 1
        return found

    def segments(self, start: int, stop: int, depth: int) -> list[_Segment | int]:
        """Runs of ops that stand in one entry of a module list; ops that stand in none as their positions."""
        found: list[_Segment | int] = []
        for position in range(start, stop):
            parts = self.ops[position].module.split(".")
            entry = next((index for index in range(depth, len(parts)) if parts[index].isdigit()), None)
            if entry is None:
                found.append(position)
                continue
            path, owner = ".".join(parts[: entry + 1]), ".".join(parts[:entry])
            last = found[-1] if found else None
            if isinstance(last, _Segment) and last.path == path:
                found[-1] = replace(last, stop=position + 1)
            else:
                found.append(_Segment(position, position + 1, owner, path))
        return found

    def region(self, segments: Sequence[_Segment | int], at: int) -> tuple[Region | None, int]:
        """The region that begins with segment `at` and how many segments it takes; the shortest period wins."""
        first = segments[at]
        assert isinstance(first, _Segment)
        run: list[_Segment] = []
        for segment in segments[at:]:
            if not isinstance(segment, _Segment) or segment.owner != first.owner:
                break
            run.append(segment)
        signatures = [self.signature(segment) for segment in run]
        for period in range(1, min(_LONGEST_PERIOD, len(run) // 2) + 1):
            repeats = 1
            while signatures[repeats * period : (repeats + 1) * period] == signatures[:period]:
                repeats += 1
            units = [run[index * period : (index + 1) * period] for index in range(repeats)]
            region = self.unify(units) if repeats > 1 else None
            if region is not None:
                return region, region.count * period
        return None, 0

    def signature(self, segment: _Segment) -> int:
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

    def outside(self, unit: Sequence[_Segment]) -> tuple[list[str], tuple[Hashable, ...]]:
        """The names from outside that the ops of a unit use, in order of first use; and what each operand of the unit
        is: one of these by its number, or which result in the unit."""
        start, stop = unit[0].start, unit[-1].stop
        names: dict[str, int] = {}
        pattern: list[Hashable] = []
        for op in self.ops[start:stop]:
            for name in op.operands:
                position, index = self.producer.get(name, (-1, 0))
                inside = start <= position < stop
                pattern.append((position - start, index) if inside else names.setdefault(name, len(names)))
        return list(names), tuple(pattern)

    def unify(self, units: Sequence[Sequence[_Segment]]) -> Region | None:
        """The region whose copies are the most of `units`, from the first on, that fit together; None below two."""
        slots, patterns = zip(*map(self.outside, units), strict=True)
        if patterns[0] != patterns[1]:
            return None
        roles: list[str | tuple[int, int]] = []
        for first, second in zip(slots[0], slots[1], strict=True):
            role = self.role(first, second, units[0], units[1])
            if role is None:
                return None
            roles.append(role)
        if not self.is_alone(units[0], slots[0], roles):
            return None
        count = 1
        while (
            count < len(units)
            and patterns[count] == patterns[0]
            and self.is_alone(units[count], slots[count], roles)
            and all(
                self.role(before, here, units[count - 1], units[count]) == role
                for before, here, role in zip(slots[count - 1], slots[count], roles, strict=True)
            )
        ):
            count += 1
        if count == 1:
            return None
        units, slots = units[:count], slots[:count]
        exports = self.exports(units)
        return self.write(units, slots, roles, exports)

    def is_alone(self, unit: Sequence[_Segment], names: Sequence[str], roles: Sequence[str | tuple[int, int]]) -> bool:
        """Whether the parameters that a copy owns are read in it alone: what reads them elsewhere, such as the same
        layer once more, would be planned by itself, and want them stored in its own way."""
        start, stop = unit[0].start, unit[-1].stop
        owned = (name for name, role in zip(names, roles, strict=True) if role == "owned" and name in self.parameters)
        return all(start <= user < stop for name in owned for user in self.users[name])

    def role(
        self, before: str, here: str, last: Sequence[_Segment], unit: Sequence[_Segment]
    ) -> str | tuple[int, int] | None:
        """The relation of a name from outside to that of the copy before: shared, owned, or carried from a result."""
        position, index = self.producer.get(here, (-1, 0))
        if last[0].start <= position < last[-1].stop:
            return (position - last[0].start, index)
        if before == here:
            return "shared"
        if before in self.states and here in self.states:
            return "owned"
        return None

    def exports(self, units: Sequence[Sequence[_Segment]]) -> dict[tuple[int, int], tuple[str | None, ...]]:
        """Results that are used outside all copies: their names there, for each copy."""
        start, stop = units[0][0].start, units[-1][-1].stop
        found: dict[tuple[int, int], list[str | None]] = {}
        for copy, unit in enumerate(units):
            for offset, op in enumerate(self.ops[unit[0].start : unit[-1].stop]):
                for index, name in enumerate(op.results):
                    if any(not start <= user < stop for user in self.users.get(name, ())):
                        found.setdefault((offset, index), [None] * len(units))[copy] = name
        return {place: tuple(names) for place, names in found.items()}

    def region_name(self, units: Sequence[Sequence[_Segment]]) -> str:
        """ "layers.*", or for a further region of the same list its entries: "layers.3-5"."""
        owner = units[0][0].owner
        if owner not in self.named:
            self.named.add(owner)
            return f"{owner}.*"
        first, last = (segment.path.rsplit(".", 1)[-1] for segment in (units[0][0], units[-1][-1]))
        return f"{owner}.{first}-{last}"

    def write(
        self,
        units: Sequence[Sequence[_Segment]],
        slots: Sequence[Sequence[str]],
        roles: Sequence[str | tuple[int, int]],
        exports: dict[tuple[int, int], tuple[str | None, ...]],
    ) -> Region:
        """The region itself: the ops of the first copy under names of the region's own."""
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
        ops = []
        for segment, star in zip(units[0], stars, strict=True):
            for op in self.ops[segment.start : segment.stop]:
                arguments = {
                    key: rename(value, lambda name: names.get(name, Ref(name))) for key, value in op.arguments.items()
                }
                module = star + op.module.removeprefix(segment.path)
                key = star + op.key.removeprefix(segment.path)
                ops.append(replace(op, arguments=arguments, module=module, key=key))
        return Region(
            name,
            tuple(tuple(segment.path for segment in unit) for unit in units),
            tuple(ops),
            tuple(carries),
            owned,
            tuple(Export(body[offset].results[index], given) for (offset, index), given in exports.items()),
        )
