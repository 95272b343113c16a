"""Typing rules for operators that the checker has none for, written with `spmd_types.rules`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import spmd_types as spmd
import torch
from spmd_types import rules
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tests.autopar.typed.layouts import is_located


@dataclass(frozen=True)
class Call:
    """An operator with its arguments that are no tensors: what it computes, and its typing rule, both of tensors."""

    name: str
    compute: Callable[..., Tensor]
    rule: Callable[..., object]

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """Compute it, typed."""
        return Typed.apply(self, *tensors)


class Typed(torch.autograd.Function):
    """An operator under a typing rule of ours; its backward is autograd's."""

    @staticmethod
    def forward(
        ctx: object,
        call: Call,
        first: Tensor,
        second: Tensor | None = None,
        third: Tensor | None = None,
        fourth: Tensor | None = None,
    ) -> Tensor:
        given = [tensor for tensor in (first, second, third, fourth) if tensor is not None]
        with torch.enable_grad():
            own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
            result = call.compute(*own)
        ctx.graph = own, result  # type: ignore[attr-defined]
        return result.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, result = ctx.graph  # type: ignore[attr-defined]
        wanted = [tensor for tensor in own if tensor.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient, retain_graph=True, allow_unused=True))
        gradients = [next(found) if tensor.requires_grad else None for tensor in own]
        return None, *gradients, *[None] * (4 - len(own))

    @staticmethod
    def spmd_typecheck(
        *, call: Call, first: Tensor, second: Tensor | None, third: Tensor | None, fourth: Tensor | None
    ) -> object:
        return call.rule(*(tensor for tensor in (first, second, third, fourth) if tensor is not None))


Typing = Tensor | rules.NdimWithSpmdType


def beside(tensor: Tensor, other: Typing) -> Typing:
    """`tensor` as an operand beside `other`: what has no gradient is R and I alike."""
    typed: Typing = tensor
    if not tensor.requires_grad:
        theirs = spmd.get_local_type(other)
        for axis, kind in list(spmd.get_local_type(tensor).items()):
            if {kind, theirs.get(axis)} == {spmd.R, spmd.I}:
                typed = rules.reinterpret(typed, axis, src=kind, dst=theirs[axis])
    return typed


def _added(equation: str, product: Typing, bias: Tensor) -> Typing:
    """A product and a bias. Where it is not known which dims of the factors are split (see the top), a bias that is
    pending says that so is the product."""
    for axis, kind in spmd.get_local_type(bias).items():
        if kind is spmd.P and spmd.get_axis_local_type(product, axis) is spmd.V:
            product = rules.reinterpret(product, axis, src=spmd.V, dst=spmd.P)
    return rules.einsum(equation, product, bias, linear_in=((0, 1),))


