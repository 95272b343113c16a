"""From a model and a request to a plan and its source, and from these to a module that runs."""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import huggingface
from autopar.batches import batching, lying_batches
from autopar.clock import Clock
from autopar.discover import rules_for
from autopar.expressions import Priced, expressions
from autopar.fingerprint import structure_fingerprint
from autopar.placing import placed_parts
from autopar.probing import FakeProber
from autopar.request import Request
from autopar.runtime import (
    CompiledProgram,
    DistributedModule,
    LoadedProgram,
    OtherSizes,
    PlannedInput,
    PlannedOutput,
)
from autopar.runtime.engine import Engine
from autopar.runtime.inputs import constant_text
from autopar.search import Search
from passes.candidates import Setting, candidates
from passes.capture import CPU, Tracing, capture
from passes.constrain import constrain, stored_as
from passes.cost.cluster import GIB, Cluster
from passes.cost.liveness import MACHINES, Batches, Machine, MemoryPeak, Stored, peak_memory
from passes.cost.walk import Optimizer, seconds_on_one, walk
from passes.emit import Naming, emit, variables
from passes.engines import engines
from passes.ir.choices import Problem, Solution
from passes.ir.demands import Demands
from passes.ir.errors import CaptureError, InfeasibleError, PlanMismatchError
from passes.ir.layout import Layout
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.lowered import Group, Lowered
from passes.ir.plan import Expressions, InputPlan, ParameterPlan, Plan, PrecisionPlan, ProgramPlan
from passes.ir.program import Folded, Input, Parameter, Program, TensorType, references
from passes.ir.regime import PLAIN, Regime
from passes.lower import Casts, lower
from passes.micro_batches import MicroBatches, micro_batches
from passes.normalize import normalize
from passes.recompute import recompute
from passes.record import discovered_ops, find_decisions, idle_axes, layout_texts, record, whole_ops
from passes.regions import fold
from passes.rules import with_rules
from passes.solve import Limits, solve
from passes.specialize import Decided, decided, hold

logger = logging.getLogger("autopar")

# So often a plan may turn out to take more memory than was counted.
_TRIES = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Compiled:
    """A plan and what runs it: programs by name, how each parameter is stored, where time went (seconds), the seed of
    random numbers: the one that torch was given on the first rank, what was decided for every node of each program,
    why there is no program for evaluation, where it cannot be traced, and the groups of parameters that an engine
    holds."""

    plan: Plan
    programs: Mapping[str, CompiledProgram]
    stored: Mapping[str, Layout]
    times: Mapping[str, float]
    seed: int
    decided: Mapping[str, Mapping[str, Decided]]
    refused: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Planned:
    """One program, planned."""

    folded: Folded
    lowered: Lowered
    record: ProgramPlan
    source: CompiledProgram
    decided: Mapping[str, Decided]
    whole_ops: tuple[str, ...]
    discovered: tuple[str, ...]
    totals: "Planned | None" = None


def compile_model(model: nn.Module, request: Request, *, both_modes: bool = False) -> Compiled:
    """Plan `model` and generate its source. With `both_modes` a model that does something else in evaluation than in
    training gets a second program for it.

    Raises CaptureError, ConstraintError, InfeasibleError or PlanMismatchError.
    """
    clock = Clock()
    fingerprint = structure_fingerprint(model)
    given = request.plan
    if given is not None:
        _check_plan(given, fingerprint, request)
        request = _as_planned(request, given)
    training = request.objective == "train"
    program = clock("capture", lambda: capture(model, request.inputs, tracing(model, request, request.objective)))
    program = clock("normalize", lambda: normalize(program))
    if given is None:
        request, first = _searched(model, program, request, clock)
    else:
        count = request.micro_batches or 1
        micro = clock("micro-batches", lambda: micro_batches(program, count)) if count > 1 else None
        runs = program if micro is None else micro.program
        demands = clock("constrain", lambda: constrain(runs, request.constraints, request.mesh))
        choose = _chooser(request, request.objective)
        first = planned(model, runs, demands, request, request.objective, clock, choose, micro)
    programs = {request.objective: first}
    stored = first.lowered.parameters
    refused = ""
    if training and both_modes:
        try:
            evaluated = clock("capture", lambda: capture(model, request.inputs, tracing(model, request, "infer")))
            evaluated = clock("normalize", lambda: normalize(evaluated))
        except CaptureError as error:
            # It can be trained all the same.
            evaluated, refused = program, str(error)
        if str(evaluated) != str(program):
            evaluated = frozen(evaluated)
            inference, choose = replace(request, objective="infer", recompute=None), _chooser(request, "infer")
            demands = stored_as(evaluated, stored)
            programs["infer"] = planned(
                model, evaluated, demands, inference, "infer", clock, choose, groups=first.lowered.held.groups
            )
    plan = _plan(model, fingerprint, request, program, programs)
    if request.symbolic:
        plan = replace(plan, expressions=clock("expressions", lambda: _expressions(model, request, program, first)))
    elif given is not None:
        plan = replace(plan, expressions=given.expressions)
    sources = {name: item.source for name, item in programs.items()}
    decisions = {name: item.decided for name, item in programs.items()}
    groups = first.lowered.held.groups
    return Compiled(plan, sources, stored, clock.times, torch.initial_seed(), decisions, refused, groups)


