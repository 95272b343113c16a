"""Requests: the arguments of a user, checked and converted to the types of the passes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from autopar.options import PIPELINE_AXIS, Options, Pipeline, Settings, settings_of
from autopar.profile import check_machine, known_cluster
from passes.cost.cluster import CLUSTERS, Cluster, find_cluster
from passes.cost.liveness import MACHINES
from passes.cost.optimizers import NO_OPTIMIZER, OPTIMIZERS
from passes.ir.configuration import RECOMPUTE, SPLITTING, ZERO_STAGES
from passes.ir.decisions import Decisions
from passes.ir.errors import ConstraintError, InputError, MeshError, PipelineError, PlanMismatchError
from passes.ir.levels import read_level
from passes.ir.mesh import Mesh, stage_mesh
from passes.ir.plan import Plan
from passes.ir.plan_contents import check_contents
from passes.lower import Casts
from passes.search import Space
from passes.search.space import PipelineChoices

# Levels of recompute, for messages.
_LEVELS = (
    f'one of {", ".join(RECOMPUTE)}, or "full:20" for the first 20 copies alone, or "full:20, selective" with a level '
    "of the others"
)

MeshLike = DeviceMesh | Mapping[str, int] | int | Cluster


@dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """Everything that a plan depends on besides the model and its inputs: the settings, and the following.

    With `any_shape` the shape of the mesh is still to be found, and `mesh` says how many devices there are.
    `mesh` is that of one pipeline stage; `whole_mesh` has the pipeline's axis, too, if there is a `pipeline`.
    `memory_limit` is in bytes per device. `plan` is a plan to replay. `micro_batches`, `recompute` (by pattern of
    regions) and `zero` are None where the planner is to choose.
    """

    mesh: Mesh
    any_shape: bool
    cluster: Cluster
    memory_limit: float
    plan: Plan | None
    micro_batches: int | None
    recompute: Mapping[str, str] | None
    zero: int | None
    whole_mesh: Mesh
    pipeline: PipelineChoices | None

    def space(self, casts: Casts, decisions: Decisions) -> Space:
        """The search space; `decisions` are fixed, `casts` are the dtypes of stored parameters and reduced
        gradients."""
        optimizer = OPTIMIZERS[self.optimizer] if self.objective == "train" else NO_OPTIMIZER
        return Space(
            self.mesh,
            self.cluster,
            self.memory_limit,
            self.objective == "train",
            optimizer.states,
            self.constraints,
            self.any_shape,
            self.micro_batches,
            self.recompute,
            casts,
            self.outputs == "full",
            decisions,
            self.zero,
            pipeline=self.pipeline,
            couples=self.aux_loss == "micro_batch",
            update_tensors=optimizer.for_all if MACHINES[self.cluster.device.type].together else 0,
        )


def is_number(mesh: object) -> bool:
    """Whether a mesh says how many devices there are, and not their shape."""
    return isinstance(mesh, (int, Cluster)) and not isinstance(mesh, bool)


def with_mesh(request: Request, mesh: Mesh, pipeline_axis: str) -> Request:
    """`request` with the mesh that was planned, which has the axis of the pipeline if there is one ("": none)."""
    pipeline = request.pipeline if pipeline_axis else None
    if pipeline is not None:
        pipeline = replace(pipeline, ranks=mesh.by_name[pipeline_axis])
    return replace(request, mesh=stage_mesh(mesh, pipeline_axis), whole_mesh=mesh, any_shape=False, pipeline=pipeline)


def make_request(mesh: MeshLike, options: Options, device_type: str | None = None) -> Request:
    """Check the arguments and fill in omitted ones. `device_type` is the device type of this process if it will run the
    plan.

    Raises MeshError, InputError, ConstraintError and PlanMismatchError for arguments that are invalid or contradict
    each other.
    """
    if options.plan is not None:
        if not isinstance(options.plan, Plan):
            raise InputError(f"plan is {options.plan!r}: give an autopar.Plan, that of a file is Plan.load(path)")
        check_contents(options.plan)
    chosen = settings_of(options)
    shape = read_mesh(mesh)
    any_shape = is_number(mesh)
    if any_shape and options.plan is not None:
        devices, shape, any_shape = shape.size, Mesh.of(options.plan.mesh), False
        if shape.size != devices:
            raise PlanMismatchError(
                f"the plan was made for the mesh {shape.by_name} of {shape.size} devices, here are {devices}: plan anew"
            )
    if any_shape and chosen.constraints:
        raise ConstraintError(
            "constraints name the axes of a mesh, but its shape is still to be found: pass a mesh with named axes"
        )
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else device_type
    cluster = _cluster(options, mesh, device_type)
    cluster.check(shape)
    if device_type is not None:
        check_machine(cluster, device_type)
    chosen = replace(
        chosen,
        memory_limit=chosen.memory_limit or cluster.usable_memory,
        # A plan to replay has its formulas.
        symbolic=chosen.symbolic and options.plan is None,
    )
    micro_batches, recompute, zero = _choices(options, chosen.objective)
    pipeline = _pipeline(options, shape, chosen.objective, any_shape=any_shape)
    if chosen.compiled and pipeline is not None and pipeline.schedule in SPLITTING:
        raise PipelineError(
            f"the schedule {pipeline.schedule} computes gradients of weights apart, which code compiled by torch "
            "cannot leave: plan without compiled=True, or take another schedule"
        )
    if pipeline is not None:
        _refuse_axis(chosen.constraints, pipeline.axis)
    return Request(
        **vars(chosen),
        mesh=stage_mesh(shape, "" if pipeline is None else pipeline.axis),
        whole_mesh=shape,
        pipeline=pipeline,
        any_shape=any_shape,
        cluster=cluster,
        plan=options.plan,
        micro_batches=micro_batches,
        recompute=recompute,
        zero=zero,
    )


def _choices(options: Options, objective: str) -> tuple[int | None, Mapping[str, str] | None, int | None]:
    """The requested number of micro-batches, recompute mode by pattern of regions, and ZeRO stage.

    Raises InputError for an invalid one.
    """
    count, given, stage, trains = options.micro_batches, options.recompute, options.zero, objective == "train"
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise InputError(f"micro_batches is {count!r}: it must be a whole number of at least 1, or None")
    if count is not None and count > 1 and not trains:
        raise InputError(f"micro_batches is {count}, but only training goes through micro-batches: leave it out")
    if not isinstance(given, (str, Mapping, type(None))):
        raise InputError(f"recompute is {given!r}: it must be {_LEVELS}, or these by region")
    levels = {"*": given} if isinstance(given, str) else dict(given or {})
    for pattern, level in levels.items():
        read = read_level(level) if isinstance(level, str) else None
        if not isinstance(pattern, str) or read is None or read.undecided:
            where = "" if isinstance(given, str) else f" for {pattern!r}"
            raise InputError(f"recompute{where} is {level!r}: it must be {_LEVELS}")
        levels[pattern] = str(read)
    if not trains and any(level != "none" for level in levels.values()):
        raise InputError("recompute is given, but only training keeps anything for a backward pass: leave it out")
    if stage is not None and (isinstance(stage, bool) or stage not in ZERO_STAGES):
        raise InputError(f"zero is {stage!r}: it must be 1, 2, 3 or None")
    if stage is not None and not trains:
        raise InputError(f"zero is {stage}, but only training has gradients and optimizer states: leave it out")
    return count, None if given is None else levels, stage


def _pipeline(options: Options, mesh: Mesh, objective: str, *, any_shape: bool) -> PipelineChoices | None:
    """The pipelines that may be chosen; None for one stage.

    Raises PipelineError for an axis that cannot be a pipeline's, and PlanMismatchError where a plan has another one.
    """
    asked, plan = options.pipeline, options.plan
    if asked not in (None, False, "auto") and not isinstance(asked, Pipeline):
        raise InputError(f"pipeline is {asked!r}: give an autopar.Pipeline, 'auto', False or None")
    if plan is not None:
        if asked is not None:
            raise PlanMismatchError(
                "pipeline= is given with a plan, which has its own: leave pipeline out, or plan anew"
            )
        axis = plan.pipeline_axis
        return PipelineChoices(axis, mesh.by_name[axis]) if axis in mesh.names else None
    if asked == "auto" and any_shape:
        return PipelineChoices(PIPELINE_AXIS, 1, required=False) if objective == "train" else None
    if asked is False or (not isinstance(asked, Pipeline) and (any_shape or PIPELINE_AXIS not in mesh.names)):
        return None
    asked = asked if isinstance(asked, Pipeline) else Pipeline()
    axis = asked.axis or PIPELINE_AXIS
    if any_shape:
        return PipelineChoices(axis, 1, asked.cuts, asked.schedule, asked.virtual_stages)
    if axis not in mesh.names:
        raise PipelineError(
            f"a pipeline is asked for over the axis {axis!r}, but the mesh has the axes {', '.join(mesh.names)}: give "
            f"a mesh whose first axis is {axis!r}, such as {{{axis!r}: 2, 'dp': 4}}"
        )
    if axis != mesh.names[0]:
        raise PipelineError(
            f"the pipeline's axis {axis!r} must be the first of the mesh, which has {', '.join(mesh.names)}: stages "
            "send least, and neighbouring ranks share the fastest links"
        )
    ranks = mesh.by_name[axis]
    if ranks == 1:
        if asked.cuts is not None or asked.schedule is not None or asked.virtual_stages not in (None, 1):
            raise PipelineError(
                f"the pipeline's axis {axis!r} has one rank, which runs the whole model: leave out cuts, schedule and "
                "virtual_stages, or give the axis more ranks"
            )
        return None
    return PipelineChoices(axis, ranks, asked.cuts, asked.schedule, asked.virtual_stages)


def _refuse_axis(constraints: Mapping[str, Mapping[str, Mapping[str, str]]], axis: str) -> None:
    """Raise ConstraintError for a constraint on the pipeline's axis."""
    for pattern, whats in constraints.items():
        for what, layouts in whats.items():
            if axis in layouts:
                raise ConstraintError(
                    f"constraint {pattern!r}, {what}: nothing is split over {axis!r}, the pipeline's axis: leave it "
                    "out, and give stages by autopar.Pipeline(cuts=...)"
                )


