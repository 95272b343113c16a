"""Programs for inputs of other sizes than planned: the model is traced once more, for all sizes that it allows, and
what the plan decided is carried over. Where values of inputs are constants, there is one trace for each."""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.agreement import from_first, gathered, together
from autopar.build import Compiled, frozen, planned, solve_held, tracing
from autopar.clock import Clock
from autopar.loading import load
from autopar.request import Request
from autopar.runtime import CompiledProgram, LoadedProgram
from passes.capture import capture, capture_symbolic
from passes.constrain import stored_as
from passes.cost.cluster import GIB
from passes.ir.choices import Problem, Solution
from passes.ir.errors import AutoparError, CaptureError, InputError
from passes.ir.layout import Shape
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.program import Folded, Program, Symbolic
from passes.ir.regime import Regime
from passes.micro_batches import micro_batches
from passes.normalize import normalize
from passes.record import find_again
from passes.solving.limits import Limits
from passes.specialize import specialize

logger = logging.getLogger("autopar")


class AnySizes:
    """Makes programs for sizes other than planned, on the first rank for all.

    It keeps how the model is built, but none of its weights.
    """

    def __init__(self, model: nn.Module, compiled: Compiled, request: Request, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._mesh = mesh
        self._planner = None if any(coordinate) else _Planner(model, compiled, request)

    def __call__(
        self, name: str, shapes: Mapping[str, Shape], values: Mapping[str, torch.Tensor], count: int
    ) -> LoadedProgram:
        """The program called `name` for inputs of `shapes` and constants of `values`, in `count` micro-batches; every
        rank calls it alike.

        Raises InputError where the model cannot run at these sizes, or ranks are called with different ones.
        """
        every = gathered(
            self._mesh,
            (name, count, dict(shapes), {given: value.tolist() for given, value in values.items()}),
            "comparing the sizes of the inputs",
        )
        for rank, other in enumerate(every):
            if other != every[0]:
                raise InputError(
                    f"ranks are called with different sizes: rank {rank} of the mesh with {other}, rank 0 with "
                    f"{every[0]}; pass the same global batch on every rank, or from_local() of equal parts"
                )
        program = from_first(
            self._mesh, lambda: self._compiled(name, shapes, values, count), "planning for other sizes of the inputs"
        )
        return together(self._mesh, lambda: load(program, name), "loading generated source")

    def _compiled(
        self, name: str, shapes: Mapping[str, Shape], values: Mapping[str, torch.Tensor], count: int
    ) -> CompiledProgram:
        assert self._planner is not None, "only the first rank plans"
        # What surrounds the call is none of the model's: the program serves other calls too.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self._mesh.device_type, enabled=False),
        ):
            return self._planner.compiled(name, shapes, values, count)


