"""Calls of local forms."""

from collections.abc import Callable
from dataclasses import replace

from passes.codegen.expressions import expression, reduction
from passes.codegen.scope import Scope
from passes.ir.lowered import Compute, Split
from passes.ir.program import Argument


def form(code: Scope, statement: Compute) -> str:
    """The call of a local form."""
    return WRITERS[statement.body](code, statement)


def _digits(code: Scope, split: Split) -> str:
    """The axes that split the factor, each with its major: "((tp, 1),)"."""
    inner = ", ".join(f"({code.axis(axis)}, {major})" for axis, major in split.digits)
    return f"({inner},)"


def _one(statement: Compute) -> Split:
    """The only factor that is split."""
    (split,) = statement.splits.values()
    return split


def _mean_form(code: Scope, statement: Compute) -> str:
    arguments = dict(statement.op.arguments)
    dtype = arguments.pop("dtype", None)
    total = reduction("sum")(code, arguments)
    if dtype is not None:
        total = f"{total}.to({dtype})"
    size = 1
    operand = code.types[statement.op.operands[0]].shape
    dims = statement.op.arguments.get("dim")
    for dim in dims if isinstance(dims, tuple) and dims else range(len(operand)):
        assert isinstance(dim, int)
        size *= operand[dim]
    return f"{total} / {size}"


def _embedding_form(code: Scope, statement: Compute) -> str:
    split = _one(statement)
    arguments = statement.op.arguments
    padding = arguments["padding_idx"]
    extra = f", padding_idx={padding}" if padding != -1 else ""
    ids, weight = code.value(arguments["indices"]), code.value(arguments["weight"])
    name = code.use("vocabulary_embedding")
    return f"{name}({ids}, {weight}, size={split.size}, digits={_digits(code, split)}{extra})"


def _loss_form(code: Scope, statement: Compute) -> str:
    split = _one(statement)
    arguments = statement.op.arguments
    name = code.use("vocabulary_cross_entropy")
    logits, target = code.value(arguments["self"]), code.value(arguments["target"])
    extra = f", ignore_index={arguments['ignore_index']}" if arguments["ignore_index"] != -100 else ""
    extra += ", summed=False" if arguments["reduction"] == 0 else ""
    return f"{name}({logits}, {target}, size={split.size}, digits={_digits(code, split)}{extra})"


def _attention_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    name = code.use("causal_attention")
    operands = ", ".join(code.value(arguments[item]) for item in ("query", "key", "value"))
    extra = f", scale={arguments['scale']}" if arguments["scale"] is not None else ""
    extra += ", enable_gqa=True" if arguments["enable_gqa"] else ""
    extra += f", dropout_p={arguments['dropout_p']}" if arguments["dropout_p"] else ""
    return f"{name}({operands}, digits={_digits(code, _one(statement))}{extra})"


def _axes(code: Scope, statement: Compute) -> str:
    """The axes of everything that is split: "(dp, tp)"."""
    digits = sorted(digit for split in statement.splits.values() for digit in split.digits)
    inner = ", ".join(code.axis(axis) for axis, _ in digits)
    return f"({inner},)" if len(digits) == 1 else f"({inner})"


def _call(code: Scope, name: str, given: list[Argument], **named: Argument | str) -> str:
    """A call with values; text among the named ones is code."""
    shown = [code.value(value) for value in given]
    shown += [f"{key}={value if isinstance(value, str) else code.value(value)}" for key, value in named.items()]
    return f"{code.use(name)}({', '.join(shown)})"


def _layer_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.whole.arguments
    sizes = arguments["normalized_shape"]
    assert isinstance(sizes, tuple)
    size = 1
    for extent in sizes:
        assert isinstance(extent, int)
        size *= extent
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
    changed = replace(op, arguments={**op.arguments, "padding": tuple(paddings)})
    return expression(code, changed, {operand: text})


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
