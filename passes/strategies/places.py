"""Blocks of the ops of a folded program."""

from dataclasses import dataclass

from passes.ir.program import Folded, Op, Region
from passes.ir.rule import Rule
from passes.rules import find_rule


@dataclass(frozen=True)
class Placed:
    """An op, its block (0, 1, …: before, inside and after each region), and its number of runs."""

    op: Op
    rule: Rule | None
    block: int
    region: Region | None

    @property
    def count(self) -> int:
        """The number of times that it runs in a micro-batch."""
        return self.region.count if self.region else 1


def place(folded: Folded) -> tuple[list[Placed], list[str]]:
    """All ops with their blocks, and the names of the blocks."""
    placed: list[Placed] = []
    rules = folded.program.rules
    blocks = ["before"]
    for item in folded.items:
        if isinstance(item, Region):
            blocks += [item.name, f"after {item.name}"]
            placed += [Placed(op, find_rule(op, folded.types, rules), len(blocks) - 2, item) for op in item.ops]
        else:
            placed.append(Placed(item, find_rule(item, folded.types, rules), len(blocks) - 1, None))
    return placed, blocks
