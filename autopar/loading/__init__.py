"""Load a plan and its generated source as a module that runs."""

import sys
from collections.abc import Mapping, Sequence, Set
from hashlib import sha256
from inspect import Signature
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.launch.world import local_device
from autopar.loading.cache import write_source
from autopar.models.huggingface import register_caches
from autopar.models.info import structure_of
from autopar.models.initialization import initializations
from autopar.planner import PlannedModel
from autopar.request import Request
from autopar.runtime import Container, DistributedModule, GeneratedProgram, LoadedProgram, OtherSizes, RegionCopy
from autopar.runtime.calls.programs import LoadedModel
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.fsdp.managers import FSDPManagers
from autopar.runtime.generated.bases import Generated, mark_list, place
from autopar.runtime.initialization import DeferredModel, blank
from autopar.runtime.pipeline.ranks import PipelineRanks, pipeline_ranks
from autopar.runtime.pipeline.running import PipelineRunner
from autopar.runtime.pipeline.shared import shared_groups, shared_parameters
from autopar.runtime.ranks.groups import axes_group
from autopar.runtime.state import from_local, local_part
from passes.capture import evaluated_parts
from passes.ir.errors import InputError
from passes.ir.layout import I, Layout
from passes.ir.lowered import FSDPUnit


def stage_ranks(planned: PlannedModel, mesh: DeviceMesh) -> PipelineRanks | None:
    """The ranks of the pipeline of a plan on `mesh`, which has all its axes; None where there is none."""
    axis, program = planned.plan.pipeline_axis, planned.plan.programs[planned.plan.objective]
    if not axis:
        return None
    return pipeline_ranks(mesh, axis, program.places)


def own_stages(planned: PlannedModel, mesh: DeviceMesh) -> tuple[int, ...]:
    """The numbers of the stages that this rank runs; a program that is not cut is stage 0."""
    ranks = stage_ranks(planned, mesh)
    return (0,) if ranks is None else ranks.own


def make_groups(planned: PlannedModel, mesh: DeviceMesh) -> None:
    """Make the process groups over several axes that `distribute` needs. Collective over the mesh.

    They are made before anything that one rank alone may fail in, so that no rank waits for another one here.
    """
    ranks = stage_ranks(planned, mesh)
    inner, own = (mesh, (0,)) if ranks is None else (ranks.inner, ranks.own)
    for group in (unit for number in own for unit in planned.units[number]):
        for axes in (group.sharded, group.replicated):
            if axes:
                axes_group(inner, axes)
    if ranks is not None:
        shared_groups(shared_holders(planned), ranks)


def shared_holders(planned: PlannedModel) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages hold, by name, and these stages."""
    return {name: item.stages for name, item in planned.plan.parameters.items() if len(item.stages) > 1}


def distribute(
    model: nn.Module,
    signature: Signature,
    planned: PlannedModel,
    request: Request,
    mesh: DeviceMesh,
    other_sizes: OtherSizes,
) -> DistributedModule:
    """The module of one rank: its part of every parameter of its stages, and the generated programs. `signature` is
    that of the model's forward.

    Nothing is sent between ranks, apart from process groups that `make_groups` has not made.
    """
    register_caches(model)
    device = local_device(mesh.device_type)
    ranks = stage_ranks(planned, mesh)
    inner, own = (mesh, (0,)) if ranks is None else (ranks.inner, ranks.own)
    managers = {number: FSDPManager(inner) for number in own}
    units = {manager: planned.units[number] for number, manager in managers.items()}
    root = placed_parts(model, planned.stored, units, request, inner, device, _held(model, planned, own))
    loaded = {name: load(program, name, own) for name, program in planned.programs.items()}
    held = root.state_dict(keep_vars=True)
    # A state dict may have other items than tensors, such as the extra state of a module.
    tensors = {name: item for name, item in model.state_dict().items() if isinstance(item, torch.Tensor)}
    elsewhere = {name: item.to("meta") for name, item in tensors.items() if name not in held}
    missing = on_meta(model)
    loaded_model = LoadedModel(
        planned.plan,
        loaded,
        signature,
        planned.seed,
        other_sizes,
        planned.refused,
        elsewhere,
        DeferredModel(structure_of(model), initializations) if missing else None,
        missing & names_of(root),
    )
    runner = None
    if ranks is not None:
        schedule, shared = planned.plan.programs[planned.plan.objective].schedule, shared_holders(planned)
        whole = planned.plan.outputs == "full"
        runner = PipelineRunner(ranks, device, schedule, shared_parameters(root, shared, ranks), whole=whole)
    module = DistributedModule(root, inner, device, loaded_model, FSDPManagers(managers), runner)
    module.take_from(model)
    return module


def on_meta(model: nn.Module) -> Set[str]:
    """The names of the parameters and buffers of `model` that have no values; tied ones have several."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, tensor in tensors if tensor.is_meta}


