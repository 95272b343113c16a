"""The collectives that generated code calls.

Each brings a tensor from one placement to another on one axis and is named after what runs forward; what runs backward
is the change from the gradient of `dst` to the gradient of `src` (R <-> P, I -> I, S -> S).

Ranks of an axis of size 2 as columns; a, b are parts of a tensor, x, y pending sums::

    all_gather      S -> R, I   [a] [b]      ->  [ab] [ab]      backward: R: reduce-scatter, I: take the own part
    reduce_scatter  P -> S      [ab] [xy]    ->  [a+x] [b+y]    backward: all-gather
    all_reduce      P -> R, I   [x] [y]      ->  [x+y] [x+y]    backward: R: all-reduce, I: nothing
    all_to_all      S -> S      [ab] [cd]    ->  [ac] [bd]      backward: all-to-all
    convert         R, I -> S   [ab] [ab]    ->  [a] [b]        backward: R: pad with zeros, I: all-gather
                    S -> P      [a] [b]      ->  [a0] [0b]      backward: take the own part
                    R, I -> P   [a] [a]      ->  [a] [0]        backward: R: zeros on the others, I: nothing
                    R <-> I     [a] [a]      ->  [a] [a]        backward: I -> R all-reduce, R -> I zeros on the others

`S(dim, m)` splits dim after its m most significant parts: a dim of size m * n * k is (m, n, k), and n is split.

They are operators of torch (`torch.ops.autopar`), so that graphs and profiles show them by name; the process group goes
into each by its name, so that two models on two meshes live in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from autopar._torch import collectives
from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.saving import note_made
from autopar.runtime.ranks.failures import raise_named
from passes.ir.layout import Placement, parse_placement
from passes.ir.redistribution import COLLECTIVES

# Data that a change saves for backward: group, size and rank; the placements; the dtypes to reduce in and to return.
_Kept = tuple[tuple[str, int, int], tuple[Placement, Placement], torch.dtype | None, torch.dtype]


@dataclass(frozen=True)
class Exchanged:
    """A tensor of an all-to-all: the part `before` that this rank has in `source`, and `after`, which takes the part in
    `target`."""

    before: Tensor
    after: Tensor
    source: Placement
    target: Placement


def _wait(tensor: Tensor) -> Tensor:
    waited: Tensor = collectives.wait_tensor(tensor)
    return waited


def _cut(tensor: Tensor, placement: Placement, size: int) -> Tensor:
    """The parts of `tensor` along a new first dim, one per rank."""
    parts = _parts(tensor, placement, size)
    return parts.reshape(size, *_cut_shape(tensor, placement, size))


def _parts(tensor: Tensor, placement: Placement, size: int) -> Tensor:
    """A view of the parts of `tensor` along a new first dim, whose own dim is two."""
    dim, shape = placement.dim, tensor.shape
    return tensor.reshape(*shape[:dim], placement.major, size, -1, *shape[dim + 1 :]).movedim(dim + 1, 0)


def _cut_shape(tensor: Tensor, placement: Placement, size: int) -> tuple[int, ...]:
    """The shape of one of `size` parts of `tensor`."""
    dim, shape = placement.dim, tensor.shape
    return *shape[:dim], shape[dim] // size, *shape[dim + 1 :]


def _join(parts: Tensor, placement: Placement) -> Tensor:
    """Concatenate the parts along the first dim into one tensor; the inverse of `_cut`."""
    size, dim = parts.shape[0], placement.dim
    shape = parts.shape[1:]
    spread = parts.reshape(size, *shape[:dim], placement.major, -1, *shape[dim + 1 :]).movedim(0, dim + 1)
    return spread.reshape(*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


def _own_part(tensor: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    dim, shape = placement.dim, tensor.shape
    parts = tensor.reshape(*shape[:dim], placement.major, size, -1, *shape[dim + 1 :]).select(dim + 1, rank)
    # A copy, so that the memory of the whole tensor can be freed.
    return parts.reshape(*shape[:dim], shape[dim] // size, *shape[dim + 1 :]).clone(
        memory_format=torch.contiguous_format
    )


def _only_first(tensor: Tensor, rank: int) -> Tensor:
    # A new tensor on every rank, the first included: what shares memory must not differ between ranks, because what is
    # gathered again in the backward pass is told by it.
    return tensor.clone() if rank == 0 else torch.zeros_like(tensor)


def _padded(tensor: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    parts = tensor.new_zeros(size, *tensor.shape)
    parts[rank] = tensor
    return _join(parts, placement)


def run_change(tensor: Tensor, group: str, size: int, rank: int, source: Placement, target: Placement) -> Tensor:
    """Bring the local `tensor` from `source` to `target` on the axis of `group`, without gradient."""
    if tensor.is_complex():
        # Not every backend sends complex numbers: pairs of real ones lie in a last dim, which is never split.
        pairs = run_change(torch.view_as_real(tensor.resolve_conj()), group, size, rank, source, target)
        return torch.view_as_complex(pairs.contiguous())
    try:
        return _run_change(tensor, group, size, rank, source, target)
    except RuntimeError as error:
        # A plain `loss.backward()` passes through no code of ours but this.
        raise_named(error, f"a redistribution from {source} to {target}")


def exchange(tensors: Sequence[Exchanged], group: str, size: int, dtype: torch.dtype) -> None:
    """One all-to-all over `group` for all `tensors`, which are sent in `dtype`."""
    widths = [each.before.numel() // size for each in tensors]
    sent = tensors[0].before.new_empty(size, sum(widths), dtype=dtype)
    for each, own in zip(tensors, torch.split(sent, widths, dim=1), strict=True):
        parts = _parts(each.before, each.target, size)
        own.view(parts.shape).copy_(parts)
    try:
        received = _wait(collectives.all_to_all_single(sent, [1] * size, [1] * size, group)).reshape(sent.shape)
    except RuntimeError as error:
        raise_named(error, "an all-to-all of parameters")
    for each, own in zip(tensors, torch.split(received, widths, dim=1), strict=True):
        parts = _parts(each.after, each.source, size)
        parts.copy_(own.view(parts.shape))


def _run_change(tensor: Tensor, group: str, size: int, rank: int, source: Placement, target: Placement) -> Tensor:
    kinds = source.kind, target.kind
    collective = COLLECTIVES[kinds]
    if collective == "all_gather":
        parts = _wait(collectives.all_gather_into_tensor(tensor.contiguous(), size, group))
        return _join(parts.reshape(size, *tensor.shape), source)
    if collective == "all_reduce":
        return _wait(collectives.all_reduce(tensor.contiguous(), "sum", group))
    if collective == "reduce_scatter":
        parts = _cut(tensor, target, size)
        # What was expanded stays so in a reshape, and not every backend copies what it is given.
        flat = parts.reshape(-1).contiguous()
        return _wait(collectives.reduce_scatter_tensor(flat, "sum", size, group)).reshape(parts.shape[1:])
    if collective == "all_to_all":
        parts = _cut(tensor, target, size).contiguous()
        splits = [1] * size
        return _join(_wait(collectives.all_to_all_single(parts, splits, splits, group)).reshape(parts.shape), source)
    if target.kind == "S":
        return _own_part(tensor, target, size, rank)
    if target.kind == "P":
        return _padded(tensor, source, size, rank) if source.kind == "S" else _only_first(tensor, rank)
    return tensor.view_as(tensor)


class _Change(torch.autograd.Function):
    """A change of placement and its conjugate."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        tensor: Tensor,
        place: tuple[str, int, int],
        placements: tuple[Placement, Placement],
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> Tensor:
        compute, reduce = dtypes
        ctx.change = (place, placements, reduce, tensor.dtype)  # type: ignore[attr-defined]
        source = tensor if compute is None else tensor.to(compute)
        return run_change(source, *place, *placements)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = grads
        kept: _Kept = ctx.change  # type: ignore[attr-defined]
        place, (source, target), reduce, dtype = kept
        if reduce is not None:
            gradient = gradient.to(reduce)
        return run_change(gradient, *place, target.gradient, source.gradient).to(dtype), None, None, None


