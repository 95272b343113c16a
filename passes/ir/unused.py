"""Dead code elimination."""

from dataclasses import replace

from passes.ir.program import Buffer, Input, Op, Parameter, Program, references


def without_unused(program: Program) -> Program:
    """Drop ops whose results are never read, and the types of the dropped tensors."""
    used = {name for value in program.outputs for name in references(value)}
    used.update(update.value for update in program.updates)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(name in used for name in op.results):
            kept.append(op)
            used.update(op.operands)
    given: tuple[Input | Parameter | Buffer, ...] = (*program.inputs, *program.parameters, *program.buffers)
    named = {item.name for item in given}
    constants = {name: value for name, value in program.constants.items() if name in used}
    typed = {*named, *constants, *(name for op in kept for name in op.results)}
    types = {name: type for name, type in program.types.items() if name in typed}
    return replace(program, ops=tuple(reversed(kept)), constants=constants, types=types)
