"""Calls of local forms."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from passes.codegen.expressions import expression, reduction
from passes.codegen.scope import Scope
from passes.codegen.values import Text, tuple_text
from passes.ir.lowered import Compute, Split
from passes.ir.program import Argument


def form(code: Scope, statement: Compute) -> str:
    """The call of a local form."""
    return WRITERS[statement.body](code, statement)


def _digits(code: Scope, split: Split) -> Text:
    """The axes that split the factor, each with its major: "((tp, 1),)"."""
    inner = ", ".join(f"({code.axis(axis)}, {major})" for axis, major in split.digits)
    return Text(f"({inner},)")


def _one(statement: Compute) -> Split:
    """The only factor that is split."""
    (split,) = statement.splits.values()
    return split


def _split(code: Scope, statement: Compute) -> dict[str, Argument]:
    """The global size of the only factor that is split, and its digits."""
    split = _one(statement)
    return {"size": split.size, "digits": _digits(code, split)}


def _mean_form(code: Scope, statement: Compute) -> str:
    arguments = dict(statement.op.arguments)
    dtype = arguments.pop("dtype", None)
    total = reduction("sum")(code, arguments)
    if dtype is not None:
        total = f"{total}.to({dtype})"
    shape = code.types[statement.op.operands[0]].shape
    dims = arguments.get("dim")
    reduced = dims if isinstance(dims, tuple) and dims else range(len(shape))
    return f"{total} / {prod(shape[dim] for dim in reduced if isinstance(dim, int))}"


def _embedding_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    padding = {"padding_idx": arguments["padding_idx"]} if arguments["padding_idx"] != -1 else {}
    given = [arguments["indices"], arguments["weight"]]
    return _call(code, "vocabulary_embedding", given, **_split(code, statement), **padding)


def _loss_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    options = {"ignore_index": arguments["ignore_index"]} if arguments["ignore_index"] != -100 else {}
    if arguments["reduction"] == 0:
        options["summed"] = False
    given = [arguments["self"], arguments["target"]]
    return _call(code, "vocabulary_cross_entropy", given, **_split(code, statement), **options)


def _attention_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    defaults: dict[str, Argument] = {"scale": None, "enable_gqa": False, "dropout_p": 0.0}
    options = {name: arguments[name] for name, default in defaults.items() if arguments[name] != default}
    given = [arguments[name] for name in ("query", "key", "value")]
    return _call(code, "causal_attention", given, digits=_digits(code, _one(statement)), **options)


def _axes(code: Scope, statement: Compute) -> Text:
    """The axes of everything that is split: "(dp, tp)"."""
    digits = sorted(digit for split in statement.splits.values() for digit in split.digits)
    return Text(tuple_text([code.axis(axis) for axis, _ in digits]))


def _call(code: Scope, name: str, given: list[Argument], **named: Argument) -> str:
    """A call with values."""
    shown = [*map(code.value, given), *(f"{key}={code.value(value)}" for key, value in named.items())]
    return f"{code.use(name)}({', '.join(shown)})"


def _layer_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.whole.arguments
    sizes = arguments["normalized_shape"]
    assert isinstance(sizes, tuple)
    size = prod(extent for extent in sizes if isinstance(extent, int))
    names = ("input", "weight", "bias")[: 3 if statement.body == "layer_norm" else 2]
    given = [statement.op.arguments[name] for name in names]
    options = {"rank": len(sizes), "size": size, "eps": arguments["eps"], "axes": _axes(code, statement)}
    return _call(code, f"split_{statement.body}", given, **options)


def _group_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    whole = code.types[statement.whole.operands[0]]
    groups = statement.whole.arguments["num_groups"]
    assert isinstance(groups, int)
    size = whole.size // (whole.shape[0] * groups)
    given = [arguments[name] for name in ("input", "weight", "bias")]
    options = {"groups": arguments["num_groups"], "size": size, "eps": arguments["eps"]}
    return _call(code, "split_group_norm", given, **options, axes=_axes(code, statement))


def _batch_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    whole = code.types[statement.whole.operands[0]]
    size = whole.size // whole.shape[1]
    given = [arguments[name] for name in ("input", "weight", "bias")]
    options = {"size": size, "eps": arguments["eps"], "axes": _axes(code, statement)}
    if len(statement.op.results) == 1:
        return f"{_call(code, 'split_batch_norm', given, **options)}[0]"
    given += [arguments["running_mean"], arguments["running_var"]]
    return _call(code, "split_updating_batch_norm", given, momentum=arguments["momentum"], **options)


def _softmax_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    dim = arguments["dim"]
    dim = dim[0] if isinstance(dim, tuple) else dim
    options = {name: arguments[name] for name in ("dtype", "keepdim") if arguments.get(name)}
    return _call(code, f"split_{statement.body}", [arguments["self"], dim], axes=_axes(code, statement), **options)


def _cumsum_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    dtype = {"dtype": arguments["dtype"]} if arguments["dtype"] is not None else {}
    split = _one(statement)
    return _call(code, "split_cumsum", [arguments["self"], split.dim], digits=_digits(code, split), **dtype)


def _haloed_form(code: Scope, statement: Compute) -> str:
    """The op on a block with what it needs of its neighbours, without padding in the dims that are split."""
    op = statement.op
    operand = next(iter(op.arguments))
    text = code.value(op.arguments[operand])
    count = len(code.types[op.operands[0]].shape)
    padding = op.arguments["padding"]
    spatial = int(op.kind[-2])
    paddings = list(padding) if isinstance(padding, tuple) else [padding]
    paddings = paddings * spatial if len(paddings) == 1 else paddings
    value = ', value=float("-inf")' if op.kind.startswith("max") else ""
    for split in statement.splits.values():
        before, after = split.reach
        reach = f"before={before}, after={after}, digits={_digits(code, split)}{value}"
        text = f"{code.use('with_halo')}({text}, {split.dim}, {reach})"
        paddings[split.dim - (count - spatial)] = 0
    changed = {**op.arguments, "padding": tuple(paddings), operand: Text(text)}
    return expression(code, replace(op, arguments=changed))


WRITERS: dict[str, Callable[[Scope, Compute], str]] = {
    "mean": _mean_form,
    "vocabulary_embedding": _embedding_form,
    "vocabulary_cross_entropy": _loss_form,
    "causal_attention": _attention_form,
    "haloed": _haloed_form,
    "layer_norm": _layer_norm_form,
    "rms_norm": _layer_norm_form,
    "group_norm": _group_norm_form,
    "batch_norm": _batch_norm_form,
    "softmax": _softmax_form,
    "log_softmax": _softmax_form,
    "logsumexp": _softmax_form,
    "cumsum": _cumsum_form,
}
