"""The entries of module lists that the ops of a program stand in: `model.layers.0`, `model.layers.1`, …"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.ir.program import Op


@dataclass(frozen=True)
class Segment:
    """The ops [start, stop) of one entry of a module list; `path` is the entry, `owner` the list (None: none)."""

    start: int
    stop: int
    owner: str | None
    path: str

    @property
    def depth(self) -> int:
        """The number of parts of `path`."""
        return self.path.count(".") + 1


def entry_segments(ops: Sequence[Op], start: int, stop: int, depth: int) -> list[Segment]:
    """Runs of the ops [start, stop), whose module paths agree in their first `depth` parts, that stand in one entry of
    a module list, and runs that stand in none."""
    found: list[Segment] = []
    for position in range(start, stop):
        parts = ops[position].module.split(".")
        entry = next((index for index in range(depth, len(parts)) if parts[index].isdigit()), None)
        owner, path = (None, "") if entry is None else (".".join(parts[:entry]), ".".join(parts[: entry + 1]))
        if found and (found[-1].owner, found[-1].path) == (owner, path):
            found[-1] = replace(found[-1], stop=position + 1)
        else:
            found.append(Segment(position, position + 1, owner, path))
    return found
