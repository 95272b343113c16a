"""Ops, their arguments, and calls of local forms as expressions: in idiomatic PyTorch where possible, else by the full
name of the operator.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from math import prod
from string import Formatter

import torch

from passes._torch import schema_of
from passes.ir.arguments import Argument, Ref, freeze, integer, listed
from passes.ir.linear_loss import AT_ONCE, SPLIT, SPLIT_AT_ONCE
from passes.ir.lowered import Compute, Split
from passes.ir.program import Op, TensorType


class Text(str):
    """An argument that is written already."""


def value_text(argument: Argument, read: Callable[[str], str]) -> str:
    """An argument as an expression; `read` gives the one that reads a tensor."""
    if isinstance(argument, Text):
        return argument
    if isinstance(argument, Ref):
        return read(argument.name)
    if isinstance(argument, tuple):
        return tuple_text([value_text(item, read) for item in argument])
    if isinstance(argument, torch.device):
        return "self.device"
    if isinstance(argument, float) and (argument != argument or argument in (float("inf"), float("-inf"))):
        return f'float("{argument}")'
    return json.dumps(argument) if isinstance(argument, str) else repr(argument)


def tuple_text(items: Sequence[str]) -> str:
    """Expressions as a tuple."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


class Scope(ABC):
    """A function body, or a statement, that is being written; `types` are the global types of its values."""

    types: Mapping[str, TensorType]

    @abstractmethod
    def read(self, value: str) -> str:
        """The expression that reads a value."""

    @abstractmethod
    def span(self, number: int) -> str:
        """The expression of the axes that a collective runs over (see `Mesh.spans`)."""

    def value(self, argument: Argument) -> str:
        """An argument as an expression."""
        return value_text(argument, self.read)

    def use(self, name: str) -> str:
        """A name of the runtime, to be imported."""
        return name

    def function(self, name: str) -> str:
        """A function of torch.nn.functional."""
        return f"F.{name}"


Writer = Callable[[Scope, Mapping[str, Argument]], str | None]


def expression(code: Scope, op: Op) -> str:
    """An op as an expression: in idiomatic PyTorch where possible, else by the full name of the operator."""
    writer = _WRITERS.get(op.kind)
    written = writer(code, op.arguments) if writer else None
    if written is not None:
        return written
    schema = {item.name: item for item in schema_of(op.overload).arguments}
    given = []
    for name, value in op.arguments.items():
        item = schema[name]
        if not item.has_default_value() and not item.kwarg_only:
            given.append(code.value(value))
        elif not item.has_default_value() or value != freeze(item.default_value):
            given.append(_named(name, code.value(value)))
    called = f"{_operator(op.target)}({', '.join(given)})"
    return f"{called}[0]" if len(op.results) == 1 and _returns_list(op) else called


def _returns_list(op: Op) -> bool:
    """Whether an operator returns a list of tensors, which may have one alone."""
    return [str(item.type) for item in schema_of(op.overload).returns] == ["List[Tensor]"]


def _named(name: str, value: str) -> str:
    """An argument by its name, which may be a word of Python, such as the `from` of `uniform`."""
    return f'**{{"{name}": {value}}}' if iskeyword(name) else f"{name}={value}"


def _operator(target: str) -> str:
    """An operator by its full name, of which an overload may be called `from`."""
    operator, _, overload = target.rpartition(".")
    return f'getattr(torch.ops.{operator}, "{overload}")' if iskeyword(overload) else f"torch.ops.{target}"


def _operand(code: Scope, argument: Argument) -> str:
    """An operand of an operator sign or method: numbers below zero in brackets."""
    text = code.value(argument)
    return f"({text})" if text.startswith("-") else text


def _sign(sign: str) -> Writer:
    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
            return None
        return f"{_operand(code, arguments['self'])} {sign} {_operand(code, arguments['other'])}"

    return write


def _method(name: str, *given: str) -> Writer:
    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        if set(arguments) - {"self", *given} or not isinstance(arguments["self"], Ref):
            return None
        return f"{code.value(arguments['self'])}.{name}({', '.join(code.value(arguments[item]) for item in given)})"

    return write


