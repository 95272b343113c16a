"""The programs of a module: those of its plan, and those for other sizes, which are made when they are first used."""

import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar.runtime.calls.inputs import BoundCall, tensors_among
from autopar.runtime.fsdp.local_parameters import LocalParameters, ReadParameters
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.bases import Generated, GeneratedProgram, LoadedProgram, OtherSizes, Wanted
from autopar.runtime.generated.random import Randomness
from passes.ir.leaves import given_name
from passes.ir.plan import Plan
from passes.ir.program import dtype_name

logger = logging.getLogger("autopar")

# Maximum number of programs kept for inputs other than planned.
KEPT = 32


@dataclass(frozen=True)
class RunnableProgram:
    """A program, the instance of its generated class that runs it, and the parameters that it reads."""

    program: GeneratedProgram
    instance: Generated
    parameters: ReadParameters


@dataclass(frozen=True)
class LoadedModel:
    """A plan, its programs by name, the signature of the model's forward, the seed of random numbers, the function that
    makes programs for other sizes, and the reason why the model cannot be evaluated, if there is one."""

    plan: Plan
    programs: Mapping[str, LoadedProgram]
    signature: inspect.Signature
    seed: int
    other_sizes: OtherSizes
    refused: str = ""


class Programs:
    """The programs of one module by name, "train" and "infer"."""

    def __init__(
        self,
        root: nn.Module,
        axes: tuple[Axis, ...],
        device: torch.device,
        random: Randomness,
        fsdp_manager: FSDPManager,
        loaded: Mapping[str, LoadedProgram],
        other_sizes: OtherSizes,
    ) -> None:
        self._root = root
        self._parameters = LocalParameters(root)
        self._axes = axes
        self._device = device
        self._random = random
        self._fsdp_manager = fsdp_manager
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

        Raises InputError where the model cannot run with these arguments.
        """
        planned = self._planned[name]
        if call.as_planned and _serves(planned.program, call, count):
            return planned
        key = (name, count, *_described(call, training))
        found = self._others.get(key)
        if found is None:
            shapes = {leaf: tuple(tensor.shape) for leaf, tensor in call.tensors.items()}
            arguments = None if call.as_planned else call.on_meta
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
        # The module of its source is of no use without it.
        sys.modules.pop(type(oldest.instance).__module__, None)
        if not self._warned and not any(axis.rank for axis in self._axes):
            logger.warning(
                "this module was called with more than %d different sizes or sets of inputs: the program that was not "
                "used for longest is dropped, and made again when it is needed; pad batches to a few sizes, or sort "
                "them into buckets",
                KEPT,
            )
        self._warned = True

    def _instance(self, loaded: LoadedProgram) -> RunnableProgram:
        program, held = loaded.program, loaded.program.held
        given = {given_name(name): value.to(self._device) for name, value in tensors_among(program.constants).items()}
        tensors = {**program.tensors, **given}
        view = self._fsdp_manager.view(self._root, held)
        parameters = self._parameters.read(view, program.parameters - held.gathered)
        groups, around = self._fsdp_manager.groups(held), self._fsdp_manager.around_copies(held)
        instance = loaded.kind(view, self._axes, self._device, tensors, self._random, groups, around)
        if loaded.totals is not None:
            instance.totals = self._instance(loaded.totals).instance
        return RunnableProgram(program, instance, parameters)


def _serves(program: GeneratedProgram, call: BoundCall, count: int) -> bool:
    """Whether a planned program has these sizes, values and number of micro-batches."""
    planned_count = 1 if program.micro_batches is None else program.micro_batches.count
    planned = tensors_among(program.constants)
    return (
        planned_count == count
        and all(tuple(call.tensors[item.name].shape) == item.type.shape for item in program.inputs)
        and all(torch.equal(value, planned[name]) for name, value in call.values.items())
    )


def _described(call: BoundCall, training: bool) -> Iterator[object]:
    """The properties of a call's arguments that its program depends on."""
    for name, leaf in sorted(call.tensors.items()):
        yield name, tuple(leaf.shape)
        if not call.as_planned:
            yield dtype_name(leaf.dtype), leaf.requires_grad and torch.is_grad_enabled()
    for name, value in sorted(call.values.items()):
        yield name, tuple(value.shape), value.numpy().tobytes()
    if not call.as_planned:
        yield training
        for name, setting in sorted(call.settings.items()):
            yield name, type(setting), setting
