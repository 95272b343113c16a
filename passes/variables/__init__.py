"""variables: a pipeline stage in, the variables of its generated functions out.

Variables have readable names. A value that leaves its module is named after the module ("q_proj",
"input_layernorm"), one that the model returns after the field ("loss"), the values that layers pass on "hidden". A
result computed within a module takes over the variable of an operand that is not read any more, as in `x = x + 1`.
That decides how long tensors live, so the memory simulator reads the same variables as code generation.
"""

from collections.abc import Iterable

from passes.ir.lowered import FunctionVariables, Loop, Stage, Variables
from passes.ir.mesh import Mesh
from passes.ir.program import Ref, references
from passes.ir.vocabulary import RESERVED, identifier
from passes.variables.function import Function, Names, hints


def name_variables(stage: Stage, mesh: Mesh) -> Variables:
    """The variables of all functions of the module that is generated for `stage`.

    `stage` is final: recompute and FSDP units are marked. No variable has the name of an axis of `mesh`, or one of
    `ir.vocabulary.RESERVED`.
    """
    program = stage.program
    stored = {item.name for item in program.parameters} | {item.name for item in program.buffers}
    returned = {name: output.name for output in stage.outputs for name in references(output.value)}
    reserved = {*RESERVED, *mesh.names}
    names = Names(stage.body, hints(stage.body, returned), reserved)
    gathering = {key for key, groups in stage.units.around_ops.items() if groups}
    whole = Function(stage.body, names, stored | set(program.constants), inner=False, gathering=gathering)
    for item in (*stage.received, *program.inputs):
        names.assign(names.fresh(identifier(item.name)), item.name)
    whole.follow()
    regions = tuple(_region(loop, call, stored, reserved) for loop, call in zip(stage.loops, whole.calls, strict=True))
    return Variables(names.frozen(), regions, tuple(whole.loops), _returned(stage, names))


def _region(loop: Loop, arguments: Iterable[str], stored: set[str], reserved: set[str]) -> FunctionVariables:
    """The variables of a region's function, whose `arguments` should have these names."""
    names = Names(loop.body, hints(loop.body, {}), reserved)
    for argument, base in zip(loop.body.arguments, arguments, strict=True):
        names.assign(names.fresh(base), argument)
    Function(loop.body, names, stored | set(loop.region.owned), inner=True).follow()
    return names.frozen()


def _returned(stage: Stage, names: Names) -> dict[str, str]:
    """The variables that hold copies of returned buffers, by output: the buffers change before the function returns."""
    updated = {buffer for buffer, _ in stage.updates}
    return {
        output.name: names.fresh(identifier(output.name))
        for output in stage.outputs
        if isinstance(output.value, Ref) and output.value.name in updated
    }
