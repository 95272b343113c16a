"""A program whose repeated layers are written once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir.program import Op, Program, TensorType


@dataclass(frozen=True)
class Carry:
    """A tensor that every copy of a region takes from the copy before: the first takes `initial`."""

    argument: str
    initial: str
    next: str


@dataclass(frozen=True)
class Export:
    """A tensor of a region's body that is used outside: for each copy its name there, or None if that copy's is not
    used."""

    value: str
    names: tuple[str | None, ...]


@dataclass(frozen=True)
class Region:
    """A repeated sequence of ops, stored once.

    `ops` is the body. Its operands are the arguments of the carries, the region's own names for tensors that differ
    between copies (`owned`: a parameter or buffer of the body -> its name in each copy), and names from outside that
    all copies share. `copies` are the module paths that each copy stands for.
    """

    name: str
    copies: tuple[tuple[str, ...], ...]
    ops: tuple[Op, ...]
    carries: tuple[Carry, ...]
    owned: Mapping[str, tuple[str, ...]]
    exports: tuple[Export, ...]

    @property
    def count(self) -> int:
        """The number of copies."""
        return len(self.copies)

    @property
    def results(self) -> tuple[str, ...]:
        """The values of a copy that the next copy or the rest of the program reads."""
        return tuple(dict.fromkeys((*(item.next for item in self.carries), *(item.value for item in self.exports))))

    def __str__(self) -> str:
        lines = (
            f"region {self.name} x {self.count}",
            *(f"  carry {carry.argument}: {carry.initial}, then {carry.next}" for carry in self.carries),
            *(f"  own {name}: {names[0]}, ..., {names[-1]}" for name, names in self.owned.items()),
            *(f"  {op}" for op in self.ops),
            *(f"  export {export.value}: {export.names[-1]}" for export in self.exports),
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Folded:
    """A program whose repeated runs are folded into regions: `items` are ops and regions in order.

    `types` has the type of every tensor in `items`, those of the regions' bodies included; `flowing` are the names of
    those that a gradient flows through: they depend on a trainable tensor, and an output depends on them. Equal layers
    that are written several times share their decisions: `alike` maps the keys of their ops, and the names of their
    parameters and buffers, to those of the first one.
    """

    program: Program
    items: tuple[Op | Region, ...]
    types: Mapping[str, TensorType]
    flowing: frozenset[str]
    alike: Mapping[str, str] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions, in order."""
        return tuple(item for item in self.items if isinstance(item, Region))

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, those of the regions' bodies once."""
        return tuple(op for op, _ in self.runs)

    @property
    def runs(self) -> Iterator[tuple[Op, int]]:
        """All ops, each with its number of copies."""
        yield from (
            (op, item.count if isinstance(item, Region) else 1)
            for item in self.items
            for op in (item.ops if isinstance(item, Region) else (item,))
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.items))


def dependents(folded: Folded) -> frozenset[str]:
    """Tensors that depend on the batch or on a parameter; the others are the same for every batch."""
    depends = {item.name for item in folded.program.inputs} | {item.name for item in folded.program.parameters}
    for region in folded.regions:
        depends.update(own for own, names in region.owned.items() if names[0] in depends)
    for _ in range(2):
        for item in folded.items:
            if isinstance(item, Region):
                depends.update(carry.argument for carry in item.carries if {carry.initial, carry.next} & depends)
            for op in item.ops if isinstance(item, Region) else (item,):
                if any(name in depends for name in op.operands):
                    depends.update(op.results)
            if isinstance(item, Region):
                depends.update(
                    name for export in item.exports if export.value in depends for name in export.names if name
                )
    return frozenset(depends)
