"""Comments of generated code on what FSDP units gather and reduce."""

from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh


def units_text(stage: Stage, number: int, mesh: Mesh) -> str:
    """A sentence for each FSDP unit around a copy of loop `number` of a stage, with a space before it."""
    text, units = "", stage.units
    first = {names[0] for names in stage.loops[number].owned.values()} & units.gathered
    own = [units.units[unit] for copies in units.around_copies[number : number + 1] for unit in copies[0]]
    own += [unit for unit in units.units if not unit.gathers and first.intersection(unit.parameters)]
    for unit in own:
        kinds = [("sharded", unit.sharded), ("replicated", unit.replicated)]
        stored = [f"{kind} over {', '.join(mesh.names[axis] for axis in axes)}" for kind, axes in kinds if axes]
        count = len(units.gathered.intersection(unit.parameters))
        parameters = f"{count} parameter{'' if count == 1 else 's'} {' and '.join(stored)}"
        text += f" {'fully_shard' if unit.gathers else 'all_reduce'}: {parameters}."
    return text