def _expressions(model: nn.Module, request: Request, program: Program, found: Planned) -> Expressions:
    """Formulas of the costs of the objective's program."""
    arguments = frozenset(item.argument for item in program.inputs)
    priced = Priced(found.folded, found.record, _master(model, request), arguments)
    with with_rules(rules_for(program) if request.discover else {}):
        return expressions(model, request, tracing(model, request, request.objective), priced)


def _searched(model: nn.Module, program: Program, request: Request, clock: Clock) -> tuple[Request, Planned]:
    """The best plan, and the request with the mesh that it is for.

    The search counts memory by blocks; what a plan takes statement by statement may be more. Then its layouts are
    chosen again with as much less memory, so that no limit is ever exceeded.
    """
    rules = clock("discover", lambda: rules_for(program)) if request.discover else {}
    search = Search(program, request, _master(model, request), clock)
    with with_rules(rules):
        tried, solution = search.best()
    found, bound, limit = replace(request, mesh=tried.mesh), solution.bound, request.memory_limit
    for _ in range(_TRIES):
        part, name, choose = tried.part, request.objective, partial(_already, replace(solution, bound=bound))
        ready = (part.folded, tried.problem)
        result = planned(model, part.program, tried.demands, found, name, clock, choose, part.micro, ready)
        over = sum(result.record.memory.values()) - request.memory_limit
        if over <= 0:
            return found, replace(result, record=replace(result.record, whole_batch=search.refused))
        limit -= over
        with with_rules(rules):
            tried, solution = search.within(tried, limit)
    raise InfeasibleError(
        f"no plan was found that fits the memory limit of {request.memory_limit / GIB:.3g} GiB per device: "
        f"{over / GIB:.3g} GiB are missing in the last of {_TRIES}; raise the limit",
        over,
    )


def _already(solution: Solution, folded: Folded, problem: Problem) -> Solution:
    return solution


def tracing(model: nn.Module, request: Request, name: str, device: torch.device = CPU) -> Tracing:
    """How the program called `name` is traced; a model on meta as if it were on `device`."""
    context = huggingface.tracing(model, request.inputs)
    return Tracing(name == "train", request.objective == "train", context, request.precision.compute, device)


def frozen(program: Program) -> Program:
    """`program` with parameters that do not train."""
    return replace(program, parameters=tuple(replace(item, trainable=False) for item in program.parameters))