def linear() -> Call:
    """`F.linear`: rows in, out in, out -> rows out."""

    def rule(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
        result = rules.einsum("...k,nk->...n", x, weight, linear_in=(0, 1))
        return result if bias is None else _added("...n,n->...n", result, bias)

    return Call("linear", functional.linear, rule)


def addmm() -> Call:
    """`torch.addmm`: out, rows in, in out -> rows out."""

    def rule(bias: Tensor, left: Tensor, right: Tensor) -> object:
        result = rules.einsum("mk,kn->mn", left, right, linear_in=(0, 1))
        labels = "mn"[2 - bias.dim() :]
        return _added(f"mn,{labels}->mn", result, bias)

    return Call("addmm", torch.addmm, rule)


def matmul() -> Call:
    """`torch.matmul` of two batches of matrices; a batch of one is used for all of the other."""

    def rule(left: Tensor, right: Tensor) -> object:
        placements = [chr(ord("a") + place_) for place_ in range(left.dim() - 2)]
        ours, theirs = (
            "".join("_" if tensor.shape[place_] == 1 else placement for place_, placement in enumerate(placements))
            for tensor in (left, right)
        )
        out = "".join(b if a == "_" else a for a, b in zip(ours, theirs, strict=True))
        return rules.einsum(f"{ours}mk,{theirs}kn->{out}mn", left, right, linear_in=(0, 1))

    return Call("matmul", torch.matmul, rule)


def embedding(padding: int | None = None) -> Call:
    """`F.embedding`: ids, rows features -> ids features; rows must be whole."""

    def rule(ids: Tensor, weight: Tensor) -> object:
        return rules.einsum("...,_d->...d", beside(ids, weight), weight, linear_in=(1,))

    return Call("embedding", lambda ids, weight: functional.embedding(ids, weight, padding_idx=padding), rule)


def cross_entropy(**options: object) -> Call:
    """`F.cross_entropy`, summed or per token: tokens classes, tokens -> tokens; classes must be whole."""
    result = {"sum": "", "none": "t"}[str(options["reduction"])]

    def rule(logits: Tensor, target: Tensor) -> object:
        return rules.einsum(f"t_,t->{result}", logits, beside(target, logits))

    return Call("cross_entropy", lambda logits, target: functional.cross_entropy(logits, target, **options), rule)


def attention(compute: Callable[..., Tensor], *, rows: bool) -> Call:
    """Attention; `rows` says that queries may be split, which they may not if a causal mask counts them."""

    def rule(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> object:
        queries = f"bh{'q' if rows else '_'}_"
        operands: list[Typing] = [query, key, value]
        terms = [queries, "bh__", "bh_w"]
        if mask is not None:
            sizes = tuple(mask.shape)
            terms.append(
                "".join("_" if size == 1 else placement for size, placement in zip(sizes, queries, strict=True))
            )
            operands.append(beside(mask, query))
        return rules.einsum(f"{','.join(terms)}->{queries[:3]}w", *operands, linear_in=(2,))

    return Call("attention", compute, rule)


def cast(dtype: torch.dtype) -> Call:
    """`Tensor.to`: a pending sum stays one."""
    return Call("to", lambda x: x.to(dtype), lambda x: rules.einsum("...->...", x, linear_in=(0,)))


def pad(widths: Sequence[int], **options: object) -> Call:
    """`F.pad`: dims that get wider must be whole."""

    def rule(x: Tensor) -> object:
        wide = {x.dim() - 1 - place_ // 2 for place_, width in enumerate(widths) if width}
        labels = "".join("_" if dim in wide else chr(ord("a") + dim) for dim in range(x.dim()))
        return rules.einsum(f"{labels}->{labels}", x)

    return Call("pad", lambda x: functional.pad(x, tuple(widths), **options), rule)


def index(key: object) -> Call:
    """`x[...]` by slices and numbers: dims of which a part is taken must be whole."""
    keys = key if isinstance(key, tuple) else (key,)

    def rule(x: Tensor) -> object:
        inner, outer = "", ""
        for dim, size in enumerate(x.shape):
            item = keys[dim] if dim < len(keys) else slice(None)
            if isinstance(item, int):
                inner += "_"
                continue
            assert isinstance(item, slice)
            label = chr(ord("a") + dim) if item.indices(size) == (0, size, 1) else "_"
            inner, outer = inner + label, outer + label
        return rules.einsum(f"{inner}->{outer}", x, linear_in=(0,))

    return Call("getitem", lambda x: x[key], rule)


def reshape(*sizes: int) -> Call:
    """`Tensor.reshape`: a split dim may become several, of which the first is then split, and it may be the first of
    several that become one. Sizes are local."""

    def rule(x: Tensor) -> object:
        labels = carried(x, sizes)
        inner = "".join(chr(ord("a") + dim) if dim in labels else "_" for dim in range(x.dim()))
        outer = ["_"] * len(sizes)
        for dim, goal in labels.items():
            outer[goal] = chr(ord("a") + dim)
        return rules.einsum(f"{inner}->{''.join(outer)}", x, linear_in=(0,))

    return Call("reshape", lambda x: x.reshape(sizes), rule)


def carried(x: Tensor, sizes: Sequence[int]) -> dict[int, int]:
    """For every split dim of `x` the dim that is split when it is reshaped to `sizes`, if there is one."""
    found: dict[int, int] = {}
    for dim, entry in enumerate(spmd.get_partition_spec(x) or ()):
        if entry is None:
            continue
        before, size = prod(x.shape[:dim]), x.shape[dim]
        places = [goal for goal in range(len(sizes)) if prod(sizes[:goal]) == before and goal not in found.values()]
        # What a size of 1 stands for is told by the dims around it, or not at all.
        likely = [goal for goal in places if sizes[goal] == size] or [goal for goal in places if sizes[goal] > 1 < size]
        if len(likely) == 1:
            found[dim] = likely[0]
    return found


def _is_split_inside(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether reshaping `x` gives a split in the middle of a dim."""
    split = {dim for dim, entry in enumerate(spmd.get_partition_spec(x) or ()) if entry is not None}
    return split != set(carried(x, sizes))


class Vocabulary(TorchFunctionMode):
    """Operators that the checker has no rule for are computed under ours, factories give R, and where the type of an
    operand does not say which dim is split, the checker looks at R, I, P and V alone."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        options = dict(kwargs) if isinstance(kwargs, Mapping) else {}
        if not spmd.is_type_checking():
            return function(*args, **options)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            # What is given here is torch's own `apply`, which would not ask the checker.
            return owner.apply(*args, **options)
        if function in _FACTORIES:
            with spmd.no_typecheck():
                result = spmd.assert_type(function(*args, **options), spmd.R)
            result.grown = frozenset(range(result.dim()))
            return result
        tensors = [item for item in pytree.tree_leaves((args, options)) if isinstance(item, Tensor)]
        found = _call(function, args, options)
        with spmd.local() if not all(map(is_located, tensors)) or _splits(function, args, options) else nullcontext():
            result = function(*args, **options) if found is None else found[0](*found[1])
        if function is Tensor.expand:
            result.grown = _grown(args[0], result)
        return result


_FACTORIES = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.full.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_full.default,
}


def _call(
    function: object, args: tuple[object, ...], options: Mapping[str, object]
) -> tuple[Call, tuple[Tensor | None, ...]] | None:
    """A call of an operator that we have a rule for, and its tensors."""
    make = _RULED.get(function)
    return None if make is None else make(*args, **options)


def _sizes(sizes: tuple[object, ...]) -> tuple[int, ...]:
    found = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return tuple(found)  # type: ignore[arg-type]


def _splits(function: object, args: tuple[object, ...], options: Mapping[str, object]) -> bool:
    """Whether the result is split in the middle of a dim where the operands are not."""
    if function is Tensor.reshape:
        return _is_split_inside(args[0], _sizes(args[1:]))  # type: ignore[arg-type]
    if function is torch.cat:
        return any(spmd.get_partition_spec(part)[options["dim"]] for part in args[0] if spmd.get_partition_spec(part))
    return False


def _grown(operand: Tensor, result: Tensor) -> frozenset[int]:
    """The dims of an expanded tensor that `operand` lacks or has once. What is R is the same all along them, so that it
    is also one part of a longer dim: then it is V, and what `reinterpret` does to R for that is nothing, forward and
    backward."""
    more = result.dim() - operand.dim()
    return frozenset(dim for dim in range(result.dim()) if dim < more or operand.shape[dim - more] == 1)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: object
) -> tuple[Call, tuple[Tensor | None, ...]]:
    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    return attention(compute, rows=not options.get("is_causal")), (query, key, value, attn_mask)


_RULED: dict[object, Callable[..., tuple[Call, tuple[Tensor | None, ...]] | None]] = {
    functional.linear: lambda x, weight, bias=None: (linear(), (x, weight, bias)),
    torch.addmm: lambda bias, left, right: (addmm(), (bias, left, right)),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), lambda left, right: (matmul(), (left, right))),
    functional.embedding: lambda ids, weight, padding_idx=None, **_: (embedding(padding_idx), (ids, weight)),
    functional.cross_entropy: lambda logits, target, **options: (cross_entropy(**options), (logits, target)),
    functional.scaled_dot_product_attention: _attention,
    Tensor.to: lambda x, dtype: (cast(dtype), (x,)),
    functional.pad: lambda x, widths, **options: (pad(widths, **options), (x,)),
    Tensor.__getitem__: lambda x, key: (index(key), (x,)),
    Tensor.reshape: lambda x, *sizes: (reshape(*_sizes(sizes)), (x,)),
}
