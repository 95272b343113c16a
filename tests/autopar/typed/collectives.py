"""Our collectives, each as the one of `spmd_types` of the same name, `src` and `dst`."""

import sys
from collections.abc import Callable, Sequence
from math import prod

import spmd_types as spmd
import spmd_types.checker
import torch
from torch import Tensor

from autopar.runtime import Axis
from passes.ir.layout import Layout, Placement, digits, local_major
from passes.ir.mesh import Mesh
from tests.autopar.typed.layouts import KINDS, SpmdTypeError, annotate, is_located, layout_of, partition_spec


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
        source, target = (KINDS[placement.kind] for placement in (src, dst))
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
    return spmd.S(placement.dim) if placement.kind == "S" else KINDS[placement.kind]


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