class _Planner:
    def __init__(self, model: nn.Module, compiled: Compiled, request: Request) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.stored = compiled.stored
        self.decided = compiled.decided
        self.groups = compiled.groups
        self.again = {name: program.stages[0].again for name, program in compiled.plan.programs.items()}
        self.regimes = {name: program.regime for name, program in compiled.plan.programs.items()}
        self.inputs = {name: program.inputs for name, program in compiled.programs.items()}
        constants = [item for program in compiled.programs.values() for item in program.constants.items()]
        values = {name: value for name, value in constants if isinstance(value, torch.Tensor)}
        self.values = {name: repr(value.tolist()) for name, value in values.items()}
        given = _with_shapes(request.inputs, {}, values)
        self.request = replace(request, inputs=given, plan=None, compiled=compiled.plan.compiled)
        self.traced: dict[str, list[Symbolic]] = {}
        self.varying: dict[str, set[tuple[str, int]]] = {}
        self.model: nn.Module | None = None
        try:
            self.model = structure_of(model)
        except Exception as error:
            # Nobody may ever need it.
            self.reason = f"{type(error).__name__}: {error}"

    def compiled(
        self, name: str, shapes: Mapping[str, Shape], values: Mapping[str, torch.Tensor], count: int
    ) -> CompiledProgram:
        """The program called `name` for inputs of `shapes` and constants of `values`, in `count` micro-batches."""
        sizes = ", ".join(f"{argument} {list(shape)}" for argument, shape in shapes.items())
        other = {name: repr(value.tolist()) for name, value in values.items()}
        sizes += "".join(f", {argument} = {value}" for argument, value in other.items())
        if self.model is None:
            raise InputError(
                f"the sizes of the inputs ({sizes}) are not the planned ones, and the model cannot be traced for them, "
                f"because it cannot be copied ({self.reason}): pass the planned sizes, or plan again"
            )
        start = time.perf_counter()
        request = replace(self.request, inputs=_with_shapes(self.request.inputs, shapes, values))
        try:
            if any(self.values[name] != value for name, value in other.items()):
                program = capture(self.model, request.inputs, tracing(self.model, request, name, self.device))
            else:
                program = self._program(self.model, request, name, shapes)
            traced = time.perf_counter()
            program = replace(normalize(program), compiled=request.compiled)
            found = self._planned(self.model, program, request, name, count)
        except AutoparError as error:
            raise InputError(
                f"the sizes of the inputs ({sizes}) are not the planned ones, and the model cannot run at them: {error}"
            ) from error
        end = time.perf_counter()
        logger.info(
            "the plan is carried over to %s: traced in %.2f s, planned in %.2f s", sizes, traced - start, end - traced
        )
        return found

    def _program(self, model: nn.Module, request: Request, name: str, shapes: Mapping[str, Shape]) -> Program:
        """The traced program at these sizes: from a trace for many sizes, or from one for these alone."""
        for symbolic in self.traced.setdefault(name, []):
            try:
                return specialize(symbolic, shapes)
            except InputError as error:
                logger.debug("another trace is needed: %s", error)
        varying = self.varying.setdefault(name, set())
        varying.update(
            (item.name, dim)
            for item in self.inputs[name]
            for dim, size in enumerate(item.type.shape)
            if shapes[item.name][dim] != size
        )
        # Nothing is for many sizes that is shown a size of one.
        symbols = {(argument, dim) for argument, dim in varying if shapes[argument][dim] > 1}
        if not symbols:
            return capture(model, request.inputs, tracing(model, request, name, self.device))
        try:
            symbolic = capture_symbolic(model, request.inputs, tracing(model, request, name, self.device), symbols)
            program = specialize(symbolic, shapes)
        except (CaptureError, InputError) as error:
            logger.info("no trace serves many sizes, so it is one for these alone: %s", error)
            return capture(model, request.inputs, tracing(model, request, name, self.device))
        if symbolic.ranges:
            self.traced[name].append(symbolic)
        return program

    def _planned(self, model: nn.Module, program: Program, request: Request, name: str, count: int) -> CompiledProgram:
        """`program` with what the plan decided, as far as it can be done at its sizes."""
        if name != request.objective:
            program, request = frozen(program), replace(request, objective=name)
        micro = micro_batches(program, count) if count > 1 else None
        program = program if micro is None else micro.program
        demands = stored_as(program, self.stored)
        choose = self._chooser(request, name, replace(self.regimes[name], micro_batches=count))
        found = planned(model, program, demands, request, name, Clock(), choose, micro, groups=self.groups)
        memory = sum(found.record.memory.values())
        if memory > request.memory_limit:
            logger.warning(
                "at these sizes the plan takes %.3g GiB per device, more than the memory limit of %.3g GiB",
                memory / GIB,
                request.memory_limit / GIB,
            )
        return found.source

    def _chooser(self, request: Request, name: str, regime: Regime) -> Callable[[Folded, Problem], Solution]:
        limits = Limits(float("inf"), request.optimizer_states)

        def choose(folded: Folded, problem: Problem) -> Solution:
            solution = solve_held(folded, problem, self.decided[name], request, limits, regime)
            return replace(solution, again=find_again(problem, solution.picks, self.again[name]))

        return choose


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers are on meta. Other tensors that it holds are shared."""
    copies: dict[int, object] = {}
    for part in model.modules():
        copies.update({id(value): value for value in vars(part).values() if isinstance(value, torch.Tensor)})
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, copies)


def _with_shapes(inputs: Inputs, shapes: Mapping[str, Shape], values: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Inputs as tensors without values; those in `shapes` have these shapes, those in `values` these values."""
    found: list[object] = []
    for name, leaf in input_leaves(inputs):
        if name in values and name not in shapes:
            found.append(values[name])
        elif isinstance(leaf, torch.Tensor):
            shape = shapes.get(name, tuple(leaf.shape))
            found.append(torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad))
        else:
            found.append(leaf)
    filled: dict[str, object] = pytree.tree_unflatten(found, pytree.tree_structure(dict(inputs)))
    return filled