def planned(
    model: nn.Module,
    program: Program,
    demands: Demands,
    request: Request,
    name: str,
    clock: Clock,
    choose: Callable[[Folded, Problem], Solution],
    micro: MicroBatches | None = None,
    ready: tuple[Folded, Problem] | None = None,
    groups: tuple[Group, ...] | None = None,
) -> Planned:
    """One program through the passes from regions to emit; `choose` is the one between candidates and lower. With
    `micro` it is that of one micro-batch. What the passes before `choose` give may be `ready`. `groups` hold the
    model's parameters already, if this is not its first program."""
    with with_rules(clock("discover", lambda: rules_for(program)) if request.discover else {}):
        mesh, cluster, precision = request.mesh, request.cluster, request.precision
        states = request.optimizer_states
        master = _master(model, request)
        if ready is None:
            folded = clock("regions", lambda: fold(program, demands.label))
            setting = Setting(mesh, cluster, states, master, precision.reduce)
            problem = clock("candidates", lambda: candidates(folded, demands, setting))
        else:
            folded, problem = ready
        solution = clock("solve", lambda: choose(folded, problem))
        lowered = clock("lower", lambda: lower(folded, problem, solution, mesh, Casts(master, precision.reduce)))
        lowered = recompute(lowered, solution.regime.recompute)
        lowered = clock("engines", lambda: engines(lowered, mesh, groups))
        seconds = walk(lowered, folded, cluster, mesh, Optimizer(states, master), solution.regime)
        if solution.bound == 0.0:
            solution = replace(solution, seconds=seconds.total, bound=seconds.total * (1 - _gap(request, name)))
        for axis in idle_axes(problem, solution, mesh) if program.parameters else ():
            logger.warning(
                "mesh axis %r of size %d splits nothing: no split divides, or none pays; "
                "its devices repeat each other's work",
                mesh.names[axis],
                mesh.sizes[axis],
            )
        title = f"{type(model).__name__} on {mesh}, for {'training' if name == 'train' else 'inference'}."
        naming = Naming(type(model).__name__, title)
        source = clock("emit", lambda: emit(lowered, mesh, naming))
        compiled = _compiled(lowered, source, naming, request)
        outputs, regime = compiled.outputs, solution.regime
        batches = Batches() if micro is None else lying_batches(micro, lowered, outputs, mesh, regime)
        memory = clock("memory", lambda: _memory(lowered, naming, request, name, master, batches))
        on_one = solution.regime.micro_batches * seconds_on_one(folded, cluster)
        plan = record(folded, problem, solution, lowered, seconds, memory, mesh, on_one)
        decisions = decided(folded, problem, solution)
        found = Planned(folded, lowered, plan, compiled, decisions, whole_ops(folded), discovered_ops(folded))
    return found if micro is None else _in_micro_batches(model, found, micro, request, name, clock)


def _in_micro_batches(
    model: nn.Module, found: Planned, micro: MicroBatches, request: Request, name: str, clock: Clock
) -> Planned:
    """`found`, which is planned for one micro-batch, with all that the whole batch needs."""
    totals = None
    if micro.totals is not None:
        # Inputs lie as they do for the program itself.
        given = {item.name: found.decided[item.name] for item in micro.totals.inputs}
        choose = _chooser(request, totals_name(name), given)
        read = {item.argument for item in micro.totals.inputs} | set(found.source.constants)
        leaves = {leaf: value for leaf, value in input_leaves(request.inputs) if leaf in read}
        summing = replace(request, inputs=leaves, objective="infer", recompute=None)
        totals = planned(model, micro.totals, Demands({}), summing, totals_name(name), clock, choose)
    made = None if totals is None else totals.source
    batch, outputs = batching(micro, found.lowered, found.source.outputs, made, request.mesh, found.record.regime)
    source = replace(found.source, outputs=outputs, micro_batches=batch)
    return replace(found, source=source, totals=totals)


def totals_name(name: str) -> str:
    """What the program is called that sums over the batch what the one called `name` needs."""
    return f"{name} totals"


def _memory(
    lowered: Lowered,
    naming: Naming,
    request: Request,
    name: str,
    master: torch.dtype | None,
    batches: Batches,
) -> MemoryPeak:
    """The bytes on one device at the peak of the program called `name`; floating parameters are stored in `master`."""
    mesh, leaves = request.mesh, dict(input_leaves(request.inputs))
    given = {
        item.name: leaf.dtype
        for item in lowered.program.inputs
        if isinstance(leaf := leaves.get(item.argument), torch.Tensor)
    }
    stored = Stored(master, given, request.optimizer if name == "train" else None)
    held, machine = variables(lowered, mesh, naming), machine_of(request.cluster)
    return peak_memory(lowered, held, stored, machine, FakeProber(mesh), mesh, batches)


def machine_of(cluster: Cluster) -> Machine:
    """What devices of a cluster do with memory; a device that nobody has is taken at its word."""
    return MACHINES["cpu" if cluster.name in ("cpu", "ideal") else "cuda"]


def _gap(request: Request, name: str) -> float:
    return request.plan.programs[name].gap if request.plan is not None else 0.0


