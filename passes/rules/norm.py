"""Norms and softmax: what they normalize over stays whole."""

from collections.abc import Mapping

from passes.ir.program import Op, TensorType
from passes.rules.parts import dim_argument, factors, named
from passes.rules.registry import rule_for
from passes.rules.rule import Part, Role, Rule, Saved


@rule_for("layer_norm", "rms_norm")
def norm(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The last dims, which the weight has too, stay whole."""
    shape = types[op.operands[0]].shape
    normalized = op.arguments["normalized_shape"]
    assert isinstance(normalized, tuple)
    first = len(shape) - len(normalized)
    whole = tuple((Part(f"whole{dim}", shape[dim]),) for dim in range(first, len(shape)))
    dims = (*named(shape[:first]), *whole)
    roles = {f"whole{dim}": Role.WHOLE for dim in range(first, len(shape))}
    weights = (whole,) * (len(op.operands) - 1)
    return Rule(factors(dims, roles=roles), (dims, *weights), (dims,), saved=(Saved(0),))


@rule_for("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The dim that sums to one stays whole."""
    shape = types[op.operands[0]].shape
    dim = dim_argument(op.arguments["dim"], len(shape))
    dims = list(named(shape))
    if dims:
        dims[dim] = (Part("whole", shape[dim]),)
    found = factors(tuple(dims), roles={"whole": Role.WHOLE})
    return Rule(found, (tuple(dims),), (tuple(dims),), saved=(Saved(0, result=True),))
