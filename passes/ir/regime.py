"""How a step is run besides its layouts: micro-batches, what is computed again, and when parameters travel."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Regime:
    """How a step is run.

    The batch goes through in `micro_batches` parts. `recompute` says by name of region what of its forward pass runs
    again in the backward pass: "none", "selective" (all but multiplications and collectives, whose results are kept) or
    "full" (all of it: only what a copy is given is kept). Parameters that are stored in parts are gathered for each
    micro-batch, or with `gather_once` at the first and kept until the last; gradients are reduced after each, or with
    `reduce_once` added up whole and reduced after the last. With ZeRO's names (Rajbhandari et al. 2020): stage 3 is
    neither, stage 2 gathers once, stage 1 does both once.
    """

    micro_batches: int = 1
    recompute: Mapping[str, str] = field(default_factory=dict)
    gather_once: bool = False
    reduce_once: bool = False

    @property
    def key(self) -> Hashable:
        """What tells it from others."""
        return self.micro_batches, tuple(sorted(self.recompute.items())), self.gather_once, self.reduce_once

    def of(self, region: str) -> str:
        """What is computed again of a region."""
        return self.recompute.get(region, "none")


PLAIN = Regime()
