"""Generated modules under the type checker of `spmd_types`, an opinion on layouts that does not come from us.

Its types are our placements (R, I, P; V, with a `PartitionSpec` that says which dim an axis splits, for S), and it
follows them through torch functions by itself: by rules of its own for R, I and P, by those of DTensor for splits. Here
is what it needs to read generated code:

- `collectives`: ours, each as the one of `spmd_types` of the same name, `src` and `dst`;
- `Vocabulary`: typing rules for operators that it has none for (or, as for `linear`, none that lets pending sums
  through), written with `spmd_types.rules`;
- `forms`: typing rules for our local forms;
- `run_typed`, which puts these in the place of the names that a generated module imports, annotates inputs and
  parameters with the layouts of the plan, and runs it.

Splits that a `PartitionSpec` cannot say are those in the middle of a dim: of fused projections, or an axis that is
left when a more significant one was gathered. A tensor with such a split is V on that axis without a dim, its placement
is noted beside it (`noted`), and what is computed from it is checked for R, I, P and V alone; which dim is split in the
result is then taken from the comment of the generated line. `Report` counts both kinds of lines.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod

import spmd_types as spmd
import spmd_types.checker
import torch
from spmd_types import rules
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import runtime
from autopar.planner import PlannedModel
from autopar.runtime import Axis, Container
from autopar.runtime.generated.bases import place
from autopar.runtime.state import axes_of, local_part
from passes.ir.layout import I, Layout, Placement, R, digits, local_major, local_shape, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.vocabulary import FORMS
from tests.autopar.without_engine import step_by_step

SpmdTypeError = spmd.SpmdTypeError
_KINDS = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": spmd.V}
_LETTERS = {spmd.R: R, spmd.I: I, spmd.P: parse_placement("P")}


# --- layouts as types ------------------------------------------------------------------------------------------------


def partition_spec(layout: Layout, dims: int, mesh: Mesh) -> tuple[spmd.PartitionSpec | None, dict[int, Placement]]:
    """The splits of a tensor with `dims` dims as a PartitionSpec, and by axis those that it cannot say."""
    entries: list[object] = []
    middle = {axis: placement for axis, placement in enumerate(layout) if placement.kind == "S"}
    for dim in range(dims):
        found: list[str] = []
        taken = 1
        for major, size, axis in digits(layout, dim, mesh):
            if major != taken:
                break
            taken *= size
            found.append(mesh.names[axis])
            del middle[axis]
        entries.append(None if not found else found[0] if len(found) == 1 else tuple(found))
    return (spmd.PartitionSpec(*entries) if any(entries) else None), middle


def annotate(tensor: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Give `tensor` the type of `layout`, or refine the type that it has."""
    spec, middle = partition_spec(layout, tensor.dim(), mesh)
    types = {name: _KINDS[placement.kind] for name, placement in zip(mesh.names, layout, strict=True)}
    spmd.assert_type(tensor, types, spec)
    tensor.noted = middle  # type: ignore[attr-defined]
    return tensor


def layout_of(tensor: Tensor, mesh: Mesh) -> Layout:
    """The layout that the type of `tensor` says, and what is noted beside it.

    Raises SpmdTypeError where it is split and not known how.
    """
    spec = spmd.get_partition_spec(tensor)
    where: dict[int, Placement] = dict(getattr(tensor, "noted", {}))
    for dim, entry in enumerate(spec or ()):
        taken = 1
        for item in entry if isinstance(entry, tuple) else (entry,) if entry is not None else ():
            axis = _number(item, mesh)
            where[axis] = Placement("S", dim, taken)
            taken *= mesh.sizes[axis]
    placements = []
    for axis, name in enumerate(mesh.names):
        kind = spmd.maybe_get_axis_local_type(tensor, name)
        if kind is None:
            raise SpmdTypeError(f"a tensor of shape {tuple(tensor.shape)} has no type on {name}")
        if kind is spmd.V and axis not in where:
            raise SpmdTypeError(f"a tensor of shape {tuple(tensor.shape)} is split on {name}, but not known where")
        placements.append(where[axis] if kind is spmd.V else _LETTERS[kind])
    return tuple(placements)