def names_of(model: nn.Module) -> Set[str]:
    """The names of the parameters and buffers of `model`; tied ones have several."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, _ in tensors}


def _held(model: nn.Module, planned: PlannedModel, own: Sequence[int]) -> Set[str] | None:
    """The names of the parameters and buffers that the ranks of the stages `own` hold; None for all.

    Those that no stage reads are held by the first.
    """
    stages = [stage for program in planned.programs.values() for stage in program.stages]
    if not stages:
        return None
    read = {name for stage in stages for name in stage.holds}
    held = {name for program in planned.programs.values() for number in own for name in program.stages[number].holds}
    totals = [item.micro_batches.totals for item in planned.programs.values() if item.micro_batches is not None]
    held |= {name for item in totals if item is not None for name in item.buffers}
    if 0 in own:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        held |= {name for name, _ in tensors if name not in read}
    return held


def placed_parts(
    model: nn.Module,
    stored: Mapping[str, Layout],
    units: Mapping[FSDPManager, Sequence[FSDPUnit]],
    request: Request,
    mesh: DeviceMesh,
    device: torch.device,
    held: Set[str] | None = None,
) -> Container:
    """Parameters as this rank's parts, and buffers, under the model's names; ties stay ties. Parts that stay in
    evaluation mode are in it, and lists of modules have their length.

    Parameters have the layouts `stored`; managers take those in their `units`. Only the tensors called as in `held` are
    placed; None for all.
    """
    root = Container()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placed: dict[int, nn.Parameter | torch.Tensor] = {}

    def part(parameter: nn.Parameter, layout: Layout) -> torch.Tensor:
        """This rank's part in `layout`: a copy, because training must not change the model."""
        whole = parameter.detach()
        dtype = request.precision.master if whole.is_floating_point() else None
        found = local_part(whole, layout, coordinate, request.mesh)
        if found.is_meta:
            return blank(found.shape, dtype or whole.dtype, device)
        return found.to(device, dtype or whole.dtype, copy=True).contiguous()

    for manager, group in ((manager, group) for manager, own in units.items() for group in own):
        members = {name: model.get_parameter(name) for name in group.parameters}
        parts = {
            name: nn.Parameter(
                part(parameter, group.gathered_layout(group.copy_layout(name, stored[name]))), parameter.requires_grad
            )
            for name, parameter in members.items()
        }
        shown = manager.add(group, parts, stored)
        placed.update((id(parameter), shown[name]) for name, parameter in members.items())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if held is not None and name not in held:
            continue
        if id(parameter) not in placed:
            layout = stored.get(name, (I,) * len(request.mesh.sizes))
            distributed = from_local(part(parameter, layout), layout, parameter.shape, mesh, request.mesh)
            placed[id(parameter)] = nn.Parameter(distributed, parameter.requires_grad)
        place(root, name, placed[id(parameter)])
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if held is not None and name not in held:
            continue
        if id(buffer) not in placed:
            empty = blank(buffer.shape, buffer.dtype, device) if buffer.is_meta else None
            placed[id(buffer)] = buffer.detach().clone().to(device) if empty is None else empty
        place(root, name, placed[id(buffer)], name in persistent)
    _set_parts(root, model)
    return root


