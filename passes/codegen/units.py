"""Comments of generated code on what FSDP units gather and reduce."""

from passes.ir.lowered import FSDPUnits
from passes.ir.mesh import Mesh
from passes.ir.program import Region


def engine_text(held: FSDPUnits, loop: int, region: Region, mesh: Mesh) -> str:
    """A sentence for each FSDP unit around a copy of a loop over `region`, with a space before it."""
    text = ""
    first = {names[0] for names in region.owned.values()} & held.gathered
    groups = [held.units[number] for copies in held.around_copies[loop : loop + 1] for number in copies[0]]
    groups += [group for group in held.units if not group.gathers and first.intersection(group.parameters)]
    for group in groups:
        ways = [("sharded", group.sharded), ("replicated", group.replicated)]
        said = [f"{way} over {', '.join(mesh.names[axis] for axis in axes)}" for way, axes in ways if axes]
        count = len(held.gathered.intersection(group.parameters))
        what = f"{count} parameter{'' if count == 1 else 's'} {' and '.join(said)}"
        text += f" {'fully_shard' if group.gathers else 'all_reduce'}: {what}."
    return text
