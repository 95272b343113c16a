"""Configurations: all decisions about a step but the layouts."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from passes.ir.mesh import Mesh

RECOMPUTE = ("none", "selective", "ops", "full")
ZERO_STAGES = (3, 2, 1)
# The schedules of one forward pass through all stages: on rank s % ranks, and in a V.
SEQUENTIAL, SEQUENTIAL_V = "sequential", "sequential_v"
# Zero-bubble schedules: gradients of weights are computed apart from those of inputs, and later.
SPLITTING = frozenset({"zb_h1", "interleaved_zero_bubble", "zbv", "dualpipev"})
# Schedules with the stages r and 2 * ranks - 1 - r on rank r; others have stage s on rank s % ranks.
IN_A_V = frozenset({"zbv", "dualpipev", SEQUENTIAL_V})


def stage_places(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of a pipeline's axis that runs each stage."""
    if schedule in IN_A_V:
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


@dataclass(frozen=True)
class Staging:
    """The split of a program into stages that run on different ranks, and the order in which these take the
    micro-batches: a name of `passes.cost.schedules`, "none" for one stage.

    `ranks` is the size of the pipeline's axis: every rank of it has `stages / ranks` stages. `cuts` are the names of
    the positions that each stage but the first begins with (see `passes.lower.stages`). `in_flight` is the number of
    micro-batches whose saved tensors the solver counts at a time, before there are cuts. `recompute` has the level of
    each region, by name, for the copies of each stage; where it is empty, that of the configuration holds.
    """

    stages: int = 1
    schedule: str = "none"
    ranks: int = 1
    cuts: tuple[str, ...] = ()
    in_flight: int = 1
    recompute: tuple[tuple[tuple[str, str], ...], ...] = ()

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are computed apart from the backward pass (see `passes.lower.deferred`). Then
        gradients are reduced after the step."""
        return self.schedule in SPLITTING

    @property
    def is_sequential(self) -> bool:
        """Whether the stages run one after the other, once."""
        return self.schedule in (SEQUENTIAL, SEQUENTIAL_V)

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of the pipeline's axis that runs each stage."""
        return stage_places(self.schedule, self.ranks, self.stages)


@dataclass(frozen=True)
class Configuration:
    """The decisions about a step on a mesh but its layouts.

    - `micro_batches`: the number of equal parts that the batch is processed in.
    - `recompute`: by name of region, the part of its forward pass that the backward pass recomputes: "none",
      "selective" (everything but multiplications and collectives, whose results are saved), "ops" (also every second
      matrix product) or "full" (everything: only the inputs of a copy are saved); or "full" of the first copies and
      another level of the others, as `passes.ir.levels` writes it.
    - `gather_once`: sharded parameters are gathered in the first micro-batch and stay gathered until the last;
      otherwise they are gathered in each.
    - `reduce_once`: gradients accumulate unsharded and are reduced after the last micro-batch; otherwise after each.
    - `pipeline`: the pipeline stages and their schedule.
    - `zero`: the ZeRO stage that was asked for. Parameters are stored split over every axis that they are gathered on,
      as far as they divide; with stage 3 those of regions are gathered again in each backward pass, even where there
      is memory to keep them. None leaves both to the solver.

    `gather_once` and `reduce_once` are the ZeRO stage (Rajbhandari et al. 2020) of the communication across
    micro-batches: stage 3 is neither, stage 2 gathers once, stage 1 does both once. The layout in which a
    parameter is stored is decided separately.
    """

    mesh: Mesh
    micro_batches: int = 1
    recompute: Mapping[str, str] = field(default_factory=dict)
    gather_once: bool = False
    reduce_once: bool = False
    pipeline: Staging = field(default_factory=Staging)
    zero: int | None = None

    @property
    def key(self) -> Hashable:
        """A key for comparisons: equal for equal configurations."""
        recompute = tuple(sorted(self.recompute.items()))
        once = self.gather_once, self.reduce_once
        return self.mesh, self.micro_batches, recompute, once, self.pipeline, self.zero

    def for_evaluation(self) -> "Configuration":
        """The configuration of a program without a backward pass beside this one: the same mesh and stages, which run
        one after the other, and the whole batch at once."""
        return Configuration(self.mesh, pipeline=replace(self.in_sequence().pipeline, recompute=()))

    def in_sequence(self) -> "Configuration":
        """This configuration with its stages one after the other."""
        schedule = self.pipeline.schedule
        if self.pipeline.stages > 1:
            schedule = SEQUENTIAL_V if schedule in IN_A_V else SEQUENTIAL
        return replace(self, pipeline=replace(self.pipeline, schedule=schedule))


def zero_timing(stage: int, micro_batches: int) -> tuple[bool, bool]:
    """`gather_once` and `reduce_once` of a ZeRO stage: a single micro-batch is the last one, which reduces."""
    return stage < 3, stage < 2 and micro_batches > 1