def _set_parts(root: Container, model: nn.Module) -> None:
    """Put the parts of `root` that stay in evaluation mode into it, and give lists of modules their length."""
    evaluated, held = evaluated_parts(model), dict(root.named_modules())
    for path, original in model.named_modules(remove_duplicate=False):
        part = held.get(path)
        # A part without parameters, or one of other stages, is not there.
        if part is None:
            continue
        part.training = path not in evaluated
        if isinstance(original, nn.ModuleList | nn.Sequential) and isinstance(part, Container) and part is not root:
            mark_list(part, len(original))


def load(program: GeneratedProgram, name: str, stages: Sequence[int] = (0,)) -> LoadedProgram:
    """A program with its generated class; of a program in a pipeline, those of `stages`."""
    batches = program.micro_batches
    totals = None if batches is None or batches.totals is None else load(batches.totals, f"{name}_totals")
    if program.stages:
        own = {number: load(program.stages[number].program, name) for number in stages}
        first = next(iter(own.values()))
        return LoadedProgram(program, first.path, Generated, totals, own)
    path, module = load_source(program.source, f"{program.class_name}_{name}")
    if program.compiled:
        compile_regions(module)
    return LoadedProgram(program, path, getattr(module, program.class_name), totals)


def compile_regions(module: ModuleType) -> None:
    """Have torch compile the regions of a generated module when they are first called."""
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, RegionCopy) and kind is not RegionCopy:
            kind.forward = torch.compile(kind.forward, dynamic=False)


def load_source(source: str, name: str) -> tuple[Path, ModuleType]:
    """Write generated source to a file, so that tracebacks and debuggers show it, and import it from memory.

    Raises CacheError where it cannot be written.
    """
    digest = sha256(source.encode()).hexdigest()[:16]
    path = write_source(f"{name.lower()[:100]}_{digest}.py", source)
    module = ModuleType(f"autopar_generated_{digest}_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return path, module


def replace_part(model: nn.Module, name: str, part: DistributedModule) -> None:
    """Replace the submodule `name` of `model` by `part`, which was made from it.

    The rest of the model runs unchanged on every rank: `part` returns whole tensors from now on, and has the attributes
    and methods of the submodule that it replaces. Children of that submodule that were not traced (an embedding, where
    the trace begins after it) are kept, with their own parameters.

    Raises InputError where there is no such submodule, where `part` was made from another one, where it shares a
    parameter with the rest of the model, and where it runs in pipeline stages.
    """
    if part.plan.pipeline_axis:
        raise InputError(
            f"the part runs in stages along {part.plan.pipeline_axis}, and cannot hand gradients to the rest of the "
            "model: parallelize it on a mesh without that axis"
        )
    try:
        original = model.get_submodule(name)
    except AttributeError:
        original = None
    if original is None or original is model:
        raise InputError(f"{type(model).__name__} has no part called {name!r}")
    if type(original).__name__ != part.plan.model:
        raise InputError(f"{name} is {type(original).__name__}, but the part was made of {part.plan.model}")
    # Both give all parameters under all their names.
    whole = model.named_parameters(remove_duplicate=False)
    outside = {id(item): other for other, item in whole if not other.startswith(f"{name}.")}
    for own, item in original.named_parameters(remove_duplicate=False):
        if own in part.used_parameters and id(item) in outside:
            raise InputError(
                f"{own!r} of {name} is also {outside[id(item)]!r} of the model, and would become another parameter: "
                "take a part that has both, or give the part what it makes of it as an input"
            )
    structure = structure_of(original)
    for path in _left_out(original, part.used_parameters):
        left = original.get_submodule(path)
        structure.set_submodule(path, left)
        part.keep(path, left)
    part.stand_for(structure.train(part.training))
    model.set_submodule(name, part)


def _left_out(original: nn.Module, used: Set[str]) -> list[str]:
    """The largest parts that have parameters, and none that is used."""
    found: list[str] = []
    for path, inner in original.named_modules():
        names = [f"{path}.{parameter}" for parameter, _ in inner.named_parameters(remove_duplicate=False)]
        above = any(path.startswith(f"{other}.") for other in found)
        if path and names and not above and not used & set(names):
            found.append(path)
    return found
