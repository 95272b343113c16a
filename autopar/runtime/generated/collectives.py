"""The collectives that generated code calls.

Each brings a tensor from one placement to another on one axis and is named after what runs forward; what runs backward
is the redistribution from the gradient of `dst` to the gradient of `src` (R <-> P, I -> I, S -> S).

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
from functools import cache, partial

import torch
from torch import Tensor

from autopar._torch import collectives
from autopar.runtime.generated.saving import note_recomputable
from autopar.runtime.ranks.failures import naming_collectives, raise_named
from autopar.runtime.state import Axis
from passes.ir.layout import P, Placement, parse_placement
from passes.ir.redistribution import COLLECTIVES

# What a redistribution saves for backward: group, size and rank; placements; the dtypes to reduce in and to return.
_Saved = tuple[tuple[str, int, int], tuple[Placement, Placement], torch.dtype | None, torch.dtype]


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


def _parts(tensor: Tensor, placement: Placement, size: int) -> Tensor:
    """A view of the parts of `tensor` along a new first dim, in which the dim that is split is two: (major, rest)."""
    dim = placement.dim
    return torch.unflatten(tensor, dim, (placement.major, size, -1)).movedim(dim + 1, 0)


def _cut(tensor: Tensor, placement: Placement, size: int) -> Tensor:
    """The parts of `tensor` along a new first dim, one per rank."""
    return _parts(tensor, placement, size).flatten(placement.dim + 1, placement.dim + 2)


def _join(parts: Tensor, placement: Placement) -> Tensor:
    """Concatenate the parts along the first dim into one tensor; the inverse of `_cut`."""
    dim = placement.dim
    return torch.unflatten(parts, dim + 1, (placement.major, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def run_change(tensor: Tensor, group: str, size: int, rank: int, source: Placement, target: Placement) -> Tensor:
    """Bring the local `tensor` from `source` to `target` on the axis of `group`, without gradient."""
    if tensor.is_complex():
        # Not every backend sends complex numbers; pairs of real numbers have one more dim, which is never split.
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
    with naming_collectives("an all-to-all of parameters"):
        received = _wait(collectives.all_to_all_single(sent, [1] * size, [1] * size, group)).reshape(sent.shape)
    for each, own in zip(tensors, torch.split(received, widths, dim=1), strict=True):
        parts = _parts(each.after, each.source, size)
        parts.copy_(own.view(parts.shape))


def start_shift(tensor: Tensor, axis: Axis, distance: int) -> Callable[[], Tensor]:
    """Send `tensor`, of one dim, `distance` ranks along `axis`. Returns a function that waits for what comes from as
    many ranks before, of the same size."""
    sent, received = [0] * axis.size, [0] * axis.size
    sent[(axis.rank + distance) % axis.size] = received[(axis.rank - distance) % axis.size] = len(tensor)
    with naming_collectives("a shift along the ring of attention"):
        pending = collectives.all_to_all_single(tensor, received, sent, axis.group)

    def wait() -> Tensor:
        with naming_collectives("a shift along the ring of attention"):
            return _wait(pending)

    return wait


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
        # A reshape may leave an expanded tensor expanded, and not every backend copies its input.
        flat = parts.reshape(-1).contiguous()
        return _wait(collectives.reduce_scatter_tensor(flat, "sum", size, group)).reshape(parts.shape[1:])
    if collective == "all_to_all":
        parts = _cut(tensor, target, size).contiguous()
        splits = [1] * size
        return _join(_wait(collectives.all_to_all_single(parts, splits, splits, group)).reshape(parts.shape), source)
    if target.kind == "S":
        # A copy, so that the memory of the whole tensor can be freed.
        part = _parts(tensor, target, size)[rank].flatten(target.dim, target.dim + 1)
        return part.clone(memory_format=torch.contiguous_format)
    if kinds == ("S", "P"):
        parts = tensor.new_zeros(size, *tensor.shape)
        parts[rank] = tensor
        return _join(parts, source)
    if target.kind == "P":
        # A new tensor on every rank, the first included: aliasing must not differ between ranks, because it decides
        # which tensors are regathered in the backward pass.
        return tensor.clone() if rank == 0 else torch.zeros_like(tensor)
    return tensor.view_as(tensor)


class _Redistribution(torch.autograd.Function):
    """A redistribution and, in the backward pass, its conjugate."""

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
        return run_change(tensor if compute is None else tensor.to(compute), *place, *placements)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        saved: _Saved = ctx.change  # type: ignore[attr-defined]
        place, (source, target), reduce, dtype = saved
        if reduce is not None:
            gradient = gradient.to(reduce)
        return run_change(gradient, *place, target.gradient, source.gradient).to(dtype), None, None, None


@cache
def _placements(src: str, dst: str) -> tuple[Placement, Placement]:
    return parse_placement(src), parse_placement(dst)


def _redistributed(
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
    result: Tensor = _Redistribution.apply(x, place, placements, dtypes)  # type: ignore[no-untyped-call]
    return result


_library = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
for _name in sorted(set(COLLECTIVES.values())):
    _library.define(  # type: ignore[no-untyped-call]
        f"{_name}(Tensor x, str group, int size, int rank, str src, str dst, *, "
        "ScalarType? dtype=None, ScalarType? grad_dtype=None) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.impl(_name, _redistributed, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _collective(
    name: str,
    x: Tensor,
    axis: Axis,
    *,
    src: Placement,
    dst: Placement,
    keep: bool = True,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Tensor:
    """Redistribute `x` from the placement `src` to `dst` on `axis` by the collective called `name`.

    With `keep=False` the result is not saved for backward: the backward pass runs the collective again. `dtype` is the
    dtype of the data sent in forward, `grad_dtype` that of the reduction in backward (None: the dtype of the tensor).
    """
    assert COLLECTIVES.get((src.kind, dst.kind)) == name, f"{name} does not go from {src} to {dst}"
    run = partial(
        getattr(torch.ops.autopar, name),
        group=axis.group,
        size=axis.size,
        rank=axis.rank,
        src=str(src),
        dst=str(dst),
        dtype=dtype,
        grad_dtype=grad_dtype,
    )
    # Recomputed results are recorded outside of the graphs that torch compiles.
    result: Tensor = run(x) if keep else _recorded(run, x)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _recorded(run: Callable[..., Tensor], x: Tensor) -> Tensor:
    """`run(x)`, which the backward pass recomputes."""
    result = run(x)
    note_recomputable(result, run, x)
    return result


# S -> R or I: every rank gets the whole.
all_gather = partial(_collective, "all_gather")
# P -> R or I: every rank gets the sum.
all_reduce = partial(_collective, "all_reduce")
# P -> S: every rank gets its part of the sum.
reduce_scatter = partial(_collective, "reduce_scatter")
# S -> S: from parts of one dim to parts of another.
all_to_all = partial(_collective, "all_to_all")
# R, I -> S; R, I, S -> P; R <-> I: nothing is sent forward.
convert = partial(_collective, "convert")


def reduce_sum(x: Tensor, axes: Sequence[Axis], target: Placement) -> Tensor:
    """The sum over all ranks of `axes`, in the placement `target` (R or I)."""
    for axis in axes:
        x = all_reduce(x, axis, src=P, dst=target)
    return x


def reduce_largest(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The elementwise largest over all ranks of `axes`, without gradient."""
    with torch.no_grad():
        for axis in axes:
            x = _wait(collectives.all_reduce(x.contiguous(), "max", axis.group))
    return x
