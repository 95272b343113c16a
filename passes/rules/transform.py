"""Fourier transforms."""

from collections.abc import Mapping

from passes.ir.program import Op, TensorType
from passes.ir.rule import Role, Rule, Saved
from passes.rules.parts import dims_argument, factors, named, one, rule_for, without


@rule_for("_fft_c2c", "_fft_r2c", "_fft_c2r")
def transform(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The dims that are transformed stay whole; a transform of a sum is the sum of the transforms."""
    shape, made = types[op.operands[0]].shape, types[op.results[0]].shape
    if not shape:
        return None
    transformed = dims_argument(op.arguments["dim"], len(shape)) if op.arguments["dim"] != () else ()
    before, roles = without(named(shape), transformed, "from")
    after = tuple(one(f"to{dim}", made[dim]) if dim in transformed else parts for dim, parts in enumerate(before))
    roles.update({f"to{dim}": Role.WHOLE for dim in transformed})
    # A transform of real numbers saves them for their sizes.
    saved = (Saved(0),) if op.kind == "_fft_r2c" else ()
    return Rule(factors(before, after, roles=roles), (before,), (after,), linear=(frozenset({0}),), saved=saved)
