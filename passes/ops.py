"""Operators that capture and normalize write into programs; the runtime imports this module, so that generated code can
call them.

They are defined in the compiler because a trace runs them, and a pass imports nothing of the runtime.

`autopar::routed_mm` multiplies each row with the matrix of its group, in the order in which the rows are given (see
`passes/normalize/routing.py`).

`autopar::scaled_dot_product_attention` also takes a window, and documents. Masks have one row for all queries, and may
be given together with `is_causal`. Here it makes a mask of queries by keys; generated code calls a function of the
runtime that does not.

`autopar::chunked_attention` is attention as models write it out: it also takes a bias that is added to scores, a soft
cap of scores before that, and a sink, a score of every query that no value belongs to. The softmax is in `dtype`.
Scores of hidden keys are the least number, so that a query without any keys attends to all alike. Of such a query alone
`fills` says what passes no gradients on: "" (nothing), "bias" (the mask fills it), or "scores" (the mask fills these).

`autopar::linear_cross_entropy` is a linear layer and the sum of the cross entropies of its result, which is multiplied
with `scale`, soft-capped, and cast to `dtype` before. Generated code calls a function of the runtime that makes logits
of some tokens at a time.

`autopar::delta_scan` and `autopar::selective_scan` are in `passes/scans`, `autopar::ctc_loss` in `passes/ctc.py`.

`autopar::padded_conv1d` is a convolution of stride 1 with as many zeros before and after as its padding says of each,
and a result as long as its operand.

`autopar::autograd_function` is a call of a custom `torch.autograd.Function`, of which a trace alone would keep only the
forward. The function goes in by its path ("package.module:Name"), its arguments as text in which tensors are x0, x1, …
and sizes n0, n1, …: a program that was pickled runs wherever the function can be imported. What runs is the function
itself, so its backward, its context and what it keeps are its own.

There is one overload for functions that give one tensor and one for several, and both again for functions that draw
random numbers. `pointwise` and `linear` say what is known of the function (see `passes/capture/functions.py`).
"""

import ast
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import conv1d, cross_entropy, linear, scaled_dot_product_attention

import passes.scans.delta
import passes.scans.selective  # noqa: F401  (both register an operator)
from passes._torch import OpOverload
from passes.ir.arguments import find_overload
from passes.ir.bands import Band, band_of
from passes.ir.errors import CaptureError

Function = type[torch.autograd.Function]

AUTOGRAD_FUNCTION = "autograd_function"

_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


@dataclass(frozen=True)
class Call:
    """A call of a function: its path, its arguments as text, and the tensors and sizes that the text refers to."""

    function: str
    arguments: str
    tensors: tuple[Tensor, ...]
    sizes: tuple[int | torch.SymInt, ...]


