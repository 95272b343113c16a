"""Global batches from the parts that the data loader of each rank gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import check_tensor, is_like
from autopar.runtime.generated.axis import axes_of
from autopar.runtime.generated.bases import GeneratedProgram
from autopar.runtime.generated.collectives import all_gather
from autopar.runtime.ranks.agreement import SENT, Agreement, Raised, digest_numbers
from autopar.runtime.ranks.values import Leaf, ValueComparison
from autopar.runtime.state import from_local, mesh_of
from passes._torch import pytree
from passes.ir.errors import InputError
from passes.ir.layout import I, R, S, fits, local_shape, whole_shape
from passes.ir.leaves import input_leaves
from passes.ir.program import TensorType, dtype_name

Batch = Mapping[str, object]

_WHAT = "from_local()"


def planned_parts(
    batch: Batch, compiled: GeneratedProgram, mesh: DeviceMesh, device: torch.device
) -> dict[str, object]:
    """`batch`, which holds this rank's parts in the planned layout, as `DTensor`s of the whole batch.

    Raises InputError for a part of another dtype or number of dims than planned, and for one that the layout cannot
    have.
    """
    shape_of_mesh = mesh_of(mesh)
    planned = {item.name: item for item in compiled.inputs}
    whole = []
    for name, leaf in input_leaves(batch):
        item = planned.get(name)
        if item is None:
            if isinstance(leaf, Tensor) and name not in compiled.constants:
                raise InputError(
                    f"the plan was made for inputs {', '.join(planned)} and has no layout for {name}: say which axes "
                    "samples are split over, from_local(batch, axes=(...))"
                )
            whole.append(leaf)
            continue
        if not isinstance(leaf, Tensor):
            raise InputError(f"{name} must be a tensor, got {type(leaf).__name__}")
        shape = whole_shape(tuple(leaf.shape), item.layout, shape_of_mesh)
        if not is_like(leaf, item.type) or not fits(shape, item.layout, shape_of_mesh):
            part = local_shape(item.type.shape, item.layout, shape_of_mesh)
            check_tensor(name, leaf, TensorType(part, item.type.dtype), "this rank's part of ")
        whole.append(from_local(leaf.to(device), item.layout, shape, mesh, shape_of_mesh))
    return _filled(batch, whole)


@dataclass(frozen=True)
class _Rows:
    """This rank's rows of a batch: its tensors by name, and the dim of each that has the samples (None: it has none,
    and is the same on every rank). `described` is all that must be equal on all ranks, by name; `count` are the rows.
    """

    tensors: Mapping[str, Tensor]
    dims: Mapping[str, int | None]
    described: Mapping[str, str]
    count: int


class RowLoader:
    """Gathers global batches from the rows of each rank, over the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, agreement: Agreement | None) -> None:
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._axes = axes_of(mesh)
        self._device = device
        self._agreement = agreement
        self._number = 0
        self._values: ValueComparison | None = None
        if agreement is not None:
            advice = "it has no samples to split, so it must be the same on every rank"
            self._values = ValueComparison(agreement, self._shape, _WHAT, advice)

    def axis_numbers(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The numbers of the axes called so.

        Raises InputError for a name that the mesh does not have, one that is there twice, and for none at all.
        """
        names = self._shape.names
        asked = (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [axis for axis in asked if axis not in names]
        if unknown or not asked or len(set(asked)) < len(asked):
            raise InputError(
                f"axes is {axes!r}: it must name axes of the mesh ({', '.join(names)}), each once, the outermost first"
            )
        return tuple(names.index(axis) for axis in asked)

    def place(self, axes: Sequence[int]) -> tuple[int, int]:
        """The number of this rank among those that differ from it on `axes`, the first one outermost; and how many
        there are."""
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None
        return _number(coordinate, axes, self._shape.sizes)

    def planned(self, batch: Batch, compiled: GeneratedProgram) -> dict[str, object]:
        """`batch`, which holds this rank's parts in the planned layout, as whole `DTensor`s. Collective over the mesh.

        Raises InputError, on all ranks, where the part of one is not such as planned, and where they do not fit
        together.
        """
        found: dict[str, object] = {}
        described: dict[str, str] = {}
        error: BaseException | None = None
        try:
            found = planned_parts(batch, compiled, self._mesh, self._device)
            described = {
                name: f"a part of {dtype_name(leaf.dtype)}{list(leaf.shape)}"
                for name, leaf in input_leaves(found)
                if isinstance(leaf, Tensor)
            }
        except BaseException as raised:
            # An interrupt too: it is told to the others before it goes on.
            error = raised
        self._agreed(described, 0, error)
        return found

    def gathered(self, batch: Batch, axes: Sequence[str], compiled: GeneratedProgram) -> dict[str, object]:
        """`batch`, which holds this rank's rows, as whole `DTensor`s on every rank. Collective over the mesh.

        Raises InputError, on all ranks, where the rows of one are not such as planned, where ranks differ in what is
        not split, and where there is no row at all.
        """
        rows: _Rows | None = None
        error: BaseException | None = None
        try:
            numbers = self.axis_numbers(axes)
            rows = _rows(batch, compiled, axes)
        except BaseException as raised:
            # An interrupt too: it is told to the others before it goes on.
            error = raised
        counts = self._agreed({} if rows is None else rows.described, 0 if rows is None else rows.count, error)
        assert rows is not None
        own = self._checked_counts(counts, numbers)
        self._number += 1
        split_on = frozenset(numbers)
        if self._values is not None:
            leaves = [
                Leaf(name, tensor, frozenset() if rows.dims[name] is None else split_on)
                for name, tensor in sorted(rows.tensors.items())
            ]
            self._values.compare(self._number, leaves)
        whole = []
        for name, leaf in input_leaves(batch):
            tensor = rows.tensors.get(name)
            whole.append(leaf if tensor is None else self._whole(tensor, rows.dims[name], numbers, own))
        return _filled(batch, whole)

    def _agreed(self, described: Mapping[str, str], count: int, error: BaseException | None) -> list[int]:
        """The number of rows that every rank of the mesh has, where all describe their batches alike.

        Raises InputError where they do not, and the own error, or that of another rank.
        """
        if self._agreement is not None:
            mine: Raised | dict[str, str] = dict(sorted(described.items())) if error is None else Raised.of(error)
            digest = digest_numbers(repr(mine).encode(), SENT - 1)
            every = self._agreement.numbers([*digest, count])
            if any(other[:-1] != every[0][:-1] for other in every):
                others = self._agreement.gathered_from(_WHAT, mine)
                if error is None:
                    _raise_difference(others)
            counts = [other[-1] for other in every]
        else:
            counts = [count]
        if error is not None:
            raise error
        return counts

    def _checked_counts(self, counts: Sequence[int], axes: Sequence[int]) -> list[int]:
        """The numbers of rows along `axes`, the first one outermost."""
        found: dict[int, tuple[int, int]] = {}
        places = self._shape.coordinates() if len(counts) > 1 else [(0,) * len(self._shape.sizes)]
        for rank, (coordinate, count) in enumerate(zip(places, counts, strict=True)):
            number, _ = _number(coordinate, axes, self._shape.sizes)
            other, expected = found.setdefault(number, (rank, count))
            if count != expected:
                names = ", ".join(self._shape.names[axis] for axis in axes)
                raise InputError(
                    f"rank {rank} of the mesh gives from_local() {count} rows, rank {other} gives {expected}, but both "
                    f"have the same place on {names}, so they must give the same rows"
                )
        if not sum(count for _, count in found.values()):
            raise InputError("no rank gives from_local() any row: the global batch would be empty")
        return [count for _, (_, count) in sorted(found.items())]

    def _whole(self, tensor: Tensor, dim: int | None, axes: Sequence[int], counts: Sequence[int]) -> DTensor:
        """The whole tensor of which this rank has rows along `dim`; `counts` are the rows along `axes`."""
        whole = tensor.to(self._device)
        if dim is not None and len(counts) > 1:
            most = max(counts)
            rows = whole.movedim(dim, 0)
            padded = rows.new_zeros(most, *rows.shape[1:])
            padded[: len(rows)] = rows
            for axis in reversed(axes):
                padded = all_gather(padded, self._axes[axis], src=S(0), dst=R)
            blocks = zip(torch.split(padded, most), counts, strict=True)
            whole = torch.cat([block[:count] for block, count in blocks]).movedim(0, dim).contiguous()
        return from_local(whole, (I,) * len(self._shape.sizes), whole.shape, self._mesh, self._shape)


def _raise_difference(every: Sequence[Raised | dict[str, str]]) -> NoReturn:
    """Raise an error that describes how the batches of ranks differ, or the error that a rank raised."""
    described: list[dict[str, str]] = []
    for rank, item in enumerate(every):
        if isinstance(item, Raised):
            item.raise_here(rank, _WHAT)
        described.append(item)
    first = described[0]
    rank, other = next((rank, item) for rank, item in enumerate(described) if item != first)
    name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
    raise InputError(
        f"ranks give from_local() what does not fit together: rank {rank} of the mesh has {name} "
        f"{other.get(name, 'left out')}, rank 0 has {name} {first.get(name, 'left out')}"
    )


def _rows(batch: Batch, compiled: GeneratedProgram, axes: Sequence[str]) -> _Rows:
    """The rows that this rank gives.

    Raises InputError for what is no batch, or not such as planned.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"from_local takes a dict of the model's arguments by name, not {type(batch).__name__}")
    planned = {item.name: item for item in compiled.inputs}
    tensors: dict[str, Tensor] = {}
    dims: dict[str, int | None] = {}
    described = {"axes": repr(axes)}
    counts: dict[str, int] = {}
    for name, leaf in input_leaves(batch):
        item = planned.get(name)
        if not isinstance(leaf, Tensor) or name in compiled.constants:
            if item is not None:
                raise InputError(f"{name} must be a tensor, got {type(leaf).__name__}")
            described[name] = str(leaf.tolist()) if isinstance(leaf, Tensor) else repr(leaf)
            continue
        if isinstance(leaf, DTensor):
            raise InputError(f"{name} is a DTensor: from_local takes this rank's own rows as plain tensors")
        if leaf.requires_grad:
            raise InputError(f"{name} requires a gradient: pass the whole tensor to the call instead of rows")
        if item is not None and not is_like(leaf, item.type):
            check_tensor(name, leaf, item.type, "this rank's rows of ")
        dim = item.samples if item is not None else 0 if leaf.dim() else None
        tensors[name], dims[name] = leaf, dim
        other = [str(size) for size in leaf.shape]
        if dim is not None:
            counts[name] = leaf.shape[dim]
            other[dim] = "rows"
        described[name] = f"{dtype_name(leaf.dtype)}[{', '.join(other)}]"
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise InputError(f"the inputs have different numbers of rows: {said}")
    return _Rows(tensors, dims, described, next(iter(counts.values()), 0))


def _number(coordinate: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    number, count = 0, 1
    for axis in axes:
        number, count = number * sizes[axis] + coordinate[axis], count * sizes[axis]
    return number, count


def _filled(batch: Batch, leaves: Sequence[object]) -> dict[str, object]:
    filled: dict[str, object] = pytree.tree_unflatten(list(leaves), pytree.tree_structure(dict(batch)))
    return filled