def _chooser(
    request: Request, name: str, given: Mapping[str, Decided] | None = None
) -> Callable[[Folded, Problem], Solution]:
    """What the given plan says, or the best choice that does what is decided already."""
    limits = Limits(request.memory_limit, replace(request, objective=name).optimizer_states)

    def choose(folded: Folded, problem: Problem) -> Solution:
        if request.plan is None or name not in request.plan.programs:
            if given is not None:
                return solve_held(folded, problem, given, request, limits)
            return solve(problem, request.cluster, request.mesh, limits)
        found = find_decisions(problem, request.plan.programs[name])
        if isinstance(found, str):
            raise PlanMismatchError(f"the plan does not fit the model as it is traced now: it differs at {found!r}")
        return found

    return choose


def solve_held(
    folded: Folded,
    problem: Problem,
    given: Mapping[str, Decided],
    request: Request,
    limits: Limits,
    regime: Regime = PLAIN,
) -> Solution:
    """The best choice for `problem` in which nodes do what is `given` for them, where they can."""
    held = hold(folded, problem, given)
    solution = solve(held, request.cluster, request.mesh, limits, regime)
    picks = tuple(node.strategies.index(solution.strategy(held, index)) for index, node in enumerate(problem.nodes))
    return replace(solution, picks=picks)


def _master(model: nn.Module, request: Request) -> torch.dtype | None:
    """What parameters are stored in; None for what they are computed with."""
    precision = request.precision
    return precision.master or (None if precision.compute is None else _stored_dtype(model))


def _stored_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model's floating parameters."""
    return next((item.dtype for item in model.parameters() if item.is_floating_point()), None)


def _compiled(lowered: Lowered, source: str, naming: Naming, request: Request) -> CompiledProgram:
    program = lowered.program
    given = dict(input_leaves(request.inputs))
    inputs = []
    for item in program.inputs:
        if item.argument not in given:
            # A total, which nobody gives.
            continue
        leaf = given[item.argument]
        assert isinstance(leaf, torch.Tensor)
        type = TensorType(tuple(leaf.shape), leaf.dtype)
        inputs.append(PlannedInput(item.argument, type, item.type.dtype, lowered.inputs[item.name], item.trainable))
    outputs = []
    for output in lowered.outputs:
        shape = tuple(size for name in references(output.value) for size in program.types[name.partition("~")[0]].shape)
        outputs.append(PlannedOutput(output.name, output.layout, shape))
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    return CompiledProgram(
        source,
        naming.class_name,
        tuple(inputs),
        _constants(request.inputs, program),
        request.assumed,
        tuple(outputs),
        program.output_tree,
        program.constants,
        _used_parameters(program),
        program.changes,
        "keep=False" in source or "recomputed(lambda" in source,
        any(item.trainable for item in sources),
        held=lowered.held,
    )


def _used_parameters(program: Program) -> frozenset[str]:
    """Names of the parameters that are read or changed, all names of each."""
    read = {name for op in program.ops for name in op.operands}
    read.update(name for output in program.outputs for name in references(output))
    read.update(change.parameter for change in program.changes)
    return frozenset(name for item in program.parameters if item.name in read for name in item.names)


def _constants(inputs: Inputs, program: Program) -> dict[str, object]:
    """What is given and is no input of the program: values that are no tensors, and tensors whose values count."""
    given = dict(input_leaves(inputs))
    left = [name for name in given if name not in {item.argument for item in program.inputs}]
    return {name: leaf.detach().cpu() if isinstance(leaf := given[name], torch.Tensor) else leaf for name in left}


