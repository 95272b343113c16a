"""Ops as expressions: in idiomatic PyTorch where possible, else by the full name of the operator."""

from collections.abc import Callable, Mapping
from string import Formatter

from passes._torch import schema_of
from passes.codegen.scope import Scope
from passes.ir.program import Argument, Op, Ref, freeze

Writer = Callable[[Scope, Mapping[str, Argument]], str | None]


def expression(code: Scope, op: Op) -> str:
    """An op as an expression: in idiomatic PyTorch where possible, else by the full name of the operator."""
    writer = _WRITERS.get(op.kind)
    written = writer(code, op.arguments) if writer else None
    if written is not None:
        return written
    schema = {item.name: item for item in schema_of(op.overload).arguments}
    given = [
        (f"{name}=" if schema[name].has_default_value() or schema[name].kwarg_only else "") + code.value(value)
        for name, value in op.arguments.items()
        if not schema[name].has_default_value() or value != freeze(schema[name].default_value)
    ]
    return f"torch.ops.{op.target}({', '.join(given)})"


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
        sizes = arguments[argument]
        assert isinstance(sizes, tuple)
        return f"{code.value(arguments['self'])}.{name}({', '.join(map(str, sizes)) or '()'})"

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
    "silu": _functional("silu", "self"),
    "gelu": _functional("gelu", "self", approximate=("approximate", "none")),
    "relu": _functional("relu", "self"),
    "scaled_dot_product_attention": _functional(
        "scaled_dot_product_attention",
        "query",
        "key",
        "value",
        attn_mask=("attn_mask", None),
        dropout_p=("dropout_p", 0.0),
        is_causal=("is_causal", False),
        scale=("scale", None),
        enable_gqa=("enable_gqa", False),
    ),
    **{name: _method(name) for name in ("rsqrt", "sqrt", "tanh", "exp", "cos", "sin", "sigmoid", "abs", "log", "erf")},
}
