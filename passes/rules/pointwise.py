"""Pointwise ops: every dim of the result is a factor, and operands broadcast to it. Among them are custom autograd
functions, with the properties that capture has found.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from passes._torch import schema_of
from passes.ir.arguments import Ref
from passes.ir.program import Op, TensorType, has_gradient
from passes.ir.rule import Rule, Saved
from passes.rules.parts import broadcast, factors, named, rule_for

NONE: tuple[Saved, ...] = ()
SELF = (Saved(0),)
RESULT = (Saved(0, result=True),)


@dataclass(frozen=True)
class Pointwise:
    """`saved` is what autograd keeps; `linear` the operand sets in which the op is linear, for one, two and three
    operands."""

    saved: tuple[Saved, ...] = NONE
    linear_one: tuple[frozenset[int], ...] = ()
    linear_two: tuple[frozenset[int], ...] = ()
    linear_three: tuple[frozenset[int], ...] = ()


_FIRST = (frozenset({0}),)
_EITHER = (frozenset({0}), frozenset({1}))
_BOTH = (frozenset({0, 1}),)

# Reduced by an op of their own.
ELEMENTWISE_LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
)

TABLE: dict[str, Pointwise] = {
    "add": Pointwise(NONE, (), _BOTH),
    "sub": Pointwise(NONE, (), _BOTH),
    "rsub": Pointwise(NONE, (), _BOTH),
    "mul": Pointwise((Saved(0, needed_by=(1,)), Saved(1, needed_by=(0,))), _FIRST, _EITHER),
    "div": Pointwise((Saved(0, needed_by=(1,)), Saved(1)), _FIRST, _FIRST),
    "neg": Pointwise(NONE, _FIRST),
    "pow": Pointwise((Saved(0), Saved(1), Saved(0, result=True, needed_by=(1,)))),
    "maximum": Pointwise((Saved(0), Saved(1))),
    "minimum": Pointwise((Saved(0), Saved(1))),
    "masked_fill": Pointwise((Saved(1, needed_by=(0,)),)),
    **{kind: Pointwise() for kind in ("detach", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "heaviside")},
    **{kind: Pointwise() for kind in ("trunc", "bitwise_left_shift", "bitwise_right_shift")},
    **{
        kind: Pointwise(linear_one=_FIRST)
        for kind in ("real", "imag", "conj", "_conj", "conj_physical", "deg2rad", "rad2deg")
    },
    **{kind: Pointwise((Saved(0), Saved(1))) for kind in ("atan2", "fmax", "fmin", "logaddexp", "logaddexp2")},
    **{kind: Pointwise((Saved(0), Saved(1))) for kind in ("_prelu_kernel",)},
    "complex": Pointwise(SELF, (), _BOTH),
    "sgn": Pointwise(SELF + RESULT),
    "lerp": Pointwise((Saved(0), Saved(1), Saved(2)), (), _BOTH, _BOTH),
    "xlogy": Pointwise((Saved(0), Saved(1)), (), _FIRST),
    **{kind: Pointwise((Saved(0), Saved(1), *RESULT)) for kind in ("copysign", "polar", "float_power", "hypot")},
    "addcmul": Pointwise((Saved(1), Saved(2)), (), (), (frozenset({0, 1}), frozenset({0, 2}))),
    "addcdiv": Pointwise((Saved(1), Saved(2)), (), (), _BOTH),
    "where": Pointwise(SELF, linear_three=(frozenset({1, 2}),)),
    "clamp": Pointwise((Saved(0), Saved(1), Saved(2))),
    **{kind: Pointwise((Saved(0), Saved(1), Saved(2))) for kind in ELEMENTWISE_LOSSES},
    **{kind: Pointwise((Saved(0, copy=True),), _FIRST) for kind in ("dropout", "alpha_dropout")},
    **{kind: Pointwise() for kind in ("rand_like", "randn_like", "randint_like", "bernoulli", "uniform")},
    **{
        kind: Pointwise()
        for kind in ("exponential", "normal_functional", "random", "geometric", "log_normal", "cauchy")
    },
    "floor_divide": Pointwise(),
    **{kind: Pointwise(SELF) for kind in ("remainder", "fmod")},
    **{kind: Pointwise() for kind in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{kind: Pointwise() for kind in ("logical_and", "logical_or", "logical_xor", "logical_not")},
    **{kind: Pointwise() for kind in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")},
    **{kind: Pointwise() for kind in ("__and__", "__or__", "__xor__", "floor", "ceil", "round", "sign", "isnan")},
    **{kind: Pointwise() for kind in ("zeros_like", "ones_like", "full_like", "empty_like")},
    **{kind: Pointwise(SELF) for kind in ("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc")},
    **{kind: Pointwise(SELF) for kind in ("log2", "log10", "logit", "erfinv", "erfc", "lgamma", "digamma", "angle")},
    **{kind: Pointwise(SELF) for kind in ("softshrink", "hardshrink", "threshold", "nan_to_num", "i0", "celu", "frac")},
    **{kind: Pointwise(SELF) for kind in ("silu", "gelu", "log", "log1p", "abs", "sin", "cos", "erf", "softplus")},
    **{kind: Pointwise(SELF) for kind in ("clamp_min", "clamp_max", "elu", "leaky_relu", "mish", "square")},
    **{kind: Pointwise(SELF) for kind in ("hardtanh", "hardswish", "hardsigmoid", "log_sigmoid", "relu6", "selu")},
    **{kind: Pointwise(RESULT) for kind in ("relu", "tanh", "sigmoid", "exp", "expm1", "sqrt", "rsqrt", "reciprocal")},
    **{kind: Pointwise(RESULT) for kind in ("exp2", "tan")},
}


@rule_for(*TABLE)
def pointwise(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Every dim may be split; sums pass where the op is linear."""
    spec = TABLE[op.kind]
    if len(op.results) != 1 or op.arguments.get("reduction"):
        return None
    result = types[op.results[0]].shape
    operands = tuple(broadcast(types[name].shape, result) for name in op.operands)
    dims = named(result)
    linear = {1: spec.linear_one, 2: spec.linear_two, 3: spec.linear_three}.get(len(operands), ())
    rounded = op.arguments.get("rounding_mode") is not None
    if not has_gradient(types[op.results[0]].dtype) or _starts_with_number(op) or rounded:
        linear = ()
    count = len(operands)
    saved = tuple(
        item
        for item in (() if rounded else spec.saved)
        if (item.result or item.index < count) and all(slot < count for slot in item.needed_by)
    )
    if op.kind == "pow" and not isinstance(op.arguments["self"], Ref):
        saved = SELF + RESULT
    return Rule(factors(dims, *operands), operands, (dims,), linear=linear, saved=saved)


def _starts_with_number(op: Op) -> bool:
    """Whether the only tensor is the second operand, as the divisor of a number."""
    first = next(iter(schema_of(op.overload).arguments)).name
    return len(op.operands) == 1 and op.kind == "div" and op.arguments[first] is not None and first != "self"


@rule_for("to")
def cast(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """A change of dtype is linear between floating dtypes."""
    source, result = types[op.operands[0]], types[op.results[0]]
    dims = named(result.shape)
    floating = source.dtype.is_floating_point and result.dtype.is_floating_point
    return Rule(factors(dims), (dims,), (dims,), linear=(frozenset({0}),) if floating else ())


@rule_for("autograd_function")
def autograd_function(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """A pointwise function can be split in every dim; all its tensors have the same shape."""
    if not op.arguments["pointwise"]:
        return None
    dims = named(types[op.results[0]].shape)
    saved = (*(Saved(slot) for slot in range(len(op.operands))), Saved(0, result=True))
    return Rule(factors(dims), (dims,) * len(op.operands), (dims,) * len(op.results), saved=saved)
