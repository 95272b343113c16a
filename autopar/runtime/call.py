"""From the arguments of a call to the program that serves it and this rank's parts of its inputs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.axis import Axis
from autopar.runtime.collectives import convert
from autopar.runtime.generated import CompiledProgram, PlannedInput
from autopar.runtime.inputs import check_names, check_tensor, listed, named_arguments, tensors_among
from autopar.runtime.programs import Programs, RunnableProgram
from autopar.runtime.state import local_part, mesh_of, placements
from passes.ir.errors import InputError
from passes.ir.layout import I
from passes.ir.leaves import input_leaves
from passes.ir.redistribution import redistribution


@dataclass(frozen=True)
class PreparedCall:
    """The program that serves a call, and this rank's parts of its inputs."""

    program: RunnableProgram
    inputs: Sequence[Tensor]


class CallPath:
    """Binds and checks the arguments of calls, chooses programs, and cuts inputs."""

    def __init__(
        self,
        signature: inspect.Signature,
        programs: Programs,
        mesh: DeviceMesh,
        axes: tuple[Axis, ...],
        device: torch.device,
    ) -> None:
        self._signature = signature
        self._programs = programs
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._axes = axes
        self._device = device

    def prepared(self, name: str, count: int, args: Sequence[object], kwargs: Mapping[str, object]) -> PreparedCall:
        """A call of the program called `name` in `count` micro-batches.

        Raises InputError for arguments that the program cannot be called with.
        """
        given = self._given(self._programs.planned(name).compiled, self._bind(args, kwargs))
        program = self._programs.at_sizes(name, given, count)
        return PreparedCall(program, [self._local_input(item, given[item.name]) for item in program.compiled.inputs])

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name; those left out stay out."""
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"the model does not take these arguments: {error}") from None
        return dict(named_arguments(self._signature, bound))

    def _given(self, compiled: CompiledProgram, batch: Mapping[str, object]) -> dict[str, object]:
        """The tensors of a call by name: planned ones, and constants."""
        planned = {item.name: item for item in compiled.inputs}
        leaves = input_leaves({name: value for name, value in batch.items() if value is not None or name in planned})
        check_names([name for name, _ in leaves], planned, compiled.constants)
        self._check_left_out([name for name, _ in leaves], compiled)
        counting = tensors_among(compiled.constants)
        missing = [name for name in counting if name not in dict(leaves)]
        if missing:
            raise InputError(f"missing {listed(missing)}: the model needs the values")
        for name, leaf in leaves:
            if name in planned or name in counting:
                continue
            if isinstance(leaf, Tensor) or leaf != compiled.constants[name]:
                raise InputError(f"{name} is {leaf!r}, but was planned as {compiled.constants[name]!r}: plan again")
        return {name: leaf for name, leaf in leaves if name in planned or name in counting}

    def _check_left_out(self, given: Sequence[str], compiled: CompiledProgram) -> None:
        """Raise where leaving out an argument would mean another value than the one that was planned."""
        for name, value in compiled.constants.items():
            parameter = self._signature.parameters.get(name)
            if name in given or name in compiled.assumed or parameter is None or isinstance(value, Tensor):
                continue
            if parameter.default is inspect.Parameter.empty:
                raise InputError(f"missing argument {name}: it was planned as {value!r}")
            if parameter.default != value:
                raise InputError(
                    f"{name} is left out, which means {parameter.default!r}, but was planned as {value!r}: pass it"
                )

    def _local_input(self, item: PlannedInput, leaf: object) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise InputError(f"{item.name} must be a tensor, got {type(leaf).__name__}")
        check_tensor(item.name, leaf, item.type, "")
        differentiable = leaf.requires_grad and torch.is_grad_enabled()
        if differentiable and not item.differentiable:
            raise InputError(f"{item.name} requires a gradient, but was planned without: plan with one that does")
        if isinstance(leaf, DTensor):
            wanted = placements(item.layout, self._shape)
            if tuple(leaf.placements) != wanted:
                raise InputError(
                    f"{item.name} lies as {leaf.placements}, but is planned as {wanted}: see input_layouts"
                )
            if differentiable and not all(letter.kind == "S" for letter in item.layout):
                raise InputError(f"{item.name} requires a gradient and is not split on all axes: pass the whole tensor")
            part = leaf.to_local()
        elif differentiable:
            # The whole is the same on every rank, and so is its gradient.
            part = leaf
            for step in redistribution((I,) * len(self._axes), item.layout, item.type.shape, self._shape):
                part = convert(part, self._axes[step.axis], src=step.source, dst=step.target)
        elif any(letter.kind == "S" for letter in item.layout):
            coordinate = self._mesh.get_coordinate()
            assert coordinate is not None
            part = local_part(leaf, item.layout, coordinate, self._shape)
        else:
            part = leaf
        return part.to(self._device, item.dtype)
