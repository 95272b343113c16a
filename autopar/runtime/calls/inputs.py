"""Inputs of calls: arguments, and global batches from the parts that the data loader of each rank gives.

Arguments are bound to the signature of the model and checked against the plan.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.generated.bases import GeneratedProgram, PlannedInput
from autopar.runtime.generated.collectives import all_gather
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.values import Leaf, ValueComparison
from autopar.runtime.state import axes_of, from_local, mesh_of, rank_along
from passes.ir.errors import InputError
from passes.ir.layout import I, R, S, fits, local_shape, whole_shape
from passes.ir.leaves import input_leaves, map_leaves
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType, dtype_name, sparse_or_nested

# Values that are no tensors and may be given where nothing was planned: a program is made for each.
_SETTINGS = (bool, int, float, str)


@dataclass(frozen=True)
class BoundCall:
    """The arguments of a call.

    `arguments` are those by name that are not left out. Their leaves by name are `tensors`, the inputs of a program,
    `values`, which are constants of it (on the CPU), and `settings`, which are no tensors. `as_planned` says that
    these are the leaves that the plan was made for.
    """

    arguments: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    settings: Mapping[str, object]
    as_planned: bool

    @property
    def on_meta(self) -> dict[str, object]:
        """The arguments with tensors on `meta`, but for those that are constants."""
        return map_leaves(self.arguments, self._on_meta)

    def _on_meta(self, name: str, leaf: object) -> object:
        if name in self.values or not isinstance(leaf, Tensor):
            return self.values.get(name, leaf)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=_differentiable(leaf))


def bound_call(
    signature: inspect.Signature, planned: GeneratedProgram, args: Sequence[object], kwargs: Mapping[str, object]
) -> BoundCall:
    """The arguments of a call of the module whose forward has `signature`, for the program `planned`.

    Raises InputError for an argument that the model does not have or that it cannot do without, for a tensor of another
    dtype or number of dims than planned, and for a constant of another value.
    """
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the model does not take these arguments: {error}") from None
    arguments = {name: value for name, value in named_arguments(signature, bound) if value is not None}
    leaves = dict(input_leaves(arguments))
    inputs = {item.name: item for item in planned.inputs}
    _check_known(signature, arguments, leaves, planned)
    _check_left_out(signature, list(leaves), planned)
    for name, value in arguments.items():
        if name in inputs and name not in leaves:
            raise InputError(f"{name} must be a tensor, got {type(value).__name__}")
    counting = tensors_among(planned.constants)
    values = {name: values_of(name, leaf, counting[name]) for name, leaf in leaves.items() if name in counting}
    tensors: dict[str, Tensor] = {}
    settings: dict[str, object] = {}
    for name, leaf in leaves.items():
        if name in inputs:
            tensors[name] = _planned_tensor(leaf, inputs[name])
        elif name in counting:
            continue
        elif name in planned.constants:
            if isinstance(leaf, Tensor) or leaf != planned.constants[name]:
                raise InputError(f"{name} is {leaf!r}, but was planned as {planned.constants[name]!r}: plan again")
        elif isinstance(leaf, Tensor):
            require_strided(name, leaf)
            tensors[name] = leaf
        elif isinstance(leaf, _SETTINGS):
            settings[name] = leaf
        else:
            raise InputError(
                f"additional argument {name} is {type(leaf).__name__}: only tensors, numbers, flags and texts can be "
                f"added to the inputs that the plan was made for, {', '.join(inputs)} (plan again with it)"
            )
    if any(tensor is not leaves[name] for name, tensor in tensors.items()):
        arguments = map_leaves(arguments, lambda name, leaf: tensors.get(name, leaf))
    as_planned = set(tensors) == set(inputs) and set(values) == set(counting) and not settings
    return BoundCall(arguments, tensors, values, settings, as_planned)


def usual_call(planned: GeneratedProgram, tensors: Mapping[str, Tensor]) -> BoundCall:
    """`bound_call` of a call whose arguments are the inputs of `planned` by name, as those of an earlier one.

    Raises InputError for a tensor of another dtype or number of dims than planned.
    """
    for item in planned.inputs:
        _planned_tensor(tensors[item.name], item)
    return BoundCall(tensors, tensors, {}, {}, True)


def _check_known(
    signature: inspect.Signature,
    arguments: Mapping[str, object],
    leaves: Mapping[str, object],
    planned: GeneratedProgram,
) -> None:
    """Raise for an argument that neither the model's signature nor the plan names, and for one that is missing."""
    inputs = [item.name for item in planned.inputs]
    for name, parameter in signature.parameters.items():
        named = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if named and parameter.default is inspect.Parameter.empty and name not in arguments:
            raise InputError(f"missing argument {name}: the plan was made for inputs {', '.join(inputs)}")
    known = {*inputs, *planned.constants}
    explicit = _named(signature)
    tops = {name: [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}[")] for name in arguments}
    additional = [name for name, inner in tops.items() if name not in explicit and not known & {name, *inner}]
    if additional:
        noun = "argument" if len(additional) == 1 else "arguments"
        raise InputError(
            f"additional {noun} {', '.join(additional)}: the model's forward does not name it, and the plan was made "
            f"for inputs {', '.join(inputs)} (plan again with it)"
        )


def _named(signature: inspect.Signature) -> set[str]:
    """The arguments that a signature names, those of `**kwargs: Unpack[...]` among them."""
    found: set[str] = set()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for keywords in get_args(parameter.annotation):
                found.update(getattr(keywords, "__annotations__", ()))
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            found.add(name)
    return found


def _check_left_out(signature: inspect.Signature, given: Sequence[str], planned: GeneratedProgram) -> None:
    """Raise where an omitted argument has a default other than the planned value."""
    for name, value in planned.constants.items():
        parameter = signature.parameters.get(name)
        if name in given or name in planned.assumed or parameter is None or isinstance(value, Tensor):
            continue
        if parameter.default != value:
            raise InputError(
                f"{name} is left out, which means {parameter.default!r}, but was planned as {value!r}: pass it"
            )


def _planned_tensor(leaf: object, item: PlannedInput) -> Tensor:
    """An argument as the tensor that was planned; a number is one without dims."""
    dtype = item.type.dtype
    is_number = type(leaf) is bool if dtype == torch.bool else type(leaf) in (int, float)
    if not item.type.shape and is_number and (type(leaf) is not float or dtype.is_floating_point):
        try:
            return torch.tensor(leaf, dtype=dtype)
        except (RuntimeError, OverflowError, ValueError):
            raise InputError(f"{item.name} is {leaf}, more than {dtype_name(dtype)} holds") from None
    if not isinstance(leaf, Tensor):
        raise InputError(f"{item.name} must be a tensor, got {type(leaf).__name__}")
    if not is_like(leaf, item.type):
        raise unlike(item.name, leaf, item.type)
    if _differentiable(leaf) and not item.differentiable:
        raise InputError(f"{item.name} requires a gradient, but was planned without: plan with one that does")
    return leaf


def _differentiable(leaf: Tensor) -> bool:
    return leaf.requires_grad and torch.is_grad_enabled()


def named_arguments(signature: inspect.Signature, bound: inspect.BoundArguments) -> list[tuple[str, object]]:
    """The given arguments by name, those in `**kwargs` among them."""
    found: list[tuple[str, object]] = []
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found += list(value.items())
        elif signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(f"the model takes *{name}: pass its inputs by name")
        else:
            found.append((name, value))
    return found


def constant_text(value: object) -> str:
    """A constant as text, in the form that plans record."""
    return f"{dtype_name(value.dtype)} {value.tolist()}" if isinstance(value, Tensor) else repr(value)


def tensors_among(constants: Mapping[str, object]) -> dict[str, Tensor]:
    """The constants that are tensors."""
    return {name: value for name, value in constants.items() if isinstance(value, Tensor)}


def values_of(name: str, leaf: object, planned: Tensor) -> Tensor:
    """The values that a call passes for a constant."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.dtype != planned.dtype:
        raise InputError(
            f"{name} must be a whole tensor of {planned.dtype}, because the model needs its values; it is {leaf!r}"
        )
    return leaf.detach().cpu().contiguous()


def require_strided(what: str, tensor: Tensor) -> None:
    """Raise InputError for a sparse or nested tensor, called `what`."""
    if (layout := sparse_or_nested(tensor)) is not None:
        dense = "a padded one (to_padded_tensor) with a mask" if layout == "nested" else "a dense one (to_dense)"
        raise InputError(f"{what} is a {layout} tensor: pass {dense}")


def is_like(tensor: Tensor, planned: TensorType) -> bool:
    """Whether a tensor equals a planned one in everything but its sizes."""
    is_alike = tensor.dtype == planned.dtype and tensor.dim() == len(planned.shape)
    return is_alike and sparse_or_nested(tensor) is None


def unlike(what: str, tensor: Tensor, planned: TensorType) -> InputError:
    """The error for a tensor, called `what`, that cannot take the place of a planned one."""
    require_strided(what, tensor)
    given = TensorType(tuple(tensor.shape), tensor.dtype)
    return InputError(f"{what} is {given}, but was planned as {planned}: pass that, or plan again")


# --- batches of data loaders -----------------------------------------------------------------------------------------

Batch = Mapping[str, object]

_WHAT = "from_local()"


class RowLoader:
    """Gathers global batches from the rows of each rank, over the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, agreement: Agreement, whole: Mesh) -> None:
        """`mesh` is that of this rank's pipeline stages, the last axes of the `whole` mesh, whose ranks all agree."""
        self._ranks = whole
        self._outer = len(whole.sizes) - mesh.ndim
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._axes = axes_of(mesh)
        self._device = device
        self._agreement = agreement
        self._number = 0
        self._values = ValueComparison(
            agreement, whole, _WHAT, "it has no samples to split, so it must be the same on every rank"
        )

    def _numbers(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The numbers of the axes called so.

        Raises InputError for a name that the mesh does not have, one that is there twice, and for none at all.
        """
        names = self._shape.names
        asked = (axes,) if isinstance(axes, str) else tuple(axes)
        outer = next((name for name in self._ranks.names[: self._outer] if name in asked), None)
        if outer is not None:
            raise InputError(
                f"axes is {axes!r}: pipeline stages run along {outer}, so ranks along it give the same rows; name "
                f"other axes of the mesh ({', '.join(names)})"
            )
        if not asked or not set(asked) <= set(names) or len(set(asked)) < len(asked):
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
            planned = {item.name: item for item in program.inputs}

            def whole(name: str, leaf: object) -> object:
                item = planned.get(name)
                if item is None:
                    if isinstance(leaf, Tensor) and name not in program.constants:
                        raise InputError(
                            f"the plan was made for inputs {', '.join(planned)} and has no layout for {name}: say "
                            "which axes samples are split over, from_local(batch, axes=(...))"
                        )
                    return leaf
                if not isinstance(leaf, Tensor):
                    raise InputError(f"{name} must be a tensor, got {type(leaf).__name__}")
                shape = whole_shape(tuple(leaf.shape), item.layout, self._shape)
                if not is_like(leaf, item.type) or not fits(shape, item.layout, self._shape):
                    part = local_shape(item.type.shape, item.layout, self._shape)
                    raise unlike(f"this rank's part of {name}", leaf, TensorType(part, item.type.dtype))
                return from_local(leaf.to(self._device), item.layout, shape, self._mesh, self._shape)

            found = map_leaves(batch, whole)
            described = {
                name: f"a part of {dtype_name(leaf.dtype)}{list(leaf.shape)}"
                for name, leaf in input_leaves(found)
                if isinstance(leaf, Tensor)
            }
        self._agreed(described, 0)
        return found

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
            Leaf(name, tensor, frozenset(() if dim is None else (number + self._outer for number in numbers)))
            for name, (tensor, dim) in sorted(tensors.items())
        ]
        self._values.compare(self._number, tuple(numbers), lambda: leaves)
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
        coordinates = self._ranks.coordinates() if len(counts) > 1 else [(0,) * len(self._ranks.sizes)]
        for rank, (coordinate, count) in enumerate(zip(coordinates, counts, strict=True)):
            other, expected = found.setdefault(tuple(coordinate[axis + self._outer] for axis in axes), (rank, count))
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