@cache
def _placements(src: str, dst: str) -> tuple[Placement, Placement]:
    return parse_placement(src), parse_placement(dst)


def _operator(name: str) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        group: str,
        size: int,
        rank: int,
        src: str,
        dst: str,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Tensor:
        place, placements, dtypes = (group, size, rank), _placements(src, dst), (dtype, grad_dtype)
        result: Tensor = _Change.apply(x, place, placements, dtypes)  # type: ignore[no-untyped-call]
        return result

    run.__name__ = name
    return run


_NAMES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")
_library = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
for _name in _NAMES:
    _library.define(  # type: ignore[no-untyped-call]
        f"{_name}(Tensor x, str group, int size, int rank, str src, str dst, *, "
        "ScalarType? dtype=None, ScalarType? grad_dtype=None) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.impl(_name, _operator(_name), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _call(
    name: str,
    x: Tensor,
    axis: Axis,
    src: Placement,
    dst: Placement,
    keep: bool,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
) -> Tensor:
    assert COLLECTIVES.get((src.kind, dst.kind)) == name, f"{name} does not go from {src} to {dst}"
    if not keep and torch.compiler.is_compiling():
        # What is noted is no part of a graph.
        result: Tensor = _uncompiled(name, x, axis, src, dst, keep, dtype, grad_dtype)
        return result
    operator = getattr(torch.ops.autopar, name)

    def run(tensor: Tensor) -> Tensor:
        result: Tensor = operator(
            tensor, axis.group, axis.size, axis.rank, str(src), str(dst), dtype=dtype, grad_dtype=grad_dtype
        )
        return result

    result = run(x)
    if not keep:
        note_made(result, run, x)
    return result


_uncompiled = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]


class Collective(Protocol):
    """Brings `x` from the placement `src` to `dst` on an axis.

    With `keep=False` the result is not saved for backward: the backward pass runs the collective again. `dtype` is the
    dtype of the data sent in forward, `grad_dtype` that of the reduction in backward (None: the dtype of the tensor).
    """

    def __call__(
        self,
        x: Tensor,
        axis: Axis,
        *,
        src: Placement,
        dst: Placement,
        keep: bool = True,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Tensor: ...


def _collective(name: str, summary: str) -> Collective:
    """Return the function that generated code calls by `name`."""

    def collective(
        x: Tensor,
        axis: Axis,
        *,
        src: Placement,
        dst: Placement,
        keep: bool = True,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return _call(name, x, axis, src, dst, keep, dtype, grad_dtype)

    collective.__name__ = collective.__qualname__ = name
    collective.__doc__ = f"{summary}\n\n{Collective.__doc__}"
    return collective


all_gather = _collective("all_gather", "S -> R or I: every rank gets the whole.")
all_reduce = _collective("all_reduce", "P -> R or I: every rank gets the sum.")
reduce_scatter = _collective("reduce_scatter", "P -> S: every rank gets its part of the sum.")
all_to_all = _collective("all_to_all", "S -> S: from parts of one dim to parts of another.")
convert = _collective("convert", "R, I -> S; R, I, S -> P; R <-> I: nothing is sent forward.")


def reduce_largest(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The elementwise largest over all ranks of `axes`, without gradient."""
    with torch.no_grad():
        for axis in axes:
            x = _wait(collectives.all_reduce(x.contiguous(), "max", axis.group))
    return x
