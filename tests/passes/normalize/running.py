"""Run a program op by op, and hold every result against the type that the program has for it."""

from typing import Any

from torch import Tensor

from passes.ir.arguments import Argument, Ref
from passes.ir.program import Op, Program, TensorType


def run(program: Program, tensors: dict[str, Tensor]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Run a program op by op: its outputs, and the new values of its buffers."""
    values: dict[str, object] = {**tensors, **program.constants}

    def concrete(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return values[argument.name]
        return [concrete(item) for item in argument] if isinstance(argument, tuple) else argument

    for op in program.ops:
        result = _call(op, {name: concrete(value) for name, value in op.arguments.items()})
        for name, value in zip(op.results, [result] if isinstance(result, Tensor) else result, strict=True):
            found = TensorType(tuple(value.shape), value.dtype)
            assert found == program.types[name], f"{name} is {found}, the program says {program.types[name]}"
            values[name] = value
    outputs = {name: concrete(value) for name, value in zip(program.output_names, program.outputs, strict=True)}
    updates = {update.buffer: values[update.value] for update in program.updates}
    return outputs, updates  # type: ignore[return-value]


def _call(op: Op, arguments: dict[str, object]) -> Any:
    positional = [arguments[item.name] for item in op.overload._schema.arguments if not item.kwarg_only]
    named = {item.name: arguments[item.name] for item in op.overload._schema.arguments if item.kwarg_only}
    return op.overload(*positional, **named)
