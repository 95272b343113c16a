"""Values that do not depend on the batch, computed while compiling."""

from collections.abc import Mapping

import torch

from passes.ir.program import Argument, Op, Ref
from passes.normalize.rewriter import Rewriter


def constant(rewriter: Rewriter, name: str) -> torch.Tensor | None:
    """The value of a result that depends on no input, parameter or buffer, computed here; None for any other."""
    needed: list[Op] = []
    wanted = {name}
    for op in reversed(rewriter.ops):
        if not wanted.isdisjoint(op.results):
            needed.append(op)
            wanted.update(op.operands)
    if not wanted <= {result for op in needed for result in op.results}:
        return None
    values: dict[str, torch.Tensor] = {}
    for op in reversed(needed):
        arguments = {key: concrete(value, values) for key, value in op.arguments.items()}
        if "device" in arguments:
            arguments["device"] = torch.device("cpu")
        result = op.overload(**arguments)
        values.update(zip(op.results, [result] if isinstance(result, torch.Tensor) else result, strict=True))
    return values[name]


def concrete(argument: Argument, values: Mapping[str, torch.Tensor]) -> object:
    """`argument` with tensors in place of the references to them."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [concrete(item, values) for item in argument]
    return argument
