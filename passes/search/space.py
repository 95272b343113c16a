"""The space that the search looks through, and the program that one point of it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.constrain import Constraints, constrain, stored_as
from passes.cost.cluster import Cluster
from passes.cost.walk import Optimizer
from passes.ir.constraints import PlacedConstraints
from passes.ir.decisions import Decisions
from passes.ir.levels import LevelItems
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.lower import Casts
from passes.rules.strategies import AllowedMethods
from passes.strategies import Setting


@dataclass(frozen=True)
class PipelineChoices:
    """The pipelines that may be chosen: over the axis called `axis`, of `ranks` ranks; where the shape of
    the mesh is to be found, their number is, too. `cuts` are the names of the
    positions that stages begin with, `per_rank` the number of stages of a rank; None where that is to be chosen.
    Where it is not `required`, there may be none."""

    axis: str
    ranks: int
    cuts: tuple[str, ...] | None = None
    schedule: str | None = None
    per_rank: int | None = None
    required: bool = True


@dataclass(frozen=True)
class Space:
    """Everything that may be chosen for one program, and the limits that the choice must keep.

    - `mesh`: the devices by axis. With `any_shape` only their number counts, and the shape is searched.
    - `memory_limit`: bytes per device.
    - `trains`: whether a backward pass is planned; `optimizer_states` is the number of tensors of its size that the
      optimizer keeps per trained parameter, `update_tensors` that of those that it makes to update all of them.
    - `micro_batches`, `recompute` (levels by pattern of regions), `zero`: None where they are to be chosen.
    - `casts`: the dtypes that parameters are stored in and gradients are reduced in.
    - `full_outputs`: outputs are whole on every rank.
    - `decisions`: what is decided already.
    - `pipeline`: None for one stage. `in_flight` are the micro-batches whose saved tensors are counted at a time.
    - `couples`: terms of the loss that couple samples are computed in each micro-batch for its own.
    - `some_copies`: whether recompute of some copies of a region may be offered, where `recompute` is to be chosen;
      `divides_copies`: whether it is. `refused` are levels of all copies that are not offered.
    - `near`: with a free shape, whether meshes of more than two axes near the best choice are searched.
    - `in_stripes`: whether methods are offered in stripes too, on each axis by itself; where something is decided, they
      are in any case. `together`: numbers of ranks of several axes that may be in stripes together.
    """

    mesh: Mesh
    cluster: Cluster
    memory_limit: float
    trains: bool
    optimizer_states: int
    constraints: Constraints = field(default_factory=dict)
    any_shape: bool = False
    micro_batches: int | None = None
    recompute: Mapping[str, str] | None = None
    casts: Casts = field(default_factory=Casts)
    full_outputs: bool = False
    decisions: Decisions = field(default_factory=Decisions)
    zero: int | None = None
    in_stripes: bool = False
    together: tuple[int, ...] = ()
    pipeline: PipelineChoices | None = None
    in_flight: int = 1
    couples: bool = False
    near: bool = True
    some_copies: bool = True
    divides_copies: bool = False
    refused: frozenset[LevelItems] = frozenset()
    update_tensors: int = 0

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer as the cost of its step needs it."""
        return Optimizer(self.optimizer_states, self.casts.master)

    def placed_constraints(self, program: Program, mesh: Mesh) -> PlacedConstraints:
        """The constraints on `program`, which is the whole program or that of one micro-batch, on `mesh`."""
        if self.decisions.stored is not None:
            return stored_as(program, self.decisions.stored)
        return constrain(program, self.constraints, mesh)

    def setting(self, mesh: Mesh, allowed: Mapping[str, AllowedMethods] | None = None) -> Setting:
        """The setting in which strategies are made on `mesh`; nodes in `allowed` have only these methods."""
        master, reduce = self.casts.master, self.casts.reduce
        return Setting(
            mesh,
            self.cluster,
            self.optimizer_states,
            self.update_tensors,
            master,
            reduce,
            allowed or {},
            self.full_outputs,
            self.in_stripes or self.decisions.configuration is not None,
            self.together,
        )