def _plan(
    model: nn.Module, fingerprint: str, request: Request, program: Program, programs: Mapping[str, Planned]
) -> Plan:
    mesh, precision = request.mesh, request.precision
    first = programs[request.objective]

    def kept_as(name: str) -> torch.dtype:
        """What a parameter is stored in: a precision for computing alone leaves that as it is."""
        dtype = model.get_parameter(name).dtype
        return precision.master or dtype if dtype.is_floating_point else dtype

    parameters = {
        item.name: ParameterPlan(
            item.type.shape,
            _dtype_text(kept_as(item.name)),
            layout_texts(first.lowered.parameters[item.name], mesh),
            item.trainable,
        )
        for item in program.parameters
    }
    inputs = {
        item.name: InputPlan(item.type.shape, _dtype_text(item.type.dtype), layout_texts(item.layout, mesh))
        for item in first.source.inputs
    }
    totals = {totals_name(name): item.totals.record for name, item in programs.items() if item.totals is not None}
    return Plan(
        model=type(model).__name__,
        fingerprint=fingerprint,
        objective=request.objective,
        mesh=dict(zip(mesh.names, mesh.sizes, strict=True)),
        cluster=request.cluster.name,
        memory_limit=request.memory_limit,
        optimizer=request.optimizer,
        precision=PrecisionPlan(*(None if dtype is None else _dtype_text(dtype) for dtype in vars(precision).values())),
        inputs=inputs,
        constants={name: constant_text(value) for name, value in first.source.constants.items()},
        parameters=parameters,
        programs={**{name: item.record for name, item in programs.items()}, **totals},
        whole_ops=first.whole_ops,
        discovered=first.discovered,
        constraints=request.constraints,
    )


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_plan(plan: Plan, fingerprint: str, request: Request) -> None:
    """Raise PlanMismatchError where a given plan is one for something else."""
    mesh = dict(zip(request.mesh.names, request.mesh.sizes, strict=True))
    if plan.fingerprint != fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another {plan.model}: class, parameters or configuration differ; "
            "plan this model anew"
        )
    if list(plan.mesh.items()) != list(mesh.items()):
        raise PlanMismatchError(f"the plan was made for the mesh {dict(plan.mesh)}, this one is {mesh}: plan anew")
    if request.objective not in plan.programs:
        raise PlanMismatchError(f"the plan has no program for objective={request.objective!r}: plan anew")
    leaves = {name: leaf for name, leaf in input_leaves(request.inputs) if isinstance(leaf, torch.Tensor)}
    given = {name: leaf for name, leaf in leaves.items() if name not in plan.constants}
    shapes = {name: (tuple(leaf.shape), _dtype_text(leaf.dtype)) for name, leaf in given.items()}
    planned = {name: (item.shape, item.dtype) for name, item in plan.inputs.items()}
    if shapes != planned:
        raise PlanMismatchError(f"the plan was made for the inputs {planned}, these are {shapes}: plan anew")


def _as_planned(request: Request, plan: Plan) -> Request:
    """`request` with what `plan` decided; what is asked for besides must be the same."""
    planned = plan.programs[request.objective]
    if request.micro_batches not in (None, planned.micro_batches):
        raise PlanMismatchError(
            f"the plan has micro_batches={planned.micro_batches}, but {request.micro_batches} are asked for: leave it "
            "out, or plan anew"
        )
    again = {} if request.objective == "infer" else planned.stages[0].recompute
    if request.recompute is not None and dict(request.recompute) != dict(again):
        raise PlanMismatchError(
            f"the plan says what is computed again, {dict(again)}: leave recompute out, or plan anew"
        )
    return replace(request, constraints=plan.constraints, micro_batches=planned.micro_batches, recompute=again)


def refuse_meta(model: nn.Module) -> None:
    """Raise CaptureError for a parameter without values."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CaptureError(
                f"parameter {name!r} is on meta: give it values before parallelize (plan alone needs none)"
            )


def distribute(
    model: nn.Module, compiled: Compiled, request: Request, mesh: DeviceMesh, other_sizes: OtherSizes
) -> DistributedModule:
    """The module of one rank: its part of every parameter, and the generated programs."""
    if huggingface.is_huggingface(model):
        huggingface.register_caches(model)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    engine = Engine(mesh)
    root = placed_parts(model, compiled.stored, compiled.groups, request, mesh, device, engine)
    loaded = {name: load(program, name) for name, program in compiled.programs.items()}
    signature, seed = request.signature, compiled.seed
    module = DistributedModule(root, mesh, device, compiled.plan, loaded, signature, seed, other_sizes, engine)
    module.refuse_evaluation(compiled.refused)
    return module


def load(program: CompiledProgram, name: str) -> LoadedProgram:
    """A program with its generated class."""
    path, module = load_source(program.source, f"{program.class_name}_{name}")
    batches = program.micro_batches
    totals = None if batches is None or batches.totals is None else load(batches.totals, f"{name}_totals")
    return LoadedProgram(program, path, getattr(module, program.class_name), totals)


def load_source(source: str, name: str) -> tuple[Path, ModuleType]:
    """Write generated source to a file, so that tracebacks and debuggers show it, and import it from there."""
    digest = sha256(source.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"autopar-{os.getuid() if hasattr(os, 'getuid') else 'user'}" / digest
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.lower()}.py"
    scratch = folder / f".{name.lower()}.{os.getpid()}"
    scratch.write_text(source, encoding="utf-8")
    scratch.replace(path)
    module = ModuleType(f"autopar_generated_{digest}_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return path, module
