"""The programs of a module: those of its plan, and those for other sizes, which are made when they are first used."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.axis import Axis
from autopar.runtime.engine import Engine
from autopar.runtime.generated import CompiledProgram, Generated, LoadedProgram, OtherSizes
from autopar.runtime.inputs import is_like, tensors_among, values_of
from autopar.runtime.random import Randomness
from passes.ir.leaves import given_name


@dataclass(frozen=True)
class RunnableProgram:
    """A program and the instance of its generated class that runs it."""

    compiled: CompiledProgram
    generated: Generated


class Programs:
    """The programs of one module by name, "train" and "infer"."""

    def __init__(
        self,
        root: nn.Module,
        axes: tuple[Axis, ...],
        device: torch.device,
        random: Randomness,
        engine: Engine,
        loaded: Mapping[str, LoadedProgram],
        other_sizes: OtherSizes,
    ) -> None:
        self._root = root
        self._axes = axes
        self._device = device
        self._random = random
        self._engine = engine
        self._other_sizes = other_sizes
        self.loaded = dict(loaded)
        self._planned = {name: self._instance(item) for name, item in loaded.items()}
        self._sized: dict[tuple[object, ...], RunnableProgram] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._planned

    def planned(self, name: str) -> RunnableProgram:
        """The program called `name`, for the planned sizes."""
        return self._planned[name]

    def at_sizes(self, name: str, given: Mapping[str, object], count: int) -> RunnableProgram:
        """The program called `name` for the sizes of the inputs, the values of constants and a number of micro-batches,
        made where it is not there yet."""
        program = self._planned[name]
        compiled = program.compiled
        planned = tensors_among(compiled.constants)
        values = {name: values_of(name, given[name], value) for name, value in planned.items()}
        shapes = {}
        for item in compiled.inputs:
            leaf = given[item.name]
            if not isinstance(leaf, Tensor) or not is_like(leaf, item.type):
                # What is wrong with it is said later.
                return program
            shapes[item.name] = tuple(leaf.shape)
        planned_count = 1 if compiled.micro_batches is None else compiled.micro_batches.count
        if (
            planned_count == count
            and all(shapes[item.name] == item.type.shape for item in compiled.inputs)
            and all(torch.equal(value, planned[name]) for name, value in values.items())
        ):
            return program
        known = [(tuple(value.shape), value.numpy().tobytes()) for value in values.values()]
        key = (name, count, *shapes.values(), *known)
        if key not in self._sized:
            self._sized[key] = self._instance(self._other_sizes(name, shapes, values, count))
        return self._sized[key]

    def _instance(self, program: LoadedProgram) -> RunnableProgram:
        compiled = program.compiled
        given = {
            given_name(name): value.to(self._device)
            for name, value in compiled.constants.items()
            if isinstance(value, Tensor)
        }
        tensors = {**compiled.tensors, **given}
        view = self._engine.view(self._root, compiled.held)
        # Totals are of inputs alone: there is nothing that the engine holds.
        groups = self._engine.groups(compiled.held) if compiled.held.groups else {}
        around = self._engine.around_copies(compiled.held)
        generated = program.kind(view, self._axes, self._device, tensors, self._random, groups, around)
        if program.totals is not None:
            generated.totals = self._instance(program.totals).generated
        return RunnableProgram(compiled, generated)
