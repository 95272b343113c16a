"""From the arguments of a call to the program that serves it and this rank's parts of its inputs."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import BoundCall, bound_call
from autopar.runtime.calls.programs import Programs, RunnableProgram
from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.bases import PlannedInput
from autopar.runtime.generated.collectives import convert
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.ranks.comparing import CallComparison, Surroundings
from autopar.runtime.state import local_part, mesh_of, placements
from passes.ir.errors import InputError
from passes.ir.layout import I
from passes.ir.redistribution import redistribution


class CallPath:
    """Binds and checks the arguments of calls, compares them between ranks, chooses programs, and cuts inputs."""

    def __init__(
        self,
        signature: inspect.Signature,
        programs: Programs,
        parameters: ParameterWatch,
        comparison: CallComparison,
        mesh: DeviceMesh,
        axes: tuple[Axis, ...],
        device: torch.device,
    ) -> None:
        self._signature = signature
        self._programs = programs
        self._parameters = parameters
        self._comparison = comparison
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._axes = axes
        self._device = device

    def prepared(
        self, name: str, surroundings: Surroundings, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[RunnableProgram, list[Tensor]]:
        """The program that serves a call of the program called `name`, and this rank's parts of its inputs.

        Every rank of the mesh calls it alike.

        Raises InputError, on all ranks, for arguments that the program cannot be called with on some rank, and where
        ranks are called with different ones.
        """
        with self._comparison.telling():
            flags = self._parameters.flags()
            call = self._bound(name, args, kwargs)
        self._comparison.compare(call, surroundings, flags, self._parameters)
        serving = self._programs.serving(name, surroundings.training, surroundings.micro_batches, call)
        return serving, [self._local_input(item, call) for item in serving.program.inputs]

    def _bound(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundCall:
        call = bound_call(self._signature, self._programs.planned(name).program, args, kwargs)
        for leaf, tensor in call.tensors.items():
            if isinstance(tensor, DTensor) and tensor.device_mesh != self._mesh:
                raise InputError(f"{leaf} is a DTensor on another mesh than the model: make it with from_local()")
        return call

    def _local_input(self, item: PlannedInput, call: BoundCall) -> Tensor:
        leaf = call.tensors[item.name]
        differentiable = leaf.requires_grad and torch.is_grad_enabled()
        if isinstance(leaf, DTensor):
            if differentiable and not all(placement.kind == "S" for placement in item.layout):
                raise InputError(f"{item.name} requires a gradient and is not split on all axes: pass the whole tensor")
            if tuple(leaf.placements) == placements(item.layout, self._shape):
                return leaf.to_local().to(self._device, item.dtype)
            if differentiable:
                raise InputError(
                    f"{item.name} requires a gradient and has the placements {leaf.placements}, but is planned as "
                    f"{placements(item.layout, self._shape)}: pass the whole tensor, or parts as input_layouts says"
                )
            # Rows of data loaders, or parts in the planned layout where the program for these sizes has another one.
            leaf = leaf.full_tensor()
        if differentiable:
            # The whole is the same on every rank, and so is its gradient.
            part = leaf
            for step in redistribution((I,) * len(self._axes), item.layout, item.type.shape, self._shape):
                part = convert(part, self._axes[step.axis], src=step.source, dst=step.target)
        elif any(placement.kind == "S" for placement in item.layout):
            part = local_part(leaf, item.layout, [axis.rank for axis in self._axes], self._shape)
        else:
            part = leaf
        return part.to(self._device, item.dtype)
