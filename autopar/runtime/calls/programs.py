"""The programs of a module: those of its plan, and those for other sizes, which are made when they are first used.

`CallPath` goes from the arguments of a call to the program that serves it and this rank's parts of its inputs.
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import BoundCall, bound_call, tensors_among, usual_call
from autopar.runtime.fsdp.local_parameters import LocalParameters, ReadParameters
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.generated.bases import Generated, GeneratedProgram, LoadedProgram, OtherSizes, PlannedInput, Wanted
from autopar.runtime.generated.collectives import convert
from autopar.runtime.generated.random import Randomness
from autopar.runtime.initialization import DeferredModel
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.ranks.comparing import CallComparison, Surroundings
from autopar.runtime.state import Axis, axes_of, axis_along, local_part, mesh_of, placements
from passes.ir.errors import InputError
from passes.ir.layout import I
from passes.ir.leaves import given_name
from passes.ir.log import logger
from passes.ir.plan import Plan
from passes.ir.program import dtype_name
from passes.ir.redistribution import redistribution

# Runs the program of totals on this rank's parts of its inputs.
Totals = Callable[[Sequence[Tensor]], Sequence[object]]

# Maximum number of programs kept for inputs other than planned.
KEPT = 32


@dataclass(frozen=True, eq=False)
class RunnableStage:
    """A pipeline stage of this rank, or a whole program that is not cut: the instance of its generated class, the
    parameters that it reads, and the FSDP manager of these."""

    program: GeneratedProgram
    instance: Generated
    parameters: ReadParameters
    manager: FSDPManager


@dataclass(frozen=True, eq=False)
class RunnableProgram:
    """A program with its stages on this rank, by number, and the code of its totals; a program that is not cut is its
    own stage 0."""

    program: GeneratedProgram
    stages: Mapping[int, RunnableStage]
    totals: Totals | None


@dataclass(frozen=True)
class LoadedModel:
    """A plan, its programs by name, the signature of the model's forward, the seed of random numbers, the function that
    makes programs for other sizes, the reason why the model cannot be evaluated, if there is one, those tensors of its
    state dict that only other ranks' pipeline stages hold, on meta, and the model if tensors of it were on meta, with
    the names of those that this rank holds."""

    plan: Plan
    programs: Mapping[str, LoadedProgram]
    signature: inspect.Signature
    seed: int
    other_sizes: OtherSizes
    refused: str = ""
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)
    deferred: DeferredModel | None = None
    missing: Set[str] = frozenset()


class Programs:
    """The programs of one module by name, "train" and "infer"."""

    def __init__(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        random: Randomness,
        managers: Mapping[int, FSDPManager],
        loaded: Mapping[str, LoadedProgram],
        other_sizes: OtherSizes,
    ) -> None:
        self._root = root
        self._parameters = LocalParameters(root, partial(_reduce_held, managers))
        self._mesh = mesh
        self._device = device
        self._random = random
        self._managers = managers
        self._other_sizes = other_sizes
        self.loaded = dict(loaded)
        self._planned = {name: self._instance(item) for name, item in loaded.items()}
        self._others: OrderedDict[tuple[object, ...], RunnableProgram] = OrderedDict()
        self._warned = False

    def __contains__(self, name: str) -> bool:
        return name in self._planned

    def planned(self, name: str) -> RunnableProgram:
        """The program called `name`, for the planned sizes."""
        return self._planned[name]

    def serving(self, name: str, training: bool, count: int, call: BoundCall) -> RunnableProgram:
        """The program called `name` for the arguments of a call in `count` micro-batches, made where it is not there
        yet; `training` is the mode of the module. Collective where one is made.

        The program of training serves evaluation, too, where it is the same, and is made anew where it is not.

        Raises InputError where the model cannot run with these arguments.
        """
        planned = self._planned[name]
        as_planned = call.as_planned and (training or name == "infer" or "infer" not in self._planned)
        if as_planned and _serves(planned.program, call, count):
            return planned
        key = (name, count, *_described(call, None if as_planned else training))
        found = self._others.get(key)
        if found is None:
            shapes = {leaf: tuple(tensor.shape) for leaf, tensor in call.tensors.items()}
            arguments = None if as_planned else call.on_meta
            found = self._instance(self._other_sizes(Wanted(name, count, shapes, call.values, arguments, training)))
            self._others[key] = found
            self._drop_oldest()
        self._others.move_to_end(key)
        return found

    def _drop_oldest(self) -> None:
        """Drop the least recently used program if there are too many."""
        if len(self._others) <= KEPT:
            return
        _, oldest = self._others.popitem(last=False)
        # The modules of its source are of no use without it.
        for stage in oldest.stages.values():
            sys.modules.pop(type(stage.instance).__module__, None)
        if not self._warned and not any(axis.rank for axis in axes_of(self._mesh)):
            logger.warning(
                "this module was called with more than %d different sizes or sets of inputs: the program that was not "
                "used for longest is dropped, and made again when it is needed; pad batches to a few sizes, or sort "
                "them into buckets",
                KEPT,
            )
        self._warned = True

    def _instance(self, loaded: LoadedProgram) -> RunnableProgram:
        stages = {number: self._stage(own, self._managers[number]) for number, own in loaded.stages.items()}
        if not loaded.program.stages:
            stages = {0: self._stage(loaded, self._managers[0])}
        return RunnableProgram(loaded.program, stages, None if loaded.totals is None else self._totals(loaded.totals))

    def _totals(self, loaded: LoadedProgram) -> Totals:
        # They read no parameters.
        instance = self._stage(loaded, next(iter(self._managers.values()))).instance
        return lambda parts: instance.forward(*parts)

    def _stage(self, loaded: LoadedProgram, manager: FSDPManager) -> RunnableStage:
        program, held = loaded.program, loaded.program.held
        given = {given_name(name): value for name, value in tensors_among(program.constants).items()}
        # A model on an accelerator may have numbers as tensors of the CPU, which eager torch mixes with others.
        constants = {name: value.to(self._device) for name, value in {**program.tensors, **given}.items()}
        view = manager.view(self._root, held)
        parameters = self._parameters.read(view, program.local, held.gathered)
        groups, around = manager.groups(held), manager.around_copies(held)
        axes = axes_of(self._mesh, sorted(program.spans))
        instance = loaded.kind(view, axes, self._device, constants, self._random, groups, around)
        return RunnableStage(program, instance, parameters, manager)


def _reduce_held(managers: Mapping[int, FSDPManager], parameter: nn.Parameter) -> None:
    for manager in managers.values():
        manager.reduce_held(parameter)


def _serves(program: GeneratedProgram, call: BoundCall, count: int) -> bool:
    """Whether a planned program has these sizes, values and number of micro-batches."""
    planned_count = 1 if program.micro_batches is None else program.micro_batches.count
    planned = tensors_among(program.constants)
    return (
        planned_count == count
        and all(tuple(call.tensors[item.name].shape) == item.type.shape for item in program.inputs)
        and all(torch.equal(value, planned[name]) for name, value in call.values.items())
    )


def _described(call: BoundCall, training: bool | None) -> Iterator[object]:
    """The properties of a call's arguments that its program depends on, and the mode of the module; None for arguments
    and a mode that were planned."""
    for name, leaf in sorted(call.tensors.items()):
        yield name, tuple(leaf.shape)
        if training is not None:
            yield dtype_name(leaf.dtype), leaf.requires_grad and torch.is_grad_enabled()
    for name, value in sorted(call.values.items()):
        yield name, tuple(value.shape), value.numpy().tobytes()
    if training is not None:
        yield training
        for name, setting in sorted(call.settings.items()):
            yield name, type(setting), setting


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
        # Of programs that were called with their inputs by name and nothing else: these names.
        self._usual: dict[str, Set[str]] = {}

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
            for leaf, tensor in call.tensors.items():
                if isinstance(tensor, DTensor) and tensor.device_mesh != self._mesh:
                    raise InputError(f"{leaf} is a DTensor on another mesh than the model: make it with from_local()")
        self._comparison.compare(call, surroundings, flags, self._parameters)
        serving = self._programs.serving(name, surroundings.training, surroundings.micro_batches, call)
        return serving, [self._local_input(item, call) for item in serving.program.inputs]

    def _bound(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundCall:
        """The arguments of a call of the program called `name`."""
        planned = self._programs.planned(name).program
        given = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
        if not args and len(given) == len(kwargs) and kwargs.keys() == self._usual.get(name):
            return usual_call(planned, given)
        call = bound_call(self._signature, planned, args, kwargs)
        if call.as_planned and not args and given.keys() == kwargs.keys() == call.tensors.keys():
            self._usual[name] = frozenset(given)
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
            for step in redistribution((I,) * len(self._axes), item.layout, item.type.shape, self._shape):
                leaf = convert(leaf, axis_along(self._mesh, step.span), src=step.source, dst=step.target)
        elif any(placement.kind == "S" for placement in item.layout):
            leaf = local_part(leaf, item.layout, [axis.rank for axis in self._axes], self._shape)
        return leaf.to(self._device, item.dtype)
