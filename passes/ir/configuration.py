"""Configurations: everything that is chosen for a step besides layouts."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from passes.ir.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Pipeline:
    """The split of a program into stages that run on different ranks, and the order in which these take the
    micro-batches. There is one stage."""

    stages: int = 1
    schedule: str = "none"


@dataclass(frozen=True)
class Configuration:
    """How a step is run on a mesh.

    - `micro_batches`: the number of equal parts that the batch is processed in, one after the other.
    - `recompute`: by name of region the part of its forward pass that runs again in the backward pass: "none",
      "selective" (everything but multiplications and collectives, whose results are saved) or "full" (everything: only
      the inputs of a copy are saved).
    - `gather_once`: sharded parameters are gathered in the first micro-batch and kept to the last; otherwise in each.
    - `reduce_once`: gradients are added up unsharded and reduced after the last micro-batch; otherwise after each.
    """

    mesh: Mesh
    micro_batches: int = 1
    recompute: Mapping[str, str] = field(default_factory=dict)
    gather_once: bool = False
    reduce_once: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO (Rajbhandari et al. 2020) by which parameters travel across micro-batches: 3 gathers and
        reduces in each, 2 gathers once, 1 does both once. How a parameter is stored is decided apart."""
        return 3 - self.gather_once - self.reduce_once

    @property
    def key(self) -> Hashable:
        """Equal for equal configurations."""
        recompute = tuple(sorted(self.recompute.items()))
        return self.mesh, self.micro_batches, recompute, self.gather_once, self.reduce_once, self.pipeline

    def recompute_of(self, region: str) -> str:
        """The level of recompute of a region."""
        return self.recompute.get(region, "none")
