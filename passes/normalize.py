"""normalize: a traced program in, the same function in normal form out.

Normal form: no assertions, no in-place ops, no ops that do nothing, no op that only repacks another one's results;
every size is written out, views are `reshape`, casts are `to.dtype`, splits are slices, a mean loss is a sum and a
count; what no rule speaks for is made of what rules speak for, where that can be. What nothing uses is gone. Every op
has its key.
"""

from collections.abc import Mapping
from dataclasses import replace

from passes.ir.program import Buffer, Input, Op, Parameter, Program, TensorType, references
from passes.normalizing.canonical import canonical
from passes.normalizing.decomposed import decomposed
from passes.normalizing.in_place import functional
from passes.rules import find_rule


def normalize(program: Program) -> Program:
    """The program in normal form.

    Raises CaptureError for changes of the model's inputs and parameters, for in-place changes that cannot be followed
    to all views, and for what the generated program could not do.
    """
    program = functional(program)
    program = canonical(program)
    program = decomposed(program, _has_rule, canonical)
    program = without_unused(program)
    return with_keys(program)


def _has_rule(op: Op, types: Mapping[str, TensorType]) -> bool:
    return find_rule(op, types) is not None


def without_unused(program: Program) -> Program:
    """Drop ops whose results nobody reads, and the types of what is gone."""
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


def with_keys(program: Program) -> Program:
    """Give every op its key: module path, operator, and its number where the module calls the operator again."""
    counts: dict[str, int] = {}
    ops = []
    for op in program.ops:
        name = f"{op.module}/{op.kind}"
        count = counts.get(name, 0)
        counts[name] = count + 1
        ops.append(replace(op, key=f"{name}.{count}" if count else name))
    return replace(program, ops=tuple(ops))
