"""Custom autograd functions, with the properties that capture has found."""

from collections.abc import Mapping

from passes.ir.program import Op, Rule, Saved, TensorType
from passes.rules.parts import factors, named, rule_for


@rule_for("autograd_function")
def autograd_function(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """A pointwise function can be split in every dim; all its tensors have the same shape."""
    if not op.arguments["pointwise"]:
        return None
    dims = named(types[op.results[0]].shape)
    saved = (*(Saved(slot) for slot in range(len(op.operands))), Saved(0, result=True))
    return Rule(factors(dims), (dims,) * len(op.operands), (dims,) * len(op.results), saved=saved)
