"""Norms and softmax: if the dims that they normalize over are split, ranks combine their statistics inside the local
form."""

from collections.abc import Mapping

from passes.ir.arguments import listed
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Role, Rule, Saved
from passes.rules.parts import dim_argument, factors, named, one, rule_for


@rule_for("layer_norm", "rms_norm")
def norm(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """rows inner, inner, inner -> rows inner. The inner dims are normalized over."""
    shape = types[op.operands[0]].shape
    first = len(shape) - len(listed(op.arguments["normalized_shape"]))
    inner = tuple(one(f"inner{dim}", shape[dim]) for dim in range(first, len(shape)))
    dims = (*named(shape[:first]), *inner)
    names = [f"inner{dim}" for dim in range(first, len(shape)) if shape[dim] != 1]
    return Rule(
        factors(dims, roles=dict.fromkeys(names, Role.INSIDE)),
        (dims, *((inner,) * (len(op.operands) - 1))),
        (dims,),
        forms=dict.fromkeys(names, op.kind),
        saved=(Saved(0),),
    )


@rule_for("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp")
def softmax(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """If the dim is split, ranks combine the largest number and the sum of exponentials."""
    shape = types[op.operands[0]].shape
    given = op.arguments["dim"]
    if isinstance(given, tuple):
        if len(given) != 1:
            return None
        given = given[0]
    dim = dim_argument(given, len(shape))
    dims = list(named(shape))
    names = []
    if dims and shape[dim] != 1:
        dims[dim] = one("along", shape[dim])
        names.append("along")
    found = factors(tuple(dims), roles={"along": Role.INSIDE})
    result = list(dims)
    saved: tuple[Saved, ...] = (Saved(0, result=True),)
    if op.kind == "logsumexp":
        saved = (Saved(0), *saved)
        if dims:
            result[dim] = ()
            result = result if op.arguments["keepdim"] else result[:dim] + result[dim + 1 :]
    forms = dict.fromkeys(names, op.kind.lstrip("_"))
    return Rule(found, (tuple(dims),), (tuple(result),), forms=forms, saved=saved)


@rule_for("group_norm")
def group_norm(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch (groups channels) space, (groups channels) -> batch (groups channels) space."""
    shape = types[op.operands[0]].shape
    groups = op.arguments["num_groups"]
    if not isinstance(groups, int):
        return None
    channels = (*one("groups", groups), *one("channels", shape[1] // groups))
    space = tuple(one(f"space{dim}", size) for dim, size in enumerate(shape[2:]))
    dims: Dims = (one("batch", shape[0]), channels, *space)
    operands: tuple[Dims, ...] = (dims, *(((channels,),) * (len(op.operands) - 1)))
    inner = ["channels", *(f"space{dim}" for dim in range(len(space)))]
    found = factors(dims, roles=dict.fromkeys(inner, Role.INSIDE))
    forms = {name: "group_norm" for name in inner if name in found}
    return Rule(found, operands, (dims,), forms=forms, saved=(Saved(0),))


@rule_for("batch_norm", "_native_batch_norm_legit_functional")
def batch_norm(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch channels space, channels, … -> batch channels space, channels, …: statistics over batch and space.

    In evaluation these are operands.
    """
    shape = types[op.operands[0]].shape
    if len(shape) < 2:
        return None
    names = ["batch", "channels", *(f"space{dim}" for dim in range(len(shape) - 2))]
    dims = tuple(one(name, size) for name, size in zip(names, shape, strict=True))
    channels: Dims = (one("channels", shape[1]),)
    inner = [name for name in names if name != "channels"] if op.arguments["training"] else []
    found = factors(dims, roles=dict.fromkeys(inner, Role.INSIDE))
    operands = (dims, *((channels,) * (len(op.operands) - 1)))
    results = (dims, *((channels,) * (len(op.results) - 1)))
    forms = {name: "batch_norm" for name in inner if name in found}
    return Rule(found, operands, results, forms=forms, saved=(Saved(0),))
