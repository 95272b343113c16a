"""Loading of state dicts into distributed parameters: each rank copies its shard of a whole plain tensor."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_shape_and_offset
from passes._torch import buffers_of, parameters_of
from passes.ir.errors import CheckpointError
from passes.ir.grouping import grouped


class Loadable(nn.Module):
    """A module that takes state dicts of the stock model.

    `_elsewhere` are, without values, the tensors of the model's state dict that only other pipeline stages hold.
    """

    _elsewhere: Mapping[str, Tensor] = MappingProxyType({})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers, as `torch.nn.Module.load_state_dict` does; every rank calls it alike.

        A value is the whole plain tensor, of which each rank takes its part, or a `DTensor` on the mesh of the
        parameter. It is converted to the dtype and device of the parameter. With `assign=True` parameters become new
        ones, with these properties all the same, or those given where they have them, and tied parameters stay tied.

        In pipeline stages it takes the state dict of the whole model, of which each rank keeps what its stages hold, or
        that of this rank's stages alone.

        Returns the names that are missing and additional, if `strict` is False; they are errors otherwise.

        Raises CheckpointError for these names, and for values of another shape, without data, on another mesh, or that
        are no tensors. Nothing is changed then.
        """
        own: dict[str, Tensor] = self.state_dict(keep_vars=True)
        # Who gives anything of other stages gives the whole model.
        known = own if self._elsewhere.keys().isdisjoint(state_dict) else {**own, **self._elsewhere}
        problems = [*(_differences(known, state_dict) if strict else ()), *_unfit(known, state_dict)]
        if problems:
            raise CheckpointError(f"the state dict does not fit the model: {'; '.join(problems)}")
        given = {name: value for name, value in state_dict.items() if name not in self._elsewhere}
        keys = super().load_state_dict(given, strict=False, assign=assign)
        if assign:
            _tie_again(self, own)
        return keys

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """Load this module's own tensors, with the part of this rank in place of a whole tensor.

        `load_state_dict` calls it, that of a module around this one included.
        """
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        given = dict(state_dict)
        for name, current in (*parameters_of(self).items(), *buffers_of(self).items()):
            value = given.get(prefix + name)
            if isinstance(value, Tensor) and current is not None and _same_shape(value, current):
                given[prefix + name] = _placed_like(current, value, assign)
        super()._load_from_state_dict(given, prefix, local_metadata, *args)


def _differences(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> Iterator[str]:
    """The names that are missing in `given`, and those that are additional there."""
    missing = [name for name in own if name not in given]
    additional = [name for name in given if name not in own]
    if missing and len(missing) == len(own):
        yield (
            "it has none of its names (where one rank has all of them, use set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict with broadcast_from_rank0=True)"
        )
    elif missing:
        yield f"missing {', '.join(missing)}"
    if additional:
        yield f"additional {', '.join(additional)}"


def _unfit(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> Iterator[str]:
    """The values of `given` that cannot be loaded, and why."""
    for name, current, value in ((name, current, given[name]) for name, current in own.items() if name in given):
        if not isinstance(value, Tensor):
            yield f"{name} is {type(value).__name__}, not a tensor"
        elif not _same_shape(value, current):
            yield f"{name} has shape {list(value.shape)}, but must have {list(current.shape)}"
        elif value.is_meta and not current.is_meta:
            yield f"{name} is on meta, without data"
        elif isinstance(value, DTensor) and isinstance(current, DTensor) and value.device_mesh != current.device_mesh:
            yield f"{name} is on another mesh (give its full_tensor(), or use torch.distributed.checkpoint)"


def copy_part(current: Tensor, value: Tensor) -> None:
    """Copy this rank's part of the whole tensor `value` into the parameter or buffer `current`."""
    with torch.no_grad():
        current.copy_(_placed_like(current, value, assign=False))


def _same_shape(value: Tensor, current: Tensor) -> bool:
    """Whether shapes agree; torch takes one element for a scalar."""
    return value.shape == current.shape or (current.dim() == 0 and value.shape == (1,))


def _placed_like(current: Tensor, value: Tensor, assign: bool) -> Tensor:
    """Return `value` in the layout of `current`, to be copied into it or to replace it."""
    if value.shape != current.shape:
        value = value[0]
    if isinstance(value, DTensor) and not (isinstance(current, DTensor) and value.placements == current.placements):
        value = value.full_tensor()
    if isinstance(current, DTensor) and not isinstance(value, DTensor):
        # One block, since parameters are stored as `passes.ir.layout.is_storable` says.
        shape, offset = local_shape_and_offset(value.shape, current.device_mesh, current.placements)
        block = value.detach()[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        part = block.to(current.to_local(), copy=True).contiguous() if assign else block
        return DTensor.from_local(
            part,
            current.device_mesh,
            current.placements,
            run_check=False,
            shape=current.shape,
            stride=current.stride(),
        )
    if not assign or (isinstance(value, nn.Parameter) and value.dtype == current.dtype):
        return value
    return value.detach().to(current)


def _tie_again(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Restore ties: parameters and buffers that were one tensor `before`, under several names, become one again."""
    for first, *others in grouped((id(item), name) for name, item in before.items()).values():
        path, _, last = first.rpartition(".")
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, getattr(module.get_submodule(path), last))