def read_mesh(mesh: MeshLike) -> Mesh:
    """Convert a mesh to the type of the passes; a number of devices becomes one axis.

    Raises MeshError for one without names, or anything else.
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError(
                "the DeviceMesh has no axis names: make it with init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
            )
        return Mesh(tuple(names), tuple(mesh.shape))
    if isinstance(mesh, Mapping):
        return Mesh.of(mesh)
    if isinstance(mesh, Cluster):
        if mesh.devices is None:
            raise MeshError(f"the cluster {mesh.name!r} does not say how many devices it has: set Cluster(devices=...)")
        return Mesh(("devices",), (mesh.devices,))
    if isinstance(mesh, int) and not isinstance(mesh, bool) and mesh > 0:
        return Mesh(("devices",), (mesh,))
    raise MeshError(
        f"the mesh is {mesh!r}: give a DeviceMesh with named axes, a dict such as {{'dp': 8, 'tp': 8}}, or a number of "
        "devices whose best shape is to be found"
    )


def _cluster(options: Options, mesh: MeshLike, device_type: str | None) -> Cluster:
    """The requested cluster, or that of the devices of this process, or the one that the plan was made for."""
    if isinstance(mesh, Cluster) and options.cluster is not None:
        raise MeshError("the mesh is a cluster already: leave out cluster=")
    asked, plan = mesh if isinstance(mesh, Cluster) else options.cluster, options.plan
    found = find_cluster(asked) if isinstance(asked, str) else asked
    if found is not None:
        if plan is not None and found.name != plan.cluster:
            raise PlanMismatchError(
                f"cluster={found.name!r} is asked for, but the plan was made with cluster={plan.cluster!r}: leave "
                "cluster out, or plan anew"
            )
        return found
    if device_type is not None:
        return known_cluster(device_type)
    if plan is not None and plan.cluster in CLUSTERS:
        return find_cluster(plan.cluster)
    if plan is not None:
        raise PlanMismatchError(
            f"the plan was made with cluster={plan.cluster!r}, which is none that is known by name: pass cluster="
        )
    raise MeshError("with a mesh that is no DeviceMesh, say for which devices: cluster='h100', for instance")
