"""The module that `parallelize` returns."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.runtime.axis import axes_of
from autopar.runtime.collectives import convert
from autopar.runtime.engine import Engine
from autopar.runtime.generated import (
    CompiledProgram,
    Container,
    Generated,
    LoadedProgram,
    OtherSizes,
    PlannedInput,
    PlannedOutput,
    local,
)
from autopar.runtime.inputs import check_names, check_tensor, is_like, listed, named_arguments, tensors_among, values_of
from autopar.runtime.random import Randomness
from autopar.runtime.saving import saving
from autopar.runtime.state import from_local, local_part, mesh_of, placements
from autopar.runtime.steps import forward_backward
from passes.ir.errors import CaptureError, InputError
from passes.ir.layout import I, Layout, fits, local_shape, whole_shape
from passes.ir.leaves import given_name, input_leaves
from passes.ir.plan import Plan
from passes.ir.program import Change, TensorType, find_overload
from passes.ir.redistribution import redistribution

# Attributes of the module below.
_OWN = (
    "_axes",
    "_device",
    "_engine",
    "_loaded",
    "_mesh",
    "_original",
    "_other_sizes",
    "_plan",
    "_programs",
    "_random",
    "_refused",
    "_root",
    "_shape",
    "_signature",
    "_sized",
)


class DistributedModule(nn.Module):
    """A model that runs on a mesh as planned.

    Called with the global batch, the same on every rank, it returns what the model returns: scalars as plain tensors,
    equal on all ranks, other tensors as `DTensor` in the plan's layout. Parameters are `DTensor`s under the model's own
    names. The first call with other sizes than planned takes a moment: the plan is carried over to them.
    """

    _root: Container

    def __init__(
        self,
        root: Container,
        mesh: DeviceMesh,
        device: torch.device,
        plan: Plan,
        programs: Mapping[str, LoadedProgram],
        signature: inspect.Signature,
        seed: int,
        other_sizes: OtherSizes,
        engine: Engine,
    ) -> None:
        super().__init__()
        taken = sorted(set(_OWN) & {*root._modules, *root._parameters, *root._buffers})
        if taken:
            raise CaptureError(f"the model has a part named {taken[0]!r}, which its distributed form needs: rename it")
        # The model's parts under their own names; they also hang on `root`, where no name of this class is in the way.
        self._modules.update(root._modules)
        self._parameters.update(root._parameters)
        self._buffers.update(root._buffers)
        self._non_persistent_buffers_set.update(root._non_persistent_buffers_set)
        axes = axes_of(mesh)
        self._axes = axes
        engine.bind(root)
        self._engine = engine
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._device = device
        self._signature = signature
        self._plan = plan
        self._random = Randomness(seed)
        self._refused = ""
        self._original: nn.Module | None = None
        self._loaded = dict(programs)
        # The parts of the model are this module's own: the container is none of them.
        object.__setattr__(self, "_root", root)
        self._programs = {name: self._instance(item) for name, item in programs.items()}
        self._other_sizes = other_sizes
        self._sized: dict[tuple[object, ...], tuple[CompiledProgram, Generated]] = {}
        self.train("train" in programs)

    def train(self, mode: bool = True) -> "DistributedModule":
        """Switch between training and evaluation; a module planned for inference only cannot train."""
        if mode and "train" not in self._programs:
            raise InputError("this module was planned for inference: plan it with objective='train' to train it")
        if not mode and self._refused:
            raise CaptureError(f"this module can be trained, but not evaluated: {self._refused}")
        super().train(mode)
        return self

    def refuse_evaluation(self, reason: str) -> None:
        """Let `eval()` raise CaptureError from now on, with a reason."""
        self._refused = reason

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """What the module has, or else what the part of a model has that it stands for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("_"):
                raise
        found: Tensor | nn.Module = getattr(original, name)
        return found

    @property
    def used_parameters(self) -> frozenset[str]:
        """The parameters that any of its programs reads or changes."""
        return frozenset[str]().union(*(program.compiled.parameters for program in self._loaded.values()))

    def stand_for(self, original: nn.Module) -> None:
        """Be a part of a model that knows nothing of meshes: return whole tensors, and have what `original` has."""
        # It is no part of this module.
        object.__setattr__(self, "_original", original)

    def keep(self, path: str, part: nn.Module) -> None:
        """Let the part at `path`, which no program uses, be `part`, with its own parameters."""
        self._root.set_submodule(path, part)
        self.set_submodule(path, part)

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh that it runs on."""
        return self._mesh

    @property
    def plan(self) -> Plan:
        """What was decided."""
        return self._plan

    @property
    def random(self) -> Randomness:
        """What dropout draws from: `random.seed(0)`, alike on all ranks, makes a run reproducible."""
        return self._random

    @property
    def code(self) -> str:
        """The generated source of the current mode."""
        return self._loaded[self._mode()].compiled.source

    @property
    def code_path(self) -> Path:
        """The file that `code` lies in."""
        return self._loaded[self._mode()].path

    @property
    def input_layouts(self) -> dict[str, dict[str, str]]:
        """How each input is split, per axis: {"input_ids": {"dp": "S(0)", "tp": "R"}}."""
        compiled, _ = self._program()
        return {item.name: dict(zip(self._shape.names, map(str, item.layout), strict=True)) for item in compiled.inputs}

    def from_local(self, batch: Mapping[str, object]) -> dict[str, object]:
        """Each rank's own part of a batch, as data loaders give it, as arguments for a call.

        `batch` holds, by name, the part that `input_layouts` says; the result holds `DTensor`s of the whole batch:
        `dist_model(**dist_model.from_local(batch))`.

        Parts of other sizes than planned are parts of a batch of other sizes, the same on every rank. Raises InputError
        for a part of another dtype or number of dims than planned, and for one that the layout cannot have.
        """
        compiled, _ = self._program()
        planned = {item.name: item for item in compiled.inputs}
        leaves = input_leaves(batch)
        check_names([name for name, _ in leaves], planned, compiled.constants)
        whole = []
        for name, leaf in leaves:
            item = planned.get(name)
            if item is None:
                whole.append(leaf)
                continue
            assert isinstance(leaf, Tensor)
            shape = whole_shape(tuple(leaf.shape), item.layout, self._shape)
            if not is_like(leaf, item.type) or not fits(shape, item.layout, self._shape):
                part = local_shape(item.type.shape, item.layout, self._shape)
                check_tensor(name, leaf, TensorType(part, item.type.dtype), "this rank's part of ")
            whole.append(from_local(leaf.to(self._device), item.layout, shape, self._mesh, self._shape))
        filled: dict[str, object] = pytree.tree_unflatten(whole, pytree.tree_structure(dict(batch)))
        return filled

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the plan on the global batch.

        Raises InputError for a missing or additional argument, for a tensor of another dtype or number of dims than
        planned, and for sizes that the model cannot be traced for.
        """
        given = self._given(self._program()[0], self._bind(args, kwargs))
        compiled, generated = self._at_sizes(given, 1)
        local_inputs = [self._local_input(item, given[item.name]) for item in compiled.inputs]
        self._change(compiled.changes)
        return self._output(compiled, self._run(compiled, generated, local_inputs))

    def _run(
        self, compiled: CompiledProgram, generated: Generated, local_inputs: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Run a program on this rank's parts of its inputs."""
        self._random.advance()
        if not compiled.differentiable:
            with torch.no_grad():
                return self._engine.run(compiled.held, generated.forward, local_inputs)
        if compiled.regathers and torch.is_grad_enabled():
            with saving():
                return self._engine.run(compiled.held, generated.forward, local_inputs)
        return self._engine.run(compiled.held, generated.forward, local_inputs)

    def _output(self, compiled: CompiledProgram, leaves: Sequence[object]) -> object:
        """What the model returns, from this rank's parts of its leaves."""
        outputs = [self._surface(leaf, item) for leaf, item in zip(leaves, compiled.outputs, strict=True)]
        return pytree.tree_unflatten(outputs, compiled.output_tree)

    def forward_backward(self, *args: object, **kwargs: object) -> object:
        """Run forward and backward on the global batch: returns the output with the loss, and adds to `.grad`.

        The batch goes through the planned number of micro-batches, whose losses and gradients add up to those of the
        whole batch; then the output is without gradient. A batch of another size is cut into as many.

        Raises InputError if the output has no loss, and what a call raises.
        """
        micro_batches = self._program()[0].micro_batches
        if micro_batches is not None:
            return self._in_micro_batches(micro_batches.count, args, kwargs)
        output = self(*args, **kwargs)
        loss = _loss(output)
        if loss is None or not loss.requires_grad:
            raise InputError("the output has no loss to run backward from: pass labels, or plan with objective='train'")
        loss.backward()  # type: ignore[no-untyped-call]
        return output

    def _in_micro_batches(self, count: int, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Forward and backward of a batch in `count` micro-batches."""
        given = self._given(self._program()[0], self._bind(args, kwargs))
        compiled, generated = self._at_sizes(given, count)
        local_inputs = [self._local_input(item, given[item.name]) for item in compiled.inputs]
        batching, totals = compiled.micro_batches, generated.totals
        assert batching is not None
        self._change(compiled.changes)
        leaves = forward_backward(
            batching,
            local_inputs,
            self._axes,
            None if totals is None else lambda parts: totals.forward(*parts),
            lambda parts: self._run(compiled, generated, parts),
            self,
        )
        return self._output(compiled, leaves)

    def holding_gradients(self) -> AbstractContextManager[None]:
        """Within, backward passes do not reduce the gradients of parameters on data axes; they add them up.

        The first backward pass afterwards reduces the sum and leaves it in `.grad`: enter it around the backward passes
        of all micro-batches but the last. Parameters whose gradients the generated code reduces are not affected.
        """
        return self._engine.holding_gradients()

    def keeping_parameters(self) -> AbstractContextManager[None]:
        """Within, parameters that the plan keeps for the backward pass stay gathered after it, too.

        Enter it around all micro-batches of a step. Parameters must not change within.
        """
        return self._engine.keeping_parameters()

    def _change(self, changes: Sequence[Change]) -> None:
        """Change parameters as the model itself does before it reads them."""
        for change in changes:
            part = local(self._root.get_parameter(change.parameter).detach())
            first, *_ = find_overload(change.target)._schema.arguments
            with torch.no_grad():
                find_overload(change.target)(**{first.name: part.data}, **change.arguments)

    def _mode(self) -> str:
        """The program that runs: an evaluation that does nothing else than training has none of its own."""
        return "train" if self.training or "infer" not in self._programs else "infer"

    def _program(self) -> tuple[CompiledProgram, Generated]:
        return self._programs[self._mode()]

    def _bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name; those left out stay out."""
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"the model does not take these arguments: {error}") from None
        return dict(named_arguments(self._signature, bound))

    def _instance(self, program: LoadedProgram) -> tuple[CompiledProgram, Generated]:
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
            _, generated.totals = self._instance(program.totals)
        return compiled, generated

    def _at_sizes(self, given: Mapping[str, object], count: int) -> tuple[CompiledProgram, Generated]:
        """The program for the sizes of the inputs, the values of constants and a number of micro-batches, made where
        it is not there yet."""
        compiled, generated = self._program()
        shapes = {}
        values = {
            name: values_of(name, given[name], value) for name, value in tensors_among(compiled.constants).items()
        }
        for item in compiled.inputs:
            leaf = given[item.name]
            if not isinstance(leaf, Tensor) or not is_like(leaf, item.type):
                # What is wrong with it is said later.
                return compiled, generated
            shapes[item.name] = tuple(leaf.shape)
        planned = tensors_among(compiled.constants)
        planned_count = 1 if compiled.micro_batches is None else compiled.micro_batches.count
        if (
            planned_count == count
            and all(shapes[item.name] == item.type.shape for item in compiled.inputs)
            and all(torch.equal(value, planned[name]) for name, value in values.items())
        ):
            return compiled, generated
        known = [(tuple(value.shape), value.numpy().tobytes()) for value in values.values()]
        key = (self._mode(), count, *shapes.values(), *known)
        if key not in self._sized:
            self._sized[key] = self._instance(self._other_sizes(self._mode(), shapes, values, count))
        return self._sized[key]

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
        elif _is_split(item.layout):
            coordinate = self._mesh.get_coordinate()
            assert coordinate is not None
            part = local_part(leaf, item.layout, coordinate, self._shape)
        else:
            part = leaf
        return part.to(self._device, item.dtype)

    def _surface(self, leaf: object, item: PlannedOutput) -> object:
        if not isinstance(leaf, Tensor) or item.layout is None or not item.shape:
            return leaf
        distributed = from_local(leaf, item.layout, item.shape, self._mesh, self._shape)
        return distributed if self._original is None else distributed.full_tensor()


def _is_split(layout: Layout) -> bool:
    return any(letter.kind == "S" for letter in layout)


def _loss(output: object) -> Tensor | None:
    """The loss in an output: what is called so, or the only scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None
