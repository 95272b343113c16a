"""Global batches from the parts that the data loader of each rank gives."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import is_like, unlike
from autopar.runtime.generated.bases import GeneratedProgram
from autopar.runtime.generated.collectives import all_gather
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.values import Leaf, ValueComparison
from autopar.runtime.state import axes_of, from_local, mesh_of, rank_along
from passes.ir.errors import InputError
from passes.ir.layout import I, R, S, fits, local_shape, whole_shape
from passes.ir.leaves import input_leaves, map_leaves
from passes.ir.program import TensorType, dtype_name

Batch = Mapping[str, object]

_WHAT = "from_local()"


class RowLoader:
    """Gathers global batches from the rows of each rank, over the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, agreement: Agreement) -> None:
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._axes = axes_of(mesh)
        self._device = device
        self._agreement = agreement
        self._number = 0
        advice = "it has no samples to split, so it must be the same on every rank"
        self._values = ValueComparison(agreement, self._shape, _WHAT, advice)

    def _numbers(self, axes: Sequence[str]) -> tuple[int, ...]:
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

    def share(self, axes: Sequence[str]) -> tuple[int, int]:
        """The number of this rank's share of the data where samples are split over `axes`; and how many there are.

        Raises InputError for unknown axes.
        """
        return rank_along([self._axes[axis] for axis in self._numbers(axes)])

    def planned(self, batch: Batch, program: GeneratedProgram) -> dict[str, object]:
        """`batch`, which holds this rank's parts in the planned layout, as whole `DTensor`s. Collective over the mesh.

        Raises InputError, on all ranks, for a part of another dtype or number of dims than planned, for one that the
        layout cannot have, and for parts that do not fit together.
        """
        with self._agreement.telling(_WHAT, _WHAT):
            found = self._planned_parts(batch, program)
            described = {
                name: f"a part of {dtype_name(leaf.dtype)}{list(leaf.shape)}"
                for name, leaf in input_leaves(found)
                if isinstance(leaf, Tensor)
            }
        self._agreed(described, 0)
        return found

    def _planned_parts(self, batch: Batch, program: GeneratedProgram) -> dict[str, object]:
        planned = {item.name: item for item in program.inputs}

        def whole(name: str, leaf: object) -> object:
            item = planned.get(name)
            if item is None:
                if isinstance(leaf, Tensor) and name not in program.constants:
                    raise InputError(
                        f"the plan was made for inputs {', '.join(planned)} and has no layout for {name}: say which "
                        "axes samples are split over, from_local(batch, axes=(...))"
                    )
                return leaf
            if not isinstance(leaf, Tensor):
                raise InputError(f"{name} must be a tensor, got {type(leaf).__name__}")
            shape = whole_shape(tuple(leaf.shape), item.layout, self._shape)
            if not is_like(leaf, item.type) or not fits(shape, item.layout, self._shape):
                part = local_shape(item.type.shape, item.layout, self._shape)
                raise unlike(f"this rank's part of {name}", leaf, TensorType(part, item.type.dtype))
            return from_local(leaf.to(self._device), item.layout, shape, self._mesh, self._shape)

        return map_leaves(batch, whole)

    def gathered(self, batch: Batch, axes: Sequence[str], program: GeneratedProgram) -> dict[str, object]:
        """`batch`, which holds this rank's rows, as whole `DTensor`s on every rank. Collective over the mesh.

        Raises InputError, on all ranks, where the rows of one are not such as planned, where ranks differ in what is
        not split, and where there is no row at all.
        """
        with self._agreement.telling(_WHAT, _WHAT):
            numbers = self._numbers(axes)
            tensors, described, count = _rows(batch, program, axes)
        own = self._checked_counts(self._agreed(described, count), numbers)
        self._number += 1
        leaves = [
            Leaf(name, tensor, frozenset(() if dim is None else numbers))
            for name, (tensor, dim) in sorted(tensors.items())
        ]
        self._values.compare(self._number, leaves)
        return map_leaves(
            batch,
            lambda name, leaf: self._whole(*tensors[name], numbers, own) if name in tensors else leaf,
        )

    def _agreed(self, described: Mapping[str, str], count: int) -> list[int]:
        """The number of rows that every rank has. Raises InputError where ranks describe their batches differently."""
        counts, difference = self._agreement.compared(_WHAT, _WHAT, dict(sorted(described.items())), count)
        if difference is not None:
            raise InputError(f"ranks give from_local() what does not fit together: {difference}")
        return counts

    def _checked_counts(self, counts: Sequence[int], axes: Sequence[int]) -> list[int]:
        """The numbers of rows along `axes`, the first one outermost."""
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        coordinates = self._shape.coordinates() if len(counts) > 1 else [(0,) * len(self._shape.sizes)]
        for rank, (coordinate, count) in enumerate(zip(coordinates, counts, strict=True)):
            other, expected = found.setdefault(tuple(coordinate[axis] for axis in axes), (rank, count))
            if count != expected:
                names = ", ".join(self._shape.names[axis] for axis in axes)
                raise InputError(
                    f"rank {rank} of the mesh gives from_local() {count} rows, rank {other} gives {expected}, but both "
                    f"have the same place on {names}, so they must give the same rows"
                )
        if not any(counts):
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


def _rows(
    batch: Batch, program: GeneratedProgram, axes: Sequence[str]
) -> tuple[Mapping[str, tuple[Tensor, int | None]], Mapping[str, str], int]:
    """The rows that this rank gives: tensors by name, each with its sample dim (None: it has none, and is the same
    on every rank), a description of the batch that must be equal on all ranks, and the number of rows.

    Raises InputError for what is no batch, or not such as planned.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"from_local takes a dict of the model's arguments by name, not {type(batch).__name__}")
    planned = {item.name: item for item in program.inputs}
    tensors: dict[str, tuple[Tensor, int | None]] = {}
    described = {"axes": repr(axes)}
    counts: dict[str, int] = {}
    for name, leaf in input_leaves(batch):
        item = planned.get(name)
        if not isinstance(leaf, Tensor) or name in program.constants:
            if item is not None:
                raise InputError(f"{name} must be a tensor, got {type(leaf).__name__}")
            described[name] = str(leaf.tolist()) if isinstance(leaf, Tensor) else repr(leaf)
            continue
        if isinstance(leaf, DTensor):
            raise InputError(f"{name} is a DTensor: from_local takes this rank's own rows as plain tensors")
        if leaf.requires_grad:
            raise InputError(f"{name} requires a gradient: pass the whole tensor to the call instead of rows")
        if item is not None and not is_like(leaf, item.type):
            raise unlike(f"this rank's rows of {name}", leaf, item.type)
        dim = item.samples if item is not None else 0 if leaf.dim() else None
        tensors[name] = leaf, dim
        other = [str(size) for size in leaf.shape]
        if dim is not None:
            counts[name] = leaf.shape[dim]
            other[dim] = "rows"
        described[name] = f"{dtype_name(leaf.dtype)}[{', '.join(other)}]"
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise InputError(f"the inputs have different numbers of rows: {said}")
    return tensors, described, next(iter(counts.values()), 0)