def written(cls: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """A call of `cls` as data.

    Raises CaptureError for a function that cannot be found by its path, and for an argument that cannot be written.
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    if _find(path) is not cls:
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} of {cls.__module__} cannot be found under that name, so a "
            "program cannot call it: define it at the top level of its module"
        )
    tensors: list[Tensor] = []
    sizes: list[int | torch.SymInt] = []

    def text(value: object) -> str:
        if isinstance(value, Tensor):
            tensors.append(value)
            return f"x{len(tensors) - 1}"
        if isinstance(value, torch.SymInt):
            sizes.append(value)
            return f"n{len(sizes) - 1}"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if type(value) in (tuple, torch.Size):
            return f"({''.join(f'{text(item)}, ' for item in value)})"  # type: ignore[attr-defined]
        if type(value) is list:
            return f"[{', '.join(map(text, value))}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{text(key)}: {text(item)}' for key, item in value.items())}}}"
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} is given a {type(value).__name__}, which cannot be written into "
            "a program: give it tensors, numbers, text, dtypes, or tuples, lists and dicts of them"
        )

    shown = [*map(text, args), *(f"{name}={text(value)}" for name, value in kwargs.items())]
    return Call(path, f"({', '.join(shown)})", tuple(tensors), tuple(sizes))


def read(
    function: str, arguments: str, tensors: Sequence[object], sizes: Sequence[object]
) -> tuple[Function, list[object], dict[str, object]]:
    """The function of a call and its arguments, with `tensors` and `sizes` in their places."""

    def value(node: ast.expr) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Name(id=name):
                return (tensors if name[0] == "x" else sizes)[int(name[1:])]
            case ast.UnaryOp(operand=operand):
                return -value(operand)  # type: ignore[operator]
            case ast.Attribute(attr=name):
                return getattr(torch, name)
            case ast.Tuple(elts=items):
                return tuple(map(value, items))
            case ast.List(elts=items):
                return list(map(value, items))
            case ast.Dict(keys=keys, values=values):
                return {value(key): value(item) for key, item in zip(keys, values, strict=True) if key is not None}
        raise AssertionError(f"{arguments!r} is no text of arguments")

    call = _parsed(arguments)
    found = _find(function)
    if found is None:
        raise ImportError(f"the program calls {function}, which this process cannot import")
    named = {item.arg: value(item.value) for item in call.keywords if item.arg is not None}
    return found, [value(item) for item in call.args], named


@cache
def _parsed(arguments: str) -> ast.Call:
    parsed = ast.parse(f"call{arguments}", mode="eval").body
    assert isinstance(parsed, ast.Call)
    return parsed


def _find(path: str) -> Function | None:
    module, _, name = path.partition(":")
    try:
        found = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, torch.autograd.Function) else None


# Whether a function runs within the operator, so that `apply` is to be its own; and, while one is traced, what it gave.
_within: ContextVar[bool] = ContextVar("within", default=False)
_given: ContextVar[list[object] | None] = ContextVar("given", default=None)


def is_within() -> bool:
    """Whether an operator of this module is running its function."""
    return _within.get()


@contextmanager
def results_noted() -> Iterator[list[object]]:
    """A context that records the results of the functions, tensors and others."""
    noted: list[object] = []
    token = _given.set(noted)
    try:
        yield noted
    finally:
        _given.reset(token)


def run(tensors: Sequence[Tensor], function: str, arguments: str, sizes: Sequence[int]) -> list[Tensor]:
    """Call a function; returns its tensors."""
    cls, args, kwargs = read(function, arguments, tensors, sizes)
    token = _within.set(True)
    try:
        result = cls.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        _within.reset(token)
    noted = _given.get()
    if noted is not None:
        noted.append(result)
    return [item for item in (result if isinstance(result, tuple) else (result,)) if isinstance(item, Tensor)]


def _called(
    tensors: Sequence[Tensor],
    function: str,
    arguments: str,
    *,
    sizes: Sequence[int] = (),
    pointwise: bool = False,
    linear: bool = False,
) -> list[Tensor]:
    return run(tensors, function, arguments, sizes)


_library = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(overload: str, returned: str, body: Callable[..., object], *tags: torch.Tag) -> None:
    _library.define(  # type: ignore[no-untyped-call]
        f"{AUTOGRAD_FUNCTION}.{overload}(Tensor[] tensors, str function, str arguments, *, SymInt[] sizes=[], "
        f"bool pointwise=False, bool linear=False) -> {returned}",
        tags=(torch.Tag.pt2_compliant_tag, *tags),
    )
    # Composite, so that autograd sees the function and not the operator.
    _library.impl(f"{AUTOGRAD_FUNCTION}.{overload}", body, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


for _drawn, _tags in (("", ()), ("_drawn", (torch.Tag.nondeterministic_seeded,))):
    _define(f"one{_drawn}", "Tensor", lambda *given, **options: _called(*given, **options)[0], *_tags)
    _define(f"several{_drawn}", "Tensor[]", _called, *_tags)


# The overload that a trace has, until the right one is known.
TRACED: OpOverload = torch.ops.autopar.autograd_function.several


def overload_for(results: int, *, drawn: bool) -> OpOverload:
    """The overload for the number of returned tensors, and for whether the function draws random numbers."""
    name = ("one" if results == 1 else "several") + "_drawn" * drawn
    found: OpOverload = getattr(getattr(torch.ops.autopar, AUTOGRAD_FUNCTION), name)
    return found


class _Permuted(torch.autograd.Function):
    """Rows in another order. The backward pass reads gradients in the `inverse` order, so both passes are gathers."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad[inverse], None, None


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    found: Tensor = _Permuted.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return found


_GROUPED = "aten._grouped_mm.default"


def _routed_mm(rows: Tensor, weight: Tensor, groups: Tensor, product: str = _GROUPED) -> Tensor:
    """Row n of the result is row n of `rows` times `weight[groups[n]]`: rows are sorted by group for one grouped
    `product` (an operator), and its result is put back into their order."""
    by_group, order = torch.sort(groups)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    numbers = torch.arange(weight.shape[0], device=groups.device, dtype=groups.dtype)
    ends = torch.searchsorted(by_group, numbers, right=True, out_int32=True)
    made = find_overload(product)(_permuted(rows, order, inverse), weight, ends)
    return _permuted(made, inverse, order)


_library.define(  # type: ignore[no-untyped-call]
    f'routed_mm(Tensor rows, Tensor weight, Tensor groups, *, str product="{_GROUPED}") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("routed_mm", _routed_mm, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Sequence[int] | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> Tensor:
    """Attention to the keys that `attn_mask` shows, in a `window` of so many before and after the query's place, and of
    the query's document: numbers of [..., queries, 1] and [..., 1, keys]."""
    seen = _seen(query, key, band_of(is_causal, window), attn_mask, (query_documents, key_documents))
    return scaled_dot_product_attention(query, key, value, seen, dropout_p, scale=scale, enable_gqa=enable_gqa)


def _seen(
    query: Tensor, key: Tensor, band: Band, mask: Tensor | None, documents: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Flags of queries by keys: in the band, shown by the mask, and of the same document."""
    after = torch.arange(key.shape[-2], device=key.device) - torch.arange(query.shape[-2], device=key.device)[:, None]
    seen = torch.ones_like(after, dtype=torch.bool)
    if band.before is not None:
        seen = seen & (after >= -band.before)
    if band.after is not None:
        seen = seen & (after <= band.after)
    if mask is not None:
        seen = seen & mask
    own, other = documents
    return seen if own is None or other is None else seen & (own == other)


ATTENTION = "autopar.scaled_dot_product_attention.default"
_library.define(  # type: ignore[no-untyped-call]
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int[]? window=None, "
    "Tensor? query_documents=None, Tensor? key_documents=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl(  # type: ignore[no-untyped-call]
    "scaled_dot_product_attention", _attention, "CompositeImplicitAutograd"
)


def _chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    dtype: torch.dtype | None = None,
    fills: str = "",
    least: float | None = None,
    enable_gqa: bool = False,
    window: Sequence[int] | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> Tensor:
    """query: [batch, heads, queries, width]; bias: [batch or 1, heads or 1, queries or 1, keys or 1]; sink: [batch or
    1, heads or 1, 1, 1]; masks and documents as above. `least` is the number that hides scores, by default the least of
    their dtype."""
    seen = _seen(query, key, band_of(is_causal, window), attn_mask, (query_documents, key_documents))
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + (bias.masked_fill(~seen, 0.0) if fills else bias)
    least = torch.finfo(scores.dtype).min if least is None else least
    scores = scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill(~seen, least)
    if fills == "scores":
        scores = scores.masked_fill(~seen, least)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value


CHUNKED_ATTENTION = "autopar.chunked_attention.default"
_library.define(  # type: ignore[no-untyped-call]
    "chunked_attention(Tensor query, Tensor key, Tensor value, Tensor? bias=None, Tensor? sink=None, "
    "Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, float? soft_cap=None, ScalarType? dtype=None, "
    'str fills="", float? least=None, bool enable_gqa=False, int[]? window=None, Tensor? query_documents=None, '
    "Tensor? key_documents=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("chunked_attention", _chunked_attention, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _padded_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """input: [batch, channels, length], with zeros before and after it, as many as `padding` says of either."""
    before, after = padding
    around = max(padding)
    wide = conv1d(input, weight, bias, 1, around, list(dilation), groups)
    return wide[..., around - before : wide.shape[-1] - (around - after)]


PADDED_CONVOLUTION = "autopar.padded_conv1d.default"
_library.define(  # type: ignore[no-untyped-call]
    "padded_conv1d(Tensor input, Tensor weight, Tensor? bias=None, *, int[2] padding=[0, 0], int[1] dilation=1, "
    "SymInt groups=1) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("padded_conv1d", _padded_conv1d, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """hidden: [tokens, width]; weight: [classes, width]; labels: [tokens]; bias: [classes]; result: a scalar."""
    logits = linear(hidden, weight, bias) * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    logits = logits if dtype is None else logits.to(dtype)
    return cross_entropy(logits, labels, reduction="sum", ignore_index=ignore_index)


LINEAR_LOSS = "autopar.linear_cross_entropy.default"
_library.define(  # type: ignore[no-untyped-call]
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias=None, *, SymInt ignore_index=-100, "
    "float scale=1.0, float? soft_cap=None, ScalarType? dtype=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("linear_cross_entropy", _linear_cross_entropy, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
