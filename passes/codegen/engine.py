"""What an engine does, in words."""

from passes.ir.lowered import Held
from passes.ir.mesh import Mesh


def engine_text(held: Held, loop: int, mesh: Mesh) -> str:
    """What the engine does around each copy of a loop: a sentence for each group, with a space before it."""
    text = ""
    for group in (held.groups[number] for copies in held.copies[loop : loop + 1] for number in copies[0]):
        ways = [("sharded", group.sharded), ("replicated", group.replicated)]
        said = [f"{way} over {', '.join(mesh.names[axis] for axis in axes)}" for way, axes in ways if axes]
        count = len(held.parameters.intersection(group.parameters))
        text += f" fully_shard: {count} parameter{'' if count == 1 else 's'} {' and '.join(said)}."
    return text
