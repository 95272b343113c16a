"""Peak memory of a lowered program: an abstract run that follows every tensor from its making to its end."""

from passes.cost.liveness.ledger import KINDS, Peak
from passes.cost.liveness.profile import (
    BackwardProfile,
    Event,
    Form,
    ForwardProfile,
    Given,
    Happening,
    Made,
    Place,
    Prober,
    Task,
)
from passes.cost.liveness.step import Batches
from passes.cost.liveness.walk import MACHINES, Machine, MemoryPeak, Stored, peak_memory

__all__ = [
    "KINDS",
    "MACHINES",
    "BackwardProfile",
    "Batches",
    "Event",
    "Form",
    "ForwardProfile",
    "Given",
    "Happening",
    "Machine",
    "Made",
    "MemoryPeak",
    "Peak",
    "Place",
    "Prober",
    "Stored",
    "Task",
    "peak_memory",
]
