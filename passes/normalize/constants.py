"""Values that do not depend on the batch, computed while compiling."""

from collections.abc import Mapping

import torch

from passes.ir.program import Argument, Op, Ref
from passes.normalize.rewriter import Rewriter


def constant(rewriter: Rewriter, name: str) -> torch.Tensor | None:
    """The value of a result that depends on no input, parameter or buffer, computed here; None for any other."""
    producers = {result: op for op in rewriter.ops for result in op.results}
    needed: list[Op] = []
    waiting, found = [name], set[str]()
    while waiting:
        wanted = waiting.pop()
        if wanted in found:
            continue
        found.add(wanted)
        if wanted not in producers:
            return None
        needed.append(producers[wanted])
        waiting.extend(producers[wanted].operands)
    order = {id(op): position for position, op in enumerate(rewriter.ops)}
    values: dict[str, torch.Tensor] = {}
    for op in sorted(needed, key=lambda op: order[id(op)]):
        arguments = {key: _concrete(value, values) for key, value in op.arguments.items()}
        if "device" in arguments:
            arguments["device"] = torch.device("cpu")
        result = op.overload(**{("self" if key == "self" else key): value for key, value in arguments.items()})
        values.update(zip(op.results, [result] if isinstance(result, torch.Tensor) else result, strict=True))
    return values[name]


def _concrete(argument: Argument, values: Mapping[str, torch.Tensor]) -> object:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [_concrete(item, values) for item in argument]
    return argument
