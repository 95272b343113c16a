"""How a local form is called."""

from collections.abc import Callable

from passes.ir.lowered import Compute, Split
from passes.writing.expressions import reduction
from passes.writing.scope import Scope


def form(code: Scope, statement: Compute) -> str:
    """The call of a local form."""
    return _WRITERS[statement.body](code, statement)


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
    return f"{name}({logits}, {target}, size={split.size}, digits={_digits(code, split)}{extra})"


def _attention_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    name = code.use("causal_attention")
    operands = ", ".join(code.value(arguments[item]) for item in ("query", "key", "value"))
    extra = f", scale={arguments['scale']}" if arguments["scale"] is not None else ""
    extra += ", enable_gqa=True" if arguments["enable_gqa"] else ""
    return f"{name}({operands}, digits={_digits(code, _one(statement))}{extra})"


_WRITERS: dict[str, Callable[[Scope, Compute], str]] = {
    "mean": _mean_form,
    "vocabulary_embedding": _embedding_form,
    "vocabulary_cross_entropy": _loss_form,
    "causal_attention": _attention_form,
}