def _number(axis: object, mesh: Mesh) -> int:
    """The number of an axis of the current mesh."""
    names = spmd.current_mesh_all_names() or {}
    return next(number for number, name in enumerate(mesh.names) if names[name] == axis)


def is_located(tensor: Tensor) -> bool:
    """Whether for every axis that splits `tensor` its type says which dim."""
    spec = spmd.get_partition_spec(tensor)
    known = set() if spec is None else spec.axes_with_partition_spec()
    return all(kind is not spmd.V or axis in known for axis, kind in spmd.get_local_type(tensor).items())


# --- collectives -----------------------------------------------------------------------------------------------------


def collectives(mesh: Mesh, without_gradient: set[int]) -> dict[str, Callable[..., Tensor]]:
    """Our collectives by name, each as the one of `spmd_types` of the same name. Notes the lines of calls whose operand
    has no gradient."""

    def typed(name: str) -> Callable[..., Tensor]:
        def change(
            x: Tensor,
            axis: Axis,
            *,
            src: Placement,
            dst: Placement,
            keep: bool = True,
            dtype: torch.dtype | None = None,
            grad_dtype: torch.dtype | None = None,
        ) -> Tensor:
            assert dtype is None, "plans of mixed precision are not typed"
            assert grad_dtype is None, "plans of mixed precision are not typed"
            if not x.requires_grad:
                without_gradient.add(sys._getframe(1).f_lineno)
            return _joint_change(name, x, [mesh.names.index(own) for own in axis.name.split(" * ")], src, dst, mesh)

        return change

    return {name: typed(name) for name in ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")}


def _joint_change(name: str, x: Tensor, axes: Sequence[int], src: Placement, dst: Placement, mesh: Mesh) -> Tensor:
    """One step of a redistribution over adjacent axes: for the checker, one axis after the other."""
    if len(axes) == 1:
        return _change(name, x, axes[0], src, dst, mesh)
    before, (first, *_, last) = layout_of(x, mesh), axes
    # The mesh and the layout in which they are one axis.
    ways = prod(mesh.sizes[axis] for axis in axes)
    one = Mesh(
        (*mesh.names[:first], "joint", *mesh.names[last + 1 :]), (*mesh.sizes[:first], ways, *mesh.sizes[last + 1 :])
    )
    joint = (*before[: first + 1], *before[last + 1 :])
    target = whole_placement(dst, joint, one, first)
    if src.kind == "S":
        seen = _seen(before[first], (*joint[:first], target, *joint[first + 1 :]), one)
        if seen != src or [before[axis] for axis in axes] != _in_row(before[first], axes, mesh):
            raise SpmdTypeError(f"{name} on {one.names[first]} of what is {before}, not {src}")
    for axis, placement in zip(axes, _in_row(target, axes, mesh), strict=True):
        now = layout_of(x, mesh)
        after = (*now[:axis], placement, *now[axis + 1 :])
        own = _seen(now[axis], after, mesh) if src.kind == "S" else src
        x = _change(name, x, axis, own, _seen(placement, now, mesh), mesh)
    return x


def _in_row(placement: Placement, axes: Sequence[int], mesh: Mesh) -> list[Placement]:
    """A placement on adjacent axes together as one on each."""
    if placement.kind != "S":
        return [placement] * len(axes)
    return [placement._replace(major=placement.major * prod(mesh.sizes[axes[0] : axis])) for axis in axes]


def _seen(placement: Placement, others: Layout, mesh: Mesh) -> Placement:
    """A placement with the major that ranks see while the other splits are those of `others`."""
    return placement if placement.kind != "S" else placement._replace(major=local_major(placement, others, mesh))


def _change(name: str, x: Tensor, axis: int, src: Placement, dst: Placement, mesh: Mesh) -> Tensor:
    """One step of a redistribution; `src` and `dst` have the majors that ranks see."""
    before = layout_of(x, mesh)
    own = mesh.names[axis]
    if before[axis].kind != src.kind and not ({before[axis].kind, src.kind} == {"R", "I"} and not x.requires_grad):
        # The checker itself takes a split tensor for a pending sum.
        raise SpmdTypeError(f"{name} on {own} of what is {before[axis]}, not {src}")
    after = (*before[:axis], whole_placement(dst, before, mesh, axis), *before[axis + 1 :])
    if src.kind == "S":
        seen = Placement("S", before[axis].dim, local_major(before[axis], after, mesh))
        if seen != src:
            raise SpmdTypeError(f"{name} on {own} of what is {seen}, not {src}")
    operator = getattr(spmd, name)
    options = {"expert_mode": True} if name == "convert" else {}
    if is_located(x) and not partition_spec(after, x.dim(), mesh)[1]:
        return _contiguous(operator(x.contiguous(), own, src=_typed(src), dst=_typed(dst), **options))
    # A split in the middle of a dim: cut it first, put it together afterwards, and send parts along a dim of their own.
    size = mesh.sizes[axis]
    with spmd.local():
        parts = (_cut(x, dst, size) if dst.kind == "S" else x).contiguous()
        source, target = (_KINDS[placement.kind] for placement in (src, dst))
        parts = _contiguous(operator(parts, own, src=source, dst=target, **options))
        result = _join(parts, src, size) if src.kind == "S" else parts
    return annotate(result, after, mesh)


def _contiguous(result: Tensor) -> Tensor:
    """Gradients of collectives must lie in one piece, which autograd does not see to."""
    if result.requires_grad:
        with spmd.no_typecheck():
            result.register_hook(lambda gradient: gradient.contiguous())
    return result


def _typed(placement: Placement) -> object:
    return spmd.S(placement.dim) if placement.kind == "S" else _KINDS[placement.kind]


def whole_placement(placement: Placement, others: Layout, mesh: Mesh, axis: int) -> Placement:
    """`placement` of `axis`, which has the major that ranks see, with its major in the whole tensor: the reverse of
    `local_major`."""
    if placement.kind != "S":
        return placement
    major = placement.major
    for place_, size, _ in digits(others, placement.dim, mesh):
        if major * mesh.sizes[axis] > place_:
            major *= size
    return Placement("S", placement.dim, major)


def _cut(x: Tensor, placement: Placement, size: int) -> Tensor:
    """The parts of `x` along a new first dim."""
    shape, dim = tuple(x.shape), placement.dim
    parts = x.reshape(*shape[:dim], placement.major, size, shape[dim] // (placement.major * size), *shape[dim + 1 :])
    return parts.movedim(dim + 1, 0).reshape(size, *shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def _join(parts: Tensor, placement: Placement, size: int) -> Tensor:
    """The reverse of `_cut`."""
    shape, dim = tuple(parts.shape[1:]), placement.dim
    spread = parts.reshape(size, *shape[:dim], placement.major, shape[dim] // placement.major, *shape[dim + 1 :])
    return spread.movedim(0, dim + 1).reshape(*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


# --- operators -------------------------------------------------------------------------------------------------------


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


def _beside(tensor: Tensor, other: Typing) -> Typing:
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
        return rules.einsum("...,_d->...d", _beside(ids, weight), weight, linear_in=(1,))

    return Call("embedding", lambda ids, weight: functional.embedding(ids, weight, padding_idx=padding), rule)


def cross_entropy(**options: object) -> Call:
    """`F.cross_entropy`, summed or per token: tokens classes, tokens -> tokens; classes must be whole."""
    result = {"sum": "", "none": "t"}[str(options["reduction"])]

    def rule(logits: Tensor, target: Tensor) -> object:
        return rules.einsum(f"t_,t->{result}", logits, _beside(target, logits))

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
            operands.append(_beside(mask, query))
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


# --- local forms -----------------------------------------------------------------------------------------------------


def vocabulary_embedding(ids: Tensor, weight: Tensor, **options: object) -> Tensor:
    """rows are summed over: ids, rows features -> ids features."""

    def rule(ids: Tensor, weight: Tensor) -> object:
        return rules.einsum("...,vd->...d", _beside(ids, weight), weight, linear_in=(1,))

    def compute(ids: Tensor, weight: Tensor) -> Tensor:
        return runtime.vocabulary_embedding(ids, weight, **options)

    return _located(Call("vocabulary_embedding", compute, rule), ids, weight)


def vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, *, digits: Sequence[tuple[Axis, int]], summed: bool = True, **options: object
) -> Tensor:
    """Classes are summed over and the sum is the same on their axes: tokens classes, tokens -> ."""

    def rule(logits: Tensor, target: Tensor) -> object:
        result = rules.einsum("tv,t->t", logits, _beside(target, logits))
        for name in (name for axis, _ in digits for name in axis.name.split(" * ")):
            pending = spmd.get_axis_local_type(result, name)
            result = rules.all_reduce(result, name, src=pending, dst=spmd.I)
        return rules.einsum("t->", result, linear_in=(0,)) if summed else result

    def compute(logits: Tensor, target: Tensor) -> Tensor:
        return runtime.vocabulary_cross_entropy(logits, target, digits=digits, summed=summed, **options)

    return _located(Call("vocabulary_cross_entropy", compute, rule), logits, target)


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]] = (),
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Attention of which the queries may be split; the form knows which they are."""

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if query.is_meta:
            # How many keys the queries of a rank need, the form reads from a tensor.
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return runtime.blockwise_attention(query, key, value, digits=digits, mask=mask, **options)

    return _located(attention(compute, rows=True), query, key, value, *(() if mask is None else (mask,)))


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]] = (),
    documents: tuple[Tensor, Tensor] | None = None,
    **options: object,
) -> Tensor:
    """Attention of which the queries may be split: a bias and masks have the dims of scores, or have them once."""
    own, other = documents or (None, None)
    others = {name: options.pop(name, None) for name in ("bias", "sink", "mask")} | {"own": own, "other": other}
    names = [name for name, each in others.items() if each is not None]

    def compute(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Tensor:
        if query.is_meta:
            # How many keys the queries of a rank need, the form reads from a tensor.
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        found = dict(zip(names, given, strict=True))
        numbered = (found.pop("own"), found.pop("other")) if "own" in found else None
        return runtime.chunked_attention(query, key, value, digits=digits, documents=numbered, **found, **options)

    def rule(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> object:
        dims = [zip(each.shape, "bhq_", strict=True) for each in given]
        terms = ["".join("_" if size == 1 else dim for size, dim in own) for own in dims]
        operands = [_beside(each, query) for each in given]
        return rules.einsum(f"{','.join(['bhq_', 'bh__', 'bh_w', *terms])}->bhqw", query, key, value, *operands,
                            linear_in=(2,))  # fmt: skip

    return _located(Call("chunked_attention", compute, rule), query, key, value, *(others[name] for name in names))


def split_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, rank: int, **options: object
) -> Tensor:
    """A layer norm whose normalized dims may be split: rows in, in, in -> rows in."""
    given = (weight, bias)

    def compute(x: Tensor, *scales: Tensor) -> Tensor:
        found = iter(scales)
        return runtime.split_layer_norm(
            x, *(None if item is None else next(found) for item in given), rank=rank, **options
        )

    def rule(x: Tensor, *scales: Tensor) -> object:
        inner = "klmnop"[:rank]
        terms = [f"...{inner}", *[inner] * len(scales)]
        return rules.einsum(f"{','.join(terms)}->...{inner}", x, *scales)

    return _located(Call("split_layer_norm", compute, rule), x, *(item for item in given if item is not None))


def split_softmax(x: Tensor, dim: int, **options: object) -> Tensor:
    """All dims may be split."""

    def rule(x: Tensor) -> object:
        return rules.einsum("...->...", x)

    return _located(Call("split_softmax", lambda x: runtime.split_softmax(x, dim, **options), rule), x)


def _located(call: Call, *tensors: Tensor) -> Tensor:
    with nullcontext() if all(map(is_located, tensors)) else spmd.local():
        return call(*tensors)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    digits: Sequence[tuple[Axis, int]],
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Attention of which queries and keys are split alike: what comes around, the checker cannot see."""

    def rule(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> object:
        rows = ",b___" if mask is not None and len(mask) > 1 else ",____"
        masks = () if mask is None else (_beside(mask, query),)
        return rules.einsum(f"bhq_,bhq_,bhq_{rows if masks else ''}->bhq_", query, key, value, *masks)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if query.is_meta:
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return runtime.ring_attention(query, key, value, digits=digits, mask=mask, **options)

    given = query, key, value, *(() if mask is None else (mask,))
    return _located(Call("ring_attention", compute, rule), *given)


_FORMS = {
    "blockwise_attention": blockwise_attention,
    "chunked_attention": chunked_attention,
    "ring_attention": ring_attention,
    "split_layer_norm": split_layer_norm,
    "split_softmax": split_softmax,
    "vocabulary_cross_entropy": vocabulary_cross_entropy,
    "vocabulary_embedding": vocabulary_embedding,
}


# --- generated modules -----------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Lines of a generated module whose comment has a layout: those of which the checker found the same by itself, and
    those of which it was told which dim is split, or that a sum is pending. `alike` are the lines of collectives on
    tensors without gradient, where R and I say the same."""

    proved: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    alike: set[int] = field(default_factory=set)
    outputs: tuple[object, ...] = ()
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


_COMMENT = re.compile(r"# \w+\[([\d, ]*)\] ([^#]*?)(?:  \S+:\d+)?")


def checked(source: str) -> str:
    """`source` with a call of `held(value, "shape", "layout", line)` behind every statement whose comment has a type
    and a layout."""
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    calls: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        text = comments.get(node.end_lineno or 0) or (above if above.startswith("#") else "")
        match = _COMMENT.fullmatch(text)
        if match is not None:
            shape, layout = match.groups()
            calls[node.end_lineno or 0] = (
                f"{' ' * node.col_offset}held({node.targets[0].id}, ({shape},), {layout!r}, {node.lineno})"
            )
    result = []
    for number, line in enumerate(lines, 1):
        result += [line, calls[number]] if number in calls else [line]
    return "\n".join(result).replace("(,)", "()") + "\n"


def read_layout(text: str, mesh: Mesh) -> Layout:
    """A layout as generated comments have it: "dp S(0), tp R", or "R" for all axes."""
    found = dict(re.findall(r"(\w+) ([RIP]|S\([\d, ]+\))", text))
    return tuple(parse_placement(found.get(name, text)) for name in mesh.names)


def same_type(tensor: Tensor, layout: Layout, mesh: Mesh) -> bool:
    """Whether `tensor` has just the type of `layout`; what has no gradient is R and I alike."""
    try:
        have = layout_of(tensor, mesh)
    except SpmdTypeError:
        return False
    if tensor.requires_grad:
        return have == layout
    return [R if item == I else item for item in have] == [R if item == I else item for item in layout]


def run_typed(
    model: nn.Module,
    compiled: PlannedModel,
    device_mesh: DeviceMesh,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    source: str | None = None,
    comments: bool = True,
) -> Report:
    """Run the program for training of `compiled` under the type checker, forward and backward.

    Without `inputs` tensors have no values. With `comments` the layouts in the comments are
    held against the types; `source` runs instead of the generated source.

    Raises SpmdTypeError where the checker refuses an operation, and where an output has not the type of the plan.
    """
    program = compiled.programs["train"]
    mesh = Mesh(tuple(device_mesh.mesh_dim_names or ()), tuple(device_mesh.shape))
    report = Report()
    namespace: dict[str, object] = {}
    text = program.source if source is None else source
    exec(compile(checked(text) if comments else text, "<generated>", "exec"), namespace)

    def held(value: Tensor, shape: tuple[int, ...], layout_text: str, line: int) -> None:
        layout = read_layout(layout_text, mesh)
        where = f"line {line}, {shape} {layout_text}"
        if tuple(value.shape) != local_shape(shape, layout, mesh):
            raise SpmdTypeError(f"{where}: the local shape is {tuple(value.shape)}")
        if same_type(value, layout, mesh):
            report.proved.append(where)
            return
        grown = getattr(value, "grown", ())
        longer = [axis for axis, placement in enumerate(layout) if placement.kind == "S" and placement.dim in grown]
        for axis in longer:
            spmd.mutate_type(value, mesh.names[axis], src=spmd.R, dst=spmd.V)
        if is_located(value) and not longer:
            raise SpmdTypeError(f"{where}: the checker finds {layout_of(value, mesh)}")
        annotate(value, _flavored(value, layout, mesh), mesh)
        report.told.append(where)

    replaced = {**collectives(mesh, report.alike), **_FORMS, "held": held}
    replaced["local"] = replaced["gathered"] = lambda tensor: tensor
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    untyped = set(FORMS) & used - set(replaced)
    assert not untyped, f"no typing rule for {', '.join(sorted(untyped))}: see the local forms above"
    namespace.update({name: value for name, value in replaced.items() if name in namespace or name == "held"})
    with spmd.set_current_mesh(device_mesh):
        root = _root(model, compiled, device_mesh, mesh, with_values=inputs is not None)
        device = torch.device("meta" if inputs is None else "cpu")
        coordinate = device_mesh.get_coordinate()
        given = []
        for item in program.inputs:
            if inputs is None:
                shape = local_shape(item.type.shape, item.layout, mesh)
                part = torch.empty(shape, dtype=item.dtype, device=device)
            else:
                part = local_part(inputs[item.name], item.layout, coordinate, mesh)
            given.append(annotate(part, item.layout, mesh))
        whole = (R,) * len(mesh.names)
        constants = {name: annotate(value.to(device), whole, mesh) for name, value in program.tensors.items()}
        kind = namespace[program.class_name]
        axes = axes_of(device_mesh, range(len(mesh.sizes), len(mesh.spans)))
        steps = collectives(mesh, report.alike)
        seen = step_by_step(model, root, program.held, compiled.stored, mesh, axes, steps)
        generated = kind(seen, axes, device, constants)  # type: ignore[operator]
        with spmd.checker.typecheck(local=False), Vocabulary():
            report.outputs = generated.forward(*given)
            for value, planned in zip(report.outputs, program.outputs, strict=True):
                if planned.layout is not None and not same_type(value, planned.layout, mesh):
                    raise SpmdTypeError(
                        f"output {planned.name} is planned as {planned.layout}, the checker finds "
                        f"{layout_of(value, mesh)}"
                    )
            report.outputs[0].backward()
    report.gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
    return report


def _flavored(value: Tensor, layout: Layout, mesh: Mesh) -> Layout:
    """`layout` with R and I as the type of `value` has them, if it has no gradient."""
    if value.requires_grad:
        return layout
    kinds = [spmd.get_axis_local_type(value, name) for name in mesh.names]
    return tuple(
        _LETTERS[kind] if placement.kind in "RI" and kind in (spmd.R, spmd.I) else placement
        for kind, placement in zip(kinds, layout, strict=True)
    )


def _root(
    model: nn.Module, compiled: PlannedModel, device_mesh: DeviceMesh, mesh: Mesh, *, with_values: bool
) -> Container:
    """Parameters as this rank's parts and buffers, with the types of the plan; plain tensors, without values unless
    asked for."""
    root = Container()
    coordinate = device_mesh.get_coordinate()
    placed: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in placed:
            layout = compiled.stored.get(name, (I,) * len(mesh.names))
            if with_values:
                part = local_part(parameter.detach(), layout, coordinate, mesh)
            else:
                shape = local_shape(tuple(parameter.shape), layout, mesh)
                part = torch.empty(shape, dtype=parameter.dtype, device="meta")
            placed[id(parameter)] = annotate(nn.Parameter(part, parameter.requires_grad), layout, mesh)
        place(root, name, placed[id(parameter)])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in placed:
            whole = buffer.detach().clone() if with_values else buffer.to("meta")
            placed[id(buffer)] = annotate(whole, (R,) * len(mesh.names), mesh)
        place(root, name, placed[id(buffer)])
    return root