def _sized(name: str, argument: str) -> Writer:
    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        sizes = ", ".join(map(str, listed(arguments[argument])))
        return f"{code.value(arguments['self'])}.{name}({sizes or '()'})"

    return write


def _template(text: str) -> Writer:
    """An expression with the values of arguments in place of their names in braces."""
    names = [name for _, name, _, _ in Formatter().parse(text) if name]

    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        return text.format(**{name: code.value(arguments[name]) for name in names})

    return write


def _slice(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    dim, start, end = arguments["dim"], arguments["start"], arguments["end"]
    if arguments["step"] != 1 or not isinstance(dim, int) or dim < 0:
        return None
    return f"{code.value(arguments['self'])}[{':, ' * dim}{start or ''}:{end}]"


def _select(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    dim = arguments["dim"]
    if not isinstance(dim, int) or dim < 0:
        return None
    return f"{code.value(arguments['self'])}[{':, ' * dim}{arguments['index']}]"


def reduction(name: str) -> Writer:
    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        if arguments.get("dtype") is not None:
            return None
        dims = arguments.get("dim")
        shown = "" if not dims else code.value(dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims)
        keep = ", keepdim=True" if arguments.get("keepdim") else ""
        return f"{code.value(arguments['self'])}.{name}({shown}{keep})"

    return write


def _functional(name: str, *given: str, **named: tuple[str, Argument]) -> Writer:
    """A function of torch.nn.functional: `given` arguments in order, `named` ones where they are not the default."""

    def write(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
        shown = [code.value(arguments[item]) for item in given]
        for keyword_name, (item, default) in named.items():
            if item in arguments and arguments[item] != default:
                shown.append(f"{keyword_name}={code.value(arguments[item])}")
        return f"{code.function(name)}({', '.join(shown)})"

    return write


def _embedding(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    if arguments["scale_grad_by_freq"] or arguments["sparse"]:
        return None
    padding = arguments["padding_idx"]
    extra = f", padding_idx={padding}" if padding != -1 else ""
    return f"{code.function('embedding')}({code.value(arguments['indices'])}, {code.value(arguments['weight'])}{extra})"


def _arange(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    if arguments.get("start") is not None or arguments.get("step") is not None:
        return None
    dtype = f", dtype={arguments['dtype']}" if arguments.get("dtype") is not None else ""
    return f"torch.arange({arguments['end']}{dtype}, device=self.device)"


def _loss(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    reductions = {0: "none", 1: "mean", 2: "sum"}
    reduction = arguments["reduction"]
    if arguments["weight"] is not None or not isinstance(reduction, int):
        return None
    shown = [code.value(arguments["self"]), code.value(arguments["target"]), f'reduction="{reductions[reduction]}"']
    if arguments["ignore_index"] != -100:
        shown.append(f"ignore_index={arguments['ignore_index']}")
    if arguments["label_smoothing"]:
        shown.append(f"label_smoothing={arguments['label_smoothing']}")
    return f"{code.function('cross_entropy')}({', '.join(shown)})"


def _pad(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    mode = "" if arguments["mode"] == "constant" else f', mode="{arguments["mode"]}"'
    value = f", value={code.value(arguments['value'])}" if arguments["value"] is not None else ""
    return f"{code.function('pad')}({code.value(arguments['self'])}, {code.value(arguments['pad'])}{mode}{value})"


def _addmm(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    if arguments["beta"] != 1 or arguments["alpha"] != 1:
        return None
    return f"torch.addmm({', '.join(code.value(arguments[item]) for item in ('self', 'mat1', 'mat2'))})"


def _where(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    return f"torch.where({', '.join(code.value(value) for value in arguments.values())})"


def _called(code: Scope, name: str, given: list[Argument], **named: Argument) -> str:
    """A call of a function of the runtime with values."""
    shown = [*map(code.value, given), *(f"{key}={code.value(value)}" for key, value in named.items())]
    return f"{code.use(name)}({', '.join(shown)})"


_FUSED_ATTENTION = _functional(
    "scaled_dot_product_attention",
    "query",
    "key",
    "value",
    attn_mask=("attn_mask", None),
    dropout_p=("dropout_p", 0.0),
    is_causal=("is_causal", False),
    scale=("scale", None),
    enable_gqa=("enable_gqa", False),
)
# The arguments of attention in blocks, by those of the op, where they are not the default.
_BLOCKWISE: Mapping[str, str] = {"is_causal": "causal", "window": "window", "attn_mask": "mask", "scale": "scale"}


def _attention(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    if "window" in arguments:
        return _in_blocks(code, "blockwise_attention", arguments)
    return _FUSED_ATTENTION(code, arguments)


def _in_blocks(code: Scope, name: str, arguments: Mapping[str, Argument], **more: Argument) -> str:
    """Attention in blocks; `more` are arguments besides those of the op."""
    options = {
        written: arguments[own]
        for own, written in _BLOCKWISE.items()
        if arguments.get(own) is not None and arguments[own] is not False
    }
    if arguments.get("query_documents") is not None:
        options["documents"] = arguments["query_documents"], arguments["key_documents"]
    return _called(code, name, [arguments[own] for own in ("query", "key", "value")], **more, **options)


def _in_chunks(code: Scope, arguments: Mapping[str, Argument], **more: Argument) -> str:
    """Attention in chunks; `more` are arguments besides those of the op."""
    options = ("bias", "sink", "soft_cap", "dtype", "least")
    added = {name: arguments[name] for name in options if arguments[name] is not None}
    fills = {"fills": arguments["fills"]} if arguments["fills"] else {}
    return _in_blocks(code, "chunked_attention", arguments, **added, **fills, **more)


def _linear_loss(code: Scope, arguments: Mapping[str, Argument], **more: Argument) -> str:
    """A linear layer and its cross entropy; `more` are arguments besides those of the op."""
    given = [arguments[name] for name in ("hidden", "weight", "labels")]
    defaults = {"bias": None, "ignore_index": -100, "scale": 1.0, "soft_cap": None, "dtype": None}
    options = {name: arguments[name] for name, default in defaults.items() if arguments[name] != default}
    return _called(code, "linear_cross_entropy", given, **options, **more)


def _padded_convolution(code: Scope, arguments: Mapping[str, Argument]) -> str | None:
    """The convolution with the larger padding on both sides, of whose result the ends are cut off."""
    before, after = map(integer, listed(arguments["padding"]))
    around = max(before, after)
    text = _WRITERS["conv1d"](code, {**arguments, "padding": (around,)})
    cut = f"{around - before or ''}:{after - around or ''}"
    return text if before == after else f"{text}[:, :, {cut}]"


_WRITERS: dict[str, Writer] = {
    "add": _sign("+"),
    "sub": _sign("-"),
    "mul": _sign("*"),
    "div": _sign("/"),
    "eq": _sign("=="),
    "ne": _sign("!="),
    "lt": _sign("<"),
    "le": _sign("<="),
    "gt": _sign(">"),
    "ge": _sign(">="),
    "__and__": _sign("&"),
    "__or__": _sign("|"),
    "matmul": _sign("@"),
    "neg": _template("-{self}"),
    "pow": _method("pow", "exponent"),
    "to": _template("{self}.to({dtype})"),
    "reshape": _sized("reshape", "shape"),
    "contiguous": _template("{self}.contiguous()"),
    "expand": lambda code, arguments: None if arguments["implicit"] else _sized("expand", "size")(code, arguments),
    "permute": _sized("permute", "dims"),
    "transpose": _method("transpose", "dim0", "dim1"),
    "slice": _slice,
    "select": _select,
    "cat": _template("torch.cat({tensors}, dim={dim})"),
    "stack": _template("torch.stack({tensors}, dim={dim})"),
    "mean": reduction("mean"),
    "sum": reduction("sum"),
    "where": _where,
    "pad": _pad,
    "masked_fill": _template("{self}.masked_fill({mask}, {value})"),
    "addmm": _addmm,
    # Pairs must lie next to each other in memory, from an even place on: those of a copy do.
    "view_as_complex": _template("torch.view_as_complex({self}.clone(memory_format=torch.contiguous_format))"),
    "rms_norm": _functional("rms_norm", "input", "normalized_shape", weight=("weight", None), eps=("eps", None)),
    "arange": _arange,
    "embedding": _embedding,
    "cross_entropy_loss": _loss,
    "linear": _functional("linear", "input", "weight", bias=("bias", None)),
    "layer_norm": _functional(
        "layer_norm", "input", "normalized_shape", weight=("weight", None), bias=("bias", None), eps=("eps", 1e-5)
    ),
    "softmax": _functional("softmax", "self", "dim", dtype=("dtype", None)),
    **{
        f"conv{rank}d": _functional(
            f"conv{rank}d",
            "input",
            "weight",
            bias=("bias", None),
            **{name: (name, (value,) * rank) for name, value in (("stride", 1), ("padding", 0), ("dilation", 1))},
            groups=("groups", 1),
        )
        for rank in (1, 2, 3)
    },
    "padded_conv1d": _padded_convolution,
    "silu": _functional("silu", "self"),
    "gelu": _functional("gelu", "self", approximate=("approximate", "none")),
    "relu": _functional("relu", "self"),
    "scaled_dot_product_attention": _attention,
    "chunked_attention": _in_chunks,
    "linear_cross_entropy": _linear_loss,
    **{name: _method(name) for name in ("rsqrt", "sqrt", "tanh", "exp", "cos", "sin", "sigmoid", "abs", "log", "erf")},
}


# Products whose weight gradients are computed apart: the method of `DeferredGradients`, and its arguments.
_DEFERRED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("linear", ("input", "weight", "bias")),
    "addmm": ("addmm", ("self", "mat1", "mat2")),
    "matmul": ("matmul", ("self", "other")),
    "mm": ("matmul", ("self", "mat2")),
    "bmm": ("matmul", ("self", "mat2")),
}


def computed(code: Scope, statement: Compute) -> str:
    """An op or the call of a local form as an expression."""
    if statement.deferred:
        name, operands = _DEFERRED[statement.op.kind]
        given = [statement.op.arguments[item] for item in operands if statement.op.arguments.get(item) is not None]
        return f"self.deferred.{name}({', '.join(map(code.value, given))})"
    return WRITERS[statement.body](code, statement) if statement.body else expression(code, statement.op)


def _digits(code: Scope, split: Split) -> Text:
    """The axes that split the factor, each with its major: "((tp, 1),)"."""
    inner = ", ".join(f"({code.span(span)}, {major})" for span, major in split.digits)
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
    return _called(code, "vocabulary_embedding", given, **_split(code, statement), **padding)


def _loss_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    options = {"ignore_index": arguments["ignore_index"]} if arguments["ignore_index"] != -100 else {}
    if arguments["reduction"] == 0:
        options["summed"] = False
    given = [arguments["self"], arguments["target"]]
    return _called(code, "vocabulary_cross_entropy", given, **_split(code, statement), **options)


def _attention_form(code: Scope, statement: Compute) -> str:
    digits = _digits(code, _one(statement))
    return _in_blocks(code, "blockwise_attention", statement.op.arguments, digits=digits)


def _chunks_form(code: Scope, statement: Compute) -> str:
    return _in_chunks(code, statement.op.arguments, digits=_digits(code, _one(statement)))


def _linear_loss_form(code: Scope, statement: Compute) -> str:
    """The form of split classes, or of logits at once, whose tokens and classes may be split."""
    classes = statement.splits.get("classes")
    options: dict[str, Argument] = {} if statement.body == SPLIT else {"at_once": True}
    if classes is not None:
        options = {"size": classes.size, "digits": _digits(code, classes), **options}
    return _linear_loss(code, statement.op.arguments, **options)


def _ring_form(code: Scope, statement: Compute) -> str:
    queries, keys = statement.splits["queries"], statement.splits["keys"]
    further = {"queries": _digits(code, queries)} if queries.digits != keys.digits else {}
    options = {"digits": _digits(code, keys), **further}
    return _in_blocks(code, "ring_attention", statement.op.arguments, **options)


def _axes(code: Scope, statement: Compute) -> Text:
    """The axes of everything that is split: "(dp, tp)"."""
    digits = sorted(digit for split in statement.splits.values() for digit in split.digits)
    return Text(tuple_text([code.span(span) for span, _ in digits]))


def _layer_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.whole.arguments
    sizes = listed(arguments["normalized_shape"])
    size = prod(map(integer, sizes))
    names = ("input", "weight", "bias")[: 3 if statement.body == "layer_norm" else 2]
    given = [statement.op.arguments[name] for name in names]
    options = {"rank": len(sizes), "size": size, "eps": arguments["eps"], "axes": _axes(code, statement)}
    return _called(code, f"split_{statement.body}", given, **options)


def _group_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    whole = code.types[statement.whole.operands[0]]
    size = whole.size // (whole.shape[0] * integer(statement.whole.arguments["num_groups"]))
    given = [arguments[name] for name in ("input", "weight", "bias")]
    options = {"groups": arguments["num_groups"], "size": size, "eps": arguments["eps"]}
    return _called(code, "split_group_norm", given, **options, axes=_axes(code, statement))


def _batch_norm_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    whole = code.types[statement.whole.operands[0]]
    size = whole.size // whole.shape[1]
    given = [arguments[name] for name in ("input", "weight", "bias")]
    options = {"size": size, "eps": arguments["eps"], "axes": _axes(code, statement)}
    if len(statement.op.results) == 1:
        return f"{_called(code, 'split_batch_norm', given, **options)}[0]"
    given += [arguments["running_mean"], arguments["running_var"]]
    return _called(code, "split_updating_batch_norm", given, momentum=arguments["momentum"], **options)


def _softmax_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    dim = arguments["dim"]
    dim = dim[0] if isinstance(dim, tuple) else dim
    options = {name: arguments[name] for name in ("dtype", "keepdim") if arguments.get(name)}
    return _called(code, f"split_{statement.body}", [arguments["self"], dim], axes=_axes(code, statement), **options)


def _cumsum_form(code: Scope, statement: Compute) -> str:
    arguments = statement.op.arguments
    dtype = {"dtype": arguments["dtype"]} if arguments["dtype"] is not None else {}
    split = _one(statement)
    return _called(code, "split_cumsum", [arguments["self"], split.dim], digits=_digits(code, split), **dtype)


def _scan_form(code: Scope, statement: Compute) -> str:
    given: list[Argument] = [value for value in statement.op.arguments.values() if value is not None]
    return _called(code, "split_delta_scan", given, digits=_digits(code, _one(statement)))


def _selective_form(code: Scope, statement: Compute) -> str:
    given = list(statement.op.arguments.values())
    return _called(code, "split_selective_scan", given, digits=_digits(code, _one(statement)))


def _haloed_form(code: Scope, statement: Compute) -> str:
    """The op on a block with what it needs of its neighbours, without padding in the dims that are split."""
    op = statement.op
    operand = next(iter(op.arguments))
    text = code.value(op.arguments[operand])
    count = len(code.types[op.operands[0]].shape)
    padding = op.arguments["padding"]
    spatial = int(op.kind[-2])
    paddings: list[Argument] = list(padding) if isinstance(padding, tuple) else [padding]
    paddings = paddings * spatial if len(paddings) == 1 else paddings
    if op.kind == "padded_conv1d":
        # Its only dim is split, and the halo is all its padding.
        paddings = [0, 0]
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
    "blockwise_attention": _attention_form,
    "chunked_attention": _chunks_form,
    "ring_attention": _ring_form,
    **dict.fromkeys((SPLIT, AT_ONCE, SPLIT_AT_ONCE), _linear_loss_form),
    "haloed": _haloed_form,
    "layer_norm": _layer_norm_form,
    "rms_norm": _layer_norm_form,
    "group_norm": _group_norm_form,
    "batch_norm": _batch_norm_form,
    "softmax": _softmax_form,
    "log_softmax": _softmax_form,
    "logsumexp": _softmax_form,
    "cumsum": _cumsum_form,
    "delta_scan": _scan_form,
    "selective_scan": _selective_form,
}
